"""Upgrades a frontend several times in a row while streams are open and requests come, and counts what fails.

    python3 run.py --kvasir PATH [--streams 500] [--rate 200] [--upgrades 5] [--json raw.json]

Mock engines, one `kvasir frontend` before them, and clients that never retry: `streams` of them hold a stream each and begin the
next one when it ends; `rate` requests a second come beside them, in turn on new connections and on kept ones. A stream is *cut* if
it ends before its last event; a request has *failed* if it has no answer, or another than 200. Nothing but Python is needed.
"""

import argparse
import asyncio
import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

MODEL = "tiny"
STREAM_TOKENS = 200
SHORT_TOKENS = 4
# How long an answer may take; past it, it counts as failed.
PATIENCE = 120


class Clients:
    """What clients see. `counts`: streams and requests by how they ended; `why`: the first reasons."""

    def __init__(self, host, port):
        self.host, self.port = host, port
        self.counts = collections.Counter()
        self.why = []
        self.idle = []
        self.open_streams = 0
        self.stopping = False

    def note(self, kind, outcome, why=None):
        self.counts[f"{kind}_{outcome}"] += 1
        if why and len(self.why) < 20:
            self.why.append(f"{kind} {outcome}: {why}")

    async def send(self, reader, writer, tokens, stream):
        prompt = [(time.monotonic_ns() // 1000 + at) % 4000 for at in range(64)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        status, headers = await read_head(reader)
        if headers.get("transfer-encoding") == "chunked":
            data = await read_chunks(reader)
        else:
            data = await reader.readexactly(int(headers.get("content-length", 0)))
        return status, headers, data

    async def one(self, kind, tokens, stream, kept):
        """One request; says how it ended."""
        reader = writer = None
        try:
            while kept and self.idle:
                reader, writer = self.idle.pop()
                if not reader.at_eof():
                    break
                writer.close()
                reader = None
            if reader is None:
                reader, writer = await asyncio.open_connection(self.host, self.port)
            self.open_streams += stream
            try:
                status, headers, data = await asyncio.wait_for(self.send(reader, writer, tokens, stream), PATIENCE)
            finally:
                self.open_streams -= stream
        except Exception as error:  # Whatever it is, a client has no answer.
            cut = isinstance(error, asyncio.IncompleteReadError) and stream
            return self.note(kind, "cut" if cut else "failed", repr(error))
        if status != 200:
            self.note(kind, "failed", f"{status} {data[:200]!r}")
        elif stream and not (b'"completion_tokens":%d' % tokens in data and data.endswith(b"data: [DONE]\n\n")):
            self.note(kind, "cut", f"its end is {data[-400:]!r}")
        else:
            self.note(kind, "whole")
        if kept and headers.get("connection") != "close":
            self.idle.append((reader, writer))
        else:
            writer.close()

    async def hold_streams(self, count):
        async def hold(at):
            await asyncio.sleep(at * 0.005)
            while not self.stopping:
                await self.one("streams", STREAM_TOKENS, True, kept=at % 2 == 0)

        await asyncio.gather(*(hold(at) for at in range(count)))

    async def keep_asking(self, rate):
        asked, begun = [], time.monotonic()
        while not self.stopping:
            due = int((time.monotonic() - begun) * rate)
            while len(asked) < due:
                asked.append(asyncio.create_task(self.one("requests", SHORT_TOKENS, False, kept=len(asked) % 2 == 0)))
            await asyncio.sleep(0.005)
        await asyncio.gather(*asked)


async def read_head(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    return int(head[0].split()[1]), headers


async def read_chunks(reader):
    data = b""
    while True:
        size = int((await reader.readuntil(b"\r\n")).strip(), 16)
        data += (await reader.readexactly(size + 2))[:-2]
        if size == 0:
            return data


class Process:
    """A `kvasir` of ours; its log goes to a file."""

    def __init__(self, kvasir, *words, folder):
        self.log = pathlib.Path(folder) / f"{words[0]}.log"
        with self.log.open("w") as log:
            env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
            self.process = subprocess.Popen([kvasir, *words], stdout=log, stderr=log, env=env)

    def wait_for(self, pattern, count=1, seconds=60):
        end = time.monotonic() + seconds
        while len(found := re.findall(pattern, self.log.read_text())) < count:
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return found


def memory_mb(pid):
    """What a process holds in memory; none if it is gone."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found.group(1)) // 1024 if found else None


async def upgrade(kvasir, url):
    """As an operator does it; the process that serves then, and how long that took."""
    begun = time.monotonic()
    asked = await asyncio.create_subprocess_exec(
        kvasir, "upgrade", "--json", "--url", url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asked.communicate()
    assert asked.returncode == 0, err.decode()
    return json.loads(out)["pid"], time.monotonic() - begun


async def load_and_upgrade(kvasir, url, streams, rate, upgrades):
    """Clients on their own, and `upgrades` one after the other; what came of both."""
    host, port = url.removeprefix("http://").split(":")
    clients = Clients(host, int(port))
    work = asyncio.gather(clients.hold_streams(streams), clients.keep_asking(rate))
    rows = []
    try:
        for _ in range(upgrades):
            end = time.monotonic() + PATIENCE
            while clients.open_streams < streams * 0.9:
                assert time.monotonic() < end, (clients.counts, clients.why)
                await asyncio.sleep(0.02)
            before = clients.open_streams
            pid, took = await upgrade(kvasir, url)
            await asyncio.sleep(1)
            rows.append({"pid": pid, "took_secs": round(took, 2), "open_streams": before, "rss_mb": memory_mb(pid)})
    finally:
        clients.stopping = True
    await work
    for _, writer in clients.idle:
        writer.close()
    return {"upgrades": rows, "clients": dict(clients.counts), "why": clients.why}


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kvasir", required=True)
    parse.add_argument("--streams", type=int, default=500)
    parse.add_argument("--rate", type=float, default=200)
    parse.add_argument("--upgrades", type=int, default=5)
    parse.add_argument("--workers", type=int, default=4)
    parse.add_argument("--json")
    asked = parse.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loopback = ["--http-host", "127.0.0.1", "--http-port", "0"]
        mocker = Process(
            asked.kvasir, "mocker", *loopback, "--workers", str(asked.workers), "--model-name", MODEL, "--max-num-seqs", "1024",
            "--events", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", folder=folder,
        )
        pids = []
        try:
            engines = mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)", asked.workers)
            workers = [word for url in engines for word in ("--worker", url)]
            frontend = Process(asked.kvasir, "frontend", *loopback, *workers, "--no-overload-protection", folder=folder)
            pids.append(frontend.process.pid)
            url = "http://" + frontend.wait_for(r"address=(127\.0\.0\.1:\d+)")[0]
            frontend.wait_for("worker joined", asked.workers)
            result = asyncio.run(load_and_upgrade(asked.kvasir, url, asked.streams, asked.rate, asked.upgrades))
            pids += [row["pid"] for row in result["upgrades"]]
            result["exit_code_of_the_first"] = frontend.process.wait(400)
        finally:
            for pid in pids[-1:]:
                try:
                    os.kill(pid, signal.SIGINT)
                except ProcessLookupError:
                    pass
            mocker.process.kill()
            mocker.process.wait()
    text = json.dumps(result, indent=1)
    if asked.json:
        pathlib.Path(asked.json).write_text(text + "\n")
    print(text)
    bad = {key: count for key, count in result["clients"].items() if not key.endswith("_whole")}
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
