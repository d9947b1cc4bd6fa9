"""Prompts on one worker and answers on another: Kvasir's and Dynamo's workers behind Kvasir, and Kvasir's behind Dynamo."""

import os
import time

import httpx
import pytest

from conftest import Kvasir, until
from dynamo_rig import Mocker, small_model_folder
from planes_rig import BUILTIN, MODEL, TEXT, Load, Planes, busy_workers, chat, first_event, free_port, rest, stream

HAS_DYNAMO = os.path.exists(os.environ.get("KVASIR_DYNAMO_PYTHON", ""))
# A prefill pool is used again this long after it is back.
BACK_SECONDS = 2
# Times that a request takes which a slow machine is given beyond that.
NOISE = 20


def ids(answer):
    assert answer.status_code == 200, answer.text
    told = answer.json()["nvext"]["worker_id"]
    return told["prefill_worker_id"], told["decode_worker_id"]


def is_split(http, text="split?"):
    prefill, decode = ids(chat(http, text, max_tokens=2))
    return prefill != decode


def roles(http):
    return {row["worker_id"]: row["role"] for row in http.get("/workers").json()["workers"] if row["state"] == "serving"}


def at_rest(kvasir):
    until(lambda: busy_workers(kvasir.http) == [], 20, kvasir.log)


@pytest.fixture(scope="module")
def planes(tmp_path_factory):
    planes = Planes("file+tcp+zmq", tmp_path_factory.mktemp("planes"))
    yield planes
    planes.end()


@pytest.fixture(scope="module")
def fleet(planes):
    """A frontend with two decode workers and no prefill worker; `prefill` starts some."""
    kvasir = planes.frontend("--migration-limit", "3")
    kvasir.decode = [planes.mocker(BUILTIN, "--disaggregation-mode", "decode") for _ in range(2)]
    kvasir.prefill = lambda *args: planes.mocker(BUILTIN, "--disaggregation-mode", "prefill", "--kv-transfer-bandwidth", "0", *args)
    decode = sorted(one.ids[0] for one in kvasir.decode)
    until(lambda: sorted(roles(kvasir.http)) == decode, 60, kvasir.log)
    yield kvasir
    for one in kvasir.decode:
        if one.process.poll() is None:
            one.stop()
    assert kvasir.stop() == 0, kvasir.log()


@pytest.mark.parametrize("path", ["answer", "meeting"])
def test_a_prefill_pool_comes_dies_under_load_and_comes_back(fleet, path):
    http = fleet.http
    assert not is_split(http), "decode workers serve alone"
    more = lambda: ["--bootstrap-ports", str(free_port())] if path == "meeting" else []  # noqa: E731
    prefill = fleet.prefill(*more())
    until(lambda: is_split(http), 20, fleet.log)
    assert roles(http)[prefill.ids[0]] == "prefill"
    first = chat(http, TEXT.format(path), max_tokens=4)
    again = chat(http, TEXT.format(path), max_tokens=4)
    assert ids(first)[0] == ids(again)[0] == prefill.ids[0]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64 or path == "meeting"
    with Load(fleet.url, clients=4) as load:
        load.until_more(20, told=fleet.log)
        prefill.process.kill()
        load.until_more(40, told=fleet.log)
        # What this machine makes of a request now.
        asked = time.monotonic()
        chat(http, max_tokens=2)
        noise = NOISE * (time.monotonic() - asked)
        prefill = fleet.prefill(*more())
        announced = time.monotonic()
        until(lambda: prefill.ids[0] in roles(http), 60, fleet.log)
        assert is_split(http), f"it is there, and not used\n{fleet.log()}"
        back = time.monotonic() - announced
        load.until_more(20, told=fleet.log)
    assert load.failed == [], f"{load.failed[:5]}\n{fleet.log()}"
    assert back < BACK_SECONDS + noise, f"used again after {back:.1f} s"
    at_rest(fleet)
    assert prefill.stop() == 0
    until(lambda: not is_split(http), 20, fleet.log)


def test_a_client_that_leaves_frees_both_workers(fleet):
    prefill = fleet.prefill("--speedup", "1")
    until(lambda: is_split(fleet.http), 20, fleet.log)
    with stream(fleet.http, "leaves while it is answered", 4000) as answer:
        first_event(answer)
    for wait in (0.005, 0.02, 0.1):
        try:
            fleet.http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": TEXT.format(wait) * 20}]}, timeout=wait)
        except Exception:  # noqa: BLE001
            pass
    at_rest(fleet)
    assert prefill.stop() == 0


def test_a_decode_worker_that_dies_is_replaced(fleet):
    prefill = fleet.prefill()
    until(lambda: is_split(fleet.http), 20, fleet.log)
    with stream(fleet.http, "long", 400) as answer:
        lines = first_event(answer)
        busy = [one for one in fleet.decode if one.ids[0] in busy_workers(fleet.http)]
        assert len(busy) == 1
        busy[0].process.kill()
        finish, usage = rest(lines, fleet.log)
    assert (finish, usage["completion_tokens"]) == ("length", 400), fleet.log()
    at_rest(fleet)
    assert prefill.stop() == 0


def test_prompts_stay_in_a_zone_and_go_past_prefill_workers_where_they_are_cached(tmp_path):
    planes = Planes("file+tcp+zmq", tmp_path)

    def worker(zone, mode, *args):
        place = tmp_path / zone
        place.mkdir(exist_ok=True)
        (place / "zone").write_text(f"{zone}\n")
        started.append(planes.mocker(BUILTIN, "--disaggregation-mode", mode, "--topology-enabled", "--topology-mount-path", str(place), *args))
        return started[-1].ids[0]

    kvasir, started = planes.frontend("--router-conditional-disagg"), []
    decode = {zone: worker(zone, "decode") for zone in ("near", "far")}
    prefill = worker("near", "prefill", "--kv-transfer-domain", "zone", "--kv-transfer-bandwidth", "0")
    http = kvasir.http
    until(lambda: set(roles(http)) == {*decode.values(), prefill}, 60, kvasir.log)
    for number in range(4):
        text = TEXT.format(f"zone {number}")
        assert ids(chat(http, text, max_tokens=2)) == (prefill, decode["near"]), kvasir.log()
        # Its blocks are known to be there once the worker has said so.
        until(lambda: ids(chat(http, text, max_tokens=2)) == (decode["near"],) * 2, 20, kvasir.log)  # noqa: B023
    counted = [line for line in http.get("/metrics").text.splitlines() if "prefill_paths_total{" in line]
    assert any('path="answer"' in line for line in counted) and any('path="short_prompt"' in line for line in counted), counted
    at_rest(kvasir)
    for one in (*started, kvasir):
        assert one.stop() == 0, one.log()


def test_the_demo_shows_it_in_one_command():
    demo = Kvasir("demo", "--disagg", "--workers", "2", "--http-host", "127.0.0.1", "--http-port", "0")
    found = demo.wait_for(r"on 1 mock workers that compute prompts and 1 that answer at (http://127\.0\.0\.1:\d+)")
    with httpx.Client(base_url=found.group(1), timeout=30) as http:
        body = {"model": "kvasir-demo", "messages": [{"role": "user", "content": "hello"}], "nvext": {"extra_fields": ["worker_id"]}}
        answer = http.post("/v1/chat/completions", json=body)
        prefill, decode = ids(answer)
        assert prefill != decode
        told = http.get(f"/decisions/{answer.json()['id']}").json()
        assert (told["winner"][0]["worker"], told["prefill"]["winner"][0]["worker"]) == (decode, prefill), told
    assert demo.stop() == 0, demo.log()


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory):
    """Workers of Dynamo behind Kvasir, and workers of Kvasir behind Dynamo. Both have a prefill worker for each path; all start at
    once, since a process of Dynamo takes its time."""
    from dynamo_frontend import Dynamo

    folder, planes = small_model_folder(), [Planes("file+tcp+zmq", tmp_path_factory.mktemp("planes")) for _ in range(2)]
    theirs = Dynamo(planes[1], tmp_path_factory.mktemp("log") / "dynamo.log")
    start = lambda *args: Mocker(folder, planes[0], "--speedup-ratio", "5", "--disaggregation-mode", *args)  # noqa: E731
    workers = [start("decode"), start("prefill"), start("prefill", "--bootstrap-ports", str(free_port()))]
    kvasir = planes[0].frontend()
    kvasir.workers, theirs.planes, theirs.folder = workers, planes[1], folder
    try:
        yield kvasir, theirs
    finally:
        for one in workers:
            one.kill()
        theirs.process.kill()
        assert kvasir.stop() == 0, kvasir.log()
        for one in planes:
            one.end()


@pytest.mark.skipif(not HAS_DYNAMO, reason="NO ai-dynamo here (KVASIR_DYNAMO_PYTHON): nothing is known of its prefill workers")
def test_workers_of_dynamo_behind_kvasir(dynamo):
    kvasir, _ = dynamo
    told = lambda: "".join(one.told() for one in kvasir.workers) + kvasir.log()  # noqa: E731
    until(lambda: sorted(roles(kvasir.http).values()) == ["decode", "prefill", "prefill"], 120, told)
    decode, *prefill = sorted(roles(kvasir.http), key=lambda worker: roles(kvasir.http)[worker])
    for worker in prefill:
        answer = chat(kvasir.http, TEXT.format(worker), max_tokens=4, nvext={"extra_fields": ["worker_id"], "prefill_worker_id": worker})
        assert ids(answer) == (worker, decode), told()
        assert answer.json()["usage"]["completion_tokens"] == 4
    with Load(kvasir.url, clients=4) as load:
        load.until_more(20, told=told)
        for one in kvasir.workers[1:]:
            one.kill()
        load.until_more(20, told=told)
    assert load.failed == [], f"{load.failed[:5]}\n{told()}"
    at_rest(kvasir)


@pytest.mark.skipif(not HAS_DYNAMO, reason="NO ai-dynamo here (KVASIR_DYNAMO_PYTHON): nothing is known of its frontend")
def test_workers_of_kvasir_behind_dynamo(dynamo):
    _, theirs = dynamo
    mocker = lambda *args: theirs.planes.mocker(theirs.folder, "--disaggregation-mode", *args)  # noqa: E731
    decode = mocker("decode")
    prefill = [mocker("prefill"), mocker("prefill", "--bootstrap-ports", str(free_port()))]
    try:
        theirs.until_serving(MODEL)
        for one in prefill:
            pins = {"prefill_worker_id": one.ids[0], "decode_worker_id": decode.ids[0]}
            answer = lambda: chat(theirs.http, TEXT.format(one.ids), max_tokens=8, nvext={"extra_fields": ["worker_id"], **pins})  # noqa: B023, E731
            # It hears of one worker after another.
            until(lambda: answer().status_code == 200, 30, theirs.log)
            answer = answer()
            assert ids(answer) == (one.ids[0], decode.ids[0]), f"{answer.text}\n{theirs.log()}"
            assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        theirs.http.close()
        theirs.process.kill()
        for one in (decode, *prefill):
            assert one.stop(60) == 0, one.log()
