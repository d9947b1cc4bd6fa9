"""Every name, parameter and default of Dynamo's Python package is here, or is listed with its reason in the decision that says what is not."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from python_rig import BUILTIN, ROOT, environment, packages
from test_python_runtime import Program

DYNAMO = os.environ.get("KVASIR_DYNAMO_PYTHON")
HERE = pathlib.Path(__file__).parent
LISTED = ROOT / "docs/decisions/0235-which-names-of-dynamos-python-are-not-here.md"
# Python cannot tell what this stands for.
UNKNOWN = "Ellipsis"


def names(package, python, path):
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    told = subprocess.run([python, HERE / "python_names.py", package], capture_output=True, text=True, timeout=120, env=env)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def compared(theirs, ours):
    """What a call for theirs would not find in ours: `(parameter)`, or `(parameter=default)` where the default is another."""
    if theirs is None:
        return
    if ours is None:
        yield "()"
        return
    order = [name for name, (is_named, _) in ours.items() if not is_named]
    place = 0
    for name, (is_named, default) in theirs.items():
        if name not in ours or (not is_named and (ours[name][0] or order.index(name) != place)):
            yield f"({name})"
        elif default not in (None, UNKNOWN) and ours[name][1] != default:
            yield f"({name}={default})"
        place += not is_named


def missing(theirs, ours):
    """All of it: `Name`, `Name.member`, `Name(parameter)`, `Name.member(parameter)`."""
    for name, about in theirs.items():
        if name not in ours:
            yield name
            continue
        here = ours[name]
        for module in set(about["in"]) - set(here["in"]):
            yield f"{module}.{name}"
        for base in set(about.get("bases", ())) - set(here.get("bases", ())):
            yield f"{name}[{base}]"
        yield from (f"{name}{what}" for what in compared(about["parameters"], here["parameters"]))
        for member, parameters in about["members"].items():
            if member not in here["members"]:
                yield f"{name}.{member}"
            else:
                yield from (f"{name}.{member}{what}" for what in compared(parameters, here["members"][member]))


def listed():
    """The first column of the decision's table."""
    rows = [line.split("|")[1] for line in LISTED.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_what_is_not_here_is_listed():
    if not DYNAMO:
        pytest.skip("NO KVASIR_DYNAMO_PYTHON: names are NOT compared with Dynamo's own")
    theirs, ours = names("dynamo", DYNAMO, ""), names("kvasir", sys.executable, packages())
    assert len(theirs) > 90, "the package was read"
    found = set(missing(theirs, ours))
    assert found == listed(), f"not listed: {sorted(found - listed())}; listed and there: {sorted(listed() - found)}"


def test_the_comparison_sees_what_differs():
    """A name that is gone, another place, another default, and one that can only be given by name."""
    theirs = {"a": [False, None], "b": [False, "1"], "c": [True, "2"]}
    assert list(compared(theirs, theirs)) == []
    assert list(compared(theirs, {"a": [False, None], "c": [False, "2"]})) == ["(b)"]
    assert list(compared(theirs, {"b": [False, "1"], "a": [False, None], "c": [True, "2"]})) == ["(a)", "(b)"]
    assert list(compared(theirs, {**theirs, "b": [False, "3"]})) == ["(b=1)"]
    assert list(compared(theirs, {**theirs, "b": [True, "1"]})) == ["(b)"]
    assert list(compared(theirs, None)) == ["()"] and list(compared(None, theirs)) == []


def test_settings_have_the_defaults_that_their_signature_says():
    script = """
import inspect, kvasir
config = kvasir.KvRouterConfig()
said = {p.name: p.default for p in inspect.signature(kvasir.KvRouterConfig).parameters.values()}
assert len(said) == 44, said
assert said == {name: getattr(config, name) for name in said}
"""
    env = {**os.environ, "PYTHONPATH": str(packages())}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr


CARDS = """
import asyncio, sys
from PACKAGE.llm import KvRouterConfig, ModelInput, ModelRuntimeConfig, ModelType, RouterConfig, RouterMode, WorkerType, register_model
from PACKAGE.runtime import DistributedRuntime

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    plain = dict(router_config=RouterConfig(RouterMode.PowerOfTwoChoices), runtime_config=ModelRuntimeConfig())
    about = ModelRuntimeConfig()
    about.total_kv_blocks, about.max_num_seqs, about.max_num_batched_tokens = 100, 8, 512
    about.tool_call_parser, about.reasoning_parser, about.tokenizer_backend = "hermes", "qwen3", "fastokens"
    about.data_parallel_start_rank, about.data_parallel_size, about.enable_local_indexer = 2, 4, False
    about.stable_routing_id, about.taints = "r1", {"b", "a"}
    about.kv_state_endpoint = "n.c.e"
    about.set_disaggregated_endpoint("h", 5)
    about.set_structural_tag({"scope": "auto"})
    about.set_engine_specific("pool", '"a"')
    settings = KvRouterConfig(
        None, 0.7, 0.2, 0.1, router_replica_sync=True, router_track_active_blocks=False, router_queue_threshold=3.0,
        router_queue_policy="wspt", shared_cache_multiplier=0.3, router_predicted_ttl_secs=4.0, conditional_disagg_enabled=True,
        conditional_disagg_eff_isl_threshold=5, overlap_score_credit=0.9, prefill_load_scale=2.0, decode_active_request_weight=1.0,
    )
    full = dict(router_config=RouterConfig(RouterMode.KV, settings, 0.5, 7, 0.25, False, 30, "soft"), runtime_config=about, user_data={"u": 1})
    for name, more in (("plain", plain), ("full", full)):
        endpoint = runtime.endpoint(f"cards.{name}.generate")
        kinds = (ModelInput.Tokens, ModelType.Chat)
        await register_model(*kinds, endpoint, sys.argv[1], name, kv_cache_block_size=16, worker_type=WorkerType.Aggregated, max_gpu_lora_count=3, **more)
    print("registered", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def cards(package, python, folder):
    """What a program announces, card by card."""
    env = environment(folder, DYN_LOG="error", HF_HUB_OFFLINE="1")
    if package == "dynamo":
        env.pop("PYTHONPATH")
    program = Program("-c", CARDS.replace("PACKAGE", package), BUILTIN, env=env, python=python)
    program.said("registered")
    files = [json.loads(path.read_text()) for path in folder.rglob("*") if path.is_file()]
    program.process.kill()
    program.process.wait(20)
    return {file["card_json"]["display_name"]: file["card_json"] for file in files if "card_json" in file}


def test_cards_say_what_dynamos_say(tmp_path):
    if not DYNAMO:
        pytest.skip("NO KVASIR_DYNAMO_PYTHON: cards are NOT compared with Dynamo's own")
    folders = {package: tmp_path / package for package in ("kvasir", "dynamo")}
    for folder in folders.values():
        folder.mkdir()
    ours, theirs = cards("kvasir", sys.executable, folders["kvasir"]), cards("dynamo", DYNAMO, folders["dynamo"])
    assert set(ours) == set(theirs) == {"plain", "full"}
    for name, card in theirs.items():
        assert ours[name]["router_config"] == card["router_config"]
        # The longest request is in the card itself, too, which is where Dynamo has it.
        ours[name]["runtime_config"].pop("context_length")
        for told in (ours[name], card):
            # A set, which Dynamo writes in an order of its own each time.
            if told["runtime_config"].get("taints"):
                told["runtime_config"]["taints"].sort()
        assert ours[name]["runtime_config"] == card["runtime_config"]
        for member in ("user_data", "model_type", "model_input", "worker_type", "needs", "context_length", "kv_cache_block_size", "migration_limit"):
            assert ours[name].get(member) == card.get(member), member
