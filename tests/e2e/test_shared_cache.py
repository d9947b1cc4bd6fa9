"""`--shared-cache-type http`: a pool beside two mock engines, as docs/guide/shared-cache.md has it."""

import json
import subprocess
import os

import httpx
import pytest

from conftest import until
from engines import Fleet, ScriptedEngine

TEXT = "a prompt that every engine could fetch from the pool instead of computing it. " * 20


@pytest.fixture(scope="module")
def pool():
    # Any server that answers a POST.
    pool = ScriptedEngine("pool")
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def fleet(pool):
    options = ["--router-mode", "kv", "--shared-cache-type", "http", "--shared-cache-url", f"{pool.url}/find", "--shared-cache-timeout-ms", "9000"]
    fleet = Fleet("m", frontend=options)
    yield fleet
    fleet.stop()


def ask(fleet, text=TEXT, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def why(fleet, answer, *more):
    told = subprocess.run([os.environ["KVASIR_BIN"], "why", answer["id"], "--url", fleet.url, *more], capture_output=True, text=True, timeout=30)
    assert told.returncode == 0, told.stderr
    return told.stdout


def metric(fleet, name):
    lines = httpx.get(f"{fleet.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_what_the_pool_holds_is_a_term_of_the_decision(fleet, pool):
    pool.say({"ranges": [[0, 4], [6, 1000]]})
    answer = ask(fleet)
    path, _, body = pool.requests[-1]
    asked = json.loads(body)
    blocks = len(asked["tokens"]) // asked["block_size"]
    assert path == "/find" and asked["model"] == "m" and blocks > 8
    decision = json.loads(why(fleet, answer, "--json"))
    terms = [candidate["terms"] for candidate in decision["candidates"]]
    # At half its worth, on both workers: neither holds any of it.
    assert [t["shared_blocks"] for t in terms] == [(blocks - 2) / 2] * 2, terms
    assert all(t["credit_blocks"] == t["shared_blocks"] for t in terms), terms
    assert "SHARED" in why(fleet, answer)
    # The first worker holds the prompt now: only what the pool has beyond that counts there.
    pool.say({"tokens": len(asked["tokens"])})
    until(lambda: holds_all(fleet, blocks), told=fleet.frontend.log)


def holds_all(fleet, blocks):
    """Whether one worker is credited with its own blocks, and the other with half of the pool's."""
    decision = json.loads(why(fleet, ask(fleet), "--json"))
    shared = sorted(candidate["terms"]["shared_blocks"] for candidate in decision["candidates"])
    return shared == [0, blocks / 2]


def test_a_pool_that_fails_fails_no_request(fleet, pool):
    pool.say({"error": "no"}, status=500)
    before = metric(fleet, "dynamo_router_shared_cache_errors_total")
    answers = [ask(fleet, f"{number} {TEXT}") for number in range(8)]
    assert all("SHARED" not in why(fleet, answer) for answer in answers)
    # Five in a row, and it is left alone for a second.
    assert metric(fleet, "dynamo_router_shared_cache_errors_total") >= before + 5
    fleet.frontend.until_logged("the shared cache failed several times in a row")
    pool.say({"tokens": 1 << 20})
    until(lambda: "SHARED" in why(fleet, ask(fleet, "back " + TEXT)), told=fleet.frontend.log)
    fleet.frontend.until_logged("the shared cache answers again")
