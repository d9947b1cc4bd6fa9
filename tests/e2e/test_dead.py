"""Workers that freeze or die with work on them: nobody waits for them, and nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import threading

import httpx
import pytest

from conftest import Kvasir, until
from engines import frontend_before

# Slow enough that an answer runs for seconds, so that it is struck in the middle.
MOCKER = ("mocker", "--workers", "1", "--model-name", "tiny", "--http-host", "127.0.0.1", "--http-port", "0",
          "--speedup-ratio", "2")
# More in each further try: where this machine is busy, some would end before all run.
TOKENS = (800, 1600, 3200, 6400)
REQUESTS = 6
# A frozen worker is given up after some 12 s; what it had is then computed anew.
TIMEOUT = 60


class Engines:
    """Mock engines, each a process of its own, behind a frontend."""

    def __init__(self, count, *options):
        self.mockers = [Kvasir(*MOCKER) for _ in range(count)]
        self.urls = [mocker.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for mocker in self.mockers]
        self.frontend = frontend_before(self.urls, "--router-mode", "round-robin", *options)
        self.url = self.frontend.url

    def descriptors(self):
        """What the frontend has open, but for idle connections, which come and go."""
        folder = f"/proc/{self.frontend.process.pid}/fd"
        return len(os.listdir(folder))

    def rows(self):
        page = httpx.get(f"{self.url}/workers", timeout=30).json()
        return page["workers"] + page["absent"]

    def running(self):
        return sum(rank["active_requests"] for row in self.rows() for rank in row["ranks"])

    def booked(self):
        loads = [rank for row in self.rows() for rank in row["ranks"]]
        names = ("active_requests", "active_decode_blocks", "active_prefill_tokens")
        return sum(rank[name] for rank in loads for name in names)

    def stop(self):
        assert self.frontend.stop() == 0, self.frontend.log()
        for mocker in self.mockers:
            if mocker.process.poll() is None:
                mocker.process.send_signal(signal.SIGCONT)
                mocker.stop()


class Question(threading.Thread):
    """One request under way; `text` is what came."""

    def __init__(self, url, number, stream, tokens):
        super().__init__(daemon=True)
        self.url, self.number, self.stream, self.tokens = url, number, stream, tokens
        self.text, self.status, self.begun = "", None, threading.Event()
        self.start()

    def run(self):
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{self.number} other words " * 20}],
                "max_tokens": self.tokens, "ignore_eos": True, "stream": self.stream,
                "nvext": {"extra_fields": ["worker_id"]}}
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=TIMEOUT) as answer:
            self.status = answer.status_code
            for piece in answer.iter_text():
                self.text += piece
                self.begun.set()

    def is_whole(self):
        if self.stream:
            return self.text.endswith("data: [DONE]\n\n") and '"error"' not in self.text
        return json.loads(self.text)["usage"]["completion_tokens"] == self.tokens


def ask_all(engines, tokens):
    """Workers are taken in turn and questions asked one after the other, so that each engine has two streams and one answer in one
    piece. None if one of them ended before all ran."""
    asked = []
    for number in range(REQUESTS):
        one = Question(engines.url, number, stream=number % 4 < 2, tokens=tokens)
        asked.append(one)
        until(lambda: engines.running() == len(asked) or not asked[0].is_alive(), TIMEOUT)
        if one.stream:
            assert one.begun.wait(TIMEOUT)
    if all(one.is_alive() for one in asked) and engines.running() == REQUESTS:
        return asked
    for one in asked:
        one.join(TIMEOUT)
    until(lambda: engines.running() == 0, TIMEOUT)
    return None


def strike(engines, kill):
    """Asks, strikes the first engine when everything runs, and waits for all answers."""
    asked = next(filter(None, (ask_all(engines, tokens) for tokens in TOKENS)))
    engines.mockers[0].process.send_signal(kill)
    for one in asked:
        one.join(2 * TIMEOUT)
        assert not one.is_alive(), "it still waits for a worker that is gone"
    return asked


def at_rest(engines, before):
    until(lambda: engines.booked() == 0)
    # Idle connections to those who live may be more than before; those to the dead are closed.
    until(lambda: engines.descriptors() <= before + 2 * REQUESTS)
    # A question about its health may be under way.
    until(lambda: len(held(engines)) <= 1, told=lambda: held(engines))


def held(engines):
    """Connections of the frontend to the engine that was struck."""
    sockets = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True).stdout if has_ss() else ""
    port = engines.urls[0].rsplit(":", 1)[1]
    pid = engines.frontend.process.pid
    return [line for line in sockets.splitlines() if f"pid={pid}," in line and f":{port} " in line]


def has_ss():
    return any(os.access(os.path.join(folder, "ss"), os.X_OK) for folder in os.environ["PATH"].split(":"))


@pytest.mark.parametrize("kill", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_what_a_dead_worker_had_is_answered_by_another(kill):
    engines = Engines(2, "--migration-limit", "3")
    before = engines.descriptors()
    asked = strike(engines, kill)
    for one in asked:
        assert one.status == 200 and one.is_whole(), one.text[-300:]
    at_rest(engines, before)
    engines.stop()


@pytest.mark.parametrize("kill", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_without_migration_a_stream_that_has_begun_ends_cleanly(kill):
    engines = Engines(2)
    before = engines.descriptors()
    asked = strike(engines, kill)
    broken = [one for one in asked if not one.is_whole()]
    assert broken and all(one.stream and one.text.endswith("data: [DONE]\n\n") for one in broken)
    assert all('"error"' in one.text for one in broken)
    at_rest(engines, before)
    if kill == signal.SIGSTOP:
        engines.mockers[0].process.send_signal(signal.SIGCONT)
        until(lambda: all(row["state"] == "serving" for row in engines.rows()), TIMEOUT)
    engines.stop()


def test_everybody_names_the_worker_that_ended_an_answer():
    """The log, `nvext.worker_id` and `kvasir why` agree after a move, and `why` marks it."""
    engines = Engines(2, "--migration-limit", "3")
    asked = strike(engines, signal.SIGKILL)
    moved = [one for one in asked if one.stream and len(set(workers(one.text))) == 2]
    assert moved, "no stream moved"
    rows = httpx.get(f"{engines.url}/decisions", timeout=30).json()["decisions"]
    for one in moved:
        first, last = list(dict.fromkeys(workers(one.text)))
        id = re.search(r'"id":"chatcmpl-([0-9a-f-]+)"', one.text).group(1)
        newest, older = [row for row in rows if row["id"] == id]
        assert newest["resumed"] and newest["winner"][0]["worker"] == last
        assert newest["outcome"]["worker"] == last and newest["outcome"]["moves"] == 1
        assert older["superseded"] and older["outcome"] is None and older["winner"][0]["worker"] == first
        line = engines.frontend.until_logged(f"request={id}")
        assert "request done" in line, line
        assert f"worker={last} " in line and "moves=1" in line
        said = subprocess.run([os.environ["KVASIR_BIN"], "why", id, "--url", engines.url],
                              capture_output=True, text=True, check=True).stdout
        assert "goes on with an answer that broke off" in said
        assert "--enable-prompt-tokens-details" not in said
    engines.stop()


def workers(text):
    return [int(id) for id in re.findall(r'"decode_worker_id":(\d+)', text)]
