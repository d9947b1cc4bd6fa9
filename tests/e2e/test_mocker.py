"""`kvasir mocker` through the real `openai` client: as a vLLM server, and as one that fails on command."""

import json
import re
import time

import httpx
import openai
import pytest

from conftest import Kvasir, until
from planes_rig import BUILTIN, Planes, streams, until_serving
from planes_rig import chat as ask

MODEL = "mock-8b"
MESSAGES = [{"role": "user", "content": "When does the ferry leave, and is there one on Sundays too? " * 8}]


@pytest.fixture(scope="module")
def mocker():
    kvasir = Kvasir(
        "mocker", "--http-host", "127.0.0.1", "--http-port", "0", "--served-model-name", MODEL,
        "--engine", "h200-llama-8b", "--block-size", "16", "--num-blocks", "4096", "--speedup", "20", "--workers", "2",
    )  # fmt: skip
    kvasir.urls = [kvasir.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for _ in range(2)]
    yield kvasir
    assert kvasir.stop() == 0, kvasir.log()


@pytest.fixture
def client(mocker):
    return openai.OpenAI(base_url=f"{mocker.urls[0]}/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture
def control(mocker):
    """Sets faults, and takes them back whatever happens."""
    with httpx.Client(base_url=mocker.urls[0], timeout=20) as http:
        yield lambda fault: http.post("/mock/faults", json={"fault": fault}).raise_for_status()
        http.delete("/mock/faults").raise_for_status()


def chat(client, **more):
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **more)


def test_a_chat_and_what_was_cached(client):
    first, second = chat(client, max_tokens=12), chat(client, max_tokens=12)
    assert first.choices[0].message.content == second.choices[0].message.content != ""
    assert first.choices[0].finish_reason == "length" and first.usage.completion_tokens == 12
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens == (second.usage.prompt_tokens - 1) // 16 * 16 > 0


def test_a_stream_with_usage(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_completions_batches_and_models(client):
    answer = client.completions.create(model=MODEL, prompt=["Once upon", "There was"], max_tokens=5, n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert all(c.text and c.finish_reason == "length" for c in answer.choices)
    model = client.models.list().data[0]
    assert model.id == MODEL and model.max_model_len > 1000


def test_workers_have_caches_of_their_own(mocker):
    prompt = {"model": MODEL, "prompt": "a prompt that only the first worker has seen " * 9, "max_tokens": 1}
    cached = lambda url: httpx.post(f"{url}/v1/completions", json=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached(mocker.urls[0]) == 0
    assert cached(mocker.urls[1]) == 0
    assert cached(mocker.urls[0]) > 0


def test_errors_are_vllms(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="another", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
        chat(client, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="max_tokens=99999999 cannot be greater"):
        chat(client, max_tokens=99999999)


@pytest.mark.parametrize("status, error", [
    (429, openai.RateLimitError), (500, openai.InternalServerError), (503, openai.InternalServerError),
])  # fmt: skip
def test_a_wrong_status(client, control, status, error):
    control(f"status={status}:count=1")
    with pytest.raises(error):
        chat(client)
    assert chat(client, max_tokens=2).choices


def test_refusal_and_silence(client, control):
    control("refuse:count=1")
    with pytest.raises(openai.APIConnectionError):
        chat(client)
    control("stall:count=1")
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5))


@pytest.mark.parametrize("fault", ["die=3", "cut=3"])
def test_death_in_mid_stream(client, control, fault):
    control(fault)
    for _ in range(5):
        seen = []
        with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
            for chunk in chat(client, stream=True, max_tokens=40):
                seen.append(chunk.choices[0].delta.content)
        assert len(seen) <= 4
        if seen:  # a cut can overtake what was written just before it
            return
    raise AssertionError("nothing was ever said before the cut")


def test_slowness(client, control):
    control("slow=40")
    began = time.monotonic()
    chunks = list(chat(client, stream=True, max_tokens=12))
    assert time.monotonic() - began >= 0.04 * len(chunks)


def test_a_restart_forgets(client, mocker):
    chat(client, max_tokens=1)
    assert chat(client, max_tokens=1).usage.prompt_tokens_details.cached_tokens > 0
    httpx.post(f"{mocker.urls[0]}/mock/restart").raise_for_status()
    assert chat(client, max_tokens=1).usage.prompt_tokens_details.cached_tokens == 0


def test_a_worker_of_a_fleet_refuses_what_is_beyond_its_limit_and_names_its_parsers(tmp_path):
    planes = Planes("file+tcp+zmq", tmp_path)
    limit = ["--engine-request-limit", "1", "--dynamo-request-queue-limit", "2"]
    worker = planes.mocker(BUILTIN, *limit, "--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3")
    frontend = planes.frontend("--no-overload-protection")
    until_serving(frontend, worker.ids)
    (card,) = [json.loads(path.read_text())["card_json"] for path in (tmp_path / "kv" / "v1" / "mdc").iterdir()]
    assert [card["runtime_config"][name] for name in ("tool_call_parser", "reasoning_parser")] == ["hermes", "qwen3"]
    with streams(frontend.http, 3):
        refused = ask(frontend.http)
        assert refused.status_code == 503, refused.text
    until(lambda: ask(frontend.http).status_code == 200, told=frontend.log)
    assert frontend.stop() == 0, frontend.log()
    assert worker.stop(60) == 0, worker.log()


def test_frontends_get_the_files_of_a_model_from_its_worker(tmp_path):
    planes = Planes("file+tcp+zmq", tmp_path)
    worker = planes.mocker(BUILTIN, "--system-port", "0")
    (card,) = [json.loads(path.read_text())["card_json"] for path in (tmp_path / "kv" / "v1" / "mdc").iterdir()]
    url = card["tokenizer"]["hf_tokenizer_json"]["path"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1/metadata/dynamo/backend/generate/m/_base/tokenizer\.json", url), url
    assert httpx.get(url).content == (BUILTIN / "tokenizer.json").read_bytes()
    other = url.replace("tokenizer.json", "model.safetensors")
    assert httpx.get(other).status_code == 404
    frontend = planes.frontend()
    until_serving(frontend, worker.ids)
    assert ask(frontend.http).status_code == 200
    assert frontend.stop() == 0, frontend.log()
    assert worker.stop(60) == 0, worker.log()
