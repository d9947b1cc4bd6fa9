#!/usr/bin/env python3
"""How long does a frontend that starts take to know what many workers have cached, and what does it need for that?

    python3 run.py --kvasir PATH [--workers 64] [--blocks 10000] [--json raw.json]

`kvasir mocker` has the workers in one process (file discovery, TCP requests, ZMQ events). A first frontend fills their caches with
prompts that share nothing, each pinned to its worker. Then a second frontend starts with nothing, finds the workers, asks each for the
dump of its tree, and is watched until its index has every block. Told are the time from its start to its first instance and from there to
the whole index, and its resident memory: the most while it recovered (`VmHWM`), and what stays. `most_over_index` is the index and
what was needed beside it, over the index. A frontend without workers says what the program needs by itself. Nothing but Python is
needed.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import pathlib
import platform
import random
import re
import subprocess
import tempfile
import time

# The small model that the binary carries: its tokenizer takes no memory to speak of.
MODEL = pathlib.Path(__file__).parents[2] / "crates/text/src/builtin"
BLOCK = 16
VOCABULARY = 2_000
# Blocks of one prompt.
PROMPT = 1_000
TIMEOUT_S = 600


def started(words, log, env):
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
    return subprocess.Popen(words, stdout=log.open("w"), stderr=subprocess.STDOUT, env={**plain, **env})


def port_of(log, process):
    end = time.monotonic() + 60
    while not (found := re.search(r"address=127\.0\.0\.1:(\d+)", log.read_text())):
        assert time.monotonic() < end and process.poll() is None, log.read_text()
        time.sleep(0.01)
    return int(found.group(1))


def ask(connection, method, path, body=None):
    connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == 200, (answer.status, text[:300])
    return text


def series(connection, name):
    page = ask(connection, "GET", "/metrics").decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))


def memory(process):
    """Resident bytes: the most, and now."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return {name: int(re.search(rf"{name}:\s+(\d+) kB", status).group(1)) * 1024 for name in ("VmHWM", "VmRSS")}


def fill(port, workers, blocks, seed=5):
    """Prompts that share nothing, until each worker has its blocks."""
    jobs = [(worker, number) for number in range(blocks // PROMPT) for worker in workers]

    def one(job):
        worker, number = job
        draw = random.Random(f"{seed} {worker} {number}")
        body = {"model": "m", "prompt": [draw.randrange(VOCABULARY) for _ in range(PROMPT * BLOCK)], "max_tokens": 1,
                "nvext": {"backend_instance_id": worker}}  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        ask(connection, "POST", "/v1/completions", body)
        connection.close()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, jobs))


def watched(process, port, wanted, begun):
    """From nothing to the whole index."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    first = None
    while True:
        entries, now = series(connection, "kvasir_index_entries"), time.monotonic()
        if entries and first is None:
            first = now
        if entries >= wanted:
            break
        assert now < begun + TIMEOUT_S, entries
        time.sleep(0.02)
    time.sleep(3)
    return {"first_secs": round(first - begun, 2), "whole_secs": round(now - begun, 2), "entries": int(entries),
            "index_mb": round(series(connection, "kvasir_index_bytes") / 1e6, 1),
            **{key: round(value / 1e6, 1) for key, value in memory(process).items()}}  # fmt: skip


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kvasir", required=True)
    parse.add_argument("--workers", type=int, default=64)
    parse.add_argument("--blocks", type=int, default=10_000)
    parse.add_argument("--json")
    asked = parse.parse_args()
    running = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        env = {"DYN_FILE_KV": str(folder / "kv")}

        def run(name, *words):
            log = folder / f"{name}.log"
            running.append(started([asked.kvasir, *words], log, env))
            return running[-1], log

        def frontend(name):
            process, log = run(name, "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv", *planes)
            return process, port_of(log, process)

        try:
            alone, port = frontend("alone")
            time.sleep(3)
            base = memory(alone)
            alone.terminate()
            alone.wait(30)
            run("mocker", "mocker", "--model-path", str(MODEL), "--model-name", "m", "--num-workers", str(asked.workers), "--block-size", str(BLOCK),
                "--num-gpu-blocks-override", str(asked.blocks + 2 * PROMPT), "--speedup", "1000", "--max-model-len", "32768", *planes)  # fmt: skip
            filler, port = frontend("filler")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            end = time.monotonic() + 60
            while len(rows := json.loads(ask(connection, "GET", "/workers"))["workers"]) < asked.workers:
                assert time.monotonic() < end, rows
                time.sleep(0.1)
            begun = time.monotonic()
            fill(port, [row["worker_id"] for row in rows], asked.blocks)
            filled = watched(filler, port, asked.workers * asked.blocks, begun)
            filler.terminate()
            filler.wait(60)
            begun = time.monotonic()
            process, port = frontend("recovered")
            recovered = watched(process, port, asked.workers * asked.blocks, begun)
        except BaseException:
            for log in folder.glob("*.log"):
                print(f"== {log.name}\n" + log.read_text()[-2000:])
            raise
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    own = round(base["VmRSS"] / 1e6, 1)
    result = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "date": time.strftime("%Y-%m-%d", time.gmtime()),
              "workers": asked.workers, "blocks": asked.blocks, "without_workers_mb": own, "filled": filled, "recovered": recovered,
              "secs_from_first_block": round(recovered["whole_secs"] - recovered["first_secs"], 2),
              "most_over_index": round(1 + (recovered["VmHWM"] - recovered["VmRSS"]) / recovered["index_mb"], 2)}  # fmt: skip
    text = json.dumps(result, indent=1)
    if asked.json:
        pathlib.Path(asked.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
