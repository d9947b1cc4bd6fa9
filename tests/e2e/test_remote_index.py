"""One router keeps the index, others ask it: `--serve-indexer` and `--use-remote-indexer`, among ours and with Dynamo's."""

import os
import re

import pytest

from conftest import until
from dynamo_frontend import Dynamo
from dynamo_rig import Mocker, model_folder
from planes_rig import BUILTIN, TEXT, Planes, chat, until_exact, until_serving, where

DYNAMO = os.environ.get("KVASIR_DYNAMO_PYTHON")


def count(kvasir, series):
    """Of a counter, by its first label."""
    found = re.findall(rf'^{series}\{{[a-z]+="([a-z]+)"\}} (\S+)$', kvasir.http.get("/metrics").text, re.M)
    return {label: float(value) for label, value in found}


def decision(kvasir, answer):
    """How a frontend of ours decided about an answer."""
    return kvasir.http.get(f"/decisions/{answer.json()['id']}").json()


def predicted(kvasir, answer):
    return decision(kvasir, answer)["predicted"]["indexed"]


def answered(kvasir, **fields):
    answer = chat(kvasir.http, **fields)
    assert answer.status_code == 200, f"{answer.text}\n{kvasir.log()}"
    return answer


@pytest.mark.parametrize("events", [True, False], ids=["events", "decisions"])
def test_a_router_without_an_index_decides_as_one_that_has_it(tmp_path, events):
    planes = Planes("file+tcp+zmq", tmp_path)
    workers = planes.mocker(BUILTIN, workers=3)
    mode = [] if events else ["--no-router-kv-events"]
    keeper = planes.frontend("--serve-indexer", *mode)
    asker = planes.frontend("--use-remote-indexer", *mode)
    for kvasir in (keeper, asker):
        until_serving(kvasir, workers.ids)
    if events:
        until_exact(keeper)
    asker.until_logged("endpoint=dynamo/backend/kv_indexer_query", 60)
    if not events:
        asker.until_logged("endpoint=dynamo/backend/kv_indexer_record_routing_decision", 60)
    # What went through either is known to both.
    for number, (through, other) in enumerate([(keeper, asker), (asker, keeper)] * 2):
        text = TEXT.format(f"remote {number}")
        target = where(answered(through, text=text, max_tokens=2))

        def alike():
            answers = [answered(kvasir, text=text, max_tokens=2) for kvasir in (keeper, asker)]
            same = {where(answer) for answer in answers} == {target}
            tokens = {predicted(kvasir, answer) for kvasir, answer in zip((keeper, asker), answers, strict=True)}
            return same and len(tokens) == 1 and min(tokens) >= 64

        until(alike, 60, lambda: f"{target}\n{asker.log()}")
    assert count(asker, "kvasir_remote_index_queries_total")["answered"] >= 4
    assert count(keeper, "kvasir_index_queries_served_total")["answered"] >= 4
    assert not any(line.startswith("kvasir_index_entries") and not line.endswith(" 0") for line in asker.http.get("/metrics").text.splitlines())
    # Without the one that keeps it, decisions go on by load, and say so.
    keeper.process.kill()
    keeper.process.wait()

    def blind():
        answer = answered(asker, text=TEXT.format("remote 0"), max_tokens=2)
        return decision(asker, answer).get("cache_unknown") is True and predicted(asker, answer) == 0

    until(blind, 60, asker.log)
    assert sum(count(asker, "kvasir_remote_index_queries_total").values()) > count(asker, "kvasir_remote_index_queries_total")["answered"]
    # Another keeper is found, and knows what workers hold.
    if events:
        keeper = planes.frontend("--serve-indexer")
        until_serving(keeper, workers.ids)
        until_exact(keeper)

        def sees():
            answer = answered(asker, text=TEXT.format("remote 0"), max_tokens=2)
            return predicted(asker, answer) >= 64

        until(sees, 90, asker.log)
        assert keeper.stop() == 0
    for process in (asker, workers):
        assert process.stop() == 0, process.log()
    planes.end()


def test_a_standalone_router_keeps_the_index_for_a_frontend(tmp_path):
    planes = Planes("file+tcp+zmq", tmp_path)
    workers = planes.mocker(BUILTIN, workers=2)
    from planes_rig import PlaneProcess

    keeper = PlaneProcess("router", "--endpoint", "dynamo.backend.generate", "--block-size", "16", "--serve-indexer", *planes.flags, env=planes.env)
    asker = planes.frontend("--use-remote-indexer")
    until_serving(asker, workers.ids)
    asker.until_logged("endpoint=dynamo/backend/kv_indexer_query", 60)
    text = TEXT.format("standalone")
    target = where(answered(asker, text=text, max_tokens=2))

    def known():
        answer = answered(asker, text=text, max_tokens=2)
        return where(answer) == target and predicted(asker, answer) >= 64

    until(known, 60, asker.log)
    for process in (asker, keeper, workers):
        assert process.stop() == 0, process.log()
    planes.end()


@pytest.mark.skipif(not DYNAMO or not os.environ.get("KVASIR_TEST_QWEN_DIR"), reason="NO KVASIR_DYNAMO_PYTHON: nothing is known of Dynamo's own routers")
def test_dynamo_asks_our_index_and_we_ask_dynamos(tmp_path):
    planes = Planes("file+tcp+zmq", tmp_path)
    model = model_folder()
    workers = Mocker(model, planes, workers=2)
    keeper = planes.frontend("--serve-indexer")
    theirs = Dynamo(planes, str(tmp_path / "asker.log"), "--use-remote-indexer")
    theirs.until_serving("m")
    served = lambda: count(keeper, "kvasir_index_queries_served_total").get("answered", 0)  # noqa: E731
    before = served()
    text = TEXT.format("theirs")

    def hit():
        answers = [chat(theirs.http, text, max_tokens=2) for _ in range(3)]
        cached = [(answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for answer in answers]
        return all(tokens >= 64 for tokens in cached)

    until(hit, 60, lambda: theirs.log() + keeper.log())
    assert served() > before
    theirs.stop()
    assert keeper.stop() == 0
    keeper = Dynamo(planes, str(tmp_path / "keeper.log"), "--serve-indexer")
    asker = planes.frontend("--use-remote-indexer")
    keeper.until_serving("m")
    asker.until_logged("endpoint=dynamo/backend/kv_indexer_query", 60)
    until(lambda: chat(asker.http, "there?").status_code == 200, 60, asker.log)

    def seen():
        answer = answered(asker, text=text, max_tokens=2)
        return predicted(asker, answer) >= 64

    until(seen, 60, lambda: asker.log() + keeper.log())
    assert asker.stop() == 0
    keeper.stop()
    workers.kill()
    planes.end()
