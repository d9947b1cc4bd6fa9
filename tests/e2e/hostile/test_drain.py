"""Engines that shut down with work on them: what still streams is left alone, what is silent is not waited for."""

import time

import httpx

from conftest import until
from engines import frontend_before
from hostile.streaming_engine import Stream, StreamingEngine

# Nothing of a worker for so long, and what it has is given up; probes notice it within two seconds more.
SILENCE = 10
# What a busy machine may add.
SLACK = 4


def test_streams_of_an_engine_that_drains_go_on_and_those_of_a_silent_one_do_not():
    # 50 and 10 tokens a second, and one token every four seconds for longer than a silence may last.
    shapes = [(350, 0.02), (70, 0.1), (4, 4)]
    *drain, silent, stays = engines = [StreamingEngine() for _ in range(5)]
    # A request may be refused by each that drains before it comes to the one that stays.
    frontend = frontend_before([engine.url for engine in engines], "--router-mode", "round-robin", "--retry-limit", "5")
    ids = {row["url"]: row["worker_id"] for row in httpx.get(f"{frontend.url}/workers", timeout=30).json()["workers"]}
    go_on = [Stream(frontend.url, ids[engine.url], *shape) for engine, shape in zip(drain, shapes)]
    hangs = Stream(frontend.url, ids[silent.url], 2, 3600)
    for stream in [*go_on, hangs]:
        assert stream.begun.wait(30), frontend.log()
    for engine in [*drain, silent]:
        engine.drain()
    fell_silent = silent.last_byte
    # Requests that come meanwhile are answered by the one that stays, and each fails at the others first.
    while hangs.is_alive() and time.monotonic() < fell_silent + 40:
        asked = Stream(frontend.url, None, 1, 0)
        asked.join(30)
        assert asked.is_whole(), asked.text
    hangs.join(1)
    assert not hangs.is_alive(), "a silent worker is still waited for"
    for stream in go_on:
        stream.join(30)
        assert stream.is_whole(), f"{stream.text[-300:]}\n{frontend.log()[-3000:]}"
    waited = hangs.ended - fell_silent
    assert SILENCE - 0.5 <= waited <= SILENCE + 2 + SLACK, f"given up after {waited:.1f} s"
    assert '"error"' in hangs.text and hangs.text.endswith("data: [DONE]\n\n"), hangs.text
    # Only the silent one.
    given_up = [line for line in frontend.lines if "no sign of life" in line]
    assert len(given_up) == 1 and silent.url in given_up[0], given_up
    rows = lambda: httpx.get(f"{frontend.url}/workers", timeout=30).json()["workers"]  # noqa: E731
    until(lambda: [row["url"] for row in rows()] == [stays.url], told=frontend.log)
    assert frontend.stop() == 0, frontend.log()
    stays.drain()
