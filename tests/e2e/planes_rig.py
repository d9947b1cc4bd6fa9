"""Planes: the servers that they stand on, real ones, and what puts a process of either kind on them."""

import atexit
import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading

import httpx
import pytest

from conftest import Kvasir, until

# Discovery, requests, events.
COMBOS = ["file+tcp+zmq", "etcd+tcp+nats", "etcd+nats+nats"]
# Seconds that a worker's keys outlive it in etcd.
LEASE_TTL = 4
# Where servers keep what they write: a disk that others keep busy makes each of their answers wait.
MEMORY = "/dev/shm"
MODEL = "m"
# A model's folder that is small and always there.
BUILTIN = pathlib.Path(__file__).parents[2] / "crates/text/src/builtin"
# Several blocks of 16 tokens, unlike any other prompt.
TEXT = "Number {0}: when does the ferry leave, who keeps the light, and is there bread on Sundays too? " * 6


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def is_open(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class Server:
    """A server that others need, which can be lost and come back at the same place."""

    tool = package = ""

    def __init__(self):
        if not shutil.which(self.tool):
            pytest.skip(f"NO {self.tool} here (Debian: {self.package}): nothing is known of what stands on it")
        self.folder = tempfile.mkdtemp(prefix=f"kvasir-{self.tool}-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.port, self.process = free_port(), None
        atexit.register(self.kill)
        self.start()

    def command(self):
        raise NotImplementedError

    def start(self):
        log = open(os.path.join(self.folder, "log"), "ab")
        self.process = subprocess.Popen([self.tool, *self.command()], stdout=log, stderr=subprocess.STDOUT)
        log.close()
        until(lambda: is_open(self.port), 60, lambda: f"{self.tool} does not start: {self.folder}/log")

    def kill(self):
        """As a machine that loses its power."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def end(self):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Etcd(Server):
    tool, package = "etcd", "etcd-server"

    def command(self):
        self.peer = getattr(self, "peer", None) or free_port()
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer}"
        return [
            "--data-dir", f"{self.folder}/data", "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        ]  # fmt: skip

    def wipe(self):
        """It comes back knowing nothing of anybody."""
        shutil.rmtree(f"{self.folder}/data")


class Nats(Server):
    tool = package = "nats-server"

    def command(self):
        return ["-js", "-sd", f"{self.folder}/jetstream", "-a", "127.0.0.1", "-p", str(self.port)]


class PlaneProcess(Kvasir):
    """One whose log is long: of every request a line."""

    def log(self):
        return "".join(line for line in self.lines if "request done" not in line)[-8000:]


class Planes:
    """Discovery, requests and events, by name: `etcd+tcp+nats`. The same flags and variables for processes of either kind."""

    def __init__(self, combo, folder, lease_ttl=LEASE_TTL):
        self.combo = combo
        discovery, requests, events = combo.split("+")
        self.flags = ["--discovery-backend", discovery, "--request-plane", requests, "--event-plane", events]
        self.env = {"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        self.etcd = self.nats = None
        if discovery == "file":
            self.env["DYN_FILE_KV"] = str(folder / "kv")
        else:
            self.etcd = Etcd()
            self.env |= {"ETCD_ENDPOINTS": f"http://127.0.0.1:{self.etcd.port}", "ETCD_LEASE_TTL": str(lease_ttl)}
        if "nats" in (requests, events):
            self.nats = Nats()
            self.env["NATS_SERVER"] = f"nats://127.0.0.1:{self.nats.port}"

    def end(self):
        for server in (self.etcd, self.nats):
            if server:
                server.end()

    def frontend(self, *args):
        """`kvasir frontend` on these planes."""
        kvasir = PlaneProcess("frontend", "--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", "0", *self.flags, *args, env=self.env)
        kvasir.url = "http://" + kvasir.wait_for(r"listening.*address=(127\.0\.0\.1:\d+)").group(1)
        kvasir.http = httpx.Client(base_url=kvasir.url, timeout=60)
        return kvasir

    def mocker(self, folder, *args, workers=1, speed="5"):
        """`kvasir mocker` on these planes; `ids` are its workers."""
        kvasir = PlaneProcess(
            "mocker", "--model-path", str(folder), "--model-name", MODEL, "--block-size", "16", "--num-blocks", "4096",
            "--max-model-len", "8192", "--speedup", speed, "--num-workers", str(workers), *self.flags, *args, env=self.env,
        )  # fmt: skip
        kvasir.ids = sorted(int(kvasir.wait_for(r"as worker (\d+) of").group(1)) for _ in range(workers))
        return kvasir


# Flags by which a mock engine on the planes has a door where it is looked at and told what to do wrong.
DOOR = ["--http-host", "127.0.0.1", "--http-port", "0"]


def door(mocker):
    """A client of that door."""
    return httpx.Client(base_url=re.search(r"as worker .*(http://127\.0\.0\.1:\d+)", mocker.log()).group(1), timeout=30)


def running(door):
    """Requests that an engine computes, and how many were cancelled there."""
    (rank,) = door.get("/mock/status").json()["ranks"]
    return rank["running"], rank["cancelled"]


def chat(http, text="hello", **fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8,
            "nvext": {"extra_fields": ["worker_id"]}, **fields}  # fmt: skip
    return http.post("/v1/chat/completions", json=body)


def where(answer):
    return answer.json()["nvext"]["worker_id"]["decode_worker_id"]


def workers_of(http):
    """The ids that a frontend of ours lists as serving."""
    return sorted(w["worker_id"] for w in http.get("/workers").json()["workers"] if w["state"] == "serving")


def until_serving(kvasir, ids, seconds=90):
    until(lambda: workers_of(kvasir.http) == sorted(ids), seconds, lambda: f"{workers_of(kvasir.http)} not {ids}\n{kvasir.log()}")


def busy_workers(http):
    """The ids of those that a frontend of ours has booked requests on."""
    rows = http.get("/workers").json()["workers"]
    return [row["worker_id"] for row in rows if any(rank["active_requests"] for rank in row["ranks"])]


def until_exact(kvasir, seconds=60):
    """Waits until everything that every rank holds is known and believed."""
    caches = lambda: [rank["cache"] for row in kvasir.http.get("/workers").json()["workers"] for rank in row["ranks"]]  # noqa: E731
    until(lambda: all(cache and cache["state"] == "exact" for cache in caches()), seconds, lambda: f"{caches()}\n{kvasir.log()}")


def stream(http, text, tokens, **fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, "nvext": {"extra_fields": ["worker_id"]}, **fields}  # fmt: skip
    return http.stream("POST", "/v1/chat/completions", json=body)


def first_event(answer):
    """Waits for the first chunk; what follows it."""
    assert answer.status_code == 200, answer.read()
    lines = answer.iter_lines()
    while not next(lines).startswith("data:"):
        pass
    return lines


@contextlib.contextmanager
def streams(http, count=4):
    """Long answers that run until the block is left."""
    with contextlib.ExitStack() as stack:
        answers = [stack.enter_context(stream(http, TEXT.format(f"load {number}") * 10, 4000)) for number in range(count)]
        # An iterator that nobody has any more closes its answer.
        begun = [first_event(answer) for answer in answers]
        yield begun


def rest(lines, told):
    """Reads a stream to its end: why it ended, and its usage."""
    finish = usage = None
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, f"{event}\n{told()}"
            usage = event.get("usage") or usage
            finish = next((choice["finish_reason"] for choice in event["choices"]), None) or finish
    return finish, usage


def until_hits(http, told, rounds=6, seconds=60):
    """Second turns go where the first was, and find its blocks there. Chance alone finds the same one of two every second time."""
    seen = []

    def hit(number):
        first, second = (chat(http, TEXT.format(number), max_tokens=2) for _ in range(2))
        cached = (second.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        seen.append((where(first), where(second), cached))
        return where(first) == where(second) and cached >= 64

    numbers = iter(range(1000 + threading.get_native_id() * 1000, 1 << 60))
    until(lambda: all(hit(next(numbers)) for _ in range(rounds)), seconds, lambda: f"{seen[-20:]}\n{told()}")


class Load:
    """Clients that ask one request after another until the block is left. `failed` is what went wrong."""

    def __init__(self, url, clients=4, **fields):
        self.url, self.fields = url, {"max_tokens": 4, **fields}
        self.failed, self.served, self._stop = [], 0, threading.Event()
        # Who answered.
        self.seen = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]

    def _ask(self, number):
        with httpx.Client(base_url=self.url, timeout=60) as http:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                try:
                    answer = chat(http, f"{number} {turn}", **self.fields)
                    error = None if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
                except httpx.HTTPError as failure:
                    error = repr(failure)
                with self._lock:
                    if error:
                        self.failed.append(error)
                    else:
                        self.served += 1
                        self.seen.add(where(answer))

    def until_more(self, count=20, seconds=60, told=lambda: ""):
        """Waits until so many more were answered."""
        wanted = self.served + count
        until(lambda: self.served >= wanted, seconds, lambda: f"{self.failed[:3]}\n{told()}")

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
