"""Does one long body hold up others? A frontend, a mock engine, three clients with bodies of 44 MB, and one who asks for `/live`.

    python3 run.py --kvasir PATH [--megabytes 44] [--json raw.json]

Only the standard library. `/live` is asked again and again over eight kept connections, so that every serving thread is asked; the
longest wait while a body is under way is what that body cost others. Those who send are processes of their own.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import socket
import subprocess
import time

SENDERS = 3
PROBES = 8


def start(command, pattern):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
    env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    for line in process.stdout:
        if found := re.search(pattern, line):
            return process, found.group(1)
    raise SystemExit(f"{command}: it ended before it listened")


def bodies(size):
    def many(part):
        return ",".join([part] * (size // (len(part) + 1)))

    chat = '{"model":"mock","max_tokens":1,"messages":[%s]}'
    cases = {
        "ids": ("/v1/completions", '{"model":"mock","max_tokens":1,"prompt":[%s]}' % many("1")),
        "token data": ("/v1/completions", '{"model":"mock","max_tokens":1,"prompt":"a","nvext":{"token_data":[%s]}}' % many("1")),
        "messages": ("/v1/chat/completions", chat % many('{"role":"user","content":"a"}')),
        "one text": ("/v1/chat/completions", chat % ('{"role":"user","content":"%s"}' % ("word " * (size // 5)))),
        "ids for an unknown model": ("/v1/completions", '{"model":"nobody","prompt":[%s]}' % many("1")),
    }
    broken = {f"{name}, broken off": (path, body[:-1]) for name, (path, body) in cases.items()}
    return {**cases, **broken}


def send(port, path, body, started):
    """One long request; its status, and how long it took."""
    started.wait()
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 120) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        try:
            connection.sendall(head.encode() + body)
        except OSError:
            pass
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except OSError:
            pass
    status = int(answer.split(b" ", 2)[1]) if answer else 0
    return status, time.monotonic() - began


class Probes:
    """Connections over which `/live` is asked."""

    def __init__(self, port):
        self.open = [socket.create_connection(("127.0.0.1", port), 120) for _ in range(PROBES)]

    def look(self):
        """How long each took to be answered."""
        waits = []
        for connection in self.open:
            began = time.monotonic()
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
            waits.append(time.monotonic() - began)
        return waits


def quantile(sorted_values, share):
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def measure(probes, port, path, body):
    with multiprocessing.Manager() as manager, multiprocessing.Pool(SENDERS) as pool:
        started = manager.Event()
        jobs = [pool.apply_async(send, (port, path, body, started)) for _ in range(SENDERS)]
        time.sleep(1)
        quiet = sorted(wait for _ in range(40) for wait in probes.look())
        started.set()
        waits = []
        while not all(job.ready() for job in jobs):
            waits += probes.look()
        answers = [job.get() for job in jobs]
    waits = sorted(waits) or [0]
    return {
        "statuses": [status for status, _ in answers],
        "seconds": round(max(took for _, took in answers), 2),
        "live_asked": len(waits),
        "live_ms": {"p50": round(quantile(waits, 0.5) * 1e3, 2), "p99": round(quantile(waits, 0.99) * 1e3, 2), "max": round(waits[-1] * 1e3, 2)},
        "live_ms_before": {"p50": round(quantile(quiet, 0.5) * 1e3, 2), "max": round(quiet[-1] * 1e3, 2)},
    }


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--kvasir", required=True)
    options.add_argument("--megabytes", type=int, default=44)
    options.add_argument("--json")
    options = options.parse_args()
    loopback = ["--http-host", "127.0.0.1", "--http-port", "0"]
    mocker, engine = start([options.kvasir, "mocker", *loopback, "--model-name", "mock", "--speedup", "50"], r"on (http://127\.0\.0\.1:\d+)")
    command = [options.kvasir, "frontend", *loopback, "--worker", engine, "--http-body-budget-mb", "1024"]
    frontend, address = start(command, r"address=(127\.0\.0\.1:\d+)")
    port = int(address.rsplit(":", 1)[1])
    time.sleep(2)
    probes = Probes(port)
    rows = {}
    try:
        for name, (path, body) in bodies(options.megabytes << 20).items():
            rows[name] = measure(probes, port, path, body.encode())
            print(f"{name:32} {rows[name]}", flush=True)
    finally:
        frontend.terminate()
        mocker.terminate()
    if options.json:
        record = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "megabytes": options.megabytes, "at_once": SENDERS, "cores": os.cpu_count(),
            "machine": platform.machine(), "load": os.getloadavg(), "bodies": rows,
        }
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
