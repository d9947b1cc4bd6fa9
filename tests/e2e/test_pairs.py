"""Prompts on one engine server and answers on another, over HTTP: vLLM's words and SGLang's, as mock engines speak them."""

import http.server
import json
import random
import re
import threading
import time

import httpx
import pytest

from conftest import Kvasir, until
from planes_rig import MODEL, TEXT, Load, busy_workers, chat, first_event, free_port, rest, stream

# A prefill server is used again this long after it is back, on a machine that does nothing else: `/v1/models` is asked every two seconds.
BACK_SECONDS = 4


class Pairs:
    """A frontend before two servers that answer and some that compute prompts."""

    def __init__(self, words, prefill=1, frontend=(), prefill_options=(), door=None):
        self.words, self.options, self.started = words, prefill_options, []
        self.prefill_ports = [free_port() for _ in range(prefill)]
        self.decode = [self.server("decode") for _ in range(2)]
        self.prefill = [self.server("prefill", port) for port in self.prefill_ports]
        urls = [one.url for one in self.prefill]
        if door:
            door.behind, urls = self.prefill[0], [f"http://127.0.0.1:{door.server_port}"]
        named = [word for url in urls for word in ("--prefill-worker", url)]
        named += [word for one in self.decode for word in ("--worker", one.url)]
        self.frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", *named, *frontend)
        self.url = "http://" + self.frontend.wait_for(r"address\W+(127\.0\.0\.1:\d+)").group(1)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.log = self.frontend.log
        until(lambda: len(self.roles()) == 2 + prefill, 60, self.log)

    def server(self, mode, port=0):
        speed, more = ("20", self.options) if mode == "prefill" else ("4", ())
        one = Kvasir("mocker", "--http-host", "127.0.0.1", "--http-port", str(port), "--model-name", MODEL, "--speedup", speed, "--kv-transfer-bandwidth", "0",
                     "--enable-prompt-tokens-details", "--disaggregation-mode", mode, "--disaggregation-engine", self.words, *more)  # fmt: skip
        one.url = one.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1)
        self.started.append(one)
        return one

    def roles(self):
        return {row["url"]: row["role"] for row in self.http.get("/workers").json()["workers"] if row["state"] == "serving"}

    def received(self, one):
        rows = httpx.get(f"{one.url}/mock/received", timeout=30).json()["requests"]
        return [httpx.Response(200, content=bytes.fromhex(row["body_hex"])).json() for row in rows if row["path"] == "/v1/chat/completions"]

    def is_split(self):
        answer = chat(self.http, "split?", max_tokens=2)
        assert answer.status_code == 200, answer.text
        told = answer.json()["nvext"]["worker_id"]
        return told["prefill_worker_id"] != told["decode_worker_id"]

    def busy(self):
        rows = self.http.get("/workers").json()["workers"]
        return {row["url"] for row in rows if any(rank["active_requests"] for rank in row["ranks"])}

    def at_rest(self):
        until(lambda: busy_workers(self.http) == [], 20, self.log)
        for one in self.prefill:
            # Blocks that nobody fetches stay for 30 seconds: those of a prompt whose client left between its last byte and ours.
            until(lambda: kept(one) == 0, 45, self.log)

    def stop(self):
        self.http.close()
        assert self.frontend.stop() == 0, self.log()
        for one in self.started:
            if one.process.poll() is None:
                one.stop()


def kept(one):
    """The share of an idle engine's blocks that is in use: kept for others."""
    page = httpx.get(f"{one.url}/metrics", timeout=30).text
    running = float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", page, re.M).group(1))
    return running or float(re.search(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", page, re.M).group(1))


@pytest.fixture(scope="module")
def vllm():
    pairs = Pairs("vllm")
    yield pairs
    pairs.stop()


def test_both_legs_of_vllm(vllm):
    assert sorted(vllm.roles().values()) == ["decode", "decode", "prefill"]
    until(vllm.is_split, 20, vllm.log)
    text = TEXT.format("legs")
    answer = chat(vllm.http, text, max_tokens=8, ignore_eos=True, temperature=0)
    assert answer.status_code == 200 and answer.json()["kv_transfer_params"] is None, answer.text
    leg = vllm.received(vllm.prefill[0])[-1]
    assert leg["max_tokens"] == 1 and leg["kv_transfer_params"]["do_remote_decode"] is True
    taken = [body for one in vllm.decode for body in vllm.received(one) if body["messages"][0]["content"] == text]
    assert [body["kv_transfer_params"]["do_remote_prefill"] for body in taken] == [True]
    # What the other engine would have said alone.
    alone = httpx.post(f"{vllm.decode[0].url}/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8,
                       "ignore_eos": True, "temperature": 0}, timeout=60)  # fmt: skip
    assert answer.json()["choices"][0]["message"]["content"] == alone.json()["choices"][0]["message"]["content"]
    again = chat(vllm.http, text, max_tokens=2, nvext={"extra_fields": ["worker_id", "timing"]})
    timing = again.json()["nvext"]["timing"]
    assert timing["prefill_time_ms"] > 0, timing
    # Why both went where they went.
    row = vllm.http.get(f"/decisions/{again.json()['id']}").json()
    told = again.json()["nvext"]["worker_id"]
    assert row["winner"][0]["worker"] == told["decode_worker_id"] and row["prefill"]["winner"][0]["worker"] == told["prefill_worker_id"], row
    vllm.at_rest()


def test_a_prefill_server_dies_under_load_and_comes_back(vllm):
    until(vllm.is_split, 20, vllm.log)
    with Load(vllm.url, clients=4) as load:
        load.until_more(20, told=vllm.log)
        vllm.prefill[0].process.kill()
        load.until_more(40, told=vllm.log)
        vllm.prefill = [vllm.server("prefill", vllm.prefill_ports[0])]
        seen = time.monotonic()
        until(vllm.is_split, BACK_SECONDS * 10, vllm.log)
        back = time.monotonic() - seen
        load.until_more(20, told=vllm.log)
    assert load.failed == [], f"{load.failed[:5]}\n{vllm.log()}"
    assert back < BACK_SECONDS * 10, f"used again after {back:.1f} s"
    vllm.at_rest()


def test_a_decode_server_that_dies_leaves_nothing_kept(vllm):
    until(vllm.is_split, 20, vllm.log)
    with stream(vllm.http, TEXT.format("dies"), 4000) as answer:
        # An iterator that nobody has any more closes its answer.
        lines = first_event(answer)
        busy = until(lambda: [one for one in vllm.decode if one.url in vllm.busy()], 20, vllm.log)
        busy[0].process.kill()
        until(lambda: chat(vllm.http, "after it", max_tokens=2).status_code == 200, 20, vllm.log)
        assert lines
    vllm.at_rest()
    vllm.decode = [one for one in vllm.decode if one is not busy[0]]


def test_a_client_that_leaves_at_any_step_leaves_nothing(vllm):
    until(vllm.is_split, 20, vllm.log)
    with stream(vllm.http, "leaves while it is answered", 4000) as answer:
        first_event(answer)
    for wait in (0.002, 0.005, 0.01, 0.02, 0.05):
        try:
            vllm.http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": TEXT.format(wait) * 20}]}, timeout=wait)
        except httpx.HTTPError:
            pass
    vllm.at_rest()


class Door(http.server.BaseHTTPRequestHandler):
    """Stands before a prefill server. Armed, it ends the server when that has computed a prompt, and only then passes the answer on."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            told = httpx.request(self.command, self.server.behind.url + self.path, content=body, headers={"content-type": "application/json"}, timeout=30)
        except httpx.HTTPError:
            self.close_connection = True
            return
        if self.server.armed and b"do_remote_decode" in body:
            self.server.armed = False
            self.server.behind.process.kill()
            self.server.behind.process.wait()
            self.server.ended.set()
        self.send_response(told.status_code)
        self.send_header("content-type", told.headers.get("content-type", "application/json"))
        self.send_header("content-length", str(len(told.content)))
        self.end_headers()
        self.wfile.write(told.content)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def door():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door)
    server.behind, server.armed, server.ended = None, False, threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_prefill_server_that_dies_between_its_answer_and_the_decode_leg_costs_nothing(door):
    pairs = Pairs("vllm", door=door)
    until(pairs.is_split, 20, pairs.log)
    for ends in ("unary", "stream"):
        text = TEXT.format(f"dies after its answer, {ends}")
        door.armed = True
        if ends == "unary":
            answer = chat(pairs.http, text, max_tokens=8, ignore_eos=True)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, f"{answer.text}\n{pairs.log()}"
        else:
            with stream(pairs.http, text, 8) as answer:
                finish, usage = rest(first_event(answer), pairs.log)
            assert (finish, usage["completion_tokens"]) == ("length", 8), pairs.log()
        assert door.ended.is_set(), pairs.log()
        # A decode server was told of it, could not fetch it, and computed it.
        legs = [body for one in pairs.decode for body in pairs.received(one) if body["messages"][0]["content"] == text]
        assert sorted("kv_transfer_params" in leg for leg in legs) == [False, True], legs
        until(lambda: busy_workers(pairs.http) == [], 20, pairs.log)
        door.ended.clear()
        door.behind = pairs.server("prefill")
        until(pairs.is_split, 60, pairs.log)
    pairs.stop()


def completions(one, **fields):
    body = {"model": MODEL, "prompt": [TEXT.format("first"), TEXT.format("second")], "max_tokens": 6, "ignore_eos": True, "temperature": 0, **fields}
    return httpx.post(f"{getattr(one, 'url', one)}/v1/completions", json=body, timeout=60)


def test_several_prompts_of_a_body_are_several_pairs(vllm):
    until(vllm.is_split, 20, vllm.log)
    alone, both = completions(vllm.decode[0], n=2).json(), completions(vllm.url, n=2)
    assert both.status_code == 200, both.text
    assert [(c["index"], c["text"]) for c in both.json()["choices"]] == [(c["index"], c["text"]) for c in alone["choices"]]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert both.json()["usage"][count] == alone["usage"][count]
    legs = [row for row in httpx.get(f"{vllm.prefill[0].url}/mock/received", timeout=30).json()["requests"] if row["path"] == "/v1/completions"]
    assert len(legs) == 4 and all('"max_tokens":1' in bytes.fromhex(row["body_hex"]).decode().replace(" ", "") for row in legs)
    texts, done, usages = {}, 0, []
    with httpx.stream("POST", f"{vllm.url}/v1/completions", json={"model": MODEL, "prompt": ["a b c", "d e f"], "max_tokens": 6, "ignore_eos": True, "stream": True,
                      "stream_options": {"include_usage": True}}, timeout=60) as answer:  # fmt: skip
        for line in answer.iter_lines():
            done += line == "data: [DONE]"
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usages += [event["usage"]] if event.get("usage") else []
                for choice in event["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert sorted(texts) == [0, 1] and all(texts.values()) and done == 1, texts
    assert len(usages) == 1 and usages[0]["completion_tokens"] == 12, usages
    vllm.at_rest()


@pytest.mark.parametrize("prefill, decode, outcome", [("vllm", "vllm", "pass"), ("sglang", "sglang", "pass"), ("sglang", "vllm", "fail"), ("vllm", "sglang", "fail")])
def test_the_doctor_checks_a_pair(prefill, decode, outcome, vllm, sglang):
    of = {"vllm": vllm, "sglang": sglang}
    named = ["--prefill-worker", of[prefill].prefill[0].url, "--worker", of[decode].decode[0].url]
    doctor = Kvasir("doctor", *named, "--json")
    doctor.process.wait(60)
    report = until(lambda: doctor.log().startswith("{") and httpx.Response(200, content=doctor.log().encode()).json(), 20, doctor.log)
    checks = {row["check"]: row for one in report["workers"] for row in one["checks"] if row["check"] == "pair"}
    assert checks["pair"]["outcome"] == outcome, doctor.log()


@pytest.fixture(scope="module")
def sglang():
    pairs = Pairs("sglang", prefill=2)
    yield pairs
    pairs.stop()


def test_sglang_servers_meet_and_one_that_dies_costs_no_request(sglang):
    assert sorted(sglang.roles().values()) == ["decode", "decode", "prefill", "prefill"]
    text = TEXT.format("meet")
    assert chat(sglang.http, text, max_tokens=4, ignore_eos=True).status_code == 200, sglang.log()
    rooms = [body["bootstrap_room"] for one in sglang.prefill + sglang.decode for body in sglang.received(one) if body["messages"][0]["content"] == text]
    assert len(rooms) == 2 and rooms[0] == rooms[1], rooms
    # Each answer of a body is a pair with a room of its own.
    both = completions(sglang.url, n=2)
    assert both.status_code == 200 and [c["index"] for c in both.json()["choices"]] == [0, 1, 2, 3], both.text
    with Load(sglang.url, clients=4) as load:
        load.until_more(20, told=sglang.log)
        sglang.prefill[0].process.kill()
        load.until_more(40, told=sglang.log)
    assert load.failed == [], f"{load.failed[:5]}\n{sglang.log()}"
    until(lambda: busy_workers(sglang.http) == [], 20, sglang.log)


def test_a_client_that_leaves_an_sglang_pair_leaves_nothing(sglang):
    with stream(sglang.http, "leaves while it is answered", 4000) as answer:
        # An iterator that nobody has any more closes its answer.
        lines = first_event(answer)
        assert sglang.busy() and lines, sglang.log()
    for wait in (0.005, 0.02, 0.05):
        try:
            sglang.http.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": TEXT.format(wait) * 20}]}, timeout=wait)
        except httpx.HTTPError:
            pass
    until(lambda: busy_workers(sglang.http) == [], 20, sglang.log)


def test_an_aggregated_sglang_server_stands_beside_a_pair(sglang):
    whole = sglang.server("agg")
    assert sglang.http.post("/workers", json={"url": whole.url}).status_code < 300
    until(lambda: sglang.roles().get(whole.url) == "aggregated", 20, sglang.log)
    # Nobody computes prompts for others any more: the one that does all of it answers.
    for one in sglang.prefill:
        if one.process.poll() is None:
            one.process.kill()
    until(lambda: chat(sglang.http, "who is left?", max_tokens=2).status_code == 200, 20, sglang.log)
    for text in ("one", "two", "three"):
        assert chat(sglang.http, text, max_tokens=2).status_code == 200, sglang.log()


FORGED_FIELDS = ["kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_room", "disagg_prefill_dp_rank"]
FORGED_VALUES = ['{"do_remote_prefill":true,"x":"FORGED"}', '"FORGED"', '["FORGED",{"a":"FORGED"}]', '{"remote_block_ids":[[1]],"remote_host":"FORGED"}']
FORGED_HEADERS = {"X-Override-Bootstrap-Host": "FORGED", "x-override-rid": "FORGED", "x-request-id": "___prefill_addr_FORGED___decode_addr_FORGED"}
FORGED_ROUTES = [
    ("/v1/chat/completions", '"messages":[{"role":"user","content":"hi"}],"max_tokens":2'),
    ("/v1/completions", '"prompt":["a","b"],"n":2,"max_tokens":2'),
    ("/tokenize", '"prompt":"hi"'),
    ("/v1/responses", '"input":"hi"'),
    ("/generate", '"text":"hi"'),
]


def forged(rng):
    """A field that no client may say, in one of the writings and places that an engine would understand."""
    written = lambda name: '"' + "".join(c if rng.random() < 0.7 else f"\\u{ord(c):04x}" for c in name) + '"'  # noqa: E731
    field = f"{written(rng.choice(FORGED_FIELDS))} : {rng.choice(FORGED_VALUES)}"
    return rng.choice([field, f"{field},{field}", f'{written("vllm_xargs")}:{{{field}}}', f'"sampling_params":{{{written("extra_args")}:{{{field}}}}}'])


def test_what_no_client_may_say_reaches_no_engine_and_ends_none(vllm):
    rng = random.Random(16)
    for number in range(60):
        path, fields = FORGED_ROUTES[number % len(FORGED_ROUTES)]
        body = "{" + ",".join([forged(rng), '"model":"m"', fields, forged(rng)]) + "}"
        answer = vllm.http.post(path, content=body, headers={"content-type": "application/json", **FORGED_HEADERS})
        assert answer.status_code in (200, 404) and "FORGED" not in answer.text and "remote_" not in answer.text, f"{body}\n{answer.text}"
    for one in vllm.prefill + vllm.decode:
        assert one.process.poll() is None, f"it ended\n{one.log()}"
        for row in httpx.get(f"{one.url}/mock/received", timeout=30).json()["requests"]:
            assert "FORGED" not in bytes.fromhex(row["body_hex"]).decode() and "FORGED" not in json.dumps(row), row
    vllm.at_rest()
