"""Prompts on one worker and answers on another: Kvasir's and Dynamo's workers behind Kvasir, and Kvasir's behind Dynamo."""

import os
import time

import httpx
import pytest

from conftest import Kvasir, until
from dynamo_rig import Mocker, model_folder
from planes_rig import BUILTIN, MODEL, TEXT, Load, Planes, busy_workers, chat, first_event, free_port, rest, stream

HAS_DYNAMO = os.path.exists(os.environ.get("KVASIR_DYNAMO_PYTHON", "")) and os.environ.get("KVASIR_TEST_QWEN_DIR")
# A prefill pool is used again this long after it is back.
BACK_SECONDS = 2


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
        prefill = fleet.prefill(*more())
        seen = time.monotonic()
        until(lambda: is_split(http), BACK_SECONDS * 5, fleet.log)
        back = time.monotonic() - seen
        load.until_more(20, told=fleet.log)
    assert load.failed == [], f"{load.failed[:5]}\n{fleet.log()}"
    assert back < BACK_SECONDS * 5, f"used again after {back:.1f} s"
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


@pytest.mark.skipif(not HAS_DYNAMO, reason="NO ai-dynamo here (KVASIR_DYNAMO_PYTHON): nothing is known of its prefill workers")
@pytest.mark.parametrize("path", ["answer", "meeting"])
def test_workers_of_dynamo_behind_kvasir(tmp_path_factory, path):
    planes, folder = Planes("file+tcp+zmq", tmp_path_factory.mktemp("planes")), model_folder()
    kvasir = planes.frontend()
    fast = ["--speedup-ratio", "5"]
    meeting = ["--bootstrap-ports", str(free_port())] if path == "meeting" else []
    started = [
        Mocker(folder, planes, *fast, "--disaggregation-mode", "decode"),
        Mocker(folder, planes, *fast, "--disaggregation-mode", "prefill", *meeting),
    ]
    told = lambda: "".join(one.told() for one in started) + kvasir.log()  # noqa: E731
    try:
        until(lambda: sorted(roles(kvasir.http).values()) == ["decode", "prefill"], 90, told)
        with Load(kvasir.url, clients=4) as load:
            until(lambda: is_split(kvasir.http), 20, told)
            load.until_more(20, told=told)
            started[1].kill()
            load.until_more(20, told=told)
        assert load.failed == [], f"{load.failed[:5]}\n{told()}"
        at_rest(kvasir)
    finally:
        for one in started:
            one.kill()
        assert kvasir.stop() == 0, kvasir.log()
        planes.end()


@pytest.mark.skipif(not HAS_DYNAMO, reason="NO ai-dynamo here (KVASIR_DYNAMO_PYTHON): nothing is known of its frontend")
def test_workers_of_kvasir_behind_dynamo(tmp_path_factory):
    from dynamo_frontend import Dynamo

    planes, folder = Planes("file+tcp+zmq", tmp_path_factory.mktemp("planes")), model_folder()
    dynamo = Dynamo(planes, tmp_path_factory.mktemp("log") / "dynamo.log")
    decode = planes.mocker(folder, "--disaggregation-mode", "decode")
    prefill = planes.mocker(folder, "--disaggregation-mode", "prefill", "--bootstrap-ports", str(free_port()))
    try:
        dynamo.until_serving(MODEL)
        answer = chat(dynamo.http, TEXT.format("whole"), max_tokens=8)
        assert ids(answer) == (prefill.ids[0], decode.ids[0]), f"{answer.text}\n{dynamo.log()}"
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        dynamo.stop()
        for one in (decode, prefill):
            assert one.stop(60) == 0, one.log()
        planes.end()
