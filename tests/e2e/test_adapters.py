"""LoRA adapters as models of their own, and what engines are told about urgency."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from conftest import Kvasir, until

BLOCK = 16
BASE, ADAPTER = "tiny", "sql"


class Fleet:
    """Two engines with events before a frontend; the first has an adapter."""

    def __init__(self):
        common = ["--http-host", "127.0.0.1", "--http-port", "0", "--model-name", BASE, "--block-size", str(BLOCK),
                  "--speedup", "50", "--kv-events-port", "0"]  # fmt: skip
        self.engines = [Kvasir("mocker", *common, "--lora-modules", f"{ADAPTER}=/loras/sql"), Kvasir("mocker", *common)]
        self.urls = [engine.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for engine in self.engines]
        self.frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--worker", self.urls[0],
                               "--worker", self.urls[1])  # fmt: skip
        url = "http://" + self.frontend.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
        self.http = httpx.Client(base_url=url, timeout=30)
        until(lambda: len(self.http.get("/workers").json()["workers"]) == 3)

    def rows(self):
        return self.http.get("/workers").json()["workers"]

    def ask(self, model, prompt, **nvext):
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "nvext": {"extra_fields": ["worker_id"], **nvext}}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def outcome(self, answer):
        return self.http.get("/decisions/" + answer["id"].removeprefix("cmpl-")).json()["outcome"]

    def heard(self):
        """All that the first engine published has come, for each of its models."""
        published = httpx.get(f"{self.urls[0]}/mock/cache").json()["ranks"][0]["published"]
        ours = [row["ranks"][0]["cache"]["events"] for row in self.rows() if row["url"] == self.urls[0]]
        return all(events["sequence"] == published - 1 for events in ours)

    def close(self):
        self.http.close()
        assert self.frontend.stop() == 0, self.frontend.log()
        for engine in self.engines:
            engine.stop()


@pytest.fixture
def fleet():
    fleet = Fleet()
    yield fleet
    fleet.close()


def test_an_adapter_is_a_model_of_the_workers_that_have_it(fleet):
    assert [model["id"] for model in fleet.http.get("/v1/models").json()["data"]] == [ADAPTER, BASE]
    with_it = {row["worker_id"] for row in fleet.rows() if row["model"] == ADAPTER}
    both = {row["worker_id"] for row in fleet.rows() if row["model"] == BASE}
    assert len(with_it) == 1 and len(both) == 2 and with_it < both
    for n in range(8):
        answer = fleet.ask(ADAPTER, [n] * 40)
        assert answer["model"] == ADAPTER
        assert {answer["nvext"]["worker_id"]["decode_worker_id"]} == with_it
    served = set()
    for n in range(60):  # Among equals one is drawn by chance.
        served.add(fleet.ask(BASE, [100 + n] * 40)["nvext"]["worker_id"]["decode_worker_id"])
        if n >= 7 and served == both:
            break
    assert served == both, "the base is at home on both"


def test_what_is_cached_for_an_adapter_is_no_hit_of_its_base(fleet):
    prompt = list(range(500, 500 + 4 * BLOCK + 1))
    [home] = [row["worker_id"] for row in fleet.rows() if row["model"] == ADAPTER]
    fleet.ask(ADAPTER, prompt)
    until(fleet.heard)
    # To the adapter it is a hit, as foretold; to its base, on that very engine, it is none, as foretold.
    outcome = fleet.outcome(fleet.ask(ADAPTER, prompt))
    assert (outcome["predicted_cached_tokens"] > 0, outcome["reported_cached_tokens"]) == (True, 4 * BLOCK), outcome
    base = fleet.ask(BASE, prompt, backend_instance_id=home)
    outcome = fleet.outcome(base)
    assert (outcome["predicted_cached_tokens"], outcome["reported_cached_tokens"]) == (0, 0), outcome
    until(fleet.heard)
    # From then on both have it there, each for itself.
    for model in [BASE, ADAPTER]:
        answer = fleet.ask(model, prompt)
        assert answer["nvext"]["worker_id"]["decode_worker_id"] == home
        outcome = fleet.outcome(answer)
        assert outcome["reported_cached_tokens"] == 4 * BLOCK and outcome["predicted_cached_tokens"] > 0, (model, outcome)


class Recorder:
    """An engine of some kind, by the names of its metrics, that keeps what it is asked."""

    def __init__(self, metrics):
        recorder = self
        self.asked = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self, status, body):
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                pages = {"/v1/models": json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}),
                         "/metrics": metrics}  # fmt: skip
                page = pages.get(self.path)
                self.answer(200 if page else 404, (page or "").encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path == "/tokenize":
                    return self.answer(404, b"{}")
                recorder.asked.append(body)
                message = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
                usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
                self.answer(200, json.dumps({"id": "chatcmpl-1", "choices": [message], "usage": usage}).encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:%d" % self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.mark.parametrize(
    "metrics, sign",
    [('sglang:num_running_reqs{model_name="m"} 0.0\n', 1), ('vllm:num_requests_running{engine="0"} 0.0\n', -1)],
    ids=["sglang", "vllm"],
)
def test_urgency_is_told_in_the_engines_own_sense(metrics, sign):
    """To SGLang the larger number is the more urgent, to vLLM the smaller; to us the larger."""
    engine = Recorder(metrics)
    frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--worker", engine.url)
    url = "http://" + frontend.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
    body = {"model": "m", "messages": [{"role": "user", "content": "now"}]}
    with httpx.Client(base_url=url, timeout=30) as http:
        until(lambda: http.get("/workers").json()["workers"])
        hinted = {**body, "nvext": {"agent_hints": {"priority": 7}}}
        for sent, headers in [(hinted, {}), (body, {"x-dynamo-request-priority": "7"}), (body, {})]:
            assert http.post("/v1/chat/completions", json=sent, headers=headers).status_code == 200
    assert [asked.get("priority") for asked in engine.asked] == [7 * sign, 7 * sign, None]
    assert all("nvext" not in asked for asked in engine.asked)
    assert frontend.stop() == 0, frontend.log()
