"""Upgrading a frontend: another process takes over its sockets, its index and its load, and no client notices."""

import asyncio
import ctypes
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from conftest import Kvasir, until
from events_rig import Engine, Rig
from planes_rig import BUILTIN, TEXT, Load, Planes, first_event, free_port, stream, until_serving
from replica_rig import requests_on

# Whoever is left by its parent becomes ours, so that it can be waited for.
PR_SET_CHILD_SUBREAPER = 36
MODEL = "tiny"


def load_bench():
    path = pathlib.Path(__file__).parents[2] / "bench" / "upgrade" / "run.py"
    spec = importlib.util.spec_from_file_location("bench_upgrade", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def subreaper():
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Upgradable(Rig):
    """A frontend that is started by a name which can be pointed elsewhere. What comes after it writes to the same log."""

    def __init__(self, folder, engines, *extra):
        self.name = folder / "kvasir"
        self.point_at(os.environ["KVASIR_BIN"])
        self.pid = None
        self.binary = os.environ["KVASIR_BIN"]
        os.environ["KVASIR_BIN"] = str(self.name)
        try:
            super().__init__(engines, *extra)
        finally:
            os.environ["KVASIR_BIN"] = self.binary
        self.pid = self.frontend.process.pid
        self.url = str(self.http.base_url).rstrip("/")

    def point_at(self, target):
        new = self.name.with_suffix(".new")
        new.symlink_to(target)
        new.rename(self.name)

    def upgrade(self, *words):
        """As an operator does it; what the command said."""
        command = [self.binary, "upgrade", "--json", "--url", self.url, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def upgraded(self):
        """Upgrades, and gives the process that serves then."""
        done = self.upgrade()
        assert done.returncode == 0, done.stderr + self.log()
        said = json.loads(done.stdout)
        assert said["replaced_pid"] == self.pid
        self.pid = said["pid"]
        self.fresh_connections()
        return self.pid

    def fresh_connections(self):
        self.http.close()
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def ended(self):
        """How the process that was started first ended, which it does by itself once another has taken over."""
        until(lambda: self.frontend.process.poll() is not None, 100, self.log)
        return self.frontend.process.returncode

    def close(self):
        self.http.close()
        if self.pid == self.frontend.process.pid:
            assert self.frontend.stop() == 0, self.log()
        else:
            assert self.ended() == 0, self.log()
            os.kill(self.pid, signal.SIGTERM)
            _, status = os.waitpid(self.pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0, self.log()
        for engine in self.engines:
            engine.http.close()
            engine.process.stop()


def test_upgrades_under_load_lose_nothing(tmp_path):
    """60 streams, 40 requests a second, two upgrades: nothing fails, nothing is cut, and both old processes end by themselves."""
    rig = Upgradable(tmp_path, [Engine("--max-num-seqs", "256") for _ in range(2)], "--no-overload-protection")
    bench = load_bench()
    rig.http.close()
    result = asyncio.run(bench.load_and_upgrade(rig.binary, rig.url, 60, 40, 2))
    counts = result["clients"]
    assert not [key for key in counts if not key.endswith("_whole")], result
    assert counts["streams_whole"] >= 60 and counts["requests_whole"] >= 40, counts
    first, last = (row["pid"] for row in result["upgrades"])
    assert len({rig.pid, first, last}) == 3
    assert rig.ended() == 0, rig.log()
    _, status = os.waitpid(first, 0)
    assert os.waitstatus_to_exitcode(status) == 0, rig.log()
    rig.pid = last
    rig.fresh_connections()
    rig.until(lambda: all(not rank["active_requests"] for row in rig.workers() for rank in row["ranks"]), "nothing is left booked")
    rig.close()


class GatedEngine:
    """An engine that begins its one stream at once and ends it when it is told to."""

    FIRST = 'data: {"id":"1","object":"text_completion","model":"tiny","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    LAST = 'data: {"id":"1","object":"text_completion","model":"tiny","choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

    def __init__(self):
        engine = self
        self.gate = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                page = {"/v1/models": json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]}), "/health": "{}"}.get(self.path)
                self.send_response(404 if page is None else 200)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write((page or "{}").encode())

            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                self.wfile.write(engine.FIRST.encode())
                self.wfile.flush()
                engine.gate.wait(120)
                self.wfile.write(engine.LAST.encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def hold_stream(rig, engine):
    """A stream of a gated engine on a connection of its own; its lines come in a list, and an event is set at its end."""
    lines, begun, done = [], threading.Event(), threading.Event()
    worker = next(row["worker_id"] for row in rig.workers() if row["url"] == engine.url)

    def read():
        body = {"model": MODEL, "prompt": list(range(1, 40)), "max_tokens": 9, "stream": True}
        pinned = {"x-dynamo-worker-instance-id": str(worker)}
        with httpx.stream("POST", f"{rig.url}/v1/completions", json=body, headers=pinned, timeout=120) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert begun.wait(30), rig.log()
    return lines, done


def booked(rig):
    return sum(rank["active_requests"] for row in rig.workers() for rank in row["ranks"])


def test_the_new_process_knows_what_the_old_one_knew(tmp_path):
    """The index, the load of what still runs there, workers and thresholds that operators set."""
    engine, gated = Engine(), GatedEngine()
    rig = Upgradable(tmp_path, [engine])
    rig.http.post("/workers", json={"url": gated.url, "block_size": 16, "taints": ["spare"]}).raise_for_status()
    rig.until(lambda: len(rig.workers()) == 2, "the added one serves")
    rig.http.post("/busy_threshold", json={"model": MODEL, "active_decode_blocks_threshold": 0.75}).raise_for_status()
    rig.ask(rig.fresh(), engine)
    rig.settle(engine)
    known = rig.indexed(engine)
    assert known
    lines, done = hold_stream(rig, gated)
    assert booked(rig) == 1
    kept = httpx.Client(base_url=rig.url, timeout=30)
    kept.get("/live").raise_for_status()

    rig.upgraded()
    assert not done.is_set(), "the stream is still open"
    assert booked(rig) == 1, "the new process counts it"
    assert known <= rig.indexed(engine), rig.log()
    assert rig.cache(engine)["events"]["batches"] == 0, "nothing had to be learned anew"
    told = next(row["told"] for row in rig.workers() if row["url"] == gated.url)
    assert told["taints"] == ["spare"] and told["block_size"] == 16
    limits = rig.http.get("/busy_threshold").json()["thresholds"]
    assert limits[0]["active_decode_blocks_threshold"] == 0.75, limits
    # A connection that was open is served by the old process, once more; health stays what it was.
    answer = kept.get("/health")
    assert (answer.status_code, answer.headers.get("connection")) == (200, "close")
    kept.close()

    gated.gate.set()
    assert done.wait(60), rig.log()
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    until(lambda: booked(rig) == 0, told=rig.log)
    assert rig.ended() == 0, rig.log()
    rig.close()


def test_a_new_process_that_does_not_start_changes_nothing(tmp_path):
    rig = Upgradable(tmp_path, [Engine()])
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    rig.point_at(broken)
    refused = rig.upgrade()
    assert refused.returncode == 1 and "ended before it served (exit status: 3)" in refused.stderr, refused.stderr
    # It comes as far as to read its standard input, and no further.
    broken.write_text("#!/bin/sh\nhead -c 1 > /dev/null\nexit 4\n")
    os.kill(rig.pid, signal.SIGUSR2)
    rig.frontend.until_logged("exit status: 4")
    broken.unlink()
    rig.point_at(tmp_path / "nothing")
    assert "cannot be started" in rig.upgrade().stderr
    assert rig.http.get("/health").status_code == 200
    rig.ask(rig.fresh(), rig.engines[0])
    # The way it was, and it works again.
    rig.point_at(rig.binary)
    rig.upgraded()
    rig.ask(rig.fresh(), rig.engines[0])
    rig.close()


def test_a_new_process_that_dies_is_replaced_by_the_old_one(tmp_path):
    """Its clients lose what ran there; who comes then is served, and so is the stream of before."""
    gated = GatedEngine()
    rig = Upgradable(tmp_path, [Engine()])
    rig.http.post("/workers", json={"url": gated.url, "block_size": 16}).raise_for_status()
    rig.until(lambda: len(rig.workers()) == 2, "both serve")
    lines, done = hold_stream(rig, gated)
    first = rig.pid
    new = rig.upgraded()
    os.kill(new, signal.SIGKILL)
    rig.frontend.until_logged("this one serves again")
    rig.fresh_connections()
    assert rig.http.get("/health").status_code == 200
    assert rig.http.get("/live").headers.get("connection") != "close"
    gated.gate.set()
    assert done.wait(60) and lines[-2] == "data: [DONE]"
    rig.pid = first
    time.sleep(0.2)
    assert rig.frontend.process.poll() is None, "it stays"
    rig.upgraded()
    rig.close()


def test_a_second_upgrade_does_not_bring_the_first_process_back(tmp_path):
    """A stream holds the first process open while the second has handed over and ended: only the third serves."""
    gated = GatedEngine()
    rig = Upgradable(tmp_path, [Engine()])
    rig.http.post("/workers", json={"url": gated.url, "block_size": 16}).raise_for_status()
    rig.until(lambda: len(rig.workers()) == 2, "both serve")
    lines, done = hold_stream(rig, gated)
    rig.upgraded()
    rig.upgraded()
    rig.frontend.until_logged("has ended in its turn")
    assert "serves again" not in rig.log() and not done.is_set()
    gated.gate.set()
    assert done.wait(60) and lines[-2] == "data: [DONE]", rig.log()
    assert rig.ended() == 0, rig.log()
    rig.close()


def test_a_new_process_that_is_told_to_end_is_not_replaced_by_the_old_one(tmp_path):
    """Who ends the frontend ends it: the process before it goes on with its stream, and takes no one else."""
    gated = GatedEngine()
    rig = Upgradable(tmp_path, [Engine()])
    rig.http.post("/workers", json={"url": gated.url, "block_size": 16}).raise_for_status()
    rig.until(lambda: len(rig.workers()) == 2, "both serve")
    lines, done = hold_stream(rig, gated)
    new = rig.upgraded()
    rig.http.close()
    os.kill(new, signal.SIGTERM)
    rig.frontend.until_logged("has ended in its turn", 60)
    assert "this one serves again" not in rig.log()
    gated.gate.set()
    assert done.wait(60) and lines[-2] == "data: [DONE]"
    assert rig.ended() == 0, rig.log()
    for engine in rig.engines:
        engine.http.close()
        engine.process.stop()


class PortHolder:
    """A frontend of token workers all of whose ports are given: for clients, for answers of workers, for replicas."""

    def __init__(self, folder):
        self.planes = Planes("file+tcp+zmq", folder)
        (folder / "secret").write_text("a secret of replicas")
        self.mocker = self.planes.mocker(BUILTIN, workers=2, speed="1")
        self.answers, self.peers = free_port(), f"127.0.0.1:{free_port()}"
        secret = ["--router-peer-secret-file", str(folder / "secret")]
        ports = ["--tcp-rpc-port", str(self.answers), "--router-peer-listen", self.peers, "--router-replica-sync", *secret]
        self.frontend = self.planes.frontend(*ports)
        self.url, self.pid, self.old = self.frontend.url, self.frontend.process.pid, []
        # Another replica, which dials this one.
        self.other = self.planes.frontend("--router-peers", self.peers, *secret)
        for frontend in (self.frontend, self.other):
            until_serving(frontend, self.mocker.ids)
        until(lambda: len(self.replicas()) == 1, 60, self.other.log)
        # An idle connection would keep it for a minute.
        self.frontend.http.close()

    def replicas(self):
        """The others, as the one that dials knows them."""
        return self.other.http.get("/workers").json()["replicas"]

    def upgrade(self):
        command = [os.environ["KVASIR_BIN"], "upgrade", "--json", "--url", self.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr + self.frontend.log()
        self.old.append(self.pid)
        self.pid = json.loads(done.stdout)["pid"]

    def booked(self):
        """What the process that serves counts."""
        with httpx.Client(base_url=self.url, timeout=30) as http:
            return sum(requests_on(http).values())

    def end(self):
        assert self.frontend.process.wait(100) == 0, self.frontend.log()
        for old in self.old[1:]:
            assert os.waitstatus_to_exitcode(os.waitpid(old, 0)[1]) == 0, self.frontend.log()
        # The last one alone is left, at the same port.
        until(lambda: len(self.replicas()) == 1, 60, self.other.log)
        os.kill(self.pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0, self.frontend.log()
        assert self.other.stop(60) == 0 and self.mocker.stop(60) == 0
        self.planes.end()


def test_ports_that_are_given_are_handed_over_with_answers_under_way(tmp_path):
    """Two upgrades while workers bring answers to one port: each answer comes to the process that asked, those of three processes at once."""
    rig = PortHolder(tmp_path)
    held = []
    with Load(rig.url, clients=4) as load:
        for number in range(3):
            # One that is held until the end, of each process.
            answer = httpx.Client(base_url=rig.url, timeout=60)
            held.append((answer, stream(answer, TEXT.format(f"held {number}"), 7000)))
            held[-1] += (first_event(held[-1][1].__enter__()),)
            load.until_more(told=rig.frontend.log)
            if number < 2:
                rig.upgrade()
                load.until_more(told=rig.frontend.log)
    assert not load.failed, load.failed[:3]
    # Those of others are counted once, though the old processes and the replicas all tell of them.
    until(lambda: rig.booked() <= 3, 60, rig.frontend.log)
    assert "cannot be taken" not in rig.frontend.log()
    for client, opened, lines in held:
        # Cut, it would fail here.
        next(lines, None)
        del lines
        opened.__exit__(None, None, None)
        client.close()
    held.clear()
    until(lambda: rig.booked() == 0, 60, rig.frontend.log)
    rig.end()


def test_a_process_that_is_told_to_take_over_from_nobody_says_so():
    lone = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", env={"KVASIR_TAKE_OVER": "1"})
    assert lone.process.wait(30) == 1
    lone._reader.join(10)
    assert "hands nothing over" in lone.log() and "no option reads it" not in lone.log()
