"""CPU of one call of the indexer's `/query` and of `/select_and_reserve`, ours beside Dynamo's, in one run.

    python3 run.py --kvasir PATH --dynamo-python PATH [--calls 20000] [--tokens 2048] [--workers 8] [--json raw.json]

Both get the same requests over kept connections, in turns of a tenth of the calls each: one at a time, and sixteen at a time. A
`kvasir mocker` publishes cache events that both listen to; a tenth of the prompts is in its cache. What is counted is the CPU time of
the service's process (user and system, `/proc/PID/stat`), divided by its calls; and the time that passed. Nothing but Python is needed.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import tempfile
import time

MODEL = "m"
CONNECTIONS = [1, 16]
BLOCK = 16
# The mock engine refuses tokens that its model has not.
VOCABULARY = 2_000
TICK = os.sysconf("SC_CLK_TCK")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Service:
    """A process that listens at a port."""

    def __init__(self, words, port, folder, env=None):
        self.port = port
        self.log = pathlib.Path(folder) / f"{port}.log"
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env={**plain, **(env or {})})
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
                time.sleep(0.05)
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def ask(self, method, path, body=None):
        self.http.request(method, path, body, {"content-type": "application/json"})
        answer = self.http.getresponse()
        return answer.status, answer.read()

    def cpu(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def prompts(count, tokens, seed):
    """Bodies' token lists; every tenth begins like the first."""
    rng = random.Random(seed)
    first = [rng.randrange(VOCABULARY) for _ in range(tokens)]
    for number in range(count):
        if number % 10 == 0:
            yield first[: tokens // 2] + [rng.randrange(VOCABULARY) for _ in range(tokens - tokens // 2)]
        else:
            yield [rng.randrange(VOCABULARY) for _ in range(tokens)]


def whole_answer(sock, kept):
    """Status and body of the next answer on this connection, and what was read beyond it."""
    while b"\r\n\r\n" not in kept:
        kept += received(sock)
    head, kept = kept.split(b"\r\n\r\n", 1)
    length = int(re.search(rb"content-length: *(\d+)", head, re.IGNORECASE).group(1))
    while len(kept) < length:
        kept += received(sock)
    return int(head.split(b" ", 2)[1]), kept[:length], kept[length:]


def received(sock):
    part = sock.recv(1 << 16)
    assert part, "the service closed the connection"
    return part


def rounds(service, requests, connections):
    """Sends so many requests at once, each whole on its own kept connection, reads their answers, and again."""
    socks = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(connections)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for begin in range(0, len(requests), connections):
        asked = list(zip(socks, requests[begin : begin + connections]))
        for sock, request in asked:
            sock.sendall(request)
        for sock, _ in asked:
            status, answer, _ = whole_answer(sock, b"")
            assert status in (200, 201), (status, answer[:300])
    for sock in socks:
        sock.close()


def measure(services, bodies, path, connections, after=None):
    """CPU and time of each service for the same calls, in turns."""
    sums = {name: {"cpu_us": 0.0, "wall_us": 0.0} for name in services}
    head = "POST {} HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
    requests = [(head.format(path, len(body)) + body).encode() for body in bodies]
    turn = max(1, len(requests) // 10)
    for begin in range(0, len(requests), turn):
        part = requests[begin : begin + turn]
        for name, service in services.items():
            cpu, start = service.cpu(), time.perf_counter()
            rounds(service, part, connections)
            row = sums[name]
            row["wall_us"] += (time.perf_counter() - start) * 1e6
            row["cpu_us"] += (service.cpu() - cpu) * 1e6
            if after:
                after(service, begin, len(part))
    figures = {name: {key: round(value / len(requests), 1) for key, value in row.items()} for name, row in sums.items()}
    if "dynamo" in figures:
        figures["cpu_ratio"] = round(figures["kvasir"]["cpu_us"] / figures["dynamo"]["cpu_us"], 3)
    return figures


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--kvasir", required=True)
    parse.add_argument("--dynamo-python")
    parse.add_argument("--calls", type=int, default=20_000)
    parse.add_argument("--tokens", type=int, default=2048)
    parse.add_argument("--workers", type=int, default=8)
    parse.add_argument("--json")
    asked = parse.parse_args()
    started, result = [], {"calls": asked.calls, "tokens": asked.tokens, "workers": asked.workers}
    with tempfile.TemporaryDirectory() as folder:
        try:
            log = pathlib.Path(folder) / "mocker.log"
            mocker = subprocess.Popen(
                [asked.kvasir, "mocker", "--http-host", "127.0.0.1", "--http-port", "0", "--model-name", MODEL, "--block-size", str(BLOCK),
                 "--workers", str(asked.workers), "--speedup", "100", "--events", "tcp://127.0.0.1:0"],
                stdout=log.open("w"), stderr=subprocess.STDOUT,
            )  # fmt: skip
            started.append(mocker)
            end = time.monotonic() + 30
            while len(engines := re.findall(r"on http://(127\.0\.0\.1:\d+)", log.read_text())) < asked.workers:
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            sockets = [source_of(engine) for engine in engines]

            def both(ours, theirs):
                port = free_port()
                kvasir = Service([asked.kvasir, *ours, "--http-host", "127.0.0.1", "--http-port", str(port)], port, folder)
                started.append(kvasir.process)
                services = {"kvasir": kvasir}
                if asked.dynamo_python:
                    port = free_port()
                    services["dynamo"] = Service([asked.dynamo_python, "-m", *theirs, "--port", str(port)], port, folder)
                    started.append(services["dynamo"].process)
                return services

            indexers = both(["indexer"], ["dynamo.indexer", "--block-size", str(BLOCK)])
            for service in indexers.values():
                for number, events in enumerate(sockets):
                    body = {"instance_id": number + 1, "endpoint": events, "model_name": MODEL, "block_size": BLOCK}
                    status, answer = service.ask("POST", "/register", json.dumps(body))
                    assert status == 201, answer
            time.sleep(2)
            held = next(prompts(1, asked.tokens, 7))[: asked.tokens // 2]
            for engine in engines[:2]:
                ask = http.client.HTTPConnection(engine, timeout=60)
                ask.request("POST", "/v1/completions", json.dumps({"model": MODEL, "prompt": held, "max_tokens": 1}), {"content-type": "application/json"})
                answer = ask.getresponse()
                assert answer.status == 200, answer.read()
            time.sleep(1)
            bodies = [json.dumps({"token_ids": prompt, "model_name": MODEL}) for prompt in prompts(asked.calls, asked.tokens, 7)]
            answers = {name: json.loads(service.ask("POST", "/query", bodies[0])[1]) for name, service in indexers.items()}
            assert len({json.dumps(answer, sort_keys=True) for answer in answers.values()}) == 1, answers
            assert answers["kvasir"]["scores"], answers
            for connections in CONNECTIONS:
                result[f"query, {connections} at a time"] = measure(indexers, bodies, "/query", connections)
            for service in indexers.values():
                service.stop()

            selectors = both(["select"], ["dynamo.select_service"])
            for service in selectors.values():
                for number, events in enumerate(sockets):
                    body = {"worker_id": number + 1, "model_name": MODEL, "endpoint": f"http://w{number}", "block_size": BLOCK, "kv_events_endpoint": events,
                            "max_num_batched_tokens": 100_000_000, "total_kv_blocks": 1_000_000}  # fmt: skip
                    status, answer = service.ask("POST", "/workers", json.dumps(body))
                    assert status == 201, answer
            time.sleep(2)
            named = [body[:-1] + f', "selection_id": "r{number}"}}' for number, body in enumerate(bodies)]

            def free(service, begin, count):
                for number in range(begin, begin + count):
                    assert service.ask("DELETE", f"/reservations/r{number}")[0] == 200

            for connections in CONNECTIONS:
                result[f"select_and_reserve, {connections} at a time"] = measure(selectors, named, "/select_and_reserve", connections, free)
            for service in selectors.values():
                service.stop()
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    text = json.dumps(result, indent=1)
    if asked.json:
        pathlib.Path(asked.json).write_text(text + "\n")
    print(text)


def source_of(engine):
    """Where a mock engine publishes, as it says itself."""
    ask = http.client.HTTPConnection(engine, timeout=30)
    ask.request("GET", "/kv_event_sources")
    listed = json.loads(ask.getresponse().read())
    return re.search(r"tcp://[^\"]+", json.dumps(listed)).group(0).replace("*", "127.0.0.1")


if __name__ == "__main__":
    main()
