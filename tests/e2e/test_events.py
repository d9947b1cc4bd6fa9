"""`kvasir frontend` before mock engines that publish their cache events over real sockets.

Each fault that an engine can be made to have is noticed, named and mended, or the engine is believed less.
"""

import contextlib
import os
import pathlib
import random
import time

import pytest

from events_rig import BLOCK, MODEL, VOCABULARY, Engine, Rig


@pytest.fixture
def rig():
    rig = Rig(1)
    yield rig
    rig.close()


@pytest.fixture
def engine(rig):
    return rig.engines[0]


def test_events_tell_which_engine_has_a_prompt():
    """Prompts as token ids, so that no tokenizer is needed; what the index foretells is what engines report."""
    rig = Rig(2)
    prompts = [rig.fresh() for _ in range(6)]
    for at, prompt in enumerate(prompts):
        rig.ask(prompt, rig.engines[at % 2])
        for engine in rig.engines:
            rig.settle(engine)
    for prompt in prompts:
        # 160 tokens are ten blocks; the last one is always computed again.
        assert rig.cached(prompt) == 144
    assert rig.foretold()[-6:] == [10] * 6
    # Had one gone astray, its blocks would now be in both.
    assert [len(engine.truth()[0]) for engine in rig.engines] == [30, 30]
    rig.close()


def threads_of(pid):
    """Names of a process's threads. One that ends meanwhile has none."""
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield (task / "comm").read_text().strip()


@pytest.mark.parametrize("threads", [1, 3])
def test_events_have_threads_of_their_own(threads):
    """As many as `--router-event-threads` says; what they apply is there whichever of them did."""
    rig = Rig(3, "--router-event-threads", str(threads))
    names = threads_of(rig.frontend.process.pid)
    assert sorted(name for name in names if name.startswith("events-")) == [f"events-{n + 1}" for n in range(threads)]
    for engine in rig.engines:
        rig.prove(engine)
        assert rig.same(engine)
    rig.close()


def test_without_faults_every_prediction_is_right():
    """Conversations of many turns over two engines whose caches are too small for them: every request's cached
    tokens are what was foretold when it was sent."""
    rig = Rig(2, engine_options=["--num-blocks", "256"])
    for engine in rig.engines:
        rig.prove(engine)
    rng = random.Random(11)
    talks = [rig.fresh(4) for _ in range(12)]
    hits = 0
    for turn in range(60):
        talk = rng.choice(talks)
        talk.extend(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40)))
        usage = rig.ask(talk)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        foretold = min(rig.foretold()[-1], (len(talk) - 1) // BLOCK) * BLOCK
        assert cached == foretold, f"turn {turn}: {len(talk)} tokens\n{rig.log()}"
        hits += cached > 0
        for engine in rig.engines:
            rig.settle(engine)
    assert hits > 20, "too few hits to show anything"
    for engine in rig.engines:
        assert rig.same(engine)
        page = rig.http.get("/metrics").text
        findings = [line for line in page.splitlines() if line.startswith("kvasir_worker_predictions_total")]
        assert findings and all('finding="right"' in line for line in findings), findings
        assert rig.cache(engine)["error"] == 0
    rig.close()


def test_a_lost_message_is_noticed_at_the_next(rig, engine):
    rig.prove(engine)
    engine.fault("drop=1")
    rig.ask(rig.fresh(), engine)
    rig.ask(rig.fresh(), engine)
    assert rig.same(engine)
    cache = rig.cache(engine)
    assert (cache["state"], cache["last_fault"]) == ("exact", "gap")
    assert cache["events"]["faults"]["missed"] == 1 == rig.faults(engine, "missed")


def test_a_lost_last_message_is_noticed_by_what_does_not_appear(rig, engine):
    """Nothing follows that could show the gap: the prompt's blocks are looked for, and the engine is asked."""
    rig.prove(engine)
    engine.fault("drop=1")
    rig.ask(rig.fresh(), engine)
    # It is looked for after a second; by then it may have been found.
    assert rig.indexed(engine) != engine.truth()[0] or rig.findings(engine, "events_missing") == 1
    assert rig.same(engine)
    assert rig.findings(engine, "events_missing") == 1
    assert rig.cache(engine)["state"] == "exact"


def test_repeated_messages_change_nothing(rig, engine):
    rig.prove(engine)
    engine.fault("duplicate")
    rig.ask(rig.fresh(), engine)
    rig.until(lambda: rig.faults(engine, "duplicate") == 1, "the second is counted")
    assert rig.same(engine)
    assert rig.cache(engine)["state"] == "exact"


def test_messages_in_disorder_are_put_in_order(rig, engine):
    rig.prove(engine)
    engine.fault("reorder")
    rig.ask(rig.fresh(), engine)
    rig.ask(rig.fresh(), engine)
    assert rig.same(engine)
    cache = rig.cache(engine)
    assert (cache["state"], cache["last_fault"]) == ("exact", "gap")
    assert cache["events"]["faults"]["missed"] == 1 == rig.faults(engine, "missed")


def test_a_late_message_is_asked_for(rig, engine):
    rig.prove(engine)
    # Longer than events are ever waited for.
    engine.fault("delay=7000")
    rig.ask(rig.fresh(), engine)
    assert rig.same(engine)
    assert rig.findings(engine, "events_missing") == 1
    rig.until(lambda: rig.faults(engine, "duplicate") == 1, "it comes after all")
    assert rig.same(engine)


def test_a_sequence_that_begins_again_empties_the_rank(rig, engine):
    """The engine still holds what nobody will tell of again: it is believed less, until an announced clear."""
    rig.prove(engine)
    old = [rig.fresh() for _ in range(14)]
    for prompt in old:
        rig.ask(prompt, engine)
    rig.settle(engine)
    engine.fault("restart-sequence")
    rig.ask(rig.fresh(), engine)
    rig.until(lambda: rig.faults(engine, "restart") == 1, "the restart is noticed")
    rig.settle(engine)
    assert rig.cache(engine)["last_fault"] == "restart"
    assert rig.indexed(engine) < engine.truth()[0]
    assert rig.cached(old[0], engine) == 144
    rig.until(lambda: rig.findings(engine, "events_missing") == 1, "named by the first answer that shows it")
    for prompt in old[1:]:
        assert rig.cached(prompt, engine) == 144
    rig.cache_state(engine, "approximate", "events_missing")
    engine.clear()
    rig.ask(rig.fresh(), engine)
    assert rig.same(engine)
    rig.prove(engine)
    assert rig.same(engine)


@pytest.mark.parametrize("how", ["restart-empty", "/mock/restart"])
def test_a_restarted_engine_is_emptied(rig, engine, how):
    rig.prove(engine)
    if how.startswith("/"):
        engine.http.post(how)
    else:
        engine.fault(how)
    rig.until(lambda: rig.faults(engine, "restart") == 1, "the restart is noticed")
    rig.until(lambda: rig.indexed(engine) == set() == engine.truth()[0], "all is forgotten")
    assert rig.cache(engine)["last_fault"] == "restart"
    rig.prove(engine)
    assert rig.same(engine)


def test_a_silent_clear_is_named_and_forgotten(rig, engine):
    rig.prove(engine)
    old = [rig.fresh() for _ in range(24)]
    for prompt in old:
        rig.ask(prompt, engine)
    rig.settle(engine)
    engine.fault("silent-clear")
    engine.clear()
    assert rig.cached(old[0], engine) == 0
    rig.until(lambda: rig.findings(engine, "silent_eviction") == 1, "named by the first answer that shows it")
    assert rig.cache(engine)["error_by_cause"]["silent_eviction"] > 0
    left = iter(old[1:])

    def discounted():
        rig.ask(next(left), engine)
        # Events have a second to explain it.
        time.sleep(1.1)
        cache = rig.cache(engine)
        return (cache["state"], cache["cause"]) == ("discounted", "silent_eviction")

    rig.until(discounted, "it is believed less", seconds=30)
    for prompt in left:
        rig.ask(prompt, engine)
    rig.settle(engine)
    assert rig.indexed(engine) <= engine.truth()[0], "ghosts are left"
    rig.prove(engine)
    engine.clear()
    rig.ask(rig.fresh(), engine)
    assert rig.same(engine)
    rig.frontend.until_logged("forgetting its blocks")


def test_a_replay_that_no_longer_reaches_back_empties_the_rank(rig, engine):
    rig.prove(engine)
    engine.fault("drop=1000")
    for _ in range(2):
        rig.ask(rig.fresh(), engine)
    engine.fault("drop=0")
    engine.fault("forget-replay=0")
    last = rig.fresh()
    rig.ask(last, engine)
    rig.until(lambda: rig.faults(engine, "replay_too_short") >= 1, "the short replay is noticed")
    rig.settle(engine)
    cache = rig.cache(engine)
    assert cache["last_fault"] == "replay_too_short" and not cache["events"]["complete"]
    assert set() < rig.indexed(engine) < engine.truth()[0]
    assert rig.cached(last, engine) == 144
    engine.clear()
    rig.prove(engine)
    assert rig.same(engine)
    assert rig.cache(engine)["events"]["complete"]


def test_another_block_size_is_named_at_the_first_event(rig, engine):
    rig.prove(engine)
    engine.fault("block-size=8")
    rig.ask(rig.fresh(), engine)
    rig.until(lambda: rig.cache(engine)["cause"] == "block_size_differs", "the size is noticed")
    assert rig.cache(engine)["state"] == "approximate"
    rig.cache_state(engine, "approximate", "block_size_differs")
    assert rig.faults(engine, "block_size") >= 1
    engine.fault("block-size=0")
    engine.clear()
    for _ in range(4):
        rig.ask(rig.fresh(), engine)
    rig.until(lambda: rig.cache(engine)["cause"] != "block_size_differs", "the size is right again")
    rig.prove(engine)
    assert rig.same(engine)


def test_an_engine_with_another_block_size_than_its_peers_is_named():
    """One index has one block size: that of the engine that came first. The other one is predicted from requests."""
    rig = Rig([Engine(), Engine("--block-size", "32")], settle=False)
    expected = [("approximate", "block_size_differs"), ("approximate", "starting")]

    def states():
        caches = [rig.cache(engine) for engine in rig.engines]
        return [(cache["state"], cache["cause"]) for cache in caches]

    rig.until(lambda: sorted(states()) == expected, "one of them is named")
    states = states()
    odd = rig.engines[states.index(("approximate", "block_size_differs"))]
    prompt = rig.fresh()
    for _ in range(3):
        rig.ask(prompt, odd)
    assert rig.foretold()[-1] > 0 and rig.cache(odd)["cause"] == "block_size_differs"
    rig.close()


def test_an_engine_that_falls_silent_is_no_longer_believed(rig, engine):
    rig.prove(engine)
    engine.fault("mute")

    def unbelieved():
        prompt = rig.fresh()
        rig.ask(prompt, engine)
        assert rig.cached(prompt, engine) == 144
        return rig.cache(engine)["state"] == "approximate"

    # Some fifteen answers must show it, each at least a second old.
    rig.until(unbelieved, "it is not believed", seconds=120)
    assert rig.cache(engine)["cause"] == "events_missing"
    # From here on its own requests say where a prompt was sent.
    prompt = rig.fresh()
    rig.ask(prompt, engine)
    rig.ask(prompt, engine)
    assert rig.foretold()[-1] == 10
    engine.fault("unmute")
    engine.clear()
    rig.prove(engine)
    assert rig.same(engine)


def test_an_engine_without_events_stays_approximate():
    rig = Rig([Engine(events=False)])
    engine = rig.engines[0]
    prompt = rig.fresh()
    for _ in range(5):
        rig.ask(prompt, engine)
    cache = rig.cache(engine)
    assert (cache["state"], cache["cause"], cache["events"]) == ("approximate", "no_events", None)
    assert rig.foretold() == [0, 10, 10, 10, 10]
    rig.close()


def test_events_can_be_refused():
    rig = Rig(1, "--no-router-kv-events")
    engine = rig.engines[0]
    prompt = rig.fresh()
    for _ in range(5):
        rig.ask(prompt, engine)
    cache = rig.cache(engine)
    assert (cache["state"], cache["cause"], cache["events"]) == ("approximate", "forced", None)
    assert rig.foretold() == [0, 10, 10, 10, 10]
    rig.close()


@pytest.mark.parametrize("how", [("--router-mode", "round-robin"), ("--router-kv-overlap-score-credit", "0")])
def test_nobody_listens_where_the_router_goes_by_load_alone(how):
    rig = Rig(1, *how)
    engine = rig.engines[0]
    prompt = rig.fresh()
    for _ in range(3):
        rig.ask(prompt, engine)
    cache = rig.cache(engine)
    assert (cache["state"], cache["cause"], cache["events"]) == ("approximate", "forced", None)
    rig.close()


def test_an_event_socket_that_is_not_there_is_named():
    engine = Engine(events=False)
    engine.url += ",events=tcp://127.0.0.1:1"
    rig = Rig([engine], settle=False)
    rig.until(lambda: rig.cache(engine)["cause"] == "events_unreachable", "the cause is named")
    cache = rig.cache(engine)
    assert cache["state"] == "approximate" and not cache["events"]["connected"] and cache["events"]["error"]
    rig.close()


def test_another_tokenizer_is_named():
    """The frontend has another model's tokenizer than the engine: the first answer shows it by its count."""
    folder = os.environ.get("KVASIR_TEST_QWEN_DIR")
    if not folder:
        pytest.skip("NO tokenizer here (KVASIR_TEST_QWEN_DIR): nothing is known of blocks by a real tokenizer")
    rig = Rig(1, "--model-path", folder)
    engine = rig.engines[0]

    def chat(text):
        body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        answer = rig.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text

    chat("Which of the boats in the harbour came first, and who was on it? " * 9)
    assert rig.findings(engine, "tokenization_differs") == 1
    for turn in range(5):
        chat(f"{turn}: which of the boats in the harbour came first, and who was on it? " * 9)
    cache = rig.cache(engine)
    assert (cache["state"], cache["cause"]) == ("approximate", "tokenization_differs")
    assert "--model-path" in cache["advice"]
    rig.cache_state(engine, "approximate", "tokenization_differs")
    rig.close()


HONEST = ["drop=1", "drop=3", "duplicate", "reorder", "delay=30", "delay=300", "restart-empty"]
ANY = [*HONEST, "restart-sequence", "silent-clear", "forget-replay=0", "forget-replay=2", "block-size=8", "mute"]


def misbehave(rig, rng, faults, steps):
    """Requests over all engines, and faults among them."""
    prompts = [rig.fresh(rng.randrange(1, 12)) for _ in range(20)]
    for _ in range(steps):
        engine = rng.choice(rig.engines)
        if rng.random() < 0.3:
            fault = rng.choice(faults)
            engine.fault(fault)
            if fault == "silent-clear":
                engine.clear()
        elif rng.random() < 0.05:
            engine.clear()
        prompt = rng.choice(prompts)
        if rng.random() < 0.3:
            prompt.extend(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 50)))
        rig.ask(prompt, rng.choice([None, engine]))


def end_faults(rig):
    """Nothing goes wrong any more, and every engine says something that shows what did."""
    for engine in rig.engines:
        for fault in ["unmute", "block-size=0", "drop=0"]:
            engine.fault(fault)
    for engine in rig.engines:
        for _ in range(2):
            rig.ask(rig.fresh(), engine)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_goes_wrong_on_the_way_is_mended(seed):
    """Messages lost, repeated, late and in disorder, engines restarted: replay tells all of it in the end."""
    rig = Rig(3, engine_options=["--num-blocks", "128"])
    misbehave(rig, random.Random(seed), HONEST, 80)
    end_faults(rig)
    for engine in rig.engines:
        rig.until(lambda: rig.same(engine), "index and engine agree")
    rig.close()


@pytest.mark.parametrize("seed", [4, 5])
def test_whatever_engines_conceal_is_relearned(seed):
    """Silent clears, numbering that begins again, replays that are too short, events that are not sent at all: once
    every engine has told of a clear, index and truth agree again, and the engines are believed again."""
    rig = Rig(3, engine_options=["--num-blocks", "128"])
    misbehave(rig, random.Random(seed), ANY, 80)
    end_faults(rig)
    for engine in rig.engines:
        # Twice: a silent clear may still be due from a time when nothing was told at all.
        for _ in range(2):
            engine.clear()
            rig.ask(rig.fresh(), engine)
    for engine in rig.engines:
        rig.until(lambda: rig.same(engine), "index and engine agree")
        rig.prove(engine)
        assert rig.same(engine)
    rig.close()
