"""What clients of unmodified engines are told beside their answers: `nvext` and annotations, through the real client."""

import json
import os

import httpx
import openai
import pytest

from engines import Fleet, ScriptedEngine, frontend_before

MODEL = "tiny"
FOLDER = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../crates/text/src/builtin"))
MESSAGES = [{"role": "user", "content": "When does the ferry leave?"}]


@pytest.fixture(scope="module")
def fleet():
    fleet = Fleet(MODEL, frontend=["--model-path", f"{MODEL}={FOLDER}"])
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def client(fleet):
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_the_tokens_of_an_answer(fleet, client):
    wish = {"nvext": {"extra_fields": ["completion_token_ids", "worker_id"]}}
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, extra_body=wish)
    ids = whole.nvext["completion_token_ids"]
    assert len(ids) == 5 and whole.choices[0].token_ids is None and whole.prompt_token_ids is None
    text = httpx.post(f"{fleet.url}/detokenize", json={"model": MODEL, "tokens": ids}).json()["prompt"]
    assert text == whole.choices[0].message.content
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, stream=True, extra_body=wish))
    told = [chunk.nvext.get("completion_token_ids", []) for chunk in chunks]
    assert sum(told, []) == ids, "the same question, the same answer"
    assert all(getattr(chunk.choices[0], "token_ids", None) is None for chunk in chunks if chunk.choices)
    assert not any(chunk.usage for chunk in chunks)
    # What the engine was asked, and what it is asked by a client without the wish.
    asked = [json.loads(request["body"]) for request in fleet.received() if "chat" in request["path"]]
    assert len(asked) == 2
    assert all(body.pop("return_token_ids") is True and "nvext" not in body for body in asked)
    fleet.forget()
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5)
    assert not hasattr(plain, "nvext")
    assert "return_token_ids" not in json.loads(fleet.received()[0]["body"])
    own = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, extra_body={**wish, "return_token_ids": True})
    assert own.choices[0].token_ids == own.nvext["completion_token_ids"] == ids and own.prompt_token_ids


def test_annotations_before_and_after_a_stream(fleet):
    names = ["request_id", "token_ids", "formatted_prompt", "llm_metrics"]
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": True, "nvext": {"annotations": names}}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body)
    events = [event.split("\n") for event in answer.text.removesuffix("\n\n").split("\n\n")]
    notes = {event[0].removeprefix("event: "): json.loads(event[1][2:]) for event in events if event[0].startswith("event: ")}
    assert list(notes) == names
    assert notes["request_id"] == answer.headers["x-request-id"]
    ids = json.loads(notes["token_ids"])
    asked = {"model": MODEL, "messages": MESSAGES}
    assert ids == httpx.post(f"{fleet.engines[0]}/tokenize", json=asked).json()["tokens"]
    prompt = httpx.post(f"{fleet.engines[0]}/detokenize", json={"model": MODEL, "tokens": ids}).json()["prompt"]
    assert notes["formatted_prompt"] == prompt and MESSAGES[0]["content"] in prompt
    metrics = json.loads(notes["llm_metrics"])
    assert (metrics["input_tokens"], metrics["output_tokens"]) == (len(ids), 4)
    assert events[-1] == ["data: [DONE]"] and events[-2][0] == "event: llm_metrics"
    data = [json.loads(event[0][6:]) for event in events if event[0].startswith("data: {")]
    assert all("nvext" not in chunk for chunk in data)


def test_timing_says_how_many_waited(client):
    wish = {"nvext": {"extra_fields": ["timing"]}}
    *_, last = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True, extra_body=wish)
    timing = last.nvext["timing"]
    assert timing["router_queue_depth"] == 0 and 0 < timing["ttft_ms"] <= timing["total_time_ms"]


def test_a_mistake_is_named_where_it_is(fleet):
    body = b'{"model":"tiny",\n "messages":[],\n "nvext":{"dp_rank":-1}}'
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "nvext.dp_rank" in answer.text and "line 3 column 22" in answer.text, answer.text


def test_routes_are_where_the_environment_puts_them():
    engine = ScriptedEngine("scripted")
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
    env = {
        "DYN_HTTP_SVC_EMB_PATH": "/emb", "DYN_HTTP_SVC_RESPONSES_PATH": "/answers", "DYN_HTTP_SVC_ANTHROPIC_PATH": "/anthropic",
        "DYN_ENABLE_ANTHROPIC_API": "true", "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "5000",
    }  # fmt: skip
    frontend = frontend_before([engine.url], env=env)
    try:
        body = {"model": "scripted", "input": "x"}
        moved = {"/emb": "/v1/embeddings", "/answers": "/v1/responses", "/anthropic": "/v1/messages",
                 "/anthropic/count_tokens": "/v1/messages/count_tokens"}  # fmt: skip
        for ours, theirs in moved.items():
            assert httpx.post(frontend.url + ours, json=body).status_code == 200
            assert engine.requests[-1][0] == theirs
            gone = httpx.post(frontend.url + theirs, json=body)
            assert gone.json() == {"message": f"Route not found: POST {theirs}", "type": "Not Found", "code": 404}
        paths = httpx.get(f"{frontend.url}/openapi.json").json()["paths"]
        assert set(moved) <= set(paths) and "/v1/messages" not in paths
        # Nobody serves it, in Anthropic's words.
        nobody = httpx.post(f"{frontend.url}/anthropic", json={"model": "other"}).json()
        assert nobody == {"type": "error", "error": {"type": "not_found_error", "message": "Model not found"}}
        # An error in the first event sets the status, and the client raises.
        engine.say(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(error).encode(), kind="text/event-stream", piece=5)
        client = openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        assert refused.value.response.json() == error
    finally:
        assert frontend.stop() == 0, frontend.log()
        engine.stop()


def test_the_log_is_text_with_one_line_a_request():
    fleet = Fleet(MODEL)
    try:
        client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="hush-sesame", max_retries=0)
        for _ in range(2):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, extra_headers={"x-request-id": "mine"})
    finally:
        fleet.stop()
    lines = [line for line in fleet.frontend.lines if "request=" in line]
    assert len(lines) == 2, lines
    for line in lines:
        for part in ["INFO", "request done", 'client_request="mine"', 'endpoint="chat_completions"', f'model="{MODEL}"', "worker=", "rank=0",
                     "status=200", "prompt=", "overlap_blocks=", "predicted=", "cached=", "output=2", "total_ms="]:  # fmt: skip
            assert part in line, (part, line)
    assert "hush-sesame" not in fleet.frontend.log() and "ferry" not in fleet.frontend.log()
