"""`kvasir frontend` before `kvasir mocker`, found through discovery: one fleet for each set of planes, one test after another."""

import json
import os
import signal
import subprocess

import openai
import pytest

from conftest import until
from planes_rig import (
    BUILTIN, COMBOS, MODEL, TEXT, Load, Planes, busy_workers, chat, first_event, free_port, rest, stream, streams, until_exact, until_hits,
    until_serving, where, workers_of,
)  # fmt: skip

@pytest.fixture(scope="module", params=COMBOS)
def fleet(request, tmp_path_factory):
    """A frontend on an empty store, and a way to start workers there."""
    planes, folder = Planes(request.param, tmp_path_factory.mktemp("planes")), BUILTIN
    frontend = planes.frontend()
    frontend.planes, frontend.mockers = planes, []

    def start(*args, **options):
        # The limit comes with the model's card: the frontend is told nothing.
        mocker = planes.mocker(folder, "--migration-limit", "3", *args, **options)
        frontend.mockers.append(mocker)
        return mocker

    frontend.start = start
    yield frontend
    for mocker in frontend.mockers:
        if mocker.process.poll() is None:
            assert mocker.stop(60) == 0, mocker.log()
    assert frontend.stop() == 0, frontend.log()
    planes.end()


def test_a_model_appears_and_answers(fleet):
    assert fleet.http.get("/v1/models").json()["data"] == [] and chat(fleet.http).status_code in (404, 503)
    first, second = fleet.start(), fleet.start()
    until_serving(fleet, first.ids + second.ids)
    assert [m["id"] for m in fleet.http.get("/v1/models").json()["data"]] == [MODEL]
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "count"}], "max_tokens": 16}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 16
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 16
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    done = client.completions.create(model=MODEL, prompt=["a b c", "d e"], max_tokens=4, n=2)
    assert len(done.choices) == 4 and done.usage.completion_tokens == 16
    listed = {w["worker_id"]: w for w in fleet.http.get("/workers").json()["workers"]}
    backend = fleet.planes.combo.split("+")[0]
    assert all(w["origins"] == ["discovery"] for w in listed.values()), listed
    assert all(source.startswith(f"discovery {backend} ") for w in listed.values() for source in w["sources"]), listed


def test_a_second_turn_finds_its_blocks(fleet):
    until_hits(fleet.http, fleet.log)


def doctor(planes, seconds=5, **changed):
    """What `kvasir doctor` says on these planes: is all well, and its checks by name, those of all workers."""
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("DYN_")}, **planes.env, **changed}
    command = [os.environ["KVASIR_BIN"], "doctor", "--json", "--timeout-secs", str(seconds), *planes.flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    checks = {}
    for worker in report["workers"]:
        for check in worker["checks"]:
            checks.setdefault(check["check"], []).append(check)
    return done.returncode == 0, checks


def test_the_doctor_finds_all_well_and_names_the_flag_of_what_is_away(fleet):
    planes = fleet.planes
    well, checks = doctor(planes)
    assert well, checks
    outcomes = {name: [check["outcome"] for check in found] for name, found in checks.items()}
    one, both = ["pass"], ["pass", "pass"]
    assert outcomes == {"discovery": one, "keys": one, "cards": one, "requests": both, "event-socket": both, "recovery": both, "events-arrive": both}
    nobody = f"127.0.0.1:{free_port()}"
    if planes.etcd:
        well, checks = doctor(planes, ETCD_ENDPOINTS=f"http://{nobody}")
        assert not well and flags(checks["discovery"]) == ["--etcd-endpoints", "--discovery-backend"], checks
    else:
        well, checks = doctor(planes, DYN_FILE_KV=planes.env["DYN_FILE_KV"] + "-not")
        assert not well and "--file-kv" in flags(checks["discovery"] + checks["keys"]), checks
    if "+nats+" in planes.combo:
        # Each worker is waited for.
        well, checks = doctor(planes, seconds=2, NATS_SERVER=f"nats://{nobody}")
        assert not well and "--nats-server" in flags(checks["event-socket"]), checks
        assert "--nats-server" in flags(checks["requests"]), checks


def flags(checks):
    """The flags that are advised."""
    return [advice["args"][0] for check in checks for advice in check["advice"] if advice["args"]]


def test_a_client_that_leaves_frees_its_worker(fleet):
    with stream(fleet.http, "x", 4000) as answer:
        first_event(answer)
    until(lambda: busy_workers(fleet.http) == [], 10, fleet.log)
    assert chat(fleet.http, max_tokens=2).status_code == 200


def test_a_frontend_that_starts_later_knows_every_cache_and_published_load(fleet):
    texts = [TEXT.format(f"kept {number}") for number in range(5)]
    before = [where(chat(fleet.http, text, max_tokens=2)) for text in texts]
    later = fleet.planes.frontend("--active-decode-blocks-threshold", "0.01")
    until_serving(later, workers_of(fleet.http))
    # Whoever said all that it holds needs to prove nothing.
    until_exact(later)
    answers = [chat(later.http, text, max_tokens=2) for text in texts]
    assert [where(answer) for answer in answers] == before, later.log()
    assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64 for answer in answers)
    # What runs on the workers then was sent by another frontend: only the load that they publish tells of it.
    with streams(fleet.http):
        refused = until(lambda: (answer := chat(later.http)).status_code != 200 and answer, 30, later.log)
        assert refused.status_code == 503, refused.text
    until(lambda: chat(later.http).status_code == 200, 30, later.log)
    assert later.stop() == 0, later.log()


def test_an_answer_goes_on_where_its_worker_is_killed(fleet):
    with stream(fleet.http, "go on", 1500) as answer:
        lines = first_event(answer)
        busy = until(lambda: busy_workers(fleet.http), 10)
        next(mocker for mocker in fleet.mockers if busy[0] in mocker.ids).process.kill()
        finish, usage = rest(lines, fleet.log)
    assert finish == "length" and usage["completion_tokens"] == 1500, (finish, usage)


def test_joining_leaving_and_dying_under_load_lose_no_request(fleet):
    old = next(mocker for mocker in fleet.mockers if mocker.process.poll() is None)
    with Load(fleet.url) as load:
        load.until_more(told=fleet.log)
        third, fourth = fleet.start(), fleet.start()
        # One that was killed may still be listed.
        until(lambda: set(old.ids + third.ids + fourth.ids) <= set(workers_of(fleet.http)), 60, fleet.log)
        load.until_more(told=fleet.log)
        old.process.send_signal(signal.SIGTERM)
        assert old.process.wait(60) == 0, old.log()
        until(lambda: not set(old.ids) & set(workers_of(fleet.http)), 60, fleet.log)
        third.process.kill()
        load.until_more(told=fleet.log)
        # Its keys expire.
        until_serving(fleet, fourth.ids)
        load.until_more(told=fleet.log)
    assert not load.failed, f"{len(load.failed)} of {len(load.failed) + load.served}: {load.failed[:3]}\n{fleet.log()[-4000:]}"


def test_the_model_goes_with_its_last_worker(fleet):
    for mocker in fleet.mockers:
        if mocker.process.poll() is None:
            assert mocker.stop(60) == 0, mocker.log()
    until(lambda: fleet.http.get("/v1/models").json()["data"] == [], 30, fleet.log)
    assert chat(fleet.http).status_code == 404
