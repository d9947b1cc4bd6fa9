"""What routing from Python costs, with either package: python measure.py {kvasir|dynamo} MODEL_FOLDER

Prints one JSON object: tokens per second and processor second through KvRouter.generate, blocks per second published by
KvEventPublisher.publish_stored, and microseconds of best_worker and, for kvasir, of kvasir.Router.place over 64 workers, each on a prompt of 8,192 tokens.
The engine is a generator of this process's own child, the same for both packages (examples/python/engine.py). Set KVASIR_PYTHON and DYNAMO_PYTHON to the interpreters.
"""

import array
import asyncio
import importlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

STREAMS, TOKENS, BLOCKS, PROMPT = 32, 2000, 1_000_000, list(range(8192))
ENGINE = pathlib.Path(__file__).parents[2] / "examples/python/engine.py"


def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def routed(llm, runtime):
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
    asked = []
    for _ in range(300):
        start = time.perf_counter()
        await router.best_worker(PROMPT)
        asked.append(time.perf_counter() - start)
    return {"tokens": got, "tokens_per_s": got / wall, "tokens_per_core_s": got / used, "best_worker_us": sorted(asked)[150] * 1e6}


def published(llm, endpoint):
    """Blocks a second, 64 at once."""
    publisher = llm.KvEventPublisher(endpoint, kv_block_size=16)
    tokens, sizes = list(range(16 * 64)), [16] * 64
    start = time.perf_counter()
    for first in range(0, BLOCKS, 64):
        publisher.publish_stored(tokens, sizes, list(range(first, first + 64)), parent_hash=first - 1 if first else None)
    return {"published_blocks_per_s": BLOCKS / (time.perf_counter() - start)}


def placed(kvasir):
    router = kvasir.Router()
    for worker in range(64):
        router.add_worker(worker)
    times = []
    for prompt in (PROMPT, array.array("I", PROMPT)):
        taken = []
        for _ in range(300):
            start = time.perf_counter()
            router.place(prompt)
            taken.append(time.perf_counter() - start)
        times.append(sorted(taken)[150] * 1e6)
    return {"place_list_us": times[0], "place_array_us": times[1]}


async def main(package):
    llm, runtimes = importlib.import_module(f"{package}.llm"), importlib.import_module(f"{package}.runtime")
    runtime = runtimes.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    found = {"package": package, **await routed(llm, runtime), **published(llm, runtime.endpoint("bench.cache.generate"))}
    if package == "kvasir":
        found |= placed(importlib.import_module("kvasir"))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    package, folder = sys.argv[1:3]
    planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": tempfile.mkdtemp(), "DYN_EVENT_PLANE": "zmq", "DYN_LOG": "error", "DYN_TCP_RPC_HOST": "127.0.0.1"}
    if len(sys.argv) == 3:
        os.environ.update(planes)
    python = os.environ.get(f"{package.upper()}_PYTHON", sys.executable)
    if len(sys.argv) == 3:
        text = ENGINE.read_text().replace("from kvasir.", "from dynamo.") if os.environ.get("ENGINE") == "dynamo" else ENGINE.read_text()
        with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
            program.write(text)
            program.flush()
            engine_python = os.environ.get("DYNAMO_PYTHON" if os.environ.get("ENGINE") == "dynamo" else "KVASIR_PYTHON", sys.executable)
            engine = subprocess.Popen([engine_python, program.name, folder], stdout=subprocess.PIPE, text=True)
            try:
                assert "serves" in engine.stdout.readline()
                subprocess.run([python, __file__, package, folder, "measure"], check=True, env={**os.environ}, timeout=600)
            finally:
                engine.kill()
    else:
        asyncio.run(main(package))
