"""A real Dynamo 1.6.1 frontend, for tests of workers behind it."""

import os
import socket
import subprocess

import httpx

from conftest import until
from dynamo_rig import PYTHON

# Its runtime is large and its start slow on a small machine.
START_SECONDS = 120


def environment(kv):
    own = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
    return {
        **own,
        "DYN_FILE_KV": str(kv), "HF_HUB_OFFLINE": "1", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_LOG": "info",
    }  # fmt: skip


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Dynamo:
    """`python -m dynamo.frontend` over file discovery, TCP and ZeroMQ."""

    def __init__(self, kv, log, *args, env=None):
        self.port = free_port()
        self.log_path = log
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        http = ["--http-host", "127.0.0.1", "--http-port", str(self.port)]
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "dynamo.frontend", "--router-mode", "kv", *http, *planes, *args],
                stdout=out, stderr=subprocess.STDOUT, env={**environment(kv), **(env or {})},
            )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def log(self):
        with open(self.log_path) as log:
            return log.read()[-8000:]

    def models(self):
        try:
            return [model["id"] for model in self.http.get("/v1/models").json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError):
            return []

    def until_serving(self, model):
        """Waits until the model is listed and answers; both are said by different parts of it."""
        until(lambda: model in self.models(), START_SECONDS, self.log)
        ask = lambda: self.http.post("/v1/chat/completions", json=chat(model, "Are you there?", max_tokens=1)).status_code  # noqa: E731
        until(lambda: ask() == 200, START_SECONDS, self.log)

    def stop(self):
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def chat(model, text, max_tokens=8, **more):
    return {
        "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
        "nvext": {"extra_fields": ["worker_id", "timing"]}, **more,
    }  # fmt: skip

