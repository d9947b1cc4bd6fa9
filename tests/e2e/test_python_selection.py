"""`SelectionService` in a program of its own: the same script says the same with Dynamo's package and with ours."""

import json
import os
import sys

import pytest

from python_rig import environment
from test_python_runtime import run

DYNAMO = os.environ.get("KVASIR_DYNAMO_PYTHON")

SCRIPT = """
import asyncio, inspect, json
from PACKAGE.llm import SelectionService

PROMPT = {"model_name": "m", "token_ids": list(range(32))}

async def main():
    service, told = SelectionService(), []

    async def note(name, call):
        try:
            found = call()
            if inspect.isawaitable(found):
                found = await found
            if isinstance(found, dict):
                found = sorted(found)
            elif isinstance(found, list):
                found = [sorted(row) for row in found]
            else:
                found = None
        except ValueError as error:
            found = "ValueError"
        except Exception as error:
            found = [type(error).__name__, error.kind, error.status_code]
        told.append((name, found))

    worker = {"worker_id": 1, "model_name": "m", "block_size": 16, "endpoint": "http://a:1", "kv_events_endpoint": "tcp://127.0.0.1:9"}
    worker["max_num_batched_tokens"] = 8192
    await note("not ready", service.ready)
    await note("select without workers", lambda: service.select(PROMPT))
    await note("a request that is none", lambda: service.select(5))
    await note("upsert", lambda: service.upsert_worker(worker))
    await note("upsert another", lambda: service.upsert_worker({**worker, "worker_id": 2}))
    await note("upsert little", lambda: service.upsert_worker({"worker_id": 3}))
    await note("patch", lambda: service.patch_worker(1, {"total_kv_blocks": 50}))
    await note("ready", service.ready)
    await note("list", lambda: service.list_workers(model_name="m"))
    await note("list of nobody", lambda: service.list_workers(model_name="x"))
    await note("select", lambda: service.select(PROMPT))
    await note("select of nobody", lambda: service.select({**PROMPT, "model_name": "x"}))
    await note("reserve", lambda: service.select_and_reserve({**PROMPT, "selection_id": "a"}))
    await note("reserve twice", lambda: service.select_and_reserve({**PROMPT, "selection_id": "a"}))
    await note("prefill", lambda: service.prefill_complete("a"))
    await note("block", lambda: service.add_output_block("a", decay_fraction=0.5))
    await note("block of nothing", lambda: service.add_output_block("x"))
    await note("loads", service.loads)
    busy = [row["active_requests"] for group in service.loads() for row in group["loads"]]
    told.append(("booked", sorted(busy)))
    await note("potential", lambda: service.potential_loads(PROMPT))
    await note("free", lambda: service.free_reservation("a"))
    await note("free again", lambda: service.free_reservation("a"))
    await note("later without selection", lambda: service.create_reservation({"model_name": "m", "selection_id": "b"}))
    await note("select for later", lambda: service.select({**PROMPT, "selection_id": "b"}))
    await note("later", lambda: service.create_reservation({"model_name": "m", "selection_id": "b"}))
    await note("free later", lambda: service.free_reservation("b"))
    await note("delete", lambda: service.delete_worker(2))
    await note("delete again", lambda: service.delete_worker(2))
    await note("peers", service.list_replica_peers)
    service.shutdown()
    await note("after", lambda: service.select(PROMPT))
    print(json.dumps(told))

asyncio.run(main())
"""
NOT_READY = ["SelectionServiceError", "not_ready", 503]
NOT_FOUND = ["SelectionServiceError", "not_found", 404]
EXPECTED = {
    "not ready": ["ready", "schedulable_workers", "workers"],
    "select without workers": NOT_READY,
    "a request that is none": "ValueError",
    "list of nobody": [],
    "select of nobody": NOT_READY,
    "reserve twice": ["SelectionServiceError", "conflict", 409],
    "prefill": None,
    "block": None,
    "block of nothing": NOT_FOUND,
    "booked": [0, 1],
    "free": None,
    "free again": NOT_FOUND,
    "later without selection": NOT_FOUND,
    "delete again": NOT_FOUND,
    "peers": [],
    "after": NOT_READY,
}


def said(package, python, tmp_path):
    env = environment(tmp_path)
    if package == "dynamo":
        env.pop("PYTHONPATH")
    told = run(SCRIPT.replace("PACKAGE", package), env, python=python)
    return dict(json.loads(told.strip().splitlines()[-1]))


def test_a_selection_service_in_a_program(tmp_path):
    ours = said("kvasir", sys.executable, tmp_path)
    assert {name: ours[name] for name in EXPECTED} == EXPECTED
    assert {"worker_id", "dp_rank", "endpoint", "overlap"} <= set(ours["select"]), ours


def test_it_says_what_dynamos_says(tmp_path):
    if not DYNAMO:
        pytest.skip("NO KVASIR_DYNAMO_PYTHON: Dynamo's own selection service is NOT compared")
    ours, theirs = (said(package, python, tmp_path) for package, python in (("kvasir", sys.executable), ("dynamo", DYNAMO)))
    # Ours can be reserved later even if the program gave it no name.
    ours["select"].remove("selection_id")
    assert ours == theirs
