"""What does a frontend do with three times too much? Mock engines, a frontend, an open-loop client; all in real time.

    python3 run.py --kvasir PATH [--surge 180] [--unary] [--frontend='--no-overload-protection'] [--json raw.json]

Only the standard library. The capacity is measured first, by as many clients as the engines run at once; then the usual
load (0.6 of it), three times the capacity for `--surge` seconds, and the usual load again. A request is one connection.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time

MODEL = "mock"


class Program:
    """A running `kvasir`; its lines are read until one has the address."""

    def __init__(self, *command):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
        env["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def ports(self, count, pattern):
        found = []
        while len(found) < count:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"{self.process.args}: ended before it listened")
            found += re.findall(pattern, line)
        return found

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


async def drain(program):
    """Nobody may block on a pipe that nobody reads."""
    await asyncio.to_thread(lambda: [None for _ in program.process.stdout])


async def ask(port, number, options):
    """One request: when it came, its status, seconds to the first bytes of the answer's body, and to its end."""
    words = " ".join(f"w{number % 8}x{at}" for at in range(options.prompt // 3))
    body = json.dumps({
        "model": MODEL, "prompt": f"{words} {number}", "max_tokens": options.output, "ignore_eos": True,
        "stream": not options.unary,
    }).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n").encode()
    row = {"at": time.monotonic(), "status": 0}
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        row["status"] = int(answer.split(" ", 2)[1])
        if after := re.search(r"retry-after: (\d+)", answer):
            row["retry_after"] = int(after.group(1))
        await reader.read(1)
        row["first"] = time.monotonic() - row["at"]
        while await reader.read(65536):
            pass
        row["all"] = time.monotonic() - row["at"]
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        row["error"] = str(error)
    return row


async def capacity(port, options):
    """Requests a second when as many run as the engines can run at once, and a few wait."""
    end, done = time.monotonic() + options.measure, []

    async def client(number):
        while time.monotonic() < end:
            row = await ask(port, number, options)
            done.append(row)
            number += 100_000

    clients = options.engines * (options.seqs + 2)
    await asyncio.gather(*(client(number) for number in range(clients)))
    good = [row for row in done if row["status"] == 200 and row["at"] + row.get("all", 1e9) <= end]
    return len(good) / options.measure


async def phase(port, rate, span, options, first):
    """Requests at even distances, whatever becomes of them."""
    begin, tasks = time.monotonic(), []
    for number in range(int(rate * span)):
        due = begin + number / rate
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(ask(port, first + number, options)))
    return tasks


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def summary(rows):
    admitted = [row for row in rows if row["status"] == 200 and "first" in row]
    refused = [row for row in rows if row["status"] in (429, 503, 529)]
    ms = lambda rows, key, share: (v := quantile([row[key] * 1e3 for row in rows if key in row], share)) and round(v, 1)  # noqa: E731
    return {
        "requests": len(rows), "admitted": len(admitted), "refused": len(refused),
        "other": len(rows) - len(admitted) - len(refused),
        "first_byte_ms": {q: ms(admitted, "first", s) for q, s in (("p50", .5), ("p99", .99), ("max", 1))},
        "refusal_ms": {q: ms(refused, "first", s) for q, s in (("p50", .5), ("p90", .9), ("p99", .99), ("max", 1))},
        "retry_after_s": sorted({row["retry_after"] for row in refused if "retry_after" in row}),
    }


async def measure(port, options):
    rate = options.capacity or await capacity(port, options)
    print(f"capacity {rate:.1f} requests/s", flush=True)
    await asyncio.sleep(2)
    before = await phase(port, 0.6 * rate, options.before, options, 1_000_000)
    began = time.monotonic()
    surge = await phase(port, 3 * rate, options.surge, options, 2_000_000)
    ended = time.monotonic()
    after = await phase(port, 0.6 * rate, options.calm, options, 3_000_000)
    rows = [await asyncio.gather(*tasks) for tasks in (before, surge, after)]
    settled = [row for row in rows[2] if row["at"] >= ended + 5]
    last = max(row["at"] + row.get("all", 0) for row in rows[1])
    return {
        "capacity_per_s": round(rate, 1), "before": summary(rows[0]), "surge": summary(rows[1]),
        "after": summary(rows[2]), "from_5_s_after": summary(settled),
        "surge_s": round(ended - began, 1), "surge_drained_s_after": round(last - ended, 1),
    }


async def run(options):
    mocker = Program(options.kvasir, "mocker", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", str(options.engines),
                     "--model-name", MODEL, "--max-num-seqs", str(options.seqs), "--speedup", str(options.speedup))
    frontend = None
    try:
        ports = mocker.ports(options.engines, r"on http://127\.0\.0\.1:(\d+)")
        workers = [word for port in ports for word in ("--worker", f"http://127.0.0.1:{port}")]
        frontend = Program(options.kvasir, "frontend", "--http-host", "127.0.0.1", "--http-port", "0", *workers,
                           *shlex.split(options.frontend))
        [port] = frontend.ports(1, r"address\W+127\.0\.0\.1:(\d+)")
        readers = [asyncio.create_task(drain(program)) for program in (mocker, frontend)]
        for _ in range(200):
            row = await ask(int(port), 0, options)
            if row["status"] == 200:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        result = await measure(int(port), options)
    finally:
        for program in (frontend, mocker):
            if program:
                program.stop()
    await asyncio.gather(*readers)
    result["command"] = " ".join(sys.argv)
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    result["date"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return result


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kvasir", required=True)
    parse.add_argument("--engines", type=int, default=2)
    parse.add_argument("--seqs", type=int, default=8, help="requests that an engine runs at once")
    parse.add_argument("--speedup", type=float, default=1)
    parse.add_argument("--prompt", type=int, default=600, help="about so many tokens")
    parse.add_argument("--output", type=int, default=64)
    parse.add_argument("--unary", action="store_true", help="answers in one piece")
    parse.add_argument("--surge", type=float, default=180)
    parse.add_argument("--before", type=float, default=20, help="seconds of the usual load")
    parse.add_argument("--calm", type=float, default=20, help="the same after the surge")
    parse.add_argument("--measure", type=float, default=10)
    parse.add_argument("--capacity", type=float, help="requests a second, instead of measuring")
    parse.add_argument("--frontend", default="", help="further options of the frontend")
    parse.add_argument("--json", help="write the result here")
    options = parse.parse_args()
    result = asyncio.run(run(options))
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        with open(options.json, "w") as out:
            out.write(text + "\n")


if __name__ == "__main__":
    main()
