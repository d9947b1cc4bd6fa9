"""`kvasir router`: the router on the request plane, called by programs of either package, before workers of either kind."""

import json
import os
import re
import signal
import sys

import httpx
import pytest

import dynamo_rig
import python_rig
from conftest import Kvasir, until
from dynamo_rig import Mocker, model_folder
from planes_rig import BUILTIN, PlaneProcess, Planes, free_port
from test_python_runtime import Program

DYNAMO = os.environ.get("KVASIR_DYNAMO_PYTHON")

# A client as users of Dynamo write it. Answers what each line of standard input asks, one line of JSON each.
CLIENT = '''
import asyncio, json, sys
from {package}.runtime import DistributedRuntime

async def one(asked):
    return [item async for item in await asked]

async def main():
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, {backend!r}, {plane!r})
    clients = dict()
    for name in ("generate", "best_worker_id", "get_overlap_scores"):
        clients[name] = await runtime.endpoint("dynamo.router." + name).client()
        await clients[name].wait_for_instances()
    print("READY", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, request = json.loads(line)
        try:
            said = await one(clients[name].random(request, annotated=False))
        except Exception as error:
            said = str(type(error).__name__) + ": " + str(error)
        print("SAID", json.dumps(said), flush=True)
    runtime.shutdown()

asyncio.run(main())
'''


class Client(Program):
    """Such a client, beside the test."""

    def __init__(self, package, planes, folder):
        if package == "dynamo":
            env, python = dynamo_rig.environment(planes), DYNAMO
        else:
            env, python = python_rig.environment(folder) | planes.env, sys.executable
        backend, plane, _ = planes.combo.split("+")
        script = CLIENT.format(package=package, backend=backend, plane=plane)
        super().__init__("-c", script, env=env, python=python, stdin=True)
        self.said("READY", 120)

    def ask(self, name, request):
        before = sum(line.startswith("SAID") for line in self.lines)
        self.process.stdin.write(json.dumps([name, request]) + "\n")
        self.process.stdin.flush()
        answers = lambda: [line for line in list(self.lines) if line.startswith("SAID")]  # noqa: E731
        until(lambda: len(answers()) > before, 60, self.log)
        return json.loads(answers()[before].removeprefix("SAID "))

    def best(self, tokens):
        (worker,) = self.ask("best_worker_id", tokens)
        return worker

    def generate(self, tokens, **more):
        request = {"model": "m", "token_ids": tokens, "stop_conditions": {"max_tokens": 6, "ignore_eos": True}, **more}
        return self.ask("generate", request)

    def end(self):
        self.process.stdin.close()
        super().end()


def router(planes, *args):
    kvasir = PlaneProcess(
        "router", "--endpoint", "dynamo.backend.generate", "--router-block-size", "16", "--system-host", "127.0.0.1",
        "--system-port", "0", *planes.flags, *args, env=planes.env,
    )  # fmt: skip
    kvasir.http = httpx.Client(base_url=status_of(kvasir))
    return kvasir


def status_of(kvasir):
    """Where a process's status server is."""
    return "http://" + kvasir.until_logged("status server listens", 60).split("address=")[1].split()[0]


def served(kvasir):
    kvasir.until_logged("endpoint=dynamo/router/get_overlap_scores", 60)
    until(lambda: kvasir.http.get("/health").status_code == 200, 30, kvasir.log)
    return kvasir


def prompt(number):
    """Eight blocks, unlike any other prompt."""
    return [number * 200 + at for at in range(128)]


def check(client, ids, told):
    """What a router does for a client: it sends to workers, and knows afterwards who holds what."""
    items = client.generate(prompt(1))
    assert isinstance(items, list) and sum(len(item["token_ids"]) for item in items) == 6, (items, told())
    target = items[0]["routing_data"]["worker_id"]["decode_worker_id"]
    assert target in ids and items[-1]["finish_reason"] == "length", items
    assert all("routing_data" not in item for item in items[1:-1]), items
    assert 0 < items[-1]["routing_data"]["timing"]["ttft_ms"] <= items[-1]["routing_data"]["timing"]["total_time_ms"], items[-1]

    def held():
        (scores,) = client.ask("get_overlap_scores", {"token_ids": prompt(1)})
        assert (scores["block_size"], scores["num_blocks"]) == (16, 8), scores
        return {row["worker_id"]: row["device_blocks"] for row in scores["workers"]}

    until(lambda: held()[target] >= 7, 60, lambda: f"{held()}\n{told()}")
    assert all(blocks == 0 for worker, blocks in held().items() if worker != target)
    assert [client.best(prompt(1)) for _ in range(3)] == [target] * 3
    again = client.generate(prompt(1))
    assert again[0]["routing_data"]["worker_id"]["decode_worker_id"] == target
    # A worker can be named, and one that is not there cannot.
    other = next(worker for worker in ids if worker != target)
    named = client.generate(prompt(1), routing={"backend_instance_id": other})
    assert named[0]["routing_data"]["worker_id"]["decode_worker_id"] == other
    refused = client.generate(prompt(1), routing={"backend_instance_id": 7})
    assert "backend_instance_id=7 does not identify a known worker" in refused, refused
    # A question books nothing, and neither does what has ended.
    assert "expected" in client.ask("best_worker_id", "no tokens")


@pytest.mark.parametrize("combo", ["file+tcp+zmq", "etcd+tcp+nats"])
@pytest.mark.parametrize("package", ["kvasir", "dynamo"])
def test_programs_of_either_package_route_through_it(package, combo, tmp_path):
    if package == "dynamo" and not DYNAMO:
        pytest.skip("NO KVASIR_DYNAMO_PYTHON: nothing is known of Dynamo's own clients")
    planes = Planes(combo, tmp_path)
    workers = planes.mocker(BUILTIN, "--system-host", "127.0.0.1", "--system-port", "0", workers=2)
    kvasir = served(router(planes, "--router-min-initial-workers", "2"))
    client = Client(package, planes, tmp_path / "kv")
    check(client, workers.ids, kvasir.log)
    # Workers say of themselves what was asked of them.
    with httpx.Client(base_url=status_of(workers)) as status:
        assert status.get("/health").json()["endpoints"] == {"generate": "ready"} and status.get("/live").status_code == 200
        page = status.get("/metrics").text
        assert re.search(r'^dynamo_component_requests_total\{.*dynamo_endpoint="generate".*\} 3$', page, re.M), page
        assert "dynamo_frontend" not in page
    page = kvasir.http.get("/metrics").text
    counts = [line for line in page.splitlines() if line.startswith("dynamo_component_router_requests_total{")]
    assert counts and counts[0].endswith(" 3") and 'dynamo_component="router"' in counts[0], counts
    client.end()
    for process in (kvasir, workers):
        assert process.stop() == 0, process.log()
    planes.end()


def test_real_dynamo_workers_stand_behind_it(tmp_path):
    if not DYNAMO or not os.environ.get("KVASIR_TEST_QWEN_DIR"):
        pytest.skip("NO KVASIR_DYNAMO_PYTHON: nothing is known of Dynamo's own workers")
    planes = Planes("file+tcp+zmq", tmp_path)
    workers = Mocker(model_folder(), planes, workers=2)
    kvasir = served(router(planes, "--router-min-initial-workers", "2"))
    client = Client("dynamo", planes, tmp_path / "kv")
    (scores,) = client.ask("get_overlap_scores", {"token_ids": prompt(0)})
    check(client, [row["worker_id"] for row in scores["workers"]], lambda: kvasir.log() + workers.told())
    client.end()
    assert kvasir.stop() == 0, kvasir.log()
    workers.kill()
    planes.end()


def test_the_end_waits_for_answers_and_says_so(tmp_path):
    planes = Planes("file+tcp+zmq", tmp_path)
    workers = planes.mocker(BUILTIN, speed="1")
    kvasir = served(router(planes))
    client = Client("kvasir", planes, tmp_path / "kv")
    request = {"model": "m", "token_ids": prompt(3), "stop_conditions": {"max_tokens": 60, "ignore_eos": True}}
    client.process.stdin.write(json.dumps(["generate", request]) + "\n")
    client.process.stdin.flush()
    started = lambda: "dynamo_component_router_requests_started_total" in page() and " 1\n" in page()  # noqa: E731
    page = lambda: "".join(f"{line}\n" for line in kvasir.http.get("/metrics").text.splitlines() if "requests_started_total{" in line)  # noqa: E731
    until(started, 60, lambda: page() + kvasir.log())
    kvasir.process.send_signal(signal.SIGTERM)
    kvasir.until_logged("draining", 30)
    # Nobody finds it any more, and the answer comes to its end.
    line = client.said("SAID", 60)
    items = json.loads(line.removeprefix("SAID "))
    assert sum(len(item["token_ids"]) for item in items) == 60, (items[-2:], kvasir.log())
    assert kvasir.process.wait(30) == 0, kvasir.log()
    client.end()
    assert workers.stop() == 0
    planes.end()


def test_a_frontend_waits_for_its_first_workers():
    """Those that are named, and as many as are to be there."""
    engines, ports = [], [free_port(), free_port()]

    def engine(port):
        engines.append(Kvasir("mocker", "--http-host", "127.0.0.1", "--http-port", str(port)))
        engines[-1].wait_for(r"on http://")

    engine(ports[0])
    named = [word for port in ports for word in ("--worker", f"http://127.0.0.1:{port}")]
    frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-min-initial-workers", "2", *named)
    with httpx.Client(base_url="http://" + frontend.wait_for(r"listening address=(127\.0\.0\.1:\d+)").group(1), timeout=30) as http:
        frontend.until_logged("waiting for the first workers", 60)
        frontend.until_logged("worker joined", 60)
        health = http.get("/health")
        assert health.status_code == 503 and "loading" in health.text, health.text
        engine(ports[1])
        until(lambda: http.get("/health").status_code == 200, 60, frontend.log)
    for process in (frontend, *engines):
        assert process.stop() == 0, process.log()
