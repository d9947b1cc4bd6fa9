"""`kvasir frontend` before mock engines that publish their cache events over real sockets."""

import re
import socket
import threading

import httpx
import pytest

from conftest import Kvasir

MODEL = "tiny"


def free_ports(count):
    """A run of free ports: an engine's replay socket is one above its events."""
    for _ in range(50):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
        try:
            for n in range(count):
                with socket.socket() as other:
                    other.bind(("127.0.0.1", port + n))
            return port
        except OSError:
            continue
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def fleet():
    """A frontend with two mock engines; `fleet.url` is where it listens."""
    common = ["--http-host", "127.0.0.1", "--http-port", "0", "--model-name", MODEL, "--block-size", "16", "--speedup", "50"]
    engines = [Kvasir("mocker", *common, "--kv-events-port", str(free_ports(2))) for _ in range(2)]
    urls = [engine.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for engine in engines]
    workers = [word for url in urls for word in ("--worker", url)]
    frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", *workers)
    frontend.url = "http://" + frontend.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
    with httpx.Client(base_url=frontend.url, timeout=30) as http:
        for _ in range(200):
            if len(http.get("/workers").json()["workers"]) == 2:
                break
            threading.Event().wait(0.05)
        frontend.http = http
        yield frontend
    assert frontend.stop() == 0, frontend.log()
    for engine in engines:
        engine.stop()


def complete(http, tokens):
    answer = http.post("/v1/completions", json={"model": MODEL, "max_tokens": 4, "prompt": tokens})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def applied(http):
    page = http.get("/metrics").text
    found = re.findall(r'kv_cache_events_applied\{.*event_type="stored",status="ok".*\} (\S+)', page)
    return sum(float(value) for value in found)


def test_events_tell_which_engine_has_a_prompt(fleet):
    """Prompts as token ids, so that no tokenizer is needed; what the index foretells is what engines report."""
    http = fleet.http
    prompts = [list(range(400 * case, 400 * case + 160)) for case in range(1, 7)]
    for prompt in prompts:
        before = applied(http)
        complete(http, prompt)
        for _ in range(200):
            if applied(http) > before:
                break
            threading.Event().wait(0.02)
        assert applied(http) > before, fleet.log()
    for prompt in prompts:
        # 160 tokens are ten blocks; the last one is always computed again.
        assert complete(http, prompt)["prompt_tokens_details"]["cached_tokens"] == 144
    lines = re.findall(r"Formula for worker_(\d+): .*\(cached_blocks: (\d+)\)", fleet.log())
    assert [blocks for _, blocks in lines[-6:]] == ["10"] * 6, lines
    assert len({worker for worker, _ in lines}) == 2, "all went to one engine"
