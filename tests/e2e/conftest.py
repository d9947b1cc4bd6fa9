"""Starts the real binary on a free port and stops it; every test talks to it as a user's program would."""

import atexit
import os
import queue
import re
import resource
import signal
import subprocess
import threading
import time

import httpx
import openai
import pytest

START_SECONDS = 60
# Nobody's balancer has to notice that a test is over.
QUICK_END = {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}


def until(holds, seconds=20, told=lambda: ""):
    """Waits for something that must happen by itself, and gives what it was. What a test asserts of a gauge, a log line or
    a list that is written after the answer, it waits for here: one such thing says nothing about another. `told` is what
    to show when it does not come."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"it did not come within {seconds} s\n{told()}"
        time.sleep(0.05)
    return found


class Kvasir:
    """A running `kvasir`, with what it wrote."""

    def __init__(self, *args, env=None, open_files=None):
        """`open_files`: how many files it may open, which it cannot raise."""
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))  # noqa: E731
        self.process = subprocess.Popen(
            [os.environ["KVASIR_BIN"], *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=limit if open_files else None,
            env={**{k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "KVASIR_"))}, **QUICK_END, **(env or {})},
        )
        # A test that fails before it stops what it started leaves nothing behind either.
        atexit.register(self.process.kill)
        self.lines = []
        self._news = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            self._news.put(line)
        self._news.put(None)

    def wait_for(self, pattern, seconds=START_SECONDS):
        """The match of the first line from now on that fits; fails with all output if none comes."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                line = self._news.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                break
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line with {pattern!r} in:\n{''.join(self.lines)}")

    def log(self):
        return "".join(self.lines)

    def until_logged(self, text, seconds=20):
        """Waits until a line has this text, wherever in the log; the line. Lines are written behind the answers."""
        return until(lambda: next((line for line in list(self.lines) if text in line), None), seconds, self.log)

    def stop(self, seconds=20):
        """Asks it to end, as an operator would; its exit code. `lines` is then all that it wrote."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not end:\n{self.log()}")
        self._reader.join(seconds)
        return code


@pytest.fixture(scope="module")
def demo():
    """A demo with four workers; `demo.url` is where it listens."""
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--log-level", "info,kvasir_router=debug")
    kvasir.url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    yield kvasir
    assert kvasir.stop() == 0, kvasir.log()


@pytest.fixture(scope="module")
def client(demo):
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def http(demo):
    with httpx.Client(base_url=demo.url, timeout=30) as http:
        yield http
