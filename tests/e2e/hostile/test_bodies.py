"""Bodies as large as they may be and as awkward as they can be: whoever else is served does not notice."""

import contextlib
import json
import threading
import time

import httpx
import pytest

from engines import Fleet

MODEL = "hostile/bodies"
# What a build that is not optimised reads in a second or two; the 44 MB that one body may have take it a minute.
SIZE = 5 << 20
# What others may wait at most while a body is read. The build under test is not optimised and shares two cores with the client
# that makes the bodies; before bodies were read elsewhere it was seconds, for everybody.
STALL_SECONDS = 1.0


@pytest.fixture(scope="module")
def fleet():
    options = ["--http-threads", "1", "--no-router-kv-events", "--router-mode", "kv", "--http-body-limit-mb", "45"]
    fleet = Fleet(MODEL, frontend=options, mocker=["--block-size", "16"])
    yield fleet
    fleet.stop()


@contextlib.contextmanager
def others_are_served(fleet):
    """Asks `/live` all the while on one connection; no answer takes longer than it may."""
    waits, ended = [], threading.Event()

    def ask():
        with httpx.Client(base_url=fleet.url, timeout=60) as client:
            while not ended.is_set():
                start = time.monotonic()
                assert client.get("/live").status_code == 200
                waits.append(time.monotonic() - start)
                time.sleep(0.005)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join(60)
    assert not thread.is_alive() and len(waits) > 3
    assert max(waits) < STALL_SECONDS, f"/live waited {max(waits):.2f} s"


def repeated(part, size):
    return ",".join([part] * (size // (len(part) + 1)))


def completion(prompt):
    return "/v1/completions", f'{{"model":"{MODEL}","max_tokens":1,"prompt":{prompt}}}'


def chat(messages, more=""):
    return "/v1/chat/completions", f'{{"model":"{MODEL}","max_tokens":1,"messages":[{messages}]{more}}}'


BODIES = {
    "ids": lambda size: completion(f"[{repeated('1', size)}]"),
    "lists of ids": lambda size: completion(f"[{repeated('[1]', size)}]"),
    "one text": lambda size: completion('"' + "word " * (size // 5) + '"'),
    "escapes": lambda size: completion('"' + "\\u00e9" * (size // 6) + '"'),
    "token data": lambda size: chat('{"role":"user","content":"a"}', f',"nvext":{{"token_data":[{repeated("1", size)}]}}'),
    "messages": lambda size: chat(repeated('{"role":"user","content":"a"}', size)),
    "nesting": lambda size: chat("[" * (size // 2) + "]" * (size // 2)),
    "fields": lambda size: chat("", "," + ",".join(f'"f{n}":1' for n in range(size // 12))),
}


@pytest.mark.parametrize("name", BODIES)
def test_nobody_waits_for_a_long_body(fleet, name):
    path, body = BODIES[name](SIZE)
    assert len(body) < 45 << 20
    for content in (body.encode(), body[:-1].encode()):
        with others_are_served(fleet):
            answer = httpx.post(f"{fleet.url}{path}", content=content, headers={"content-type": "application/json"}, timeout=120)
        assert answer.status_code in (200, 400, 413, 503), answer.text[:200]


def test_three_at_once_stop_nobody(fleet):
    path, body = BODIES["ids"](SIZE // 4)

    def post():
        headers = {"content-type": "application/json"}
        answers.append(httpx.post(f"{fleet.url}{path}", content=body.encode(), headers=headers, timeout=120).status_code)

    answers = []
    with others_are_served(fleet):
        threads = [threading.Thread(target=post) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert len(answers) == 3


def test_it_serves_as_before(fleet):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200 and json.loads(answer.text)["choices"]
