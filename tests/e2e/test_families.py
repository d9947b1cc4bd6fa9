"""Models that one engine serves: they see each other's load, its events are listened to once, and they end with it."""

import contextlib
import socket

import httpx
import pytest

from conftest import Kvasir, until

BLOCK = 16
BASE, ADAPTERS = "tiny", ["sql", "code", "chat", "math"]


def mocker(*args, port=0):
    return Kvasir("mocker", "--http-host", "127.0.0.1", "--http-port", str(port), "--block-size", str(BLOCK), *args)


def address(engine):
    return engine.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1)


def frontend(*workers):
    named = [arg for url in workers for arg in ("--worker", url)]
    process = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv", *named)
    process.url = "http://" + process.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
    return process


@pytest.fixture(scope="module")
def family():
    """Two engines with events, each with a base and its adapters, before a frontend."""
    adapters = [arg for name in ADAPTERS for arg in ("--lora-modules", f"{name}=/loras/{name}")]
    engines = [mocker("--model-name", BASE, "--kv-events-port", "0", "--max-num-seqs", "64", *adapters) for _ in range(2)]
    urls = [address(engine) for engine in engines]
    process = frontend(*urls)
    with httpx.Client(base_url=process.url, timeout=30) as http:
        until(lambda: len(http.get("/workers").json()["workers"]) == 2 * (1 + len(ADAPTERS)))
        yield http, urls
    assert process.stop() == 0, process.log()
    for engine in engines:
        engine.stop()


def rows(http):
    return http.get("/workers").json()["workers"]


def ask(http, model, prompt):
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "nvext": {"extra_fields": ["worker_id"]}}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_request_sees_the_load_of_the_other_models_of_its_engine(family):
    http, urls = family
    ids = {row["url"]: row["worker_id"] for row in rows(http)}
    busy, free = (ids[url] for url in urls)
    reading = []
    with contextlib.ExitStack() as running:
        for n in range(8):
            body = {"model": BASE, "prompt": [1000 + n] * 40 * BLOCK, "max_tokens": 20_000, "ignore_eos": True,
                    "stream": True, "nvext": {"backend_instance_id": busy}}  # fmt: skip
            stream = running.enter_context(http.stream("POST", "/v1/completions", json=body))
            assert stream.status_code == 200
            lines = stream.iter_lines()
            next(lines)
            reading.append(lines)  # One that is dropped closes its stream.
        loads = {(row["worker_id"], row["model"]): row["ranks"][0]["active_requests"] for row in rows(http)}
        assert all(loads[busy, model] == 8 and loads[free, model] == 0 for model in [BASE, *ADAPTERS]), loads
        for n in range(12):
            answer = ask(http, ADAPTERS[n % len(ADAPTERS)], [100 + n] * 40)
            assert answer["nvext"]["worker_id"]["decode_worker_id"] == free, n
            decision = http.get("/decisions/" + answer["id"].removeprefix("cmpl-")).json()
            assert decision["model"] == ADAPTERS[n % len(ADAPTERS)]
    until(lambda: all(row["ranks"][0]["active_requests"] == 0 for row in rows(http)))


def connections(port):
    """Established connections to a port of this machine."""
    with open("/proc/net/tcp") as table:
        fields = [line.split() for line in table][1:]
    return sum(1 for field in fields if field[2].endswith(f":{port:04X}") and field[3] == "01")


def test_an_engine_is_listened_to_once_however_many_models_it_serves(family):
    http, _ = family
    until(lambda: all(row["ranks"][0]["cache"]["events"]["connected"] for row in rows(http)))
    events = {row["ranks"][0]["cache"]["events"]["address"] for row in rows(http)}
    assert len(events) == 2
    for endpoint in events:
        assert connections(int(endpoint.rsplit(":", 1)[1])) == 1, endpoint


def test_the_series_of_the_router_have_the_name_of_the_base(family):
    http, _ = family
    for model in [BASE, "sql"]:
        ask(http, model, [7] * 40)
    page = http.get("/metrics").text.splitlines()
    of = lambda name: {line.split("{")[1].split("}")[0] for line in page if line.startswith(name + "{")}  # noqa: E731
    assert of("kvasir_index_bytes") == {f'model="{BASE}"'}
    assert {labels.split(",")[-1] for labels in of("kvasir_worker_events_connected")} != set()
    assert all(f'model="{BASE}"' in labels for labels in of("kvasir_worker_events_connected"))
    assert len(of("kvasir_worker_events_connected")) == 2
    answered = [labels for labels in of("dynamo_frontend_requests_total") if 'status="success"' in labels]
    assert {f'model="{model}"' in labels for labels in answered for model in [BASE, "sql"]} == {True, False}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def chat(http, model):
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return http.post("/v1/chat/completions", json=body).status_code


def test_a_model_ends_with_the_word_of_its_last_worker():
    port = free_port()
    engine = mocker("--model-name", "one", port=port)
    url = address(engine)
    process = frontend(url)
    series = lambda name: [line for line in http.get("/metrics").text.splitlines() if f'model="{name}"' in line]  # noqa: E731
    with httpx.Client(base_url=process.url, timeout=30) as http:
        until(lambda: chat(http, "one") == 200)
        assert series("one")
        # Out of reach: known, and not ready.
        engine.stop()
        until(lambda: http.get("/v1/models").json()["data"] == [])
        assert chat(http, "one") == 503
        assert http.get("/v1/models/one").status_code == 200
        # Back as another: the first is unknown, by every door.
        engine = mocker("--model-name", "two", port=port)
        until(lambda: chat(http, "two") == 200, seconds=30)
        until(lambda: chat(http, "one") == 404)
        until(lambda: http.get("/v1/models/one").status_code == 404)
        until(lambda: [model["id"] for model in http.get("/v1/models").json()["data"]] == ["two"])
        until(lambda: series("one") == [])
        assert series("two")
        # Not wanted any more.
        [worker] = [row["worker_id"] for row in rows(http)]
        assert http.delete(f"/workers/{worker}").status_code in (200, 202)
        until(lambda: http.get("/v1/models/two").status_code == 404)
        until(lambda: chat(http, "two") == 404)
        until(lambda: series("two") == [])
    assert process.stop() == 0, process.log()
    engine.stop()
