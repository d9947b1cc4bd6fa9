"""`kvasir mocker` as workers of a real Dynamo 1.6.1 frontend: one fleet for each set of planes, one test after another."""

import concurrent.futures
import json
import os
import pathlib
import signal

import pytest

from conftest import until
from dynamo_frontend import Dynamo
from dynamo_rig import need_dynamo, small_model_folder
from planes_rig import (
    COMBOS, DOOR, MODEL, TEXT, Load, Planes, chat, door, first_event, rest, running, stream, streams, until_hits, where,
)  # fmt: skip

need_dynamo()


def keys(planes):
    """All keys in the folder, by bucket."""
    found = {}
    for bucket in ("instances", "mdc", "event_channels", "event_sources"):
        folder = pathlib.Path(planes.env["DYN_FILE_KV"]) / "v1" / bucket
        names = [name for name in os.listdir(folder) if not name.startswith(".tmp_")] if folder.exists() else []
        if names:
            found[bucket] = len(names)
    return found


@pytest.fixture(scope="module", params=COMBOS)
def fleet(request, tmp_path_factory):
    # On a busy machine a worker may stand still for seconds, and this frontend answers 404 from the moment that the last one's keys are gone.
    planes, folder = Planes(request.param, tmp_path_factory.mktemp("planes"), lease_ttl=10), small_model_folder()
    # The frontend gets the tokenizer from the workers themselves.
    start = lambda **options: planes.mocker(folder, *DOOR, "--system-port", "0", **options)  # noqa: E731
    dynamo = Dynamo(planes, tmp_path_factory.mktemp("log") / "dynamo.log", "--migration-limit", "3")
    dynamo.planes, dynamo.start = planes, start
    with concurrent.futures.ThreadPoolExecutor() as both:
        dynamo.running = list(both.map(lambda _: start(), range(2)))
    try:
        dynamo.until_serving(MODEL)
        yield dynamo
        for mocker in dynamo.running:
            assert mocker.stop(60) == 0, mocker.log()
    finally:
        dynamo.stop()
        planes.end()


def ask(dynamo, text, **more):
    answer = chat(dynamo.http, text, **more)
    assert answer.status_code == 200, f"{answer.text}\n{dynamo.log()}"
    return answer


def until_only(dynamo, wanted):
    """Waits until all answers come, and from these workers."""
    numbers = iter(range(1 << 30))
    asked = lambda: chat(dynamo.http, TEXT.format(f"only {next(numbers)}"), max_tokens=1)  # noqa: E731
    is_well = lambda answer: answer.status_code == 200 and where(answer) in wanted  # noqa: E731
    until(lambda: all(is_well(asked()) for _ in range(6)), 60, dynamo.log)


def test_a_worker_owns_the_keys_that_were_recorded(fleet):
    if "DYN_FILE_KV" in fleet.planes.env:
        # Two workers: generate, a query for each cache, clear_kv_blocks; four channels each. A worker that stood still for longer
        # than its files live has to put them there again.
        wanted = {"instances": 6, "mdc": 2, "event_channels": 8, "event_sources": 2}
        until(lambda: keys(fleet.planes) == wanted, 30, lambda: f"{keys(fleet.planes)}\n{fleet.log()}")


def test_a_chat_a_completion_and_a_stream(fleet):
    whole = ask(fleet, TEXT.format(1), max_tokens=12).json()
    assert whole["choices"][0]["message"]["content"] and whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 12
    text, finish = "", None
    with stream(fleet.http, TEXT.format(1), 12) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
    assert (text, finish) == (whole["choices"][0]["message"]["content"], "length")
    done = fleet.http.post("/v1/completions", json={"model": MODEL, "prompt": "a b c", "max_tokens": 4})
    assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 4, done.text


def test_a_second_turn_finds_its_blocks(fleet):
    """The frontend learns of a worker's blocks from its events: the next request with that prefix goes where they are."""
    until_hits(fleet.http, fleet.log)


def computing(mockers):
    """Those that have a request."""
    return [mocker for mocker in mockers if running(door(mocker))[0]]


def test_a_client_that_leaves_stops_its_request(fleet):
    with stream(fleet.http, TEXT.format(2), 4000) as answer:
        _begun = first_event(answer)
        (busy,) = until(lambda: computing(fleet.running), 20, fleet.log)
    until(lambda: running(door(busy)) == (0, 1), 20, lambda: f"{running(door(busy))}\n{busy.log()}")
    ask(fleet, TEXT.format(3))


def test_a_frontend_that_starts_later_knows_every_cache_and_published_load(fleet, tmp_path):
    texts = [TEXT.format(f"kept {number}") for number in range(5)]
    before = [where(ask(fleet, text, max_tokens=2)) for text in texts]
    later = Dynamo(fleet.planes, tmp_path / "dynamo.log", "--active-decode-blocks-threshold", "0.01")
    try:
        later.until_serving(MODEL)
        found = lambda: [where(ask(later, text, max_tokens=2)) for text in texts]  # noqa: E731
        until(lambda: found() == before, 30, later.log)
        # What runs on the workers was sent by another frontend: only the load that they publish tells of it.
        with streams(fleet.http):
            until(lambda: chat(later.http).status_code in (503, 529), 30, later.log)
        until(lambda: chat(later.http).status_code == 200, 30, later.log)
    finally:
        later.stop()


def test_an_answer_goes_on_where_its_worker_is_killed(fleet):
    with stream(fleet.http, TEXT.format("go on"), 1500) as answer:
        lines = first_event(answer)
        (busy,) = until(lambda: computing(fleet.running), 20, fleet.log)
        busy.process.kill()
        finish, usage = rest(lines, fleet.log)
    assert finish == "length" and usage["completion_tokens"] == 1500, (finish, usage)
    fleet.running.remove(busy)
    # Its keys expire.
    until_only(fleet, fleet.running[0].ids)


def test_joining_and_leaving_under_load_lose_no_request(fleet):
    (old,) = fleet.running
    with Load(fleet.url, clients=6, max_tokens=32) as load:
        load.until_more(told=fleet.log)
        # It is slow: what it answers in the next test lasts longer than a frontend may take to see that its keys are gone.
        new = fleet.start(speed="1")
        fleet.running.append(new)
        until(lambda: new.ids[0] in load.seen, 60, fleet.log)
        old.process.send_signal(signal.SIGTERM)
        assert old.process.wait(60) == 0, old.log()
        fleet.running = [new]
        load.until_more(told=fleet.log)
    assert not load.failed, f"{len(load.failed)} of {len(load.failed) + load.served}: {load.failed[:3]}\n{old.log()}\n{new.log()}\n{fleet.log()[-2000:]}"


def test_sigterm_takes_the_keys_back_and_answers_what_runs(fleet):
    (last,) = fleet.running
    with stream(fleet.http, TEXT.format(4), 4000) as answer:
        lines = first_event(answer)
        last.process.send_signal(signal.SIGTERM)
        if "DYN_FILE_KV" in fleet.planes.env:
            until(lambda: not keys(fleet.planes), 10, last.log)
        until(lambda: fleet.models() == [], 20, fleet.log)
        assert last.process.poll() is None, "it answers what it has"
        finish, _ = rest(lines, fleet.log)
    assert finish == "length", fleet.log()
    assert last.process.wait(30) == 0, last.log()
    fleet.running = []
