#!/usr/bin/env python3
"""Policies before mock engines in real time, beside the simulator: does a policy keep conversations where their cache is?

Eight `kvasir mocker` engines with the profile of a slow machine (a prompt of 1,000 tokens takes 0.2 s, a step 20 ms, 200
blocks of 32 tokens each) and 24 clients in conversations of several turns. Each policy gets the same conversations:

    sticky  conversation n is pinned to engine n mod 8, through the same router
    kv      kvasir frontend --router-policy kv
    time    kvasir frontend --router-policy time, learned from nothing

The same conversations are played by `kvasir replay`. Needs Python and a `kvasir` binary, nothing else:

    bench/policy/run.py --kvasir target/release/kvasir --repeat 2
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import socket
import subprocess
import sys
import tempfile
import time

ENGINES = 8
CLIENTS = 24
THINK_S = 0.2
BLOCK = 32
# Ids that the built-in tokenizer of the mock engine has.
VOCABULARY = 250
ENGINE = ["--engine", "constant", "--step-ms", "20", "--prompt-token-ms", "0.18", "--decode-ms", "0.2",
          "--block-size", str(BLOCK), "--num-blocks", "201", "--max-model-len", "6000"]  # fmt: skip


def conversations(args):
    """Turns as token ids: each prompt holds all of the turns before it, with made-up answers."""
    draw = random.Random(args.seed)
    around = lambda mean: draw.randint(mean // 2, mean * 3 // 2)  # noqa: E731
    tokens = lambda count: [draw.randrange(20, VOCABULARY) for _ in range(count)]  # noqa: E731
    made = []
    for _ in range(args.conversations):
        history, turns = tokens(around(args.system)), []
        for _ in range(args.turns):
            history = history + tokens(around(args.user))
            output = around(args.output)
            turns.append((history, output))
            history = history + tokens(output)
        made.append(turns)
    return made


def write_trace(made, path):
    with open(path, "w", encoding="utf-8") as out:
        for number, turns in enumerate(made):
            for prompt, output in turns:
                row = {"at_ms": number, "tokens": prompt, "output_tokens": output, "session": f"c{number}", "delay_ms": 0}
                out.write(json.dumps(row) + "\n")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_ports(count):
    """The first of so many ports in a row that are free now."""
    while True:
        first = free_port()
        if first + count > 65_000:
            continue
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


class Connection:
    """One kept connection that posts completions and reads their streams."""

    def __init__(self, port):
        self.port, self.reader, self.writer = port, None, None

    async def ask(self, prompt, output, fields=""):
        body = json.dumps({
            "model": "m", "prompt": prompt, "max_tokens": output, "min_tokens": output, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        })  # fmt: skip
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n{fields}content-length: {len(body)}\r\n\r\n"
        begun = time.perf_counter()
        self.writer.write((head + body).encode())
        status = await self.reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(status.decode())
        while (await self.reader.readline()).strip():
            pass
        first, usage, last = None, {}, None
        async for event in self.events():
            if event == "[DONE]":
                continue
            said = json.loads(event)
            if said.get("usage"):
                usage = said["usage"]
            if any(choice.get("text") for choice in said.get("choices", [])):
                last = time.perf_counter()
                first = first or last
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        tokens = usage.get("completion_tokens", output)
        return {
            "ttft": first - begun,
            "itl": (last - first) / max(tokens - 1, 1),
            "prompt": usage["prompt_tokens"],
            "cached": cached,
        }

    async def events(self):
        kept = b""
        while size := int(await self.reader.readline(), 16):
            kept += await self.reader.readexactly(size)
            await self.reader.readline()
            *whole, kept = kept.split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield event[6:].decode()
        await self.reader.readline()


async def play(made, port, fields_of=lambda number: ""):
    """All conversations, by so many clients, to one port; `fields_of` says which header fields a conversation's turns have."""
    left, results = list(enumerate(made))[::-1], []

    async def client():
        while left:
            number, turns = left.pop()
            connection = Connection(port)
            for prompt, output in turns:
                results.append(await connection.ask(prompt, output, fields_of(number)))
                await asyncio.sleep(THINK_S)
            connection.writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    mean = lambda field: sum(result[field] for result in results) / len(results)  # noqa: E731
    return {
        "requests": len(results),
        "ttft_ms": 1e3 * mean("ttft"),
        "itl_ms": 1e3 * mean("itl"),
        "hit_share": sum(r["cached"] for r in results) / sum(r["prompt"] for r in results),
    }


async def started(port, path, wanted):
    for _ in range(600):
        with contextlib.suppress(OSError, ValueError, IndexError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n".encode())
            page = (await reader.read()).decode()
            writer.close()
            if wanted(page):
                return page
        await asyncio.sleep(0.05)
    raise RuntimeError(f"port {port} did not start")


async def real_time(args, made, policy):
    """One policy before engines that are new."""
    first, events = free_ports(ENGINES), free_ports(2 * ENGINES)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [args.kvasir, "mocker", "--http-port", str(first), "--workers", str(ENGINES), "--served-model-name", "m",
               "--kv-events-port", str(events), *ENGINE]  # fmt: skip
    with contextlib.ExitStack() as processes:
        run = lambda words: processes.enter_context(ended(subprocess.Popen(words, **quiet)))  # noqa: E731
        run(command)
        for port in range(first, first + ENGINES):
            await started(port, "/health", lambda page: " 200 " in page.split("\r\n", 1)[0])
        front = free_port()
        workers = [word for port in range(first, first + ENGINES) for word in ["--worker", f"http://127.0.0.1:{port}"]]
        chosen = "kv" if policy == "sticky" else policy
        run([args.kvasir, "frontend", "--http-host", "127.0.0.1", "--http-port", str(front), "--router-policy", chosen, *workers])
        serving = lambda page: len(re.findall('"state":"serving"', page)) == ENGINES  # noqa: E731
        page = await started(front, "/workers", serving)
        if policy != "sticky":
            return await play(made, front)
        # Through the same router, so that both have its hop; each conversation is pinned to an engine.
        ids = [worker["worker_id"] for worker in json.loads(page.split("\r\n\r\n", 1)[1])["workers"]]
        return await play(made, front, lambda number: f"x-dynamo-worker-instance-id: {ids[number % ENGINES]}\r\n")


@contextlib.contextmanager
def ended(process):
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def simulated(args, trace):
    """The same conversations in the simulator."""
    policies = {"sticky": "kv,router-session-affinity-ttl-secs=600", "kv": "kv", "time": "time"}
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [args.kvasir, "replay", "--trace", trace, "--workers", str(ENGINES), "--closed-loop", str(CLIENTS),
                   "--think-ms", str(THINK_S * 1e3), "--json", out.name, *ENGINE]  # fmt: skip
        for policy in policies.values():
            command += ["--policy", policy]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        runs = json.load(out)["runs"]
    found = {run["policy"]: run for run in runs}
    row = lambda run: {"requests": run["requests"], "ttft_ms": run["ttft_ms"]["mean"], "itl_ms": run["itl_ms"]["mean"], "hit_share": run["hit_share"]}  # noqa: E731, E501
    return {name: row(found[policy]) for name, policy in policies.items()}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kvasir", required=True, help="the binary")
    options.add_argument("--repeat", type=int, default=1)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--conversations", type=int, default=96)
    options.add_argument("--turns", type=int, default=6)
    options.add_argument("--system", type=int, default=200)
    options.add_argument("--user", type=int, default=100)
    options.add_argument("--output", type=int, default=40)
    options.add_argument("--policies", default="sticky,kv,time")
    options.add_argument("--json", help="where the figures go")
    args = options.parse_args()
    made = conversations(args)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as trace:
        write_trace(made, trace.name)
        report = {"simulated": simulated(args, trace.name), "real_time": {}}
    print(f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC; {' '.join(sys.argv[1:])}")
    print(f"{'':<10} {'policy':<8} {'TTFT ms':>8} {'ITL ms':>7} {'hits':>6}")
    line = lambda kind, policy, row: print(f"{kind:<10} {policy:<8} {row['ttft_ms']:8.1f} {row['itl_ms']:7.2f} {row['hit_share']:6.3f}", flush=True)  # noqa: E731, E501
    for policy, row in report["simulated"].items():
        line("simulated", policy, row)
    for _ in range(args.repeat):
        for policy in args.policies.split(","):
            row = asyncio.run(real_time(args, made, policy))
            report["real_time"].setdefault(policy, []).append(row)
            line("real time", policy, row)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(report, out, indent=1)
    return judge(report)


def judge(report):
    """What must hold, said and checked."""
    mean = lambda policy, field: sum(r[field] for r in report["real_time"][policy]) / len(report["real_time"][policy])  # noqa: E731
    if not {"sticky", "kv", "time"} <= set(report["real_time"]):
        return 0
    checks = [
        ("hits of time over sticky", mean("time", "hit_share") / mean("sticky", "hit_share"), ">=", 0.95),
        ("TTFT of time over sticky", mean("time", "ttft_ms") / mean("sticky", "ttft_ms"), "<=", 1.0),
        ("TTFT of time over kv", mean("time", "ttft_ms") / mean("kv", "ttft_ms"), "<=", 1.0),
    ]
    for policy in ["kv", "time"]:
        ratio = mean(policy, "ttft_ms") / report["simulated"][policy]["ttft_ms"]
        checks.append((f"real over simulated TTFT of {policy}", ratio, "within", 0.10))
    bad = 0
    for name, value, how, bound in checks:
        holds = {">=": value >= bound, "<=": value <= bound, "within": abs(value - 1) <= bound}[how]
        bad += not holds
        print(f"{'holds' if holds else 'FAILS'}  {name}: {value:.3f} ({how} {bound})")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
