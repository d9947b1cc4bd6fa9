"""What goes wrong on command at `kvasir mocker` on the planes, and what a frontend makes of it: no request is lost, and what is known of
caches is the truth again."""

import collections
import time

import httpx
import pytest

from conftest import until
from planes_rig import BUILTIN, DOOR, MODEL, TEXT, Planes, busy_workers, chat, door, first_event, rest, stream, until_hits, until_serving

COMBOS = ["file+tcp+zmq", "etcd+nats+nats"]


class Engine:
    """A mock engine on the planes, and the door where it is told what to do wrong."""

    def __init__(self, planes):
        self.process = planes.mocker(BUILTIN, "--migration-limit", "3", *DOOR)
        (self.id,) = self.process.ids
        self.http = door(self.process)

    def fault(self, fault, kind="faults"):
        answer = self.http.post(f"/mock/{kind}", json={"fault": fault})
        assert answer.status_code == 200, answer.text

    def cached_blocks(self):
        """How many blocks its cache holds, whatever its events told."""
        (rank,) = self.http.get("/mock/status").json()["ranks"]
        return rank["cached_blocks"]


@pytest.fixture(scope="module", params=COMBOS)
def fleet(request, tmp_path_factory):
    planes = Planes(request.param, tmp_path_factory.mktemp("planes"))
    frontend = planes.frontend()
    frontend.engines = [Engine(planes), Engine(planes)]
    until_serving(frontend, [engine.id for engine in frontend.engines])
    yield frontend
    for engine in frontend.engines:
        engine.http.close()
        assert engine.process.stop(60) == 0, engine.process.log()
    assert frontend.stop() == 0, frontend.log()
    planes.end()


def ask(fleet, engine, text):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = fleet.http.post("/v1/chat/completions", json=body, headers={"x-dynamo-worker-instance-id": str(engine.id)})
    assert answer.status_code == 200, f"{answer.text}\n{fleet.log()}"


def indexed(fleet, engine):
    """The blocks that the index believes an engine to hold."""
    counts = collections.Counter()
    for event in fleet.http.get("/dump").json().get(f"{MODEL}:default", {}).get("events", []):
        if event["worker_id"] == engine.id:
            data = event["event"]["data"]
            if "stored" in data:
                counts.update(block["block_hash"] for block in data["stored"]["blocks"])
            else:
                counts.subtract(data["removed"]["block_hashes"])
    return {name for name, count in counts.items() if count > 0}


def until_in_step(fleet, engine):
    """Waits until the index has as many blocks of an engine as that holds."""
    seen = lambda: (len(indexed(fleet, engine)), engine.cached_blocks())  # noqa: E731
    until(lambda: len(set(seen())) == 1, 60, lambda: f"{seen()}\n{fleet.log()}")


@pytest.mark.parametrize("fault", ["drop=1", "drop=5", "duplicate", "reorder", "restart-empty"])
def test_what_events_lose_is_asked_for(fleet, fault):
    engine = fleet.engines[0]
    ask(fleet, engine, TEXT.format(f"before {fault}"))
    engine.fault(fault, "event_faults")
    # As many as are lost, and those by which it is noticed.
    for number in range(8):
        ask(fleet, engine, TEXT.format(f"{fault} {number}"))
    until_in_step(fleet, engine)
    until_hits(fleet.http, fleet.log)


def test_a_cache_of_which_nothing_was_told_is_asked_for_when_it_speaks_again(fleet):
    engine = fleet.engines[0]
    engine.fault("mute", "event_faults")
    for number in range(4):
        ask(fleet, engine, TEXT.format(f"mute {number}"))
    engine.fault("unmute", "event_faults")
    ask(fleet, engine, TEXT.format("heard again"))
    until_in_step(fleet, engine)


def until_struck(engine, ask_once):
    """Asks until the fault of an engine has struck, which it does once."""
    armed = lambda: engine.http.get("/mock/faults").json()["faults"]  # noqa: E731
    for number in range(40):
        ask_once(number)
        if not armed():
            return
    raise AssertionError(f"never struck: {armed()}")


@pytest.mark.parametrize("fault", ["refuse", "die=5", "cut=5", "status=500"])
def test_an_answer_that_breaks_off_goes_on_elsewhere(fleet, fault):
    engine = fleet.engines[0]
    engine.fault(f"{fault}:count=1")

    def ask_once(number):
        with stream(fleet.http, TEXT.format(f"{fault} {number}"), 40) as answer:
            finish, usage = rest(first_event(answer), fleet.log)
        assert finish == "length" and usage["completion_tokens"] == 40, (finish, usage)

    until_struck(engine, ask_once)


def test_a_worker_that_never_calls_home_is_left_by_who_leaves(fleet):
    engine = fleet.engines[0]
    engine.fault("stall:count=1")
    left = []

    def ask_once(number):
        try:
            assert chat(httpx.Client(base_url=fleet.url, timeout=2), TEXT.format(f"stall {number}")).status_code == 200
        except httpx.ReadTimeout:
            left.append(number)

    until_struck(engine, ask_once)
    assert len(left) == 1
    until(lambda: busy_workers(fleet.http) == [], 20, fleet.log)


def test_a_slow_worker_is_slow(fleet):
    for engine in fleet.engines:
        engine.fault("slow=400")
    began = time.monotonic()
    assert chat(fleet.http, max_tokens=1).status_code == 200
    assert time.monotonic() - began >= 0.4
    for engine in fleet.engines:
        assert engine.http.request("DELETE", "/mock/faults").status_code == 200


def test_a_restart_cuts_what_runs_and_it_goes_on_elsewhere(fleet):
    with stream(fleet.http, "go on", 1000) as answer:
        lines = first_event(answer)
        busy = until(lambda: busy_workers(fleet.http), 10)[0]
        engine = next(engine for engine in fleet.engines if engine.id == busy)
        assert engine.http.post("/mock/restart").status_code == 200
        finish, usage = rest(lines, fleet.log)
    assert finish == "length" and usage["completion_tokens"] == 1000, (finish, usage)
    until_in_step(fleet, engine)
