"""A real Dynamo 1.6.1 frontend, for tests of workers behind it."""

import atexit
import subprocess

import httpx

from conftest import until
from dynamo_rig import PYTHON, environment
from planes_rig import chat, free_port

# Its runtime is large and its start slow on a small machine.
START_SECONDS = 120


class Dynamo:
    """`python -m dynamo.frontend` on these planes."""

    def __init__(self, planes, log, *args):
        self.port = free_port()
        self.log_path = log
        http = ["--http-host", "127.0.0.1", "--http-port", str(self.port)]
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "dynamo.frontend", "--router-mode", "kv", *http, *planes.flags, *args],
                stdout=out, stderr=subprocess.STDOUT, env=environment(planes),
            )  # fmt: skip
        atexit.register(self.process.kill)
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
        until(lambda: chat(self.http, "Are you there?", max_tokens=1).status_code == 200, START_SECONDS, self.log)

    def stop(self):
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
