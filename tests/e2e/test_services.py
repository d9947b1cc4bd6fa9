"""`kvasir indexer`, `kvasir slot-tracker` and `kvasir select` as programs ask them, with a mock engine's real events."""

import itertools
import time

import httpx
import pytest

from conftest import Kvasir, until
from events_rig import BLOCK, MODEL, Engine


def service(command, *words):
    started = Kvasir(command, "--http-host", "127.0.0.1", "--http-port", "0", *words)
    started.http = httpx.Client(base_url="http://" + started.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1), timeout=30)
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
    assert http.get("/nothing").status_code == 404 and http.get("/query").status_code == 405
    assert http.put("/query", json={}).status_code == 405
    end(indexer)


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
