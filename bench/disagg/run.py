#!/usr/bin/env python3
"""What does a request cost the frontend whose prompt and answer are on different workers? CPU of `kvasir frontend`, in one run: workers that
compute whole requests, a prefill and a decode worker, and the two that meet; the same of engine servers behind HTTP. Prints JSON. See README.md."""

import argparse
import http.client
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

LOAD = pathlib.Path(__file__).resolve().parent / "load.lua"
MODEL = pathlib.Path(__file__).resolve().parents[2] / "crates/text/src/builtin"
PLANES = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
START_SECONDS = 60
# What each request asks: words of the prompt, and the body's own fields.
SCENARIOS = {
    "short": (12, {"max_tokens": 8}),
    "prompt": (1500, {"max_tokens": 8}),
    "stream": (12, {"max_tokens": 128, "ignore_eos": True, "stream": True}),
}
TICKS = os.sysconf("SC_CLK_TCK")
# Each arm, and the one with workers that compute whole requests it is compared with.
WHOLE = {"aggregated": "aggregated", "answer": "aggregated", "bootstrap": "aggregated", "http": "http", "http_vllm": "http", "http_sglang": "http"}
MOCKER = ["mocker", "--model-name", "m", "--block-size", "16", "--num-blocks", "65536", "--max-model-len", "32768", "--speedup", "100000",
          "--kv-transfer-bandwidth", "0", "--log-level", "warn"]  # fmt: skip


class Arm:
    """A frontend and its workers, which nobody else has."""

    def __init__(self, name, kvasir, folder, workers, port):
        self.name, self.port, self.folder = name, port, folder
        folder.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
        env |= {"DYN_FILE_KV": str(folder / "kv"), "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1"}
        start = lambda log, *args: subprocess.Popen([kvasir, *args], stdout=open(folder / log, "wb"), stderr=subprocess.STDOUT, env=env)  # noqa: E731
        frontend = ["frontend", "--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", str(port), "--log-level", "warn"]
        if name.startswith("http"):
            ports = [port + 100 + at for at in range(len(workers))]
            self.workers = [
                start(f"worker{at}.log", *MOCKER, "--http-host", "127.0.0.1", "--http-port", str(own), *args)
                for at, (own, args) in enumerate(zip(ports, workers))
            ]
            flag = lambda args: "--prefill-worker" if "prefill" in args else "--worker"  # noqa: E731
            named = [word for own, args in zip(ports, workers) for word in (flag(args), f"http://127.0.0.1:{own}")]
            self.frontend = start("frontend.log", *frontend, *named)
        else:
            self.frontend = start("frontend.log", *frontend, *PLANES)
            mocker = [*MOCKER, "--model-path", str(MODEL), *PLANES]
            self.workers = [start(f"worker{at}.log", *mocker, *args) for at, args in enumerate(workers)]

    def serving(self):
        """Whether requests are answered as they should be here."""
        try:
            status, answer = ask(self.port, body("are you there?", {"max_tokens": 2}))
        except OSError:
            return False
        if status != 200:
            return False
        told = json.loads(answer)["nvext"]["worker_id"]
        return (told["prefill_worker_id"] != told["decode_worker_id"]) == (WHOLE[self.name] != self.name)

    def cpu(self):
        """Seconds that the frontend has computed."""
        fields = pathlib.Path(f"/proc/{self.frontend.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def stop(self):
        for one in (self.frontend, *self.workers):
            one.send_signal(signal.SIGKILL)
            one.wait()


def body(text, fields):
    message = {"model": "m", "messages": [{"role": "user", "content": text}], "nvext": {"extra_fields": ["worker_id"]}, **fields}
    return json.dumps(message).encode()


def ask(port, content):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def load(arm, scenario, seconds, clients, pause_ms, seed):
    """`clients` connections that ask one request after another, each after a pause. Requests answered, and the frontend's CPU for each, in microseconds."""
    words, fields = SCENARIOS[scenario]
    env = {"SCENARIO": scenario, "SEED": str(seed), "WORDS": str(words), "PAUSE_MS": str(pause_ms), "FIELDS": json.dumps(fields)[1:-1]}
    wrk = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--timeout", "30s", "-s", str(LOAD), f"http://127.0.0.1:{arm.port}"]
    before, begun = arm.cpu(), time.monotonic()
    told = subprocess.run(wrk, env={**os.environ, **env}, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    spent, took = arm.cpu() - before, time.monotonic() - begun
    found = json.loads(told.splitlines()[-1])
    assert found["failed"] == 0 and found["requests"] > 0, f"{arm.name}: {found}"
    return {"requests": found["requests"], "per_second": found["requests"] / took, "cpu_us": spent / found["requests"] * 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvasir", required=True, help="a release build")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--arms", default=",".join(WHOLE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--secs", type=int, default=3)
    parser.add_argument("--clients", default="4,32", help="connections, one number after another")
    parser.add_argument("--pause-ms", type=int, default=0, help="of each connection before a request: the same traffic for all arms")
    parser.add_argument("--first-port", type=int, default=9500)
    parser.add_argument("--json", help="write it there too")
    args = parser.parse_args()
    port = args.first_port
    mode = lambda of, *more: ["--disaggregation-mode", of, *more]  # noqa: E731
    fleets = {
        "aggregated": [[], []],
        "answer": [mode("prefill"), mode("decode")],
        "bootstrap": [mode("prefill", "--bootstrap-ports", str(port + 50)), mode("decode")],
        "http": [[], []],
        "http_vllm": [mode("prefill"), mode("decode")],
        "http_sglang": [mode("prefill", "--bootstrap-ports", str(port + 51)), mode("decode", "--disaggregation-engine", "sglang")],
    }
    fleets = {name: fleets[name] for name in args.arms.split(",")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    samples, arms = [], []
    with tempfile.TemporaryDirectory(prefix="kvasir-disagg-") as folder:
        try:
            for at, (name, workers) in enumerate(fleets.items()):
                arms.append(Arm(name, args.kvasir, pathlib.Path(folder) / name, workers, port + 3 * at))
            end = time.monotonic() + START_SECONDS
            while not all(arm.serving() for arm in arms):
                assert time.monotonic() < end, f"a fleet does not serve as it should: {folder}"
                time.sleep(0.2)
            for arm in arms:
                load(arm, "short", 1, 8, 0, "warm")
            for scenario, clients in settings(args):
                for turn in range(args.rounds):
                    for arm in arms if turn % 2 == 0 else arms[::-1]:
                        found = load(arm, scenario, args.secs, clients, args.pause_ms, f"{clients} {turn}")
                        samples.append({"scenario": scenario, "clients": clients, "round": turn, "arm": arm.name, **found})
                    print(f"{scenario}, {clients} clients: {turn + 1}/{args.rounds}", file=sys.stderr)
        finally:
            for arm in arms:
                arm.stop()
    report = {"command": " ".join(sys.argv), "cores": os.cpu_count(), "summary": summary(samples, args), "samples": samples}
    text = json.dumps(report, indent=1)
    if args.json:
        pathlib.Path(args.json).write_text(text)
    print(text)


def settings(args):
    """What is asked, and by how many."""
    return [(scenario, int(clients)) for clients in args.clients.split(",") for scenario in args.scenarios.split(",")]


def summary(samples, args):
    """Medians over rounds; ratios are to whole requests of the same round."""
    out = {}
    for setting in settings(args):
        of = lambda arm, field: [s[field] for s in samples if (s["scenario"], s["clients"], s["arm"]) == (*setting, arm)]  # noqa: B023, E731
        rows = {}
        for arm in args.arms.split(","):
            own, whole = of(arm, "cpu_us"), of(WHOLE[arm], "cpu_us")
            ratios = [mine / theirs for mine, theirs in zip(own, whole)]
            rows[arm] = {
                "cpu_us": round(statistics.median(own), 1), "per_second": round(statistics.median(of(arm, "per_second"))),
                "ratio": round(statistics.median(ratios), 3), "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
            }  # fmt: skip
        out["{} {}".format(*setting)] = rows
    return out


if __name__ == "__main__":
    main()
