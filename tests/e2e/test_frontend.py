"""`kvasir frontend` before unmodified engines, through the real `openai` client and `curl`.

Two mock servers that answer as vLLM does; beside them an engine that says what a test tells it, for answers that
mock servers do not give: recorded ones of a real vLLM, tool calls, log probabilities, bytes cut anywhere.
"""

import json
import os
import subprocess
import threading
import time

import httpx
import openai
import pytest

from conftest import until
from engines import Fleet, ScriptedEngine, frontend_before
from test_demo import promtool_complaints, promtool_expected

MODEL = "tiny"
CONTEXT = 4096
MESSAGES = [{"role": "user", "content": "When does the ferry leave, and is there one on Sundays too? " * 6}]
RECORDED = os.path.join(os.path.dirname(__file__), "..", "..", "testdata", "vllm-http", "cases.jsonl")
TOOLS = [{
    "type": "function",
    "function": {
        "name": "timetable",
        "description": "Departures of a day",
        "parameters": {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]},
    },
}]  # fmt: skip


@pytest.fixture(scope="module")
def fleet():
    fleet = Fleet(MODEL, mocker=["--max-model-len", str(CONTEXT), "--speedup", "10"])
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def client(fleet):
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def direct(fleet):
    """The same client before one engine, without us."""
    return openai.OpenAI(base_url=f"{fleet.engines[0]}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def http(fleet):
    with httpx.Client(base_url=fleet.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def scripted():
    """An engine that says what it is told, behind a frontend of its own; `scripted.frontend` is where."""
    engine = ScriptedEngine("scripted")
    frontend = frontend_before([engine.url], "--enable-anthropic-api")
    engine.frontend = frontend.url
    yield engine
    assert frontend.stop() == 0, frontend.log()
    engine.stop()


def chat(client, **more):
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **more})


def same(answer):
    """What of an answer does not change from one request to the next."""
    body = json.loads(answer.model_dump_json())
    for field in ("id", "created"):
        body.pop(field)
    (body.get("usage") or {}).pop("prompt_tokens_details", None)
    return body


# Answers


def test_a_chat_is_answered_as_the_engine_answers(client, direct):
    ours, theirs = chat(client, max_tokens=12), chat(direct, max_tokens=12)
    assert same(ours) == same(theirs)
    assert ours.choices[0].message.content and ours.usage.completion_tokens == 12
    assert chat(client, max_tokens=12).usage.prompt_tokens_details.cached_tokens > 0


def test_a_streamed_chat_has_the_engines_chunks(client, direct):
    ours = list(chat(client, max_tokens=12, stream=True))
    theirs = list(chat(direct, max_tokens=12, stream=True))
    # An engine says several tokens in one chunk when it is quick; what it says does not depend on that.
    for chunks in (ours, theirs):
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
        assert len(chunks) > 2 and len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks)
    said = [[chunk.choices[0].delta.content or "" for chunk in chunks] for chunks in (ours, theirs)]
    assert "".join(said[0]) == "".join(said[1]) != ""
    assert same(ours[0]) == same(theirs[0])


def test_usage_in_a_stream_comes_when_it_is_asked_for(client):
    whole = chat(client, max_tokens=12)
    chunks = list(chat(client, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content


def test_completions_of_text_tokens_and_several_prompts(client, direct):
    for prompt in ("The harbour", [1, 2, 3, 4, 5], ["one", "two"], [[1, 2], [3, 4]]):
        ask = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0}
        ours, theirs = client.completions.create(**ask), direct.completions.create(**ask)
        assert same(ours) == same(theirs), prompt
        streamed = list(client.completions.create(**ask, stream=True))
        for index, choice in enumerate(ours.choices):
            mine = [c.choices[0].text for c in streamed if c.choices and c.choices[0].index == index]
            assert "".join(mine) == choice.text, prompt


def test_choices_stops_and_limits(client):
    several = chat(client, n=3, max_tokens=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.usage.completion_tokens == 15
    text = chat(client).choices[0].message.content
    word = text.split()[4]
    stopped = chat(client, stop=[word, "never said"])
    assert stopped.choices[0].finish_reason == "stop" and word not in stopped.choices[0].message.content
    assert text.startswith(stopped.choices[0].message.content)
    assert chat(client, max_tokens=1).choices[0].finish_reason == "length"
    streamed = list(chat(client, n=2, max_tokens=4, stream=True))
    assert {chunk.choices[0].index for chunk in streamed if chunk.choices} == {0, 1}


def test_models(client, fleet):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# Tool calls and log probabilities, which mock servers do not invent


def test_tool_calls_pass_both_ways(scripted):
    client = openai.OpenAI(base_url=f"{scripted.frontend}/v1", api_key="none", max_retries=0)
    call = {"id": "call_1", "type": "function", "function": {"name": "timetable", "arguments": '{"day": "Sunday"}'}}
    answer = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "scripted",
        "choices": [{"index": 0, "finish_reason": "tool_calls",
                     "message": {"role": "assistant", "content": None, "tool_calls": [call]}}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
    }  # fmt: skip
    scripted.say(answer)
    got = chat(client, model="scripted", tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
    assert got.choices[0].message.tool_calls[0].function.arguments == '{"day": "Sunday"}'
    sent = json.loads(scripted.requests[-1][2])
    assert sent["tools"] == TOOLS and sent["tool_choice"] == "auto" and sent["parallel_tool_calls"] is False
    follow_up = [*MESSAGES, got.choices[0].message, {"role": "tool", "tool_call_id": "call_1", "content": "09:00"}]
    chat(client, model="scripted", messages=follow_up)
    assert json.loads(scripted.requests[-1][2])["messages"][1]["tool_calls"] == [call]


def test_log_probabilities_pass(scripted):
    client = openai.OpenAI(base_url=f"{scripted.frontend}/v1", api_key="none", max_retries=0)
    top = {"token": " né", "logprob": -0.25, "bytes": [32, 110, 195, 169]}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "scripted",
             "choices": [{"index": 0, "delta": {"content": " né"}, "finish_reason": None,
                          "logprobs": {"content": [{**top, "top_logprobs": [top]}]}}]}  # fmt: skip
    scripted.say(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(chunk).encode(), kind="text/event-stream", piece=7)
    chunks = list(chat(client, model="scripted", stream=True, logprobs=True, top_logprobs=1))
    got = chunks[0].choices[0].logprobs.content[0]
    assert (got.token, got.logprob, got.top_logprobs[0].bytes) == (" né", -0.25, top["bytes"])
    sent = json.loads(scripted.requests[-1][2])
    assert sent["logprobs"] is True and sent["top_logprobs"] == 1


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7, 64])
def test_text_is_whole_wherever_the_engine_cuts_it(scripted, piece):
    text = "né 日本語 🦭🏴‍☠️ \u2028 \\n \"quoted\" é"
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    events = b""
    for word in text:
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        events += b"data: %s\r\n\r\n" % json.dumps({**chunk, "choices": [choice]}, ensure_ascii=False).encode()
    events += b": comment\n\ndata: [DONE]\n\n"
    scripted.say(events, kind="text/event-stream; charset=utf-8", piece=piece)
    client = openai.OpenAI(base_url=f"{scripted.frontend}/v1", api_key="none", max_retries=0)
    chunks = list(chat(client, model="scripted", stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == text
    raw = httpx.post(f"{scripted.frontend}/v1/chat/completions",
                     json={"model": "scripted", "messages": MESSAGES, "stream": True})  # fmt: skip
    assert raw.content == events and raw.headers["content-type"] == "text/event-stream; charset=utf-8"


def recorded(*prefixes):
    with open(RECORDED, encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    return [case for case in cases if case["name"].startswith(prefixes) and case["body"]]


@pytest.mark.parametrize("case", recorded("chat", "completions_t", "error_bad_t", "error_max"), ids=lambda c: c["name"])
def test_recorded_answers_of_vllm_pass_unchanged(scripted, case):
    path = "/v1/completions" if case["name"].startswith("completions") else "/v1/chat/completions"
    asked = case["body"].replace('"tiny-qwen"', '"scripted"')
    stream = json.loads(asked).get("stream") is True
    answer = case["answer"].encode()
    scripted.say(answer, case["status"], "text/event-stream" if stream else "application/json", piece=33)
    got = httpx.post(f"{scripted.frontend}{path}", content=asked, headers={"content-type": "application/json"})
    assert (got.status_code, got.content) == (case["status"], answer)


# What engines receive

ODD = b"""{ "model" : "tiny",\t"max_tokens":3,  "temperature": 0.70e-0, "seed": 18446744073709551615,
  "x_unknown": {"nested":[1, 2.50, {"deep": null}]},"messages":[{"content":"caf\\u00e9 \\ud83e\\uddad \xc3\xa9","role":"user"}],
  "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}], "stop" : [ "zzz" ],
  "logit_bias":{"50256":-100}, "n":1,"user":"u" }\n"""


def post(http, fleet, path, body, **headers):
    """Sends bytes as they are; the answer, and the one request that an engine got."""
    fleet.forget()
    answer = http.post(path, content=body, headers={"content-type": "application/json", **headers})
    requests = fleet.received(path)
    assert len(requests) == 1, requests
    return answer, requests[0]


def test_bodies_reach_the_engine_byte_for_byte(http, fleet):
    answer, request = post(http, fleet, "/v1/chat/completions", ODD)
    assert answer.status_code == 200, answer.text
    assert request["body"] == ODD and request["path"] == "/v1/chat/completions"
    asks_usage = ODD.replace(b'"n":1', b'"n":1,"stream":true,"stream_options":{"include_usage":true}')
    _, request = post(http, fleet, "/v1/chat/completions", asks_usage)
    assert request["body"] == asks_usage
    completion = b'{"model":"tiny","prompt":[1,2,  3],"max_tokens":2,"echo":false}'
    _, request = post(http, fleet, "/v1/completions?verbose=1", completion)
    assert request["body"] == completion and request["path"] == "/v1/completions?verbose=1"


def test_only_the_named_fields_change(http, fleet):
    """The exceptions: extensions go, usage is asked for, salt and priority become the engine's fields."""
    streamed = ODD.replace(b'"n":1', b'"n":1,"stream":true')
    answer, request = post(http, fleet, "/v1/chat/completions", streamed)
    assert "usage\":{" not in answer.text
    added = {**json.loads(streamed), "stream_options": {"include_usage": True}}
    assert json.loads(request["body"]) == added
    inner = streamed.strip()[1:-1].strip()
    assert inner in request["body"], "bytes that the client sent were written anew"
    nvext = b'"nvext":{"agent_hints":{"priority":7},"cache_salt":"s","extra_fields":["worker_id"]},'
    extended = ODD.replace(b'"n":1', nvext + b'"n":1')
    answer, request = post(http, fleet, "/v1/chat/completions", extended)
    assert answer.json()["nvext"]["worker_id"]["decode_worker_id"] > 0
    assert json.loads(request["body"]) == {**json.loads(ODD), "priority": -7, "cache_salt": "s"}


def test_heads_reach_the_engine(http, fleet):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"authorization": "Bearer k", "traceparent": trace, "tracestate": "a=b", "x-request-id": "mine",
               "x-custom": "1", "connection": "x-secret", "x-secret": "2", "te": "trailers"}  # fmt: skip
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 1}).encode()
    answer, request = post(http, fleet, "/v1/chat/completions", body, **headers)
    got = dict(request["headers"])
    assert got["authorization"] == "Bearer k" and got["tracestate"] == "a=b" and got["x-custom"] == "1"
    assert got["traceparent"].split("-")[1] == trace.split("-")[1]
    assert got["x-request-id"] == "mine" and got["via"].startswith("1.1 kvasir-")
    assert not {"x-secret", "te", "keep-alive", "transfer-encoding"} & set(got)
    assert answer.headers["x-request-id"] == "mine" and "mine" in answer.json()["id"]


def test_long_bodies_pass_and_too_long_ones_are_refused(http, fleet):
    long = json.dumps({"model": MODEL, "prompt": "long words " * 700_000, "max_tokens": 1}).encode()
    assert len(long) > 7_000_000
    answer, request = post(http, fleet, "/v1/completions", long)
    assert answer.status_code == 400 and "maximum context length" in answer.json()["error"]["message"]
    assert request["body"] == long
    fleet.forget()
    too_long = http.post("/v1/completions", content=b"[" * (46 << 20), headers={"content-type": "application/json"})
    assert too_long.status_code == 413 and "45" in too_long.json()["message"] and not fleet.received()


# Routes that only engines know


def test_other_routes_pass_unread(http, fleet, direct):
    body = b'{"model":"tiny", "prompt":"The harbour",  "add_special_tokens":true}'
    answer, request = post(http, fleet, "/tokenize", body)
    assert request["body"] == body and answer.json() == httpx.post(f"{fleet.engines[0]}/tokenize", content=body,
        headers={"content-type": "application/json"}).json()  # fmt: skip
    tokens = answer.json()["tokens"]
    back, _ = post(http, fleet, "/detokenize", json.dumps({"model": MODEL, "tokens": tokens}).encode())
    assert back.json()["prompt"] == "The harbour"
    unknown, request = post(http, fleet, "/v1/embeddings", b'{"model":"tiny","input":"x"}')
    assert unknown.status_code == 404 and unknown.json() == {"detail": "Not Found"}
    assert request["path"] == "/v1/embeddings"


def test_embeddings_and_responses_pass(scripted):
    client = openai.OpenAI(base_url=f"{scripted.frontend}/v1", api_key="none", max_retries=0)
    scripted.say({"object": "list", "model": "scripted", "usage": {"prompt_tokens": 2, "total_tokens": 2},
                  "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}]})  # fmt: skip
    got = client.embeddings.create(model="scripted", input=["é"], encoding_format="float")
    assert got.data[0].embedding == [0.5, -0.25] and scripted.requests[-1][0] == "/v1/embeddings"
    for case in recorded("responses", "messages_anthropic"):
        path = "/v1/responses" if case["name"] == "responses" else "/v1/messages"
        scripted.say(case["answer"].encode(), piece=11)
        body = case["body"].replace('"tiny-qwen"', '"scripted"')
        got = httpx.post(scripted.frontend + path, content=body, headers={"content-type": "application/json"})
        assert got.content == case["answer"].encode() and scripted.requests[-1][2] == body.encode()


# Errors


def test_errors_are_the_engines_or_say_what_is_wrong(client, direct, http, fleet):
    def refused(ask, **more):
        with pytest.raises(openai.APIStatusError) as error:
            chat(ask, **more)
        return error.value.status_code, error.value.response.json()

    for bad in ({"max_tokens": -1}, {"temperature": -1}, {"messages": []}, {"max_tokens": 10 * CONTEXT}):
        assert refused(client, **bad) == refused(direct, **bad), bad
    too_long = [{"role": "user", "content": "word " * 2 * CONTEXT}]
    status, body = refused(client, messages=too_long)
    assert (status, body) == refused(direct, messages=too_long) and status == 400
    assert "maximum context length" in body["error"]["message"]
    status, body = refused(client, model="other")
    assert status == 404 and "not found" in body["message"].lower()
    json_type = {"content-type": "application/json"}
    for broken in (b"", b"{", b"[]", b'{"model": "tiny", "messages": [}', b"\xff\xfe", b'{"model":"tiny"} {}'):
        answer = http.post("/v1/chat/completions", content=broken, headers=json_type)
        assert answer.status_code == 400 and answer.json()["message"], broken
    assert http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/csv"}).status_code == 415
    assert http.get("/v1/chat/completions").status_code == 405
    assert http.post("/v1/nothing", json={}).json()["message"] == "Route not found: POST /v1/nothing"
    streamed = http.post("/v1/chat/completions", json={"model": MODEL, "messages": [], "stream": True})
    assert streamed.status_code == 400 and "error" in streamed.json()


# Cancellation


def idle(fleet, http):
    """Whether neither the router nor an engine has anything under way."""
    ranks = [rank for worker in http.get("/workers").json()["workers"] for rank in worker["ranks"]]
    booked = sum(rank["active_requests"] + rank["active_decode_blocks"] + rank["active_prefill_tokens"] for rank in ranks)
    status = [httpx.get(f"{engine}/mock/status").json()["ranks"] for engine in fleet.engines]
    return booked == 0 and all(rank["running"] + rank["waiting"] == 0 for ranks in status for rank in ranks)


def cancelled(fleet):
    status = [httpx.get(f"{engine}/mock/status").json()["ranks"] for engine in fleet.engines]
    return sum(rank["cancelled"] for ranks in status for rank in ranks)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_work_within_a_second(client, http, fleet, stream):
    before = cancelled(fleet)
    long = {"max_tokens": 3500, "extra_body": {"ignore_eos": True}}
    if stream:
        answer = chat(client, stream=True, **long)
        next(iter(answer))
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            chat(client.with_options(timeout=0.3), **long)
    end = time.monotonic() + 1
    while time.monotonic() < end and not (cancelled(fleet) == before + 1 and idle(fleet, http)):
        threading.Event().wait(0.02)
    assert cancelled(fleet) == before + 1 and idle(fleet, http)


# curl


def curl(*args, stdin=None):
    return subprocess.run(["curl", "-sS", "--max-time", "30", *args], input=stdin, capture_output=True, timeout=60)


def test_curl_streams_uploads_and_reads_heads(fleet):
    chat_url, kind = f"{fleet.url}/v1/chat/completions", ["-H", "content-type: application/json"]
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "stream": True})
    told = curl("-N", "-i", *kind, "-d", body, chat_url)
    head, _, events = told.stdout.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200") and "text/event-stream" in head and "x-request-id: " in head
    assert events.endswith("data: [DONE]\n\n") and events.count("data: ") > 2
    chunked = curl(*kind, "-H", "transfer-encoding: chunked", "--data-binary", "@-", chat_url, stdin=body.encode())
    assert chunked.stdout.endswith(b"data: [DONE]\n\n")
    fleet.forget()
    expects = body.replace('"max_tokens"', f'"x":"{"y" * 2_000_000}","max_tokens"').encode()
    waited = curl(*kind, "-H", "expect: 100-continue", "--data-binary", "@-", chat_url, stdin=expects)
    assert waited.stdout.endswith(b"data: [DONE]\n\n"), waited
    assert "expect" not in dict(fleet.received()[0]["headers"])
    assert curl("-I", f"{fleet.url}/health").stdout.startswith(b"HTTP/1.1 200")
    two = curl("-d", "{", *kind, chat_url, "--next", "-sS", f"{fleet.url}/live")
    assert two.stdout.endswith(b'{"status":"live","message":"Service is live"}')


# What is seen from outside


def test_promtool_reads_the_metrics_of_a_frontend(client, http):
    chat(client, max_tokens=3)
    list(chat(client, max_tokens=3, stream=True))
    with pytest.raises(openai.BadRequestError):
        chat(client, max_tokens=-1)

    def lines_of(page, name):
        return [line for line in page.splitlines() if line.startswith(f"dynamo_frontend_{name}_total{{")]

    def settled():
        """The page, once every request that was started is done: a client has its last byte a moment before."""
        page = http.get("/metrics").text
        started, done = (sum(float(line.split()[-1]) for line in lines_of(page, name)) for name in ("requests_started", "requests"))
        return page if started == done else None

    page = until(settled, told=lambda: http.get("/metrics").text)
    try:
        assert promtool_complaints(page) == promtool_expected(page)
    except FileNotFoundError:
        pytest.skip("NO promtool here: the page of metrics is NOT checked")
    done = lines_of(page, "requests")
    labels = ('endpoint="chat_completions"', f'model="{MODEL}"')
    assert any('status="success"' in line and all(label in line for label in labels) for line in done)
    assert any('error_type="validation"' in line and all(label in line for label in labels) for line in done)


def test_one_line_a_request_in_the_log(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sesame-hush\n")
    fleet = Fleet(MODEL, frontend=["--log-format", "json", "--http-api-key-file", str(keys)], token="sesame-hush")
    try:
        client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="sesame-hush", max_retries=0)
        first = chat(client, max_tokens=4)
        again = chat(client, max_tokens=4, extra_headers={"x-request-id": "mine"})
        list(chat(client, max_tokens=4, stream=True))
        with pytest.raises(openai.BadRequestError):
            chat(client, max_tokens=-1)
    finally:
        fleet.stop()
    lines = [json.loads(line) for line in fleet.frontend.lines if line.startswith("{")]
    assert len(lines) == len(fleet.frontend.lines), "a line that is no JSON"
    done = [line for line in lines if line["message"] in ("request done", "request failed")]
    assert len(done) == 4 and len({line["request"] for line in done}) == 4
    assert [line for line in lines if "request" in line] == done, "more than one line about a request"
    one, two, streamed, failed = done
    assert one["request"] in first.id and two["client_request"] == "mine" and "client_request" not in one
    assert {line["worker"] for line in (one, two, streamed)} == {one["worker"]} and one["rank"] == 0
    assert (one["model"], one["endpoint"], one["status"], one["output"]) == (MODEL, "chat_completions", 200, 4)
    assert one["prompt"] == first.usage.prompt_tokens and one["cached"] == 0 and one["predicted"] == 0
    assert one["overlap_blocks"] == 0 and two["overlap_blocks"] > 0
    assert two["cached"] == again.usage.prompt_tokens_details.cached_tokens > 0 and two["predicted"] > 0
    assert 0 <= streamed["ttft_ms"] <= streamed["total_ms"] and streamed["output"] == 4
    assert "ttft_ms" not in one, "an answer in one piece does not tell when its first token was there"
    assert (failed["status"], failed["level"]) == (400, "INFO") and "output" not in failed
    text = fleet.frontend.log()
    assert "sesame-hush" not in text and "ferry" not in text, "a secret or a prompt in the log"


def test_each_rank_of_an_engine_is_a_candidate():
    """The mock engine refuses a rank that it does not have, and notes what it was told."""
    fleet = Fleet(MODEL, mocker=["--data-parallel-size", "2"])
    try:
        client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
        for number in range(12):
            chat(client, messages=[{"role": "user", "content": f"{number} " * 200}], max_tokens=2)
        told = [dict(request["headers"])["x-data-parallel-rank"] for request in fleet.received()]
        assert len(told) == 12 and set(told) == {"0", "1"}
        fleet.forget()
        for rank in ("0", "1", "0"):
            chat(client, max_tokens=2, extra_headers={"x-data-parallel-rank": rank})
        told = [dict(request["headers"])["x-data-parallel-rank"] for request in fleet.received()]
        assert sorted(told) == ["0", "0", "1"]
        with pytest.raises(openai.InternalServerError) as refused:
            chat(client, max_tokens=2, extra_body={"nvext": {"dp_rank": 2}})
        assert refused.value.status_code == 503
    finally:
        fleet.stop()


def test_where_a_request_would_go_is_asked_of_nobody(fleet):
    fleet.forget()
    body = {"model": MODEL, "prompt": [5, 6, 7], "nvext": {"annotations": ["query_instance_id:"]}}
    told = httpx.post(f"{fleet.url}/v1/completions", json=body).json()["nvext"]
    workers = {worker["worker_id"] for worker in httpx.get(f"{fleet.url}/workers").json()["workers"]}
    assert told["token_ids"] == [5, 6, 7] and told["worker_id"]["decode_worker_id"] in workers
    assert fleet.received() == []


def test_the_same_seed_chooses_the_same_workers(fleet):
    """Engines join in the order in which they answer, which may be another one in every run."""
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "nvext": {"extra_fields": ["worker_id"]}}
    for mode in ["random", "kv"]:
        runs = []
        for engines in [fleet.engines, fleet.engines[::-1]]:
            frontend = frontend_before(engines, "--router-mode", mode, "--no-router-kv-events", "--seed", "7")
            answers = [httpx.post(f"{frontend.url}/v1/chat/completions", json=ask, timeout=30).json() for _ in range(16)]
            runs.append([answer["nvext"]["worker_id"] for answer in answers])
            assert frontend.stop() == 0, frontend.log()
        assert runs[0] == runs[1], mode


def test_cpu_workers_get_their_share_by_the_ratio(fleet):
    """An idle fleet uses its GPU; whether the second of two requests goes to the CPU is the ratio's to say."""
    ask = {"model": MODEL, "messages": MESSAGES, "nvext": {"extra_fields": ["worker_id"]}}
    cpu, gpu = fleet.engines
    options = ["--router-mode", "device-aware-weighted", "--encoder-cuda-to-cpu-ratio"]

    def where(answer):
        return answer["nvext"]["worker_id"]

    def beside_a_stream(url):
        """Where a request goes while a stream runs; none if the stream ended meanwhile."""
        long = {**ask, "stream": True, "max_tokens": 3000, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=30) as stream:
            chunks = stream.iter_raw()
            next(chunks)
            second = where(httpx.post(f"{url}/v1/chat/completions", json={**ask, "max_tokens": 1}, timeout=30).json())
            rows = httpx.get(f"{url}/workers", timeout=30).json()["workers"]
        return second if any(rank["active_requests"] for row in rows for rank in row["ranks"]) else None

    for ratio, same in [("1", False), ("8", True)]:
        frontend = frontend_before([f"{cpu},device=cpu", gpu], *options, ratio)
        url = f"{frontend.url}/v1/chat/completions"
        idle = {str(where(httpx.post(url, json={**ask, "max_tokens": 1}, timeout=30).json())) for _ in range(6)}
        assert len(idle) == 1, "the GPU"
        second = until(lambda: beside_a_stream(frontend.url), seconds=60)
        assert ({str(second)} == idle) == same, ratio
        assert frontend.stop() == 0, frontend.log()
    bad = subprocess.run([os.environ["KVASIR_BIN"], "frontend", "--worker", f"{cpu},device=abacus"], capture_output=True, text=True, timeout=30)
    assert bad.returncode == 2 and "cpu or gpu" in bad.stderr + bad.stdout
