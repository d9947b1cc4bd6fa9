"""`agent_hints.speculative_prefill`: when the next turn comes, its beginning is in the engine's cache."""


import httpx
import pytest

from conftest import Kvasir, until

SYSTEM = " ".join(f"Rule {n}: answer in the words of the harbour master." for n in range(30))


@pytest.fixture(scope="module")
def http():
    common = ["--http-host", "127.0.0.1", "--http-port", "0"]
    mocker = Kvasir("mocker", *common, "--workers", "2", "--model-name", "tiny", "--block-size", "16", "--speedup", "50")
    workers = [word for _ in range(2) for word in ("--worker", mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1))]
    frontend = Kvasir("frontend", *common, *workers)
    url = "http://" + frontend.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
    with httpx.Client(base_url=url, timeout=30) as http:
        until(lambda: len(http.get("/workers").json()["workers"]) == 2)
        yield http
    assert frontend.stop() == 0, frontend.log()
    mocker.stop()


def done(http):
    lines = http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("kvasir_speculative_prefills_total") and 'outcome="done"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def chat(http, messages, ahead, **more):
    nvext = {"agent_hints": {"speculative_prefill": ahead}, "extra_fields": ["worker_id"]}
    body = {"model": "tiny", "messages": messages, "max_tokens": 48, "ignore_eos": True, "nvext": nvext, **more}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_next_turn_finds_its_beginning(http):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is the tide today?"}]
    first = chat(http, messages, ahead=True)
    until(lambda: done(http) == 1)
    messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    # What the engine computed ahead: the conversation and its answer, without the opening of another.
    tokens = http.post("/tokenize", json={"model": "tiny", "messages": messages, "add_generation_prompt": False}).json()
    messages.append({"role": "user", "content": "And tomorrow?"})
    second = chat(http, messages, ahead=False)
    assert second["nvext"]["worker_id"] == first["nvext"]["worker_id"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens["count"] // 16 * 16
    assert done(http) == 1
    loads = lambda: [rank for worker in http.get("/workers").json()["workers"] for rank in worker["ranks"]]  # noqa: E731
    until(lambda: all(rank["active_requests"] == 0 for rank in loads()))


def test_another_salt_shares_nothing(http):
    """What was cached under one salt is not found, nor looked for, under another."""
    messages = [{"role": "system", "content": SYSTEM + " Salted."}, {"role": "user", "content": "Any ships?"}]
    chat(http, messages, ahead=False, cache_salt="a")
    again = chat(http, messages, ahead=False, cache_salt="a")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    other = chat(http, messages, ahead=False, cache_salt="b")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
