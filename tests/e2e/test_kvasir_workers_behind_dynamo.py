"""`kvasir mocker` as workers of a real Dynamo 1.6.1 frontend: file discovery, TCP requests, ZeroMQ events."""

import json
import os
import signal
import time

import pytest

from conftest import Kvasir, until
from dynamo_frontend import Dynamo, chat
from dynamo_rig import model_folder, need_dynamo

need_dynamo()
MODEL_DIR = str(model_folder())
MODEL = "mock-qwen"
# Several blocks of 16 tokens, unlike any other prompt.
TEXT = "Number {0}: when does the ferry leave, who keeps the light, and is there bread on Sundays too? " * 6


def mocker(kv, *more):
    return Kvasir(
        "mocker", "--model-path", MODEL_DIR, "--model-name", MODEL, "--discovery-backend", "file", "--request-plane", "tcp",
        "--event-plane", "zmq", "--block-size", "16", "--num-blocks", "4096", "--max-model-len", "8192", "--speedup", "5", *more,
        env={"DYN_FILE_KV": str(kv), "DYN_TCP_RPC_HOST": "127.0.0.1"},
    )  # fmt: skip


def keys(kv):
    """All keys in the store, by bucket."""
    found = {}
    for bucket in ("instances", "mdc", "event_channels", "event_sources"):
        folder = kv / "v1" / bucket
        names = [name for name in os.listdir(folder) if not name.startswith(".tmp_")] if folder.exists() else []
        if names:
            found[bucket] = len(names)
    return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    kv = tmp_path_factory.mktemp("kv")
    workers = mocker(kv, "--num-workers", "2")
    dynamo = Dynamo(kv, tmp_path_factory.mktemp("log") / "dynamo.log")
    try:
        for _ in range(2):
            workers.wait_for(r"as worker (\d+) of dynamo/backend/generate")
        dynamo.workers = workers
        dynamo.kv = kv
        dynamo.until_serving(MODEL)
        yield dynamo
        assert workers.stop(60) == 0, workers.log()
    finally:
        dynamo.stop()


def ask(dynamo, text, **more):
    answer = dynamo.http.post("/v1/chat/completions", json=chat(MODEL, text, **more))
    assert answer.status_code == 200, f"{answer.text}\n{dynamo.log()}"
    return answer.json()


def where(answer):
    return answer["nvext"]["worker_id"]["decode_worker_id"]


def test_a_worker_owns_the_keys_that_were_recorded(fleet):
    # Two workers: generate, a query for each cache, clear_kv_blocks; four channels each.
    assert keys(fleet.kv) == {"instances": 6, "mdc": 2, "event_channels": 8, "event_sources": 2}


def test_a_chat_and_a_stream(fleet):
    whole = ask(fleet, TEXT.format(1), max_tokens=12)
    assert whole["choices"][0]["message"]["content"] and whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 12
    text, finish = "", None
    with fleet.http.stream("POST", "/v1/chat/completions", json=chat(MODEL, TEXT.format(1), max_tokens=12, stream=True)) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
    assert (text, finish) == (whole["choices"][0]["message"]["content"], "length")


def test_a_second_turn_finds_its_blocks(fleet):
    """The frontend learns of a worker's blocks from its events: the next request with that prefix goes where they are."""

    def hit(number):
        first, second = (ask(fleet, TEXT.format(number)) for _ in range(2))
        same = where(first) == where(second)
        return same and second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64

    # Two workers: chance alone finds the same one every second time.
    numbers = iter(range(100, 100_000))
    until(lambda: all(hit(next(numbers)) for _ in range(6)), 60, fleet.log)


def test_a_client_that_leaves_stops_its_request(fleet):
    long = chat(MODEL, TEXT.format(2), max_tokens=4000, stream=True, ignore_eos=True)
    with fleet.http.stream("POST", "/v1/chat/completions", json=long) as stream:
        next(line for line in stream.iter_lines() if line.startswith("data: {"))
    ask(fleet, TEXT.format(3))


def test_sigterm_takes_the_keys_back_and_answers_what_runs(fleet, tmp_path):
    kv = tmp_path / "kv"
    workers = mocker(kv, "--speedup", "0.5")
    dynamo = Dynamo(kv, tmp_path / "dynamo.log")
    try:
        workers.wait_for(r"as worker \d+")
        dynamo.until_serving(MODEL)
        long = chat(MODEL, TEXT.format(4), max_tokens=200, stream=True, ignore_eos=True)
        finish = None
        with dynamo.http.stream("POST", "/v1/chat/completions", json=long) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            next(lines)
            workers.process.send_signal(signal.SIGTERM)
            until(lambda: not keys(kv), 10, workers.log)
            assert workers.process.poll() is None, "it answers what it has"
            for line in lines:
                if line != "data: [DONE]":
                    finish = json.loads(line[6:])["choices"][0]["finish_reason"] or finish
        assert finish == "length", dynamo.log()
        assert workers.process.wait(30) == 0, workers.log()
        until(lambda: dynamo.models() == [], 20, dynamo.log)
    finally:
        workers.process.kill()
        dynamo.stop()


def test_a_killed_worker_is_left_out_and_another_serves(tmp_path):
    kv = tmp_path / "kv"
    first, second = mocker(kv), mocker(kv)
    dynamo = Dynamo(kv, tmp_path / "dynamo.log")
    try:
        ids = [int(worker.wait_for(r"as worker (\d+)").group(1)) for worker in (first, second)]
        dynamo.until_serving(MODEL)
        first.process.kill()
        # Until its keys expire a request may still go there, and fail at once.
        end = time.monotonic() + 40
        answers = lambda: dynamo.http.post("/v1/chat/completions", json=chat(MODEL, TEXT.format(time.monotonic())))  # noqa: E731
        until(lambda: keys(kv).get("mdc") == 1, 40, dynamo.log)
        until(lambda: all(answers().status_code == 200 for _ in range(5)), end - time.monotonic(), dynamo.log)
        assert where(answers().json()) == ids[1]
        assert second.stop(30) == 0
    finally:
        first.process.kill()
        second.process.kill()
        dynamo.stop()
