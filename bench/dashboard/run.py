"""What does the dashboard cost, and does it stay flat? A frontend before 200 mock engines of 3 models, an open load, real Chromium.

    python3 run.py --kvasir PATH [--seconds 600] [--rate 500] [--json raw.json]

Needs Chromium and nothing of Python beside the standard library. Phases: nobody watches, ten streams that are only read (for the
cost of a viewer), then one Chromium on the fleet for `--seconds`. Server figures are the frontend's own, from /proc; the page's are
its heap after a collection, and frames that the browser drew against those that it could have.
"""

import argparse
import asyncio
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/e2e"))
from browser import Browser  # noqa: E402

MODELS = {"alpha": 67, "beta": 67, "gamma": 66}
TICKS = os.sysconf("SC_CLK_TCK")


class Program:
    def __init__(self, *command):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
        env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def find(self, count, pattern):
        found = []
        while len(found) < count:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"{self.process.args}: ended before it listened")
            found += re.findall(pattern, line)
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()
        return found

    def cpu(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Load:
    """Open load over kept connections: prompts with shared beginnings, short streamed answers."""

    def __init__(self, port, rate):
        self.port, self.rate, self.sent, self.failed, self.running = port, rate, 0, 0, True
        self.idle = []

    async def one(self, number):
        if self.idle:
            try:
                return await self.over(self.idle.pop(), number)
            except (OSError, asyncio.IncompleteReadError) as error:
                # A kept connection that the server closed for its idleness: any client asks again on a new one.
                if getattr(error, "partial", b""):
                    raise
        await self.over(await asyncio.open_connection("127.0.0.1", self.port), number)

    async def over(self, connection, number):
        reader, writer = connection
        model = list(MODELS)[number % 3]
        prompt = " ".join(f"c{number % 40}w{at}" for at in range(60)) + f" {number}"
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}).encode()
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        if b"chunked" in head.lower():
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", head.lower()).group(1)))
        self.failed += not head.startswith(b"HTTP/1.1 200")
        self.idle.append(connection)

    async def run(self):
        began, tasks = time.monotonic(), set()
        while self.running:
            due = int((time.monotonic() - began) * self.rate) - self.sent
            for _ in range(due):
                self.sent += 1
                if len(tasks) < 2000:
                    task = asyncio.create_task(self.guarded(self.sent))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                else:
                    self.failed += 1
            await asyncio.sleep(0.005)

    async def guarded(self, number):
        try:
            await self.one(number)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self.failed += 1

    def start(self):
        threading.Thread(target=lambda: asyncio.run(self.run()), daemon=True).start()


def watch(port, seconds):
    """Reads a stream, as cheaply as can be; its bytes."""
    import socket
    taken, end = 0, time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port)) as stream:
        stream.sendall(b"GET /dashboard/stream HTTP/1.1\r\nhost: x\r\n\r\n")
        while time.monotonic() < end:
            taken += len(stream.recv(1 << 20))
    return taken


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--kvasir", required=True)
    options.add_argument("--seconds", type=int, default=600)
    options.add_argument("--rate", type=int, default=500)
    options.add_argument("--phase", type=int, default=40)
    options.add_argument("--json")
    options = options.parse_args()
    programs, engines, port = [], [], 18000
    browser = None
    try:
        for model, count in MODELS.items():
            mocker = Program(options.kvasir, "mocker", "--http-host", "127.0.0.1", "--http-port", str(port), "--workers", str(count), "--model-name", model,
                             "--speedup", "20", "--log-level", "warn")  # fmt: skip
            programs.append(mocker)
            engines += mocker.find(count, r"on (http://127\.0\.0\.1:\d+)")
            port += 100
        workers = [word for url in engines for word in ("--worker", url)]
        frontend = Program(options.kvasir, "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv", *workers, "--log-level", "kvasir=info")
        programs.append(frontend)
        listens = int(frontend.find(1, r"address\W+127\.0\.0\.1:(\d+)")[0])
        time.sleep(20)
        load = Load(listens, options.rate)
        load.start()
        time.sleep(15)
        raw = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "seconds": options.seconds, "rate": options.rate, "phases": []}

        def measure(name, seconds, during=lambda: None):
            sent, cpu, at = load.sent, frontend.cpu(), time.monotonic()
            extra = during()
            time.sleep(max(0, seconds - (time.monotonic() - at)))
            took = time.monotonic() - at
            row = {"phase": name, "cores": (frontend.cpu() - cpu) / took, "rss_mib": frontend.rss(), "requests_per_s": (load.sent - sent) / took, "failed": load.failed, **(extra or {})}
            print(json.dumps(row), flush=True)
            raw["phases"].append(row)

        measure("nobody watches", options.phase)

        def ten():
            taken = [0] * 10
            readers = [threading.Thread(target=lambda at=at: taken.__setitem__(at, watch(listens, options.phase - 1))) for at in range(10)]
            [reader.start() for reader in readers]
            [reader.join() for reader in readers]
            return {"bytes_per_viewer_s": sum(taken) / 10 / (options.phase - 1)}

        measure("ten streams", options.phase, ten)
        measure("nobody watches again", options.phase)
        browser = Browser()
        page = browser.open(f"http://127.0.0.1:{listens}/dashboard#fleet")
        page.until("document.querySelectorAll('.fleet tbody tr').length === 200")
        page.run("(() => { window.frames_ = 0; const each = () => { window.frames_ += 1; requestAnimationFrame(each) }; requestAnimationFrame(each) })()")

        def heap():
            page._call("HeapProfiler.collectGarbage")
            return page.run("performance.memory.usedJSHeapSize") / 1048576

        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            def look():
                frames, at = page.run("window.frames_"), time.monotonic()
                time.sleep(20)
                return {"frames_per_s": (page.run("window.frames_") - frames) / (time.monotonic() - at), "page_heap_mib": heap(), "page_nodes": page.run("document.querySelectorAll('*').length")}
            measure("one Chromium on the fleet", 30, look)
        raw["complaints"] = page.complaints()
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(raw, indent=1) + "\n")
    finally:
        if browser:
            browser.close()
        for program in programs:
            program.stop()


main()
