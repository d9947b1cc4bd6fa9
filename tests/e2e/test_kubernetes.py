"""Stock engines in pods, found by labels, and Dynamo's workers in their custom resources; the cluster's API server is one of ours."""

import threading
import time

import httpx
import pytest

from conftest import Kvasir, until
from engines import frontend_before
from kube_api import KubeApi

LABELS = {"app": "vllm", "kubernetes.io/service-name": "vllm"}
# Requests must be there when pods come and go, not end before.
ENGINE = ("mocker", "--workers", "1", "--model-name", "tiny", "--http-host", "127.0.0.1", "--http-port", "0", "--speedup", "20")


class Cluster:
    """A frontend with `--worker-selector`, the API server, and engines that are its pods. Loopback has one address for all, so that
    each has a slice with its own port."""

    def __init__(self, folder, *options):
        self.api = KubeApi("engines", token="secret")
        config = self.api.kubeconfig(folder / "config")
        env = {"KUBECONFIG": config}
        self.frontend = frontend_before([], "--worker-selector", "app=vllm", *options, env=env)
        self.http = httpx.Client(base_url=self.frontend.url, timeout=60)
        self.engines = {}

    def start(self, pod):
        mocker = Kvasir(*ENGINE)
        port = int(mocker.wait_for(r"on http://127\.0\.0\.1:(\d+)").group(1))
        self.engines[pod] = (mocker, port)
        self.show(pod)

    def show(self, pod, ready=True, ending=False):
        port = self.engines[pod][1]
        self.api.slice(f"vllm-{pod}", LABELS, [(pod, "127.0.0.1", ready, ending)], [("http", port)])

    def rows(self):
        return self.http.get("/workers").json()["workers"]

    def serving(self):
        return sorted(int(row["url"].rpartition(":")[2]) for row in self.rows() if row["state"] == "serving")

    def until_serving(self, *pods):
        wanted = sorted(self.engines[pod][1] for pod in pods)
        until(lambda: self.serving() == wanted, told=self.frontend.log)

    def end(self, pod):
        """As a cluster does: the endpoint ends, the process is told to, and the endpoint goes."""
        self.show(pod, ready=False, ending=True)
        assert self.engines[pod][0].stop() == 0
        self.api.slice(f"vllm-{pod}", LABELS, [], [("http", self.engines[pod][1])])

    def stop(self):
        self.http.close()
        assert self.frontend.stop() == 0, self.frontend.log()
        for mocker, _ in self.engines.values():
            mocker.stop()
        if self.api.server:
            self.api.stop()


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.stop()


class Load:
    """Clients that ask without pause until told to stop; `failed` is every answer that was not whole."""

    def __init__(self, url, clients=4):
        self.url, self.over, self.done, self.failed = url, threading.Event(), 0, []
        self.threads = [threading.Thread(target=self.run, args=(n,), daemon=True) for n in range(clients)]
        for thread in self.threads:
            thread.start()

    def run(self, number):
        with httpx.Client(base_url=self.url, timeout=60) as http:
            turn = 0
            while not self.over.is_set():
                turn += 1
                body = {"model": "tiny", "max_tokens": 20, "stream": turn % 2 == 0, "ignore_eos": True,
                        "messages": [{"role": "user", "content": f"{number} asks {turn} " * 10}]}
                try:
                    answer = http.post("/v1/chat/completions", json=body)
                    whole = answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
                    if answer.status_code != 200 or (body["stream"] and not whole):
                        self.failed.append((answer.status_code, answer.text[-500:]))
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                self.done += 1

    def more(self, count=20):
        """Waits for so many further answers."""
        wanted = self.done + count
        until(lambda: self.done >= wanted, 60)

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join(60)
        return self.failed


def test_a_deployment_scales_up_and_down_under_load_and_the_api_server_is_away(cluster):
    cluster.start("a")
    cluster.until_serving("a")
    assert cluster.rows()[0]["origins"] == ["kubernetes"]
    load = Load(cluster.frontend.url)
    load.more()
    cluster.start("b")
    cluster.until_serving("a", "b")
    load.more()
    # The API server is away for some seconds; who was known serves, and a pod that came meanwhile is found later.
    cluster.api.stop()
    until(lambda: health(cluster)["state"] == "lost", told=cluster.frontend.log)
    assert 'kvasir_discovery_up{backend="worker-selector"} 0' in cluster.http.get("/metrics").text
    cluster.start("c")
    load.more()
    time.sleep(2)
    assert len(cluster.serving()) == 2
    load.more()
    cluster.api.start()
    cluster.until_serving("a", "b", "c")
    until(lambda: health(cluster)["state"] == "ready", told=cluster.frontend.log)
    assert cluster.frontend.log().count("the cluster cannot be asked") == 1, cluster.frontend.log()
    cluster.end("a")
    cluster.until_serving("b", "c")
    load.more()
    cluster.end("c")
    cluster.until_serving("b")
    load.more()
    assert load.stop() == [], cluster.frontend.log()
    assert load.done > 100


def health(cluster):
    return cluster.http.get("/health").json()["discovery"][0]


def test_a_pod_that_is_not_ready_gets_nothing_and_one_that_is_again_does(cluster):
    cluster.start("a")
    cluster.start("b")
    cluster.until_serving("a", "b")
    cluster.show("a", ready=False)
    cluster.until_serving("b")
    cluster.show("a")
    cluster.until_serving("a", "b")


def test_what_cannot_be_followed_is_an_error_at_the_start(tmp_path):
    config = tmp_path / "config"
    config.write_text(
        """{current-context: c, contexts: [{name: c, context: {cluster: k, user: u}}], clusters: [{name: k, cluster:
        {server: 'https://127.0.0.1:1'}}], users: [{name: u, user: {exec: {command: aws}}}]}"""
    )
    for env, word in (({"KUBECONFIG": str(config)}, "exec plugin"), ({}, "--kubeconfig")):
        kvasir = Kvasir("frontend", "--worker-selector", "app=vllm", "--http-host", "127.0.0.1", "--http-port", "0", env=env)
        assert kvasir.process.wait(60) == 2, kvasir.log()
        kvasir.until_logged(word)
