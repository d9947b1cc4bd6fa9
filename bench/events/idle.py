"""What listening to idle engines costs: CPU time of `kvasir frontend` before 100 mock engines that say nothing.

    python3 bench/events/idle.py target/release/kvasir [workers] [seconds]

Two runs, with events and without: the difference is what the event streams cost. Both ask every engine for
its metrics once a second, as the frontend always does.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

TICKS = os.sysconf("SC_CLK_TCK")


def free_run(count):
    """The first of `count` free ports in a row."""
    for first in range(20000, 32000 - count, max(count, 10)):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise SystemExit("no free ports")


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def switches(pid):
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        text = open(f"/proc/{pid}/task/{task}/status").read()
        total += sum(int(n) for n in re.findall(r"ctxt_switches:\s+(\d+)", text))
    return total


def sockets(pid):
    links = (os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return sum(link.startswith("socket:") for link in links)


def measure(kvasir, urls, seconds, *more):
    workers = [word for url in urls for word in ("--worker", url)]
    port = free_run(1)
    command = [kvasir, "frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--log-level", "error", *workers, *more]
    frontend = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            time.sleep(0.1)
            try:
                rows = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/workers"))["workers"]
            except OSError:
                continue
            if sum(row["state"] == "serving" for row in rows) == len(urls):
                break
        else:
            raise SystemExit("the workers never joined")
        time.sleep(3)
        before, switched = cpu_seconds(frontend.pid), switches(frontend.pid)
        time.sleep(seconds)
        cpu, switched = cpu_seconds(frontend.pid) - before, switches(frontend.pid) - switched
        return cpu, switched, sockets(frontend.pid)
    finally:
        frontend.terminate()
        frontend.wait()


def main():
    kvasir = sys.argv[1]
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    seconds = int(sys.argv[3]) if len(sys.argv) > 3 else 20
    http = free_run(3 * count)
    events = http + count
    mocker = subprocess.Popen([
        kvasir, "mocker", "--http-host", "127.0.0.1", "--http-port", str(http), "--workers", str(count),
        "--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{events + count}", "--num-blocks", "1000",
    ], stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        urls = [f"http://127.0.0.1:{http + at}" for at in range(count)]
        time.sleep(3)
        if mocker.poll() is not None:
            raise SystemExit("the mock engines did not start")
        for name, more in [("with events", []), ("without events", ["--no-router-kv-events"])]:
            cpu, switched, open_sockets = measure(kvasir, urls, seconds, *more)
            print(f"{name:<15} {count} idle workers, {seconds} s: {cpu:.2f} s of CPU ({cpu / seconds:.2%} of a core), "
                  f"{switched / seconds:.0f} context switches/s, {open_sockets} sockets", flush=True)  # fmt: skip
    finally:
        mocker.terminate()
        mocker.wait()


main()
