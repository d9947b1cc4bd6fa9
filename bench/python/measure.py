"""What routing from Python costs, with either package: python measure.py MODEL_FOLDER [ROUNDS]

Runs itself with KVASIR_PYTHON and with DYNAMO_PYTHON, in turns, ROUNDS times (3), before the same workers: an engine of examples/python/engine.py for streams,
and 64 mock workers (KVASIR_BIN mocker) for best_worker. Prints one JSON object for each run, then the medians and the ratios that are promised:

- tokens a processor second through KvRouter.generate (the router's process alone): at least 3 times Dynamo's;
- best_worker on a prompt of 8,192 tokens over 64 workers, as a list and as an array: at most 1.3 times the same question asked in Rust, and 30 us more;
- 1,000,000 blocks through KvEventPublisher.publish_stored, 64 at once: at least twice as many a second as Dynamo's.
"""

import array
import asyncio
import importlib
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

STREAMS, TOKENS, BLOCKS, PROMPT, ASKED, WORKERS = 32, 2000, 1_000_000, list(range(8192)), 1000, 64
ENGINE = pathlib.Path(__file__).parents[2] / "examples/python/engine.py"


def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def streamed(llm, runtime):
    """Tokens a second, and a processor second, through the router."""
    router = llm.KvRouter(runtime.endpoint("dynamo.backend.generate"), 16, llm.KvRouterConfig())
    wanted = {"max_tokens": TOKENS, "ignore_eos": True}

    async def one(at):
        stream = await router.generate([at] * 64, "echo", stop_conditions=wanted)
        return sum([len(item.get("token_ids") or []) async for item in stream])

    await one(0)
    wall, used = time.perf_counter(), processor()
    got = sum(await asyncio.gather(*(one(at) for at in range(1, STREAMS + 1))))
    wall, used = time.perf_counter() - wall, processor() - used
    return {"tokens": got, "tokens_per_s": got / wall, "tokens_per_core_s": got / used}


async def asked(llm, runtime, package):
    """Microseconds of a question about a long prompt over many workers."""
    endpoint = runtime.endpoint("many.backend.generate")
    router = llm.KvRouter(endpoint, 16, llm.KvRouterConfig())
    client = await endpoint.client()
    while len(client.instance_ids()) < WORKERS:
        await asyncio.sleep(0.05)
    while len(await router.get_potential_loads(PROMPT[:64])) < WORKERS:
        await asyncio.sleep(0.05)
    found = {}
    prompts = {"list": PROMPT}
    if package == "kvasir":
        prompts["array"] = array.array("I", PROMPT)
    for name, prompt in prompts.items():
        taken = []
        for _ in range(ASKED):
            start = time.perf_counter()
            await router.best_worker(prompt)
            taken.append(time.perf_counter() - start)
        found[f"best_worker_{name}_us"] = statistics.median(taken) * 1e6
    if package == "kvasir":
        found["best_worker_rust_us"] = router._core.measure_best_worker(array.array("I", PROMPT), ASKED) * 1e6
    return found


def published(llm, endpoint):
    """Blocks a second, 64 at once."""
    publisher = llm.KvEventPublisher(endpoint, kv_block_size=16)
    tokens, sizes = list(range(16 * 64)), [16] * 64
    names = [list(range(first, first + 64)) for first in range(1, BLOCKS, 64)]
    start = time.perf_counter()
    for at, named in enumerate(names):
        publisher.publish_stored(tokens, sizes, named, parent_hash=named[0] - 1 if at else None)
    return {"published_blocks_per_s": BLOCKS / (time.perf_counter() - start)}


def placed(kvasir):
    """The plain object, over as many workers."""
    router = kvasir.Router()
    for worker in range(WORKERS):
        router.add_worker(worker)
    found = {}
    for name, prompt in (("list", PROMPT), ("array", array.array("I", PROMPT))):
        taken = []
        for _ in range(ASKED):
            start = time.perf_counter()
            router.place(prompt)
            taken.append(time.perf_counter() - start)
        found[f"place_{name}_us"] = statistics.median(taken) * 1e6
    return found


async def measure(package):
    llm, runtimes = importlib.import_module(f"{package}.llm"), importlib.import_module(f"{package}.runtime")
    runtime = runtimes.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    found = {"package": package, **await streamed(llm, runtime), **await asked(llm, runtime, package)}
    found |= published(llm, runtime.endpoint("bench.cache.generate"))
    if package == "kvasir":
        found |= placed(importlib.import_module("kvasir"))
    print(json.dumps(found), flush=True)


def main(folder, rounds):
    pythons = {name: os.environ[f"{name.upper()}_PYTHON"] for name in ("kvasir", "dynamo")}
    planes = {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": tempfile.mkdtemp(), "DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp",
        "DYN_LOG": "error", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    env = {**os.environ, **planes}
    many = ["mocker", "--endpoint", "many.backend.generate", "--num-workers", str(WORKERS), "--model-path", folder, "--model-name", "many", "--block-size", "16"]
    engine = subprocess.Popen([pythons["kvasir"], ENGINE, folder], stdout=subprocess.PIPE, text=True, env=env)
    mocker = subprocess.Popen([os.environ["KVASIR_BIN"], *many], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    runs = {name: [] for name in pythons}
    try:
        assert "serves" in engine.stdout.readline()
        for _ in range(rounds):
            for name, python in pythons.items():
                done = subprocess.run([python, __file__, "--measure", name], check=True, env=env, timeout=600, stdout=subprocess.PIPE, text=True)
                print(done.stdout.strip(), flush=True)
                runs[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    finally:
        engine.kill()
        mocker.terminate()
        mocker.wait(30)
    median = {name: {key: statistics.median(run[key] for run in of) for key in of[0] if key != "package"} for name, of in runs.items()}
    ours, theirs = median["kvasir"], median["dynamo"]
    print(json.dumps({"median": median}, indent=1))
    allowed = 1.3 * ours["best_worker_rust_us"] + 30
    print(f"streaming: {ours['tokens_per_core_s'] / theirs['tokens_per_core_s']:.2f} of Dynamo's tokens a processor second (at least 3)")
    for name in ("list", "array"):
        print(f"best_worker of a {name}: {ours[f'best_worker_{name}_us']:.0f} us, {allowed:.0f} allowed (Dynamo: {theirs['best_worker_list_us']:.0f} with a list)")
    print(f"publishing: {ours['published_blocks_per_s'] / theirs['published_blocks_per_s']:.2f} of Dynamo's blocks a second (at least 2)")


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        asyncio.run(measure(sys.argv[2]))
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
