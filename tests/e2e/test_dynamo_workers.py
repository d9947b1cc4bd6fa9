"""Workers of Dynamo 1.6.1 behind `kvasir frontend`: file discovery, requests over TCP."""

import json
import threading
import time

import httpx
import openai
import pytest

from conftest import Kvasir, until
from dynamo_rig import Mocker, file_plane, model_folder, need_dynamo, until_serving, workers_of

need_dynamo()


@pytest.fixture(scope="module")
def model():
    return model_folder()


@pytest.fixture
def fleet(model, tmp_path):
    """A frontend on an empty store, and a way to start workers in it."""
    flags, env = file_plane(tmp_path / "kv")
    kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--tcp-rpc-host", "127.0.0.1", "--migration-limit", "3",
                    *flags, env=env)
    url = "http://" + kvasir.wait_for(r"listening.*address=(127\.0\.0\.1:\d+)").group(1)
    started = []

    def start(*args, workers=1, speed="20"):
        started.append(Mocker(model, env, "--speedup-ratio", speed, *flags, *args, workers=workers))
        return started[-1]

    with httpx.Client(base_url=url, timeout=60) as http:
        kvasir.url, kvasir.http, kvasir.start = url, http, start
        yield kvasir
    for mocker in started:
        mocker.kill()
    assert kvasir.stop() == 0, kvasir.log()


def chat(http, text="hello", **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}
    return http.post("/v1/chat/completions", json=body)


def test_a_worker_appears_answers_and_vanishes(fleet):
    assert chat(fleet.http).status_code in (404, 503)
    mocker = fleet.start(workers=2)
    ids = until_serving(fleet.http, 2, told=lambda: mocker.told() + fleet.log())
    health = fleet.http.get("/health").json()
    assert health["status"] == "healthy" and health["discovery"][0]["state"] == "ready", health
    listed = fleet.http.get("/v1/models").json()["data"]
    assert [m["id"] for m in listed] == ["m"], listed

    answer = chat(fleet.http, nvext={"extra_fields": ["worker_id"]})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 8 and usage["prompt_tokens"] > 8, usage

    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    chunks = list(client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "count"}], max_tokens=16, stream=True,
        stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 16
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    done = client.completions.create(model="m", prompt=["a b c", "d e"], max_tokens=4, n=2)
    assert len(done.choices) == 4 and done.usage.completion_tokens == 16

    # SIGTERM: the keys go at once, and the model with its last worker.
    mocker.terminate()
    until(lambda: fleet.http.get("/v1/models").json()["data"] == [], 30, fleet.log)
    assert chat(fleet.http).status_code == 404
    assert set(ids).isdisjoint(workers_of(fleet.http))


def test_killing_and_joining_under_load_loses_no_request(fleet):
    first = fleet.start(speed="5")
    first_ids = until_serving(fleet.http, 1, told=lambda: first.told() + fleet.log())
    second = fleet.start(speed="5")
    both = until_serving(fleet.http, 2, told=second.told)
    failed, served, stop = [], [], threading.Event()

    def ask(number):
        with httpx.Client(base_url=fleet.url, timeout=60) as http:
            turn = 0
            while not stop.is_set():
                turn += 1
                answer = chat(http, f"{number} {turn}", max_tokens=4)
                (served if answer.status_code == 200 else failed).append(answer.text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(served) > 20, 60)
        before = len(served)
        first.kill()
        until(lambda: len(served) > before + 20, 60, fleet.log)
        # Nobody but us is there to sweep the keys of the dead.
        left = until(lambda: (ids := workers_of(fleet.http)) == sorted(set(both) - set(first_ids)) and ids, 60, fleet.log)
        third = fleet.start(speed="5")
        grown = until_serving(fleet.http, 2, told=lambda: third.told() + fleet.log())
        second.terminate()
        until(lambda: workers_of(fleet.http) == sorted(set(grown) - set(left)), 60, fleet.log)
        before = len(served)
        until(lambda: len(served) > before + 20, 60, fleet.log)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failed, failed[:3]


def test_a_client_that_leaves_frees_its_worker(fleet):
    mocker = fleet.start(speed="1")
    until_serving(fleet.http, 1, told=mocker.told)
    with fleet.http.stream("POST", "/v1/chat/completions", json={
            "model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        while not next(lines).startswith("data:"):
            pass
    booked = lambda: sum(rank["active_requests"] for w in fleet.http.get("/workers").json()["workers"]  # noqa: E731
                         for rank in w["ranks"])
    until(lambda: booked() == 0, 10, lambda: json.dumps(fleet.http.get("/workers").json()))
    started = time.monotonic()
    assert chat(fleet.http, max_tokens=2).status_code == 200
    assert time.monotonic() - started < 30


def test_the_fleet_outlives_its_store(fleet, tmp_path):
    mocker = fleet.start()
    until_serving(fleet.http, 1, told=mocker.told)
    kept = tmp_path / "kept"
    (tmp_path / "kv").rename(kept)
    until(lambda: fleet.http.get("/health").json()["discovery"][0]["state"] == "lost", 30, fleet.log)
    assert chat(fleet.http).status_code == 200
    assert "kvasir_discovery_up{backend=\"file\"} 0" in fleet.http.get("/metrics").text
    fleet.until_logged("discovery is lost")
    kept.rename(tmp_path / "kv")
    until(lambda: fleet.http.get("/health").json()["discovery"][0]["state"] == "ready", 30, fleet.log)
    assert chat(fleet.http).status_code == 200
