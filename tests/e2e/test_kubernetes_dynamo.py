"""Workers of Dynamo 1.6.1 in a cluster behind `kvasir frontend`, and mock engines of ours behind its frontend; the cluster's API server
is one of ours."""

import httpx
import pytest

from conftest import Kvasir, until
from dynamo_frontend import Dynamo
from dynamo_rig import Mocker, model_folder, need_dynamo
from kube_api import WORKERS, KubeApi
from planes_rig import workers_of

need_dynamo()

LABELS = {"nvidia.com/dynamo-discovery-enabled": "true", "nvidia.com/dynamo-discovery-backend": "kubernetes"}
PLANES = ["--discovery-backend", "kubernetes", "--request-plane", "tcp", "--event-plane", "zmq"]
# What follows from the pod's name, as Dynamo computes it.
WORKER_0 = 1186445869714687


@pytest.fixture(scope="module")
def model():
    return model_folder()


@pytest.fixture
def api(tmp_path):
    api = KubeApi("default")
    api.config = api.kubeconfig(tmp_path / "config")
    yield api
    api.stop()


def pod(api, name):
    return {"KUBECONFIG": api.config, "POD_NAME": name, "POD_UID": f"{name}-uid", "POD_NAMESPACE": "default"}


class PodPlanes:
    """What puts a process of Dynamo into a pod of the cluster."""

    def __init__(self, api, name):
        self.flags = PLANES
        self.env = {**pod(api, name), "HF_HUB_OFFLINE": "1", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1"}


def ready(api, *pods):
    api.slice("workers", LABELS, [(name, "127.0.0.1", True, False) for name in pods])


def ask(http):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    return http.post("/v1/chat/completions", json=body)


def test_a_worker_of_dynamo_serves_while_its_pod_is_ready(api, model):
    frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--tcp-rpc-host", "127.0.0.1", *PLANES,
                      env={"KUBECONFIG": api.config})
    url = "http://" + frontend.wait_for(r"listening.*address=(127\.0\.0\.1:\d+)").group(1)
    worker = Mocker(model, PodPlanes(api, "worker-0"))
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            announced = lambda: (api.objects.get((WORKERS.format(ns="default"), "worker-0")) or {}).get("spec", {})  # noqa: E731
            until(lambda: announced().get("data", {}).get("model_cards"), 90, worker.told)
            assert workers_of(http) == [], "its pod is not ready"
            ready(api, "worker-0")
            told = lambda: worker.told() + frontend.log()  # noqa: E731
            until(lambda: workers_of(http) == [WORKER_0], 90, told)
            answer = ask(http)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text
            assert http.get("/health").json()["discovery"][0]["state"] == "ready"
            # It takes its endpoint back when it is told to end, before it ends.
            worker.terminate()
            until(lambda: workers_of(http) == [], 60, told)
    finally:
        worker.kill()
    assert frontend.stop() == 0, frontend.log()


def test_a_worker_of_ours_serves_behind_dynamos_frontend(api, model, tmp_path):
    worker = Kvasir("mocker", "--model-path", str(model), "--model-name", "m", "--tcp-rpc-host", "127.0.0.1", *PLANES, "--speedup", "20",
                    env=pod(api, "worker-0"))
    ready(api, "worker-0", "frontend-0")
    dynamo = Dynamo(PodPlanes(api, "frontend-0"), tmp_path / "log")
    try:
        dynamo.until_serving("m")
        answer = ask(dynamo.http)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text
        assert worker.stop() == 0, worker.log()
        assert (WORKERS.format(ns="default"), "worker-0") not in api.objects
        until(lambda: "m" not in dynamo.models(), 60, dynamo.log)
    finally:
        dynamo.stop()
