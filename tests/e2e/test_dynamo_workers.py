"""Workers of Dynamo 1.6.1 behind `kvasir frontend`: one fleet for each set of planes, one test after another."""

import pathlib

import openai
import pytest

from conftest import until
from dynamo_rig import Mocker, model_folder, need_dynamo
from planes_rig import (
    COMBOS, MODEL, TEXT, Load, Planes, busy_workers, chat, first_event, rest, stream, streams, until_exact, until_hits, until_serving, where,
    workers_of,
)  # fmt: skip

need_dynamo()


@pytest.fixture(scope="module", params=COMBOS)
def fleet(request, tmp_path_factory):
    """A frontend on an empty store, and a way to start workers there."""
    planes, folder = Planes(request.param, tmp_path_factory.mktemp("planes")), model_folder()
    frontend = planes.frontend("--migration-limit", "3")
    frontend.planes, frontend.mockers = planes, {}

    def start(count=1):
        """Starts so many processes, of one worker each, one after the other: so it is known which worker is in which."""
        started = []
        for _ in range(count):
            known = set(workers_of(frontend.http))
            mocker = Mocker(folder, planes, "--speedup-ratio", "5")
            told = lambda: mocker.told() + frontend.log()  # noqa: B023, E731
            (mocker.id,) = until(lambda: set(workers_of(frontend.http)) - known, 90, told)  # noqa: B023
            started.append(mocker)
        return started

    frontend.start = start
    frontend.running = []
    yield frontend
    for mocker in frontend.running:
        mocker.kill()
    assert frontend.stop() == 0, frontend.log()
    planes.end()


def test_workers_appear_and_answer(fleet):
    assert chat(fleet.http).status_code in (404, 503)
    fleet.running += fleet.start(2)
    health = fleet.http.get("/health").json()
    assert health["status"] == "healthy" and health["discovery"][0]["state"] == "ready", health
    assert [m["id"] for m in fleet.http.get("/v1/models").json()["data"]] == [MODEL]
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "count"}], "max_tokens": 16}
    whole = client.chat.completions.create(**asked)
    assert whole.usage.completion_tokens == 16 and whole.usage.prompt_tokens > 8
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 16
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    done = client.completions.create(model=MODEL, prompt=["a b c", "d e"], max_tokens=4, n=2)
    assert len(done.choices) == 4 and done.usage.completion_tokens == 16


def test_a_second_turn_finds_its_blocks(fleet):
    until_hits(fleet.http, fleet.log)


def test_a_client_that_leaves_frees_its_worker(fleet):
    with stream(fleet.http, "x", 4000) as answer:
        first_event(answer)
    until(lambda: busy_workers(fleet.http) == [], 10, fleet.log)
    assert chat(fleet.http, max_tokens=2).status_code == 200


def test_a_frontend_that_starts_later_knows_every_cache_and_published_load(fleet):
    texts = [TEXT.format(f"kept {number}") for number in range(5)]
    before = [where(chat(fleet.http, text, max_tokens=2)) for text in texts]
    later = fleet.planes.frontend("--active-decode-blocks-threshold", "0.003")
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
        busy = until(lambda: busy_workers(fleet.http), 10)[0]
        killed = next(mocker for mocker in fleet.running if mocker.id == busy)
        killed.kill()
        finish, usage = rest(lines, fleet.log)
    assert finish == "length" and usage["completion_tokens"] == 1500, (finish, usage)
    fleet.running.remove(killed)
    # Its keys expire, or are swept: nobody but us is there to do it.
    until_serving(fleet, [mocker.id for mocker in fleet.running], 60)
    migrated = f'dynamo_frontend_model_migration_total{{migration_type="ongoing_request",model="{MODEL}"}} 1'
    assert migrated in fleet.http.get("/metrics").text, fleet.log()


def test_joining_leaving_and_dying_under_load_lose_no_request(fleet):
    (old,) = fleet.running
    with Load(fleet.url) as load:
        load.until_more(told=fleet.log)
        fleet.running += fleet.start(2)
        load.until_more(told=fleet.log)
        old.terminate()
        until(lambda: old.id not in workers_of(fleet.http), 60, fleet.log)
        load.until_more(told=fleet.log)
        fleet.running[1].kill()
        load.until_more(told=fleet.log)
        until(lambda: len(workers_of(fleet.http)) == 1, 60, fleet.log)
        load.until_more(told=fleet.log)
    assert not load.failed, f"{len(load.failed)} of {len(load.failed) + load.served}: {load.failed[:3]}\n{fleet.log()[-4000:]}"


def test_the_fleet_outlives_its_store(fleet, tmp_path):
    if "DYN_FILE_KV" not in fleet.planes.env:
        return  # Servers that are lost: test_outages.py.
    store, kept = pathlib.Path(fleet.planes.env["DYN_FILE_KV"]), tmp_path / "kept"
    store.rename(kept)
    state = lambda: fleet.http.get("/health").json()["discovery"][0]["state"]  # noqa: E731
    until(lambda: state() == "lost", 30, fleet.log)
    assert chat(fleet.http).status_code == 200
    assert 'kvasir_discovery_up{backend="file"} 0' in fleet.http.get("/metrics").text
    fleet.until_logged("discovery is lost")
    kept.rename(store)
    until(lambda: state() == "ready", 30, fleet.log)
    assert chat(fleet.http).status_code == 200


def test_the_model_goes_with_its_last_worker(fleet):
    for mocker in fleet.running:
        if mocker.process.poll() is None:
            mocker.terminate()
    until(lambda: fleet.http.get("/v1/models").json()["data"] == [], 30, fleet.log)
    assert chat(fleet.http).status_code == 404
