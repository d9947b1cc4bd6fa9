"""`--index-snapshot`: a frontend that is drained, or killed, and started again knows what it knew."""

import signal
import time

import pytest

from events_rig import MODEL, Engine, Rig


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "index.kv"


def restart(rig, kept, meanwhile=lambda: None):
    """Drains the frontend and starts another one before the same engines."""
    rig.http.close()
    assert rig.frontend.stop() == 0, rig.log()
    meanwhile()
    rig.start("--index-snapshot", str(kept))


def test_a_restarted_frontend_goes_on_where_it_was(kept):
    """What engines did while nobody listened is replayed; one that was restarted meanwhile is learned anew."""
    rig = Rig(3, "--index-snapshot", str(kept))
    assert "no index snapshot" in rig.log()
    steady, busy, reborn = rig.engines
    prompts = {}
    for engine in rig.engines:
        rig.prove(engine)
        prompts[engine] = rig.fresh()
        rig.ask(prompts[engine], engine)
        rig.ask(rig.fresh(), engine, cache_salt="tenant")
        rig.settle(engine)
    missed = rig.fresh()

    def meanwhile():
        assert kept.exists() and not list(kept.parent.glob("*.new"))
        answer = busy.http.post("/v1/completions", json={"model": MODEL, "max_tokens": 4, "prompt": missed})
        assert answer.status_code == 200
        reborn.fault("restart-empty")

    restart(rig, kept, meanwhile)
    rig.frontend.until_logged("index snapshot restored")
    for engine in rig.engines:
        assert rig.same(engine)
        assert rig.cache(engine)["state"] == "exact", "what it had proven counts"
    assert rig.indexed(reborn) == set() and rig.indexed(steady)
    assert rig.faults(reborn, "restart") == 1 and rig.faults(steady, "restart") == 0
    # Nothing but what was missed was replayed.
    assert rig.cache(steady)["events"]["batches"] == 0
    assert rig.cache(busy)["events"]["batches"] >= 1
    for engine, prompt in [(steady, prompts[steady]), (busy, missed)]:
        assert rig.cached(prompt) == 144, "the first request after the start finds its engine"
        assert rig.foretold()[-1] == 10
    # And again, with what a salted sequence leaves to its children.
    restart(rig, kept)
    for engine in rig.engines:
        assert rig.same(engine)
    rig.close()


def test_a_frontend_that_is_killed_goes_on_where_it_was(kept):
    """Nothing is drained. What was written last is there, with the cursors of that moment, and no block is counted twice."""
    often = ["--index-snapshot", str(kept), "--index-snapshot-interval-secs", "0.2"]
    rig = Rig(2, *often, engine_options=["--num-blocks", "256"])
    prompts = {}
    for engine in rig.engines:
        rig.prove(engine)
        prompts[engine] = rig.fresh()
        rig.ask(prompts[engine], engine)
        rig.settle(engine)
    rig.until(kept.exists, "the first write")
    until_rested(rig, kept)
    rested = kept.stat()
    time.sleep(1)
    assert kept.stat() == rested, "nothing changed, nothing was written"
    rig.ask(rig.fresh(), rig.engines[0])
    rig.until(lambda: kept.stat().st_mtime_ns != rested.st_mtime_ns, "a change is written")
    until_rested(rig, kept)
    # While requests run the copy is of one moment, too.
    last = [rig.fresh() for _ in range(30)]
    for at, prompt in enumerate(last):
        rig.ask(prompt, rig.engines[at % 2])
    rig.http.close()
    rig.frontend.process.kill()
    rig.frontend.process.wait()
    assert not list(kept.parent.glob("*.new")) or kept.exists()
    rig.start(*often)
    rig.frontend.until_logged("index snapshot restored")
    for engine in rig.engines:
        assert rig.same(engine), "the rest was replayed"
        assert rig.cache(engine)["state"] == "exact"
        assert rig.cached(prompts[engine]) == 144
    # Blocks that leave an engine leave the index: they were counted once.
    for engine in rig.engines:
        before = engine.truth()[0]
        for _ in range(40):
            rig.ask(rig.fresh(), engine)
        assert not before & engine.truth()[0], "all of them were evicted"
        assert rig.same(engine)
    rig.close()


def test_what_was_kept_of_a_worker_that_is_away_is_kept_on(kept):
    """It does not answer while another frontend comes and is killed; to the third its cache view is what it was."""
    often = ["--index-snapshot", str(kept), "--index-snapshot-interval-secs", "0.2"]
    rig = Rig(2, *often)
    here, away = both = rig.engines
    for engine in both:
        rig.prove(engine)
    prompt = rig.fresh()
    rig.ask(prompt, away)
    rig.settle(away)
    rig.http.close()
    assert rig.frontend.stop() == 0
    away.process.process.send_signal(signal.SIGSTOP)
    rig.engines = [here]
    before = kept.stat().st_mtime_ns
    rig.start("--worker", away.url, *often)
    rig.ask(rig.fresh(), here)
    rig.until(lambda: kept.stat().st_mtime_ns != before, "it is written without the other")
    rig.http.close()
    rig.frontend.process.kill()
    away.process.process.send_signal(signal.SIGCONT)
    rig.engines = both
    rig.start(*often)
    assert rig.same(away) and rig.cache(away)["state"] == "exact"
    assert rig.cache(away)["events"]["batches"] == 0, "nothing had to be replayed"
    assert rig.cached(prompt) == 144
    rig.close()


def until_rested(rig, kept):
    """Waits until the file says all that there is to say: it is as it was five intervals ago."""
    seen = []

    def rested():
        seen.append(kept.stat().st_mtime_ns)
        time.sleep(1)
        return kept.stat().st_mtime_ns == seen[-1]

    rig.until(rested, "the file rests")


def test_a_start_without_a_file_recovers_from_replay(kept):
    rig = Rig(1)
    engine = rig.engines[0]
    prompt = rig.fresh()
    rig.ask(prompt, engine)
    restart(rig, kept)
    assert rig.same(engine)
    # Unproven events count half, beside our own decisions.
    cache = rig.cache(engine)
    assert (cache["state"], cache["cause"], cache["credit"]) == ("approximate", "starting", 0.5)
    assert rig.cached(prompt) == 144
    assert rig.foretold()[-1] == 5
    rig.close()


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"#!/bin/sh\n", "it is no index snapshot of kvasir"),
        (b"KVST\x63\x00", "version 99 was written by another release"),
        (None, "it is damaged"),
    ],
)
def test_a_file_that_cannot_be_used_costs_a_cold_start(kept, content, reason):
    rig = Rig(1, "--index-snapshot", str(kept))
    engine = rig.engines[0]
    rig.ask(rig.fresh(), engine)
    rig.settle(engine)

    def spoil():
        good = kept.read_bytes()
        kept.write_bytes(good[: len(good) // 2] + b"\xff" + good[len(good) // 2 + 1 :] if content is None else content)

    restart(rig, kept, spoil)
    assert reason in rig.frontend.until_logged("index snapshot refused: starting cold")
    assert rig.same(engine), "replay tells all"
    restart(rig, kept)
    rig.frontend.until_logged("index snapshot restored")  # the next one is good again
    rig.close()


def test_what_was_kept_of_an_engine_without_events_is_forgotten(kept):
    """The engine comes back at its old address and publishes no more."""
    rig = Rig(1, "--index-snapshot", str(kept))
    engine = rig.engines[0]
    rig.ask(rig.fresh(), engine)
    rig.settle(engine)
    assert rig.indexed(engine)
    port = engine.url.rsplit(":", 1)[1]
    engine.http.close()
    engine.process.stop()
    rig.http.close()
    assert rig.frontend.stop() == 0
    rig.engines = [Engine("--http-port", port, events=False)]
    rig.start("--index-snapshot", str(kept))
    engine = rig.engines[0]
    assert rig.cache(engine)["cause"] == "no_events"
    assert rig.indexed(engine) == set()
    rig.close()
