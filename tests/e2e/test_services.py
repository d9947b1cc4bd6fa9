"""`kvasir indexer`, `kvasir slot-tracker` and `kvasir select` as programs ask them, with a mock engine's real events."""

import atexit
import itertools
import os
import subprocess
import time

import httpx
import pytest

from conftest import Kvasir, until
from events_rig import BLOCK, MODEL, Engine
from planes_rig import free_port


def service(command, *words):
    started = Kvasir(command, "--http-host", "127.0.0.1", "--http-port", "0", *words)
    started.http = httpx.Client(base_url="http://" + started.wait_for(r"listening address=(127\.0\.0\.1:\d+)").group(1), timeout=30)
    return started


@pytest.fixture(scope="module")
def engine():
    engine = Engine()
    sources = engine.http.get("/kv_event_sources").json()
    engine.events = sources["0"]["endpoint"]
    yield engine
    engine.http.close()
    engine.process.stop()


def ask(engine, prompt):
    answer = engine.http.post("/v1/completions", json={"model": MODEL, "max_tokens": 1, "prompt": prompt})
    assert answer.status_code == 200, answer.text


def held_prompt(engine, first, blocks, is_held, told):
    """A prompt of so many blocks that the engine holds and that its listener knows of. The events of the first may be sent before
    anybody listens: then the next one is asked for."""
    prompts = (list(range(at, at + blocks * BLOCK)) for at in itertools.count(first, blocks * BLOCK))

    def known():
        prompt = next(prompts)
        ask(engine, prompt)
        end = time.monotonic() + 1
        while not is_held(prompt) and time.monotonic() < end:
            time.sleep(0.02)
        return prompt if is_held(prompt) else None

    return until(known, told=told)


def end(started):
    started.http.close()
    assert started.stop() == 0, started.log()


def test_an_indexer_knows_what_an_engine_holds(engine):
    indexer = service("indexer", "--listen", f"7={engine.events}", "--listen-model", MODEL, "--block-size", str(BLOCK))
    http = indexer.http
    until(lambda: http.get("/workers").json()[0]["status"] == "active", told=indexer.log)
    query = lambda prompt: http.post("/query", json={"model_name": MODEL, "token_ids": prompt + [1] * BLOCK}).json()["instances"]  # noqa: E731
    prompt = held_prompt(engine, 500, 4, query, indexer.log)
    assert query(prompt)["7"]["gpu"] == 4 * BLOCK, query(prompt)
    assert http.get("/dump").json()[f"{MODEL}:default"]["events"]
    assert http.post("/query", content=b"{").status_code == 400
    assert http.post("/query", content=b" " * (9 << 20)).status_code == 413
    assert http.get("/health").status_code == 200 and http.get("/metrics").status_code == 200
    page = http.get("/metrics").text
    for series in ('requests_total{endpoint="/query",method="POST"}', 'errors_total{endpoint="/query",status_class="4xx"}', 'listeners{status="active"} 1', "workers 1", "models 1", 'request_duration_seconds_count{endpoint="/query"}'):
        assert f"dynamo_kvindexer_{series}" in page, page
    assert http.get("/nothing").status_code == 404 and http.get("/query").status_code == 405
    assert http.put("/query", json={}).status_code == 405
    end(indexer)


def test_a_service_that_starts_takes_over_the_index_of_a_peer(engine):
    source = engine.http.get("/kv_event_sources").json()["0"]
    register = {"instance_id": 7, "endpoint": source["endpoint"], "replay_endpoint": source["replay_endpoint"], "model_name": MODEL, "block_size": BLOCK}
    gpu = lambda of, prompt: of.http.post("/query", json={"model_name": MODEL, "token_ids": prompt}).json()["instances"].get("7", {}).get("gpu")  # noqa: E731
    first = service("indexer")
    assert first.http.post("/register", json=register).status_code == 201
    prompt = held_prompt(engine, 1000, 4, lambda prompt: gpu(first, prompt), first.log)
    # One that does not answer is passed over.
    peers = f"http://127.0.0.1:{free_port()},{first.http.base_url}"
    second = service("indexer", "--indexer-peers", peers)
    assert "the index of a peer cannot be had" in second.log() and "the index of a peer is taken over" in second.log()
    assert len(second.http.get("/peers").json()) == 2
    assert second.http.post("/register", json=register).status_code == 201
    assert gpu(second, prompt) == 4 * BLOCK, second.log()
    second.until_logged("index snapshot restored")
    select = service("select", "--indexer-peers", str(first.http.base_url))
    worker = {"worker_id": 7, "model_name": MODEL, "endpoint": engine.url, "block_size": BLOCK, "kv_events_endpoint": source["endpoint"],
              "replay_endpoint": source["replay_endpoint"], "max_num_batched_tokens": 8192}  # fmt: skip
    assert select.http.post("/workers", json=worker).json()["lifecycle"] == "schedulable"
    scores = lambda prompt: select.http.post("/overlap_scores", json={"model_name": MODEL, "token_ids": prompt}).json()["workers"][0]["device_blocks"]  # noqa: E731
    assert scores(prompt) == 4, select.log()
    # What the engine stores from then on is heard by all of them.
    other = list(range(3000, 3000 + 4 * BLOCK))
    ask(engine, other)
    for of in (first, second):
        until(lambda: gpu(of, other) == 4 * BLOCK, told=of.log)  # noqa: B023
    until(lambda: scores(other) == 4, told=select.log)
    assert scores(prompt) == 4 and gpu(second, prompt) == 4 * BLOCK
    for started in (first, second, select):
        end(started)


def test_a_selection_service_books_what_it_chooses(engine):
    select = service("select", "--router-temperature", "0")
    http = select.http
    assert http.get("/ready").status_code == 503
    worker = {"worker_id": 1, "model_name": MODEL, "endpoint": engine.url, "block_size": BLOCK, "kv_events_endpoint": engine.events, "max_num_batched_tokens": 8192}
    assert http.post("/workers", json=worker).json()["lifecycle"] == "schedulable"
    held = lambda prompt: http.post("/overlap_scores", json={"model_name": MODEL, "token_ids": prompt}).json()["workers"][0]["device_blocks"] == 3  # noqa: E731
    prompt = held_prompt(engine, 2000, 3, held, select.log)
    chosen = http.post("/select_and_reserve", json={"model_name": MODEL, "token_ids": prompt, "selection_id": "r1"}).json()
    assert (chosen["endpoint"], chosen["overlap"]["gpu"]) == (engine.url, 3 * BLOCK)
    assert http.get("/loads").json()[0]["loads"][0]["active_requests"] == 1
    assert http.post("/select_and_reserve", json={"model_name": MODEL, "token_ids": prompt, "selection_id": "r1"}).status_code == 409
    assert http.delete("/reservations/r1").status_code == 200
    assert http.get("/loads").json()[0]["loads"][0]["active_requests"] == 0
    assert http.patch("/workers/1", json={"endpoint": "http://elsewhere"}).json()["endpoint"] == "http://elsewhere"
    assert http.delete("/workers/1").status_code == 200 and http.get("/ready").status_code == 503
    end(select)


def test_a_slot_tracker_counts_what_it_is_told():
    tracker = service("slot-tracker")
    http = tracker.http
    assert http.post("/register", json={"worker_id": 1, "model_name": MODEL, "block_size": BLOCK}).status_code == 201
    add = {"model_name": MODEL, "request_id": "r", "worker_id": 1, "dp_rank": 0, "sequence_hashes": [-1, 2], "new_isl_tokens": 9}
    assert http.post("/add", json=add).status_code == 201
    assert http.get("/loads").json()[0]["active_decode_blocks"] == 2
    assert http.post("/free", json={"model_name": MODEL, "request_id": "r"}).status_code == 200
    assert http.get("/loads").json()[0]["active_decode_blocks"] == 0
    end(tracker)


WORKER = {"worker_id": 1, "model_name": "m", "routing_group": "default", "block_size": 16, "dp_start": 0, "dp_size": 1}
GROUP = {"model_name": "m", "routing_group": "default"}


class DynamoTracker:
    """Dynamo's own slot tracker."""

    def __init__(self, python):
        port, sync = free_port(), free_port()
        command = [python, "-m", "dynamo.slot_tracker", "--port", str(port), "--replica-sync-port", str(sync)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.process.kill)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self.sync = f"tcp://127.0.0.1:{sync}"
        self.log = lambda: "a tracker of Dynamo's"

        def is_up():
            try:
                return self.http.get("/health").status_code == 200
            except httpx.HTTPError:
                return False

        until(is_up, 60)


def tracker():
    started = service("slot-tracker", "--replica-sync-port", "0")
    started.sync = "tcp://" + started.until_logged("telling other services of load").split("address=")[1].split()[0]
    return started


def load_of(tracker):
    (row,) = tracker.http.get("/loads").json()
    return row["active_decode_blocks"], row["active_prefill_tokens"]


@pytest.mark.parametrize("other", ["kvasir", "dynamo"])
def test_trackers_tell_each_other_of_load(other):
    python = os.environ.get("KVASIR_DYNAMO_PYTHON")
    if other == "dynamo" and not python:
        pytest.skip("NO KVASIR_DYNAMO_PYTHON: nothing is known of Dynamo's own trackers")
    one, two = tracker(), tracker() if other == "kvasir" else DynamoTracker(python)
    for mine, theirs in ((one, two), (two, one)):
        assert mine.http.post("/register", json=WORKER).status_code == 201
        assert mine.http.post("/replica_sync/register_peer", json={"endpoint": theirs.sync}).status_code in (200, 201)
        assert mine.http.get("/replica_sync/peers").json() == [theirs.sync]
    names = (f"r{number}" for number in itertools.count())
    for told, heard in ((one, two), (two, one)):

        def seen():
            """What is told before the other listens is lost: then the next one is."""
            name = next(names)
            add = {**GROUP, "request_id": name, "worker_id": 1, "dp_rank": 0, "sequence_hashes": [1, 2, 3], "new_isl_tokens": 20}
            assert told.http.post("/add", json=add).status_code == 201
            end = time.monotonic() + 1
            while load_of(heard) != (3, 20) and time.monotonic() < end:
                time.sleep(0.02)
            if load_of(heard) == (3, 20):
                return name
            assert told.http.post("/free", json={**GROUP, "request_id": name}).status_code == 200
            return None

        name = until(seen, 60, told.log)
        assert told.http.post("/prefill_complete", json={**GROUP, "request_id": name}).status_code == 200
        until(lambda: load_of(heard) == (3, 0), 30, heard.log)
        assert told.http.post("/free", json={**GROUP, "request_id": name}).status_code == 200
        until(lambda: load_of(heard) == (0, 0), 30, heard.log)
    # Who is gone takes its load along.
    name = until(lambda: seen(), 60, two.log)
    assert name and load_of(one) == (3, 20)
    two.process.kill()
    two.process.wait()
    until(lambda: load_of(one) == (0, 0), 30, one.log)
    assert one.http.post("/replica_sync/deregister_peer", json={"endpoint": two.sync}).status_code == 200
    assert one.http.post("/replica_sync/deregister_peer", json={"endpoint": two.sync}).status_code == 404
    two.http.close()
    end(one)


def selector():
    started = service("select", "--router-temperature", "0", "--no-router-kv-events", "--replica-sync-port", "0")
    started.sync = "tcp://" + started.until_logged("telling other services of load").split("address=")[1].split()[0]
    return started


def reserved(select):
    """Requests that a selection service knows of, by worker."""
    groups = select.http.get("/loads").json()
    return {row["worker_id"]: row["active_requests"] for group in groups for row in group["loads"]}


def test_selection_services_tell_each_other_what_they_reserve():
    one, two = selector(), selector()
    for mine, theirs in ((one, two), (two, one)):
        for number in (1, 2):
            worker = {"worker_id": number, "model_name": MODEL, "endpoint": f"http://gpu-{number}:8000", "block_size": BLOCK, "max_num_batched_tokens": 8192}
            assert mine.http.post("/workers", json=worker).json()["lifecycle"] == "schedulable", mine.log()
        assert mine.http.post("/replica_sync/register_peer", json={"endpoint": theirs.sync}).status_code in (200, 201)
    names = (f"r{number}" for number in itertools.count())
    prompt = list(range(8 * BLOCK))

    def seen(told, heard):
        """A reservation at one that the other knows of. What is told before the other listens is lost: then the next one is."""
        name = next(names)
        chosen = told.http.post("/select_and_reserve", json={"model_name": MODEL, "token_ids": prompt, "selection_id": name}).json()["worker_id"]
        end = time.monotonic() + 1
        while reserved(heard)[chosen] != 1 and time.monotonic() < end:
            time.sleep(0.02)
        if reserved(heard)[chosen] == 1:
            return name, chosen
        assert told.http.delete(f"/reservations/{name}").status_code == 200
        return None

    for told, heard in ((one, two), (two, one)):
        name, chosen = until(lambda: seen(told, heard), 60, told.log)  # noqa: B023
        # It counts where the other chooses, too.
        other = heard.http.post("/select", json={"model_name": MODEL, "token_ids": [7] * 8 * BLOCK}).json()["worker_id"]
        assert {chosen, other} == {1, 2}, heard.log()
        assert told.http.delete(f"/reservations/{name}").status_code == 200
        until(lambda: not any(reserved(heard).values()), 30, heard.log)  # noqa: B023
    # Who is gone takes its load along.
    until(lambda: seen(two, one), 60, two.log)
    two.process.kill()
    two.process.wait()
    until(lambda: not any(reserved(one).values()), 30, one.log)
    two.http.close()
    end(one)


def test_a_service_without_a_socket_says_so():
    started = service("slot-tracker")
    refused = started.http.post("/replica_sync/register_peer", json={"endpoint": "tcp://127.0.0.1:9"})
    assert refused.status_code == 501 and "--replica-sync-port" in refused.text
    end(started)
