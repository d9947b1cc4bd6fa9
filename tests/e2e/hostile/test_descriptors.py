"""A frontend without file descriptors: nothing is held against its workers, nothing that runs is lost, and idle clients go first."""

import re
import resource
import socket
import time

import httpx

from conftest import Kvasir
from engines import frontend_before
from hostile.streaming_engine import Stream, StreamingEngine

MOCKER = ("mocker", "--workers", "1", "--model-name", "m", "--http-host", "127.0.0.1", "--http-port", "0",
          "--events", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0")
IDLE_CLIENTS = 300
# Longer than a worker would have been given up in, were it to blame.
SHORT_FOR = 12
# Why a cache view may not be trusted without a fault of its engine's.
NO_BLAME = (None, "starting", "no_events")
# What the frontend says when it holds something against a worker.
BLAMED = re.compile("does not answer|health check failed|no sign of life|gets no requests|event socket not connected")


class Rig:
    """A frontend before an engine that publishes its events, and one that ends each connection with its answer: whatever is asked
    of that one needs a new descriptor."""

    def __init__(self, *options, open_files=None):
        self.mocker = Kvasir(*MOCKER)
        self.publishes = self.mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1)
        self.closes = StreamingEngine(closes=True)
        self.frontend = frontend_before([self.publishes, self.closes.url], *options, open_files=open_files)
        self.url = self.frontend.url
        # A connection that is there when no other can be made.
        self.kept = httpx.Client(base_url=self.url, timeout=30)
        self.ids = {row["url"]: row["worker_id"] for row in self.rows()}
        # Its event socket is connected.
        self.frontend.until_logged("event socket connected")
        assert self.ask_on(self.kept)
        self.before = self.judged()
        assert [row[1:] for row in self.before] == [("serving", False, True)] * 2, self.before

    def rows(self):
        return httpx.get(f"{self.url}/workers", timeout=30).json()["workers"]

    def judged(self):
        """What is held against each worker, and whether something is held against its events."""
        calm = lambda row: all(rank["cache"]["cause"] in NO_BLAME for rank in row["ranks"])  # noqa: E731
        return sorted((row["url"], row["state"], row["down"], calm(row)) for row in self.rows())

    def stream(self, tokens, pause):
        stream = Stream(self.url, self.ids[self.closes.url], tokens, pause)
        assert stream.begun.wait(30), self.frontend.log()
        return stream

    def ask(self):
        with httpx.Client(base_url=self.url, timeout=30) as client:
            return self.ask_on(client)

    @staticmethod
    def ask_on(client):
        body = {"model": "m", "messages": [{"role": "user", "content": "1 0"}], "max_tokens": 2, "stream": True}
        answer = client.post("/v1/chat/completions", json=body)
        return answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text

    def connect(self, count):
        host, port = self.url.removeprefix("http://").split(":")
        return [socket.create_connection((host, int(port)), timeout=30) for _ in range(count)]

    def check(self):
        """Nothing was held against anybody, and what was said of the shortage was said once."""
        assert self.judged() == self.before, self.frontend.log()
        assert [line for line in self.frontend.lines if BLAMED.search(line)] == []
        said = [line for line in self.frontend.lines if "idle connections of clients are closed" in line]
        assert len(said) <= 1, said
        return said

    def stop(self):
        self.kept.close()
        assert self.frontend.stop() == 0, self.frontend.log()
        assert self.mocker.stop() == 0, self.mocker.log()
        self.closes.drain()


def test_idle_clients_keep_nobody_out_when_few_files_may_be_open():
    rig = Rig(open_files=256)
    line = rig.frontend.until_logged("open files")
    assert "limit=256" in line and "client_connections=96" in line, line
    stream = rig.stream(120, 0.05)
    idle = rig.connect(IDLE_CLIENTS)
    for _ in range(20):
        assert rig.ask(), rig.frontend.log()
    # Those that were idle for longest were closed by the other side.
    idle[0].settimeout(10)
    assert idle[0].recv(1) == b""
    stream.join(60)
    assert stream.is_whole(), f"{stream.text[-300:]}\n{rig.frontend.log()[-3000:]}"
    rig.check()
    for connection in idle:
        connection.close()
    rig.stop()


def test_more_connections_than_files_are_not_promised():
    rig = Rig("--http-connections-max", "5000", open_files=256)
    rig.frontend.until_logged("--http-connections-max is more than")
    assert rig.ask()
    rig.stop()


def test_without_a_single_descriptor_nothing_that_runs_is_lost_and_nobody_is_blamed():
    """The limit is taken below what is open: whatever the frontend tries fails at once, every time. The stream is silent for longer
    than that takes, as one in a long prefill is."""
    rig = Rig()
    streams = [rig.stream(150, 0.1), rig.stream(1, 15)]
    pid = rig.frontend.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == hard, "it was raised at the start"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    # Requests on a connection that stands, and clients that nobody can accept.
    asked = [rig.ask_on(rig.kept) for _ in range(4)]
    waiting = rig.connect(5)
    time.sleep(SHORT_FOR)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    # At once: who was ejected or had left would be back only after the next questions.
    assert len(rig.check()) == 1, rig.frontend.log()
    for connection in waiting:
        connection.close()
    assert rig.ask(), (asked, rig.frontend.log())
    for stream in streams:
        stream.join(60)
        assert stream.is_whole(), f"{stream.text[-300:]}\n{rig.frontend.log()[-3000:]}"
    rig.check()
    rig.stop()
