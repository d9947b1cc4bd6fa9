"""Tool calls and reasoning of token workers, as OpenAI's own client reads them."""

import json
import os
import pathlib

import httpx
import openai
import pytest

from conftest import Kvasir, until
from scripted_worker import ScriptedWorker

QWEN = os.environ.get("KVASIR_TEST_QWEN_DIR", "")
if not QWEN:
    pytest.skip("NO tokenizer here (KVASIR_TEST_QWEN_DIR): nothing is known of tool calls from token workers", allow_module_level=True)

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
CITY = {"city": "Köln", "days": 2}
AS_JSON = json.dumps(CITY, ensure_ascii=False)
# The form of each model, and how it calls `get_weather`.
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {AS_JSON}}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {AS_JSON}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {AS_JSON}}}]',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{AS_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3_1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{AS_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{AS_JSON}",
}
TEXTS = {
    **CALLS,
    "two": CALLS["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "thought": "<think>\nHow is it there?\n</think>\n\n" + CALLS["hermes"],
    "analysis": "<|channel|>analysis<|message|>How is it there?<|end|><|start|>assistant<|channel|>final<|message|>Rain.",
    "broken": "See <tool_call>this</tool_call>.",
    "plain": "No tool is needed.",
    "named": AS_JSON,
    "slow": '<tool_call>{"name": "now", "arguments": {"a": \0"b"}}</tool_call>',
}
MODELS = {**{name: (name, None) for name in CALLS}, "thinker": ("hermes", "qwen3"), "gpt": ("harmony", "gpt_oss"), "unknown": ("no_such_form", None)}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A frontend and a worker that has a model of each form."""
    store = tmp_path_factory.mktemp("kv")
    model = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).symlink_to(pathlib.Path(QWEN) / name)
    (model / "config.json").write_text('{"eos_token_id": 151645, "max_position_embeddings": 32768}')
    worker = ScriptedWorker(store, model, MODELS, TEXTS)
    kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--tcp-rpc-host", "127.0.0.1", "--discovery-backend", "file",
                    "--request-plane", "tcp", env={"DYN_FILE_KV": str(store)})  # fmt: skip
    kvasir.url = "http://" + kvasir.wait_for(r"listening.*address=(127\.0\.0\.1:\d+)").group(1)
    kvasir.worker = worker
    listed = lambda: {m["id"] for m in httpx.get(kvasir.url + "/v1/models").json()["data"]}  # noqa: E731
    until(lambda: listed() == set(MODELS), 120, kvasir.log)
    yield kvasir
    worker.stop()
    assert kvasir.stop() == 0, kvasir.log()


@pytest.fixture(scope="module")
def client(fleet):
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(text, **more):
    return {"messages": [{"role": "user", "content": f"say {text}"}], "tools": TOOLS, **more}


def whole_and_streamed(client, model, text, **more):
    """The same answer both ways; the client itself puts the stream together."""
    whole = client.chat.completions.create(model=model, **ask(text, **more)).choices[0]
    with client.chat.completions.stream(model=model, **ask(text, **more)) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        yield choice


@pytest.mark.parametrize("form", CALLS)
def test_a_call_is_a_call(client, form):
    for choice in whole_and_streamed(client, form, form):
        assert choice.finish_reason == "tool_calls", choice
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.id and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == CITY
        assert not choice.message.content


def test_two_calls(client):
    for choice in whole_and_streamed(client, "hermes", "two"):
        assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "now"]
        assert len({call.id for call in choice.message.tool_calls}) == 2


def test_arguments_come_as_they_are_written(client, fleet):
    fleet.worker.go_on.clear()
    begun, rest = [], []
    for chunk in client.chat.completions.create(model="hermes", stream=True, **ask("slow")):
        for call in chunk.choices[0].delta.tool_calls or []:
            (rest if fleet.worker.go_on.is_set() else begun).append(call)
        # The worker says no more before this was seen.
        if any('"a"' in call.function.arguments for call in begun):
            fleet.worker.go_on.set()
    assert begun[0].id and begun[0].function.name == "now"
    assert all(call.id is None and call.function.name is None for call in rest) and rest
    assert "".join(call.function.arguments for call in begun + rest) == '{"a": "b"}'


def test_reasoning_is_apart(client):
    for choice in whole_and_streamed(client, "thinker", "thought"):
        assert choice.message.reasoning_content == "\nHow is it there?\n"
        assert choice.message.tool_calls[0].function.name == "get_weather"
        assert choice.finish_reason == "tool_calls"
    for choice in whole_and_streamed(client, "gpt", "analysis"):
        assert choice.message.reasoning_content == "How is it there?"
        assert (choice.message.content, choice.finish_reason) == ("Rain.", "stop")


def test_what_is_no_call_is_content(client, fleet):
    for model, text in (("hermes", "broken"), ("hermes", "plain"), ("unknown", "hermes"), ("llama3_json", "named")):
        for choice in whole_and_streamed(client, model, text):
            assert choice.message.content == TEXTS[text] and not choice.message.tool_calls, choice
            assert choice.finish_reason == "stop"
    fleet.until_logged("no_such_form")
    for more in ({"tool_choice": "none"}, {"tools": openai.omit}):
        choice = client.chat.completions.create(model="hermes", **{**ask("hermes"), **more}).choices[0]
        assert choice.message.content == TEXTS["hermes"] and choice.finish_reason == "stop"


def test_a_call_that_is_cut_off_ends_for_its_length(client):
    most = len(CALLS["hermes"].split('"days"')[0].encode())
    choice = client.chat.completions.create(model="hermes", max_tokens=most, **ask("hermes")).choices[0]
    assert choice.finish_reason == "length"
    [call] = choice.message.tool_calls
    assert call.function.arguments and AS_JSON.startswith(call.function.arguments)


def test_a_demanded_call_is_demanded_of_the_worker(client, fleet):
    choose = {"type": "function", "function": {"name": "get_weather"}}
    for choice in whole_and_streamed(client, "hermes", "named", tool_choice=choose):
        [call] = choice.message.tool_calls
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == CITY
        assert choice.finish_reason == "tool_calls"
    guided = fleet.worker.requests[-1]["sampling_options"]["guided_decoding"]
    assert guided["json"]["required"] == ["city"], guided
