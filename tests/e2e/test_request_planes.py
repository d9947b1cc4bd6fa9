"""Workers on all three request planes in one fleet: each is reached as it announces."""

import json
import pathlib
import shutil
import socket
import subprocess

import httpx
import pytest

from conftest import Kvasir, until
from planes_rig import workers_of

if not shutil.which("nats-server"):
    pytest.skip("NO nats-server here: nothing is known of requests over NATS", allow_module_level=True)

# Small: a debug build reads it in no time.
MODEL = pathlib.Path(__file__).parents[2] / "crates" / "text" / "src" / "builtin"


@pytest.fixture(scope="module")
def nats(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = open(tmp_path_factory.mktemp("nats") / "log", "w")
    server = subprocess.Popen(["nats-server", "-a", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    yield f"nats://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.fixture
def fleet(nats, tmp_path):
    """A frontend, and one mock engine on each plane."""
    env = {"DYN_FILE_KV": str(tmp_path / "kv"), "DYN_TCP_RPC_HOST": "127.0.0.1", "NATS_SERVER": nats}
    mockers = {
        plane: Kvasir("mocker", "--model-path", str(MODEL), "--model-name", "m", "--discovery-backend", "file", "--block-size", "16",
                      "--request-plane", plane, "--event-plane", events, env=env)
        for plane, events in (("tcp", "zmq"), ("nats", "nats"), ("http", "nats"))
    }
    kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "round-robin", "--discovery-backend", "file",
                    env=env)
    url = "http://" + kvasir.wait_for(r"listening.*address=(127\.0\.0\.1:\d+)").group(1)
    with httpx.Client(base_url=url, timeout=60) as http:
        until(lambda: len(workers_of(http)) == 3, 90, kvasir.log)
        kvasir.http, kvasir.mockers, kvasir.kv = http, mockers, tmp_path / "kv"
        yield kvasir
    for mocker in mockers.values():
        assert mocker.stop(60) == 0, mocker.log()
    assert kvasir.stop() == 0, kvasir.log()


def ask(http, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4,
            "nvext": {"extra_fields": ["worker_id"]}, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_worker_is_reached_as_it_announces(fleet):
    records = [json.loads(path.read_text()) for path in (fleet.kv / "v1" / "instances").iterdir()]
    announced = [kind for record in records if record["endpoint"] == "generate" for kind in record["transport"]]
    assert sorted(announced) == ["http", "nats_tcp", "tcp"], records
    served = {ask(fleet.http)["nvext"]["worker_id"]["decode_worker_id"] for _ in range(6)}
    assert len(served) == 3, served
    # A client that leaves ends its stream on every plane.
    for _ in range(3):
        with fleet.http.stream("POST", "/v1/chat/completions", json={
                "model": "m", "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 20_000, "ignore_eos": True, "stream": True}) as answer:
            next(line for line in answer.iter_lines() if line.startswith("data:"))
    booked = lambda: sum(rank["active_requests"] for w in fleet.http.get("/workers").json()["workers"] for rank in w["ranks"])  # noqa: E731
    until(lambda: booked() == 0, 20, fleet.log)
    # SIGTERM on one: its keys go, the others serve.
    fleet.mockers["nats"].process.terminate()
    until(lambda: len(workers_of(fleet.http)) == 2, 30, fleet.log)
    assert len({ask(fleet.http)["nvext"]["worker_id"]["decode_worker_id"] for _ in range(4)}) == 2
