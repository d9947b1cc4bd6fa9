#!/usr/bin/env python3
"""How long until 2,000 instances that join at once are served, and does a request wait for them?

    python3 run.py --kvasir PATH [--workers 2000] [--json raw.json]

A frontend serves one worker of `kvasir mocker` under load (file discovery, TCP requests, ZMQ events). Others have their
workers, 500 each, announced in a folder that the frontend does not watch. Then all their records are linked into the folder that it watches, as if
all had come at once; a link has the file's times, so the workers keep their records alive in both. Told are the times from the first link
to the last, to the first new worker and to all of them in `/workers`, and how long requests took before, meanwhile and after. At the end
requests pinned to 50 of the new ones are answered, and each of them must come from its worker. Nothing but Python is needed.
"""

import argparse
import http.client
import json
import os
import pathlib
import platform
import random
import resource
import statistics
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "recovery"))
from run import MODEL, ask, memory, port_of, started  # noqa: E402

PINNED = 50
# Workers of one process of `kvasir mocker`.
PER_PROCESS = 500


def body(worker=None, text="hello"):
    fields = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 2, "nvext": {"extra_fields": ["worker_id"]}}
    if worker:
        fields["nvext"]["backend_instance_id"] = worker
    return fields


class Load(threading.Thread):
    """One request after another: when each began, and how long it took."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.port, self.took, self.ended = port, [], threading.Event()

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.ended.is_set():
            begun = time.monotonic()
            ask(connection, "POST", "/v1/chat/completions", body(text=f"{begun}"))
            self.took.append((begun, time.monotonic() - begun))


def told(took):
    """Milliseconds of these requests."""
    took = sorted(took)
    at = lambda share: round(took[min(len(took) - 1, int(share * len(took)))] * 1e3, 2)  # noqa: E731
    return {"requests": len(took), "p50_ms": round(statistics.median(took) * 1e3, 2), "p99_ms": at(0.99), "longest_ms": at(1)}


def link_all(source, target):
    for bucket in sorted((source / "v1").iterdir()):
        (target / "v1" / bucket.name).mkdir(parents=True, exist_ok=True)
        for file in bucket.iterdir():
            if not file.name.startswith(".tmp_"):
                os.link(file, target / "v1" / bucket.name / file.name)


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kvasir", required=True)
    parse.add_argument("--workers", type=int, default=2_000)
    parse.add_argument("--json")
    asked = parse.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    running = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        mocker = ["mocker", "--model-path", str(MODEL), "--model-name", "m", "--block-size", "16", "--num-blocks", "256", "--speedup", "1000"]

        def run(name, store, *words):
            log = folder / f"{name}.log"
            env = {"DYN_FILE_KV": str(folder / store), "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1"}
            running.append(started([asked.kvasir, *words, *planes], log, env))
            return running[-1], log

        def until(holds, seconds=300):
            end = time.monotonic() + seconds
            while not (found := holds()):
                assert time.monotonic() < end and all(process.poll() is None for process in running)
                time.sleep(0.01)
            return found

        try:
            counts = [min(PER_PROCESS, asked.workers - at) for at in range(0, asked.workers, PER_PROCESS)]
            many = [run(f"many-{at}", "elsewhere", *mocker, "--num-workers", str(count))[1] for at, count in enumerate(counts)]
            until(lambda: sum(log.read_text().count("as worker") for log in many) == asked.workers)
            run("one", "kv", *mocker)
            frontend, log = run("frontend", "kv", "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv")
            port = port_of(log, frontend)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            listed = lambda: [row["worker_id"] for row in json.loads(ask(connection, "GET", "/workers"))["workers"] if row["state"] == "serving"]  # noqa: E731
            until(lambda: len(listed()) == 1)
            load = Load(port)
            load.start()
            time.sleep(5)
            begun = time.monotonic()
            link_all(folder / "elsewhere", folder / "kv")
            linked = time.monotonic()
            until(lambda: len(listed()) > 1)
            first = time.monotonic()
            ids = until(lambda: len(found := listed()) == asked.workers + 1 and found)
            joined = time.monotonic()
            time.sleep(5)
            load.ended.set()
            load.join(60)
            for worker in random.Random(1).sample(ids, min(PINNED, len(ids))):
                answer = json.loads(ask(connection, "POST", "/v1/chat/completions", body(worker)))
                assert answer["nvext"]["worker_id"]["decode_worker_id"] == worker, answer
            resident = memory(frontend)
        except BaseException:
            for log in folder.glob("*.log"):
                print(f"== {log.name}\n" + log.read_text()[-2000:])
            raise
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    parts = {"before": (0, begun), "meanwhile": (begun, joined), "after": (joined, joined + 3600)}
    result = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "date": time.strftime("%Y-%m-%d", time.gmtime()),
              "workers": asked.workers, "linked_secs": round(linked - begun, 2), "first_secs": round(first - begun, 2),
              "all_secs": round(joined - begun, 2), "frontend_mb": round(resident["VmRSS"] / 1e6, 1),
              **{name: told([took for at, took in load.took if start <= at < end]) for name, (start, end) in parts.items()}}  # fmt: skip
    text = json.dumps(result, indent=1)
    if asked.json:
        pathlib.Path(asked.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
