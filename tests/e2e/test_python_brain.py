"""The wheel without planes: the brain, the index, settings, exceptions, types, the command."""

import array
import ast
import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import venv

import httpx
import pytest

import python_rig
from python_rig import EXAMPLES, ROOT, kvasir, packages, wheel  # noqa: F401

# Named by ai-dynamo 1.6.1 itself.
BLOCKS = [15310707395893867146, 15292316782987903195]
IN_SCOPE = [3582629321028870536, 14385768573089824096]
WITH_IMAGE = [14492624133500104032, 15292316782987903195]


def test_blocks_are_named_as_dynamo_names_them(kvasir):  # noqa: F811
    tokens = list(range(40))
    name = kvasir.compute_block_hash_for_seq
    assert name(tokens, 16) == name(tuple(tokens), 16) == name(array.array("I", tokens), 16) == name(array.array("q", tokens), 16) == BLOCKS
    assert name(tokens, 16, lora_name="a", cache_namespace="t", is_eagle=True) == IN_SCOPE
    assert name(tokens, 16, [{"mm_objects": [{"mm_hash": 5, "offsets": []}]}, None]) == WITH_IMAGE
    assert kvasir.lora_name_to_id("my-lora") == 868637996
    for wrong, error in [("text", TypeError), ([1.5], TypeError), ([-1], OverflowError), ([1 << 40], OverflowError), (array.array("q", [-1]), ValueError)]:
        with pytest.raises(error):
            name(wrong, 16)
    with pytest.raises(ValueError, match="kv_block_size"):
        name(tokens, 0)


def test_a_decision_comes_with_its_terms(kvasir):  # noqa: F811
    router = kvasir.Router(block_size=4)
    with pytest.raises(kvasir.WorkerUnavailable, match="0 known"):
        router.place([1])
    router.add_worker(1, total_kv_blocks=1000)
    router.add_worker(2, dp_size=2)
    assert router.worker_ids() == [1, 2]
    prompt = [7, 7, 7, 7, 8, 8, 8, 8, 9]
    assert router.stored(2, prompt[:8], [101, -102], dp_rank=1)
    asked = router.place(prompt)
    assert (asked.worker_id, asked.dp_rank, asked.overlap_blocks, asked.booked, asked.reason) == (2, 1, 2, False, "lowest_cost")
    assert (asked.eligible, asked.prompt_tokens, asked.cached_tokens) == (3, 9, 8)
    best, second = asked.candidates[:2]
    assert best.cost < second.cost and best.cached_blocks == 2 and second.cached_blocks == 0
    assert best.cost == pytest.approx(best.prefill_blocks + best.decode_blocks)
    assert asked.formula.startswith("Formula for worker_2:")
    assert json.loads(json.dumps(asked.to_dict()))["candidates"][0]["worker_id"] == 2
    assert router.booked == 0
    booked = router.place(prompt, "a")
    assert booked.booked and router.booked == 1
    rows = {(row["worker_id"], row["dp_rank"]): row for row in router.potential_loads(prompt)}
    assert len(rows) == 3 and rows[2, 1]["active_requests"] == 1 and rows[1, 0]["potential_prefill_tokens"] == 9
    with pytest.raises(kvasir.InvalidArgument, match="already exists"):
        router.place(prompt, "a")
    router.mark_prefill_complete("a")
    router.free("a")
    for forgotten in (router.free, router.mark_prefill_complete):
        with pytest.raises(kvasir.RequestNotFound, match="Request a not found"):
            forgotten("a")
    assert router.removed(2, [101, -102], dp_rank=1) and not router.removed(2, [101], dp_rank=1)
    assert router.place(prompt).overlap_blocks == 0
    router.place(prompt, "b", worker_id=1)
    router.remove_worker(1)
    assert router.booked == 0 and router.worker_ids() == [2]


def test_the_same_calls_give_the_same_decisions(kvasir):  # noqa: F811
    def run():
        router = kvasir.Router(block_size=4, config=kvasir.KvRouterConfig(router_temperature=0.5), seed=7)
        for worker in range(8):
            router.add_worker(worker, now=0.0)
        return [router.place([1, 2, 3, 4, at], str(at), now=at / 10).worker_id for at in range(50)]

    assert run() == run()


def test_what_has_to_wait_is_polled(kvasir):  # noqa: F811
    router = kvasir.Router(block_size=4, config=kvasir.KvRouterConfig(router_queue_threshold=1.0))
    router.add_worker(1, max_num_batched_tokens=8, now=0.0)
    assert router.place(list(range(32)), "first", now=0.0).worker_id == 1
    second = router.place(list(range(40, 72)), "second", now=0.0)
    assert second.queued and second.worker_id is None and router.waiting == 1
    router.free("first", now=1.0)
    [released] = router.poll(now=1.0)
    assert (released.request_id, released.worker_id, released.queued_seconds) == ("second", 1, 1.0)
    router.free("second", now=2.0)
    assert router.booked == router.waiting == 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda k: k.KvRouterConfig(1, 2, 3, 4, 5, 6), TypeError, "5 positional"),
        (lambda k: k.KvRouterConfig(temperature=1), TypeError, "unexpected keyword argument 'temperature'"),
        (lambda k: k.KvRouterConfig(router_temperature="hot"), TypeError, "router_temperature"),
        (lambda k: k.KvRouterConfig(router_temperature=-1.0), ValueError, "router_temperature cannot be -1"),
        (lambda k: k.KvRouterConfig(host_cache_hit_weight=7.0), ValueError, "between 0 and 1"),
        (lambda k: k.KvRouterConfig(router_queue_policy="zz"), ValueError, "fcfs, lcfs, wspt"),
        (lambda k: k.KvRouterConfig.from_json('{"x": 1}'), ValueError, "unknown field `x`"),
        (lambda k: k.KvRouterConfig.from_json("nope"), ValueError, "JSON"),
        (lambda k: k.KvRouterConfig(router_approximate_cache_policy="lru"), ValueError, "use_kv_events=False"),
        (lambda k: k.KvRouterConfig(use_kv_events=False, router_predicted_ttl_secs=1.0), ValueError, "use_kv_events=True"),
        (lambda k: k.KvRouterConfig(router_decode_policy="best"), ValueError, "default, kv or time"),
        (lambda k: k.RouterConfig(k.RouterMode.KV, session_affinity_mode="weak"), ValueError, "hard or soft"),
        (lambda k: k.ModelRuntimeConfig().set_structural_tag({"mode": "on"}), ValueError, "scope"),
        (lambda k: k.Router(block_size=0), ValueError, "block_size"),
        (lambda k: k.Router(mode="best"), ValueError, "round-robin"),
        (lambda k: k.Router().place([]), ValueError, "no tokens"),
        (lambda k: k.Router().place([1], overrides={"temperature": 1.0}), ValueError, "unknown override"),
        (lambda k: k.Router().place([1], now=-1.0), ValueError, "now is in seconds"),
        (lambda k: k.Router().stored(1, [1] * 32, [5]), ValueError, "each full block has a hash"),
        (lambda k: k.RadixTree().apply_event(1, b"{}"), ValueError, "Failed to deserialize KvCacheEvent"),
        (lambda k: k.ApproxKvIndexer(None, 16, -1.0), ValueError, "router_ttl_secs"),
        (lambda k: k.DistributedRuntime(None, "zookeeper"), ValueError, "zookeeper"),
        (lambda k: k.DistributedRuntime(None, "mem").endpoint("a.b"), ValueError, "namespace.component.endpoint"),
    ],
)
def test_a_mistake_is_named(kvasir, call, error, words):  # noqa: F811
    with pytest.raises(error) as raised:
        call(kvasir)
    assert words in str(raised.value)


def test_settings_have_the_names_and_the_meaning_of_dynamo(kvasir):  # noqa: F811
    config = kvasir.KvRouterConfig(2.0, 0.5, 0.1, 0.7, False, router_track_output_blocks=True)
    assert (config.prefill_load_scale, config.host_cache_hit_weight, config.disk_cache_hit_weight) == (2.0, 0.5, 0.1)
    assert (config.router_temperature, config.use_kv_events, config.router_track_output_blocks) == (0.7, False, True)
    assert kvasir.KvRouterConfig(0.0).overlap_score_credit == 0.0
    again = kvasir.KvRouterConfig.from_json(config.to_json())
    assert again == config == config.copy() and again != kvasir.KvRouterConfig()
    changed = config.with_overrides(prefill_load_scale=3.0)
    assert (changed.prefill_load_scale, changed.overlap_score_weight, changed.host_cache_hit_weight) == (3.0, None, 0.5)
    assert kvasir.KvRouterConfig(serve_indexer=True).without_effect() == []
    assert kvasir.KvRouterConfig(conditional_disagg_enabled=True).without_effect() == ["conditional_disagg_enabled"]
    assert kvasir.KvRouterConfig.from_json('{"durable_kv_events": true}').durable_kv_events


def test_indexes_as_plain_objects(kvasir):  # noqa: F811
    tree = kvasir.RadixTree()
    blocks = [{"block_hash": 11, "tokens_hash": 1}, {"block_hash": 12, "tokens_hash": 2}]
    event = {"event_id": 1, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    tree.apply_event(7, json.dumps(event).encode())
    assert tree.find_matches([1, 2, 3]).scores == {(7, 0): 2}
    assert tree.find_matches([2]).scores == {} and tree.find_matches([1, 2], early_exit=True).scores[7, 0] >= 1
    [dumped] = tree.dump_tree_as_events()
    copy = kvasir.RadixTree()
    copy.apply_event(9, dumped.encode())
    assert copy.find_matches([1, 2]).scores == {(9, 0): 2}
    tree.clear_all_blocks(7)
    assert tree.find_matches([1, 2]).scores == {}

    async def approximate():
        indexer = kvasir.ApproxKvIndexer(None, 4, router_ttl_secs=60.0)
        await indexer.process_routing_decision_for_request(list(range(8)), 7)
        assert indexer.find_matches_for_request(list(range(8))).scores == {(7, 0): 2}
        assert (await indexer.find_matches_for_request(list(range(9)))).scores == {(7, 0): 2}
        assert indexer.block_size() == 4

    asyncio.run(approximate())


def test_a_replay_gives_tables(kvasir):  # noqa: F811
    workload = "chat,sessions=20,turns=3,rate=4,system=900,output=20"
    found = kvasir.replay(workload=workload, policies=["round-robin", "kv"], workers=3, num_blocks=4000, speed=[1, 2])
    rows = {(row["policy"], row["speed"]): row for row in found.rows()}
    assert set(rows) == {(policy, speed) for policy in ("round-robin", "kv") for speed in (1.0, 2.0)}
    assert rows["kv", 1.0]["hit_share"] > rows["round-robin", 1.0]["hit_share"]
    assert "round-robin" in repr(found) and "<iframe" in found._repr_html_() and len(found.table()) == 4
    with pytest.raises(ValueError, match="router-temperature"):
        kvasir.replay(workload="chat", policies=["kv,router-temprature=1"])
    with pytest.raises(ValueError, match="one of them"):
        kvasir.replay()


def test_the_notebook_on_replay_runs(kvasir):  # noqa: F811
    """Each cell of `examples/python/replay.ipynb`, in order, as a kernel runs them; its last line is what it shows."""
    notebook = json.loads((EXAMPLES / "replay.ipynb").read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"]), "kept without its output"
    names, shown = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"]))
            last = ast.Expression(body.body.pop().value)
            exec(compile(body, cell["id"], "exec"), names)
            shown.append(eval(compile(last, cell["id"], "eval"), names))
    page, rows, sooner, tuned = shown
    assert "<iframe" in page._repr_html_() and len(rows) == 6 and len(tuned) == 3
    assert sooner["round-robin"] == 1 and sooner["kv"] > 1, sooner


def test_types_hold():
    """The package passes a strict type checker, and its stub says what the module has."""
    mypy = [sys.executable, "-m", "mypy"]
    env = {**os.environ, "PYTHONPATH": str(packages()), "MYPYPATH": str(ROOT / "bindings/python/python")}
    cache = ["--cache-dir", str(packages().parent / "mypy")]
    strict = ["--strict", "--namespace-packages", "--explicit-package-bases"]
    sources = ROOT / "bindings/python/python/kvasir"
    done = subprocess.run([*mypy, *strict, *cache, str(sources)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    env.pop("MYPYPATH")
    stubtest = [sys.executable, "-m", "mypy.stubtest", "--concise", "--ignore-disjoint-bases", "kvasir._native"]
    done = subprocess.run(stubtest, capture_output=True, text=True, timeout=300, env=env, cwd=packages().parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_in_an_empty_environment(tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*install, str(wheel())], check=True, timeout=120)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_", "PYTHON"))}
    for command in ([str(tmp_path / "venv/bin/kvasir")], [str(python), "-m", "kvasir"]):
        told = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, env=env)
        assert told.stdout.startswith("kvasir "), told
    told = subprocess.run([python, EXAMPLES / "brain.py"], capture_output=True, text=True, timeout=60, env=env)
    assert told.returncode == 0 and "worker 2, 2 blocks cached, because of lowest_cost" in told.stdout, told
    demo = [tmp_path / "venv/bin/kvasir", "demo", "--http-host", "127.0.0.1", "--http-port", "0", "--traffic"]
    with subprocess.Popen(demo, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as running:
        line = next(line for line in running.stdout if "http://127.0.0.1:" in line)
        threading.Thread(target=running.stdout.read, daemon=True).start()
        url = re.search(r"http://127\.0\.0\.1:\d+", line).group(0)
        model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        asked = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
        running.terminate()
        assert running.wait(60) == 0
    # A program that is checked beside the installed wheel sees its types: what is right passes, what is wrong does not.
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--cache-dir", str(tmp_path / "mypy")]
    checked = subprocess.run([*mypy, EXAMPLES / "brain.py", EXAMPLES / "route.py", EXAMPLES / "gateway.py"], capture_output=True, text=True, timeout=300, env=env)
    assert checked.returncode == 0, checked.stdout
    (tmp_path / "wrong.py").write_text('import kvasir\n\nkvasir.Router(block_size="16").place([1]).worker_id + 1\n')
    checked = subprocess.run([*mypy, tmp_path / "wrong.py"], capture_output=True, text=True, timeout=300, env=env)
    assert checked.returncode == 1 and checked.stdout.count("error:") == 2, checked.stdout
