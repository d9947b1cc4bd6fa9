#!/usr/bin/env python3
"""What a frontend costs at rest, and what it holds: idle CPU with many workers, memory before traffic, memory with many open streams.

    python3 rest.py --kvasir PATH [--workers 100] [--secs 40] [--streams 9000] [--json raw.json]

Engines are stubs in one process of their own that answer as a recorded vLLM does (`/v1/models`, `/version`, and a `/metrics` page of 65 kB that is asked
for every two seconds); clients are plain sockets in another. Figures are the frontend's own, from /proc. Loopback only; needs `ulimit -n` above twice the streams.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import pathlib
import re
import resource
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
FACTS = ROOT / "testdata" / "vllm-facts"
MODELS = b'{"object":"list","data":[{"id":"m","max_model_len":32768}]}'
ASK = b'{"model":"m","stream":true,"max_tokens":100,"messages":[{"role":"user","content":"hello there"}]}'
EVENT = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":" tok"},"finish_reason":null}]}\n\n'


def whole(body, kind=b"application/json"):
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


async def engine(reader, writer, pages):
    """One connection: answers questions, and keeps every stream open with an event now and then."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path = head.split(b" ", 2)[:2]
            if length := re.search(rb"content-length: (\d+)", head):
                await reader.readexactly(int(length[1]))
            if method == b"GET":
                writer.write(pages.get(path, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"))
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            while not reader.at_eof():
                writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
                try:
                    await asyncio.wait_for(reader.read(1), 10)
                except asyncio.TimeoutError:
                    pass
            return
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def engines(count, ports):
    """Serves `count` engines, each on a port of its own."""

    async def main():
        page = (FACTS / "metrics.txt").read_bytes()
        pages = {b"/v1/models": whole(MODELS), b"/version": whole(b'{"version":"0.32.0"}'), b"/metrics": whole(page, b"text/plain")}
        servers = [await asyncio.start_server(lambda r, w: engine(r, w, pages), "127.0.0.1", 0, backlog=4096) for _ in range(count)]
        ports.put([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    asyncio.run(main())


def streams(port, count, opened, close):
    """Opens `count` streams, says when each has had its first event, and holds them."""

    async def one(gate):
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(ASK), ASK))
            await reader.readuntil(b"\n\n")
        return reader, writer

    async def drain(reader):
        while await reader.read(65536):
            pass

    async def main():
        gate = asyncio.Semaphore(200)
        held = await asyncio.gather(*(one(gate) for _ in range(count)))
        readers = [asyncio.create_task(drain(reader)) for reader, _ in held]
        opened.put(len(held))
        await asyncio.to_thread(close.wait)
        for task in readers:
            task.cancel()
        for _, writer in held:
            writer.close()

    asyncio.run(main())


class Frontend:
    def __init__(self, kvasir, ports, *options):
        workers = [word for port in ports for word in ("--worker", f"http://127.0.0.1:{port}")]
        command = [kvasir, "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--log-level", "info", *workers, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            if found := re.search(r"listening.*address\W+127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()

    def joined(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/workers", timeout=10) as answer:
            return len(json.load(answer)["workers"])

    def cpu(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        of = lambda name: int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024
        return {"rss_mib": round(of("VmRSS"), 1), "anonymous_mib": round(of("RssAnon"), 1), "threads": int(re.search(r"Threads:\s+(\d+)", status)[1])}

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self):
        self.process.terminate()
        return self.process.wait(30)


def wait(what, holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            sys.exit(f"{what}: not within {seconds} s")
        time.sleep(0.2)


def start_engines(count):
    ports = multiprocessing.Queue()
    process = multiprocessing.Process(target=engines, args=(count, ports), daemon=True)
    process.start()
    return process, ports.get(timeout=30)


def idle(args):
    stub, ports = start_engines(args.workers)
    frontend = Frontend(args.kvasir, ports)
    wait("workers join", lambda: frontend.joined() == args.workers)
    time.sleep(5)
    memory, cpu, begun = frontend.memory(), frontend.cpu(), time.monotonic()
    time.sleep(args.secs)
    spent = time.monotonic() - begun
    share = 100 * (frontend.cpu() - cpu) / spent
    found = {"workers": args.workers, "seconds": round(spent, 1), "cpu_percent_of_a_core": round(share, 2), **memory}
    assert frontend.stop() == 0
    stub.kill()
    return found


def alone(args):
    frontend = Frontend(args.kvasir, [])
    time.sleep(2)
    memory = frontend.memory()
    assert frontend.stop() == 0
    return memory


def open_streams(frontend, count, floor):
    """Opens `count` streams, looks, and closes them again."""
    opened, close = multiprocessing.Queue(), multiprocessing.Event()
    clients = multiprocessing.Process(target=streams, args=(frontend.port, count, opened, close))
    clients.start()
    count = opened.get(timeout=240)
    time.sleep(3)
    found = {"streams": count, **frontend.memory(), "descriptors": frontend.descriptors()}
    cpu, begun = frontend.cpu(), time.monotonic()
    time.sleep(15)
    found["cpu_percent_of_a_core"] = round(100 * (frontend.cpu() - cpu) / (time.monotonic() - begun), 2)
    close.set()
    clients.join(60)
    wait("streams end", lambda: frontend.descriptors() <= floor + 50)
    return found


def many_streams(args):
    """Twice: what the allocator keeps after the first time must be used again, not added to."""
    stub, ports = start_engines(8)
    frontend = Frontend(args.kvasir, ports)
    wait("workers join", lambda: frontend.joined() == 8)
    before = {**frontend.memory(), "descriptors": frontend.descriptors()}
    rounds = [open_streams(frontend, args.streams, before["descriptors"]) for _ in range(2)]
    after = {**frontend.memory(), "descriptors": frontend.descriptors()}
    assert frontend.stop() == 0
    stub.kill()
    return {"before": before, "open": rounds, "after": after}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvasir", required=True)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--secs", type=float, default=40)
    parser.add_argument("--streams", type=int, default=9000)
    parser.add_argument("--json")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < 2 * args.streams + 200:
        sys.exit(f"ulimit -n is {hard}; {args.streams} streams need {2 * args.streams + 200}")
    found = {"load_average": os.getloadavg(), "alone": alone(args), "idle": idle(args), "streams": many_streams(args)}
    print(json.dumps(found, indent=2))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
