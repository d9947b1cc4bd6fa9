"""Chat templates and tokenizers that mean harm: they come from an engine's folder, so they are input."""

import json
import os
import pathlib
import shutil
import time

import httpx
import pytest

from conftest import Kvasir, until
from engines import ScriptedEngine, frontend_before

BUILTIN = pathlib.Path(__file__).parents[3] / "crates/text/src/builtin"
ANSWER = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
ASK = {"model": "m", "messages": [{"role": "user", "content": "hello " + "a" * 40}]}


def folder(tmp_path, template=None, pattern=None):
    """The folder of the built-in tokenizer with another template or pattern."""
    made = tmp_path / "model"
    made.mkdir()
    for file in BUILTIN.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, made / file.name)
    if template is not None:
        (made / "chat_template.jinja").write_text(template)
    if pattern is not None:
        tokenizer = json.loads((made / "tokenizer.json").read_text())
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
        (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


def announcing(root):
    """An engine that names this folder as its model's."""
    models = {"object": "list", "data": [{"id": "m", "object": "model", "root": str(root), "max_model_len": 4096}]}
    return ScriptedEngine("m", pages={"/v1/models": json.dumps(models)})


def served(kvasir, engine, times=6):
    """Requests are answered and `/live` is; the seconds that the slowest took."""
    slowest = 0
    for _ in range(times):
        engine.say(ANSWER)
        start = time.monotonic()
        answer = httpx.post(f"{kvasir.url}/v1/chat/completions", json=ASK, timeout=60)
        assert answer.status_code == 200, answer.text
        slowest = max(slowest, time.monotonic() - start)
        assert httpx.get(f"{kvasir.url}/live", timeout=5).status_code == 200
    return slowest


def metric(kvasir, line):
    return any(l.startswith(line) for l in httpx.get(f"{kvasir.url}/metrics", timeout=30).text.splitlines())


DOUBLES = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
RUNNING = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
    "doubles": DOUBLES,
    "nests": "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
    "recurses": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "elifs": "{% if x %}" + "{% elif x %}" * 900 + "{% endif %}",
}
REFUSED = {
    "not": "{{ " + "not " * 100_000 + "x }}",
    "elif": "{% if x %}" + "{% elif x %}" * 10_000 + "{% endif %}",
    "long": "x" * (2 << 20),
}


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG = {"type": "Prepend", "prepend": "a" * (1 << 20)}
PETABYTE = {
    "strategy": {"Fixed": 1 << 50}, "direction": "Right", "pad_to_multiple_of": None,
    "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
}
ENDLESS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 10_000, "pair": [], "special_tokens": {}}
# What the file says, and the limit that it is told.
GREEDY = {
    "doubles": ("normalizer", {"type": "Sequence", "normalizers": [DOUBLE] * 30}, "times that a text becomes longer"),
    "prepends": ("normalizer", {"type": "Sequence", "normalizers": [LONG] * 3}, "times that a text becomes longer"),
    "frames": ("post_processor", ENDLESS, "pieces of the post_processor"),
}


def rewrite(made, name, value):
    """Sets a field of the folder's `tokenizer.json`."""
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    tokenizer[name] = value
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


def test_a_tokenizer_that_pads_to_a_petabyte_pads_nothing(tmp_path):
    engine = announcing(rewrite(folder(tmp_path), "padding", PETABYTE))
    kvasir = frontend_before([engine.url], "--router-mode", "kv", "--no-router-kv-events")
    kvasir.until_logged("tokenizer loaded from the folder that the engine names", 60)
    served(kvasir, engine)
    assert kvasir.stop() == 0
    engine.stop()


@pytest.mark.parametrize("name", GREEDY)
def test_a_tokenizer_that_would_take_all_memory_is_refused(tmp_path, name):
    field, value, told = GREEDY[name]
    engine = announcing(rewrite(folder(tmp_path), field, value))
    kvasir = frontend_before([engine.url], "--router-mode", "kv", "--no-router-kv-events")
    kvasir.until_logged("the folder that the engine names has no usable tokenizer", 60)
    assert told in kvasir.log()
    served(kvasir, engine, 2)
    assert kvasir.stop() == 0
    engine.stop()


@pytest.mark.parametrize("name", RUNNING)
def test_a_template_that_does_too_much_is_done_without(tmp_path, name):
    engine = announcing(folder(tmp_path, template=RUNNING[name]))
    kvasir = frontend_before([engine.url], "--router-mode", "kv", "--no-router-kv-events")
    kvasir.until_logged("loading the tokenizer from the folder that the engine names")
    served(kvasir, engine)
    assert kvasir.process.poll() is None
    assert kvasir.stop() == 0
    engine.stop()


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_would_overflow_the_stack_is_refused(tmp_path, name):
    made = folder(tmp_path, template=REFUSED[name])
    engine = announcing(made)
    kvasir = frontend_before([engine.url], "--router-mode", "kv", "--no-router-kv-events")
    kvasir.until_logged("the folder that the engine names has no usable tokenizer")
    served(kvasir, engine, 2)
    assert kvasir.stop() == 0
    engine.stop()
    # Named by the operator, it stops the start, in words.
    stopped = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--model-path", str(made))
    assert stopped.process.wait(60) == 2
    until(lambda: "chat template `default` is not usable" in stopped.log(), told=stopped.log)


def test_a_tokenizer_that_never_ends_rests(tmp_path):
    """
    A run of `a` may be cut at every place, and the engine of the pattern tries them all, at each of its letters. It
    gives up at a million attempts, so the runs are short enough for less; forty of them are minutes of work.
    """
    engine = announcing(folder(tmp_path, pattern="a*a*(?=b)|."))
    kvasir = frontend_before([engine.url], "--router-mode", "kv", "--no-router-kv-events")
    kvasir.until_logged("tokenizer loaded from the folder that the engine names", 60)
    body = {"model": "m", "prompt": ("a" * 1200 + "c") * 40}
    for n in range(3):
        engine.say(ANSWER)
        answer = httpx.post(f"{kvasir.url}/v1/completions", json={**body, "prompt": body["prompt"] + "c" * n}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert httpx.get(f"{kvasir.url}/live", timeout=5).status_code == 200
    assert metric(kvasir, 'kvasir_tokenizer_resting{model="m"} 1'), kvasir.log()
    assert kvasir.log().count("took too long: prompts are routed without it for a while") == 1
    engine.say(ANSWER)
    start = time.monotonic()
    assert httpx.post(f"{kvasir.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert time.monotonic() - start < 2, "it is not asked again"
    kvasir.process.terminate()
    assert kvasir.process.wait(20) is not None, "a thread that never ends holds nobody up"
    engine.stop()


def test_loading_a_tokenizer_is_logged(tmp_path):
    engine = ScriptedEngine("m")
    kvasir = frontend_before([engine.url], "--model-path", str(folder(tmp_path)))
    kvasir.until_logged("loading the tokenizer")
    kvasir.until_logged("tokenizer loaded", 60)
    assert kvasir.stop() == 0
    engine.stop()


def test_a_folder_that_takes_long_to_read_delays_nobody(tmp_path):
    """It is live at once, says that it loads, asks clients to come again, and serves when all is read."""
    made = folder(tmp_path)
    tokenizer = (made / "tokenizer.json").read_bytes()
    (made / "tokenizer.json").unlink()
    os.mkfifo(made / "tokenizer.json")
    engine = ScriptedEngine("m")
    engine.say(ANSWER)
    options = ["--http-host", "127.0.0.1", "--http-port", "0", "--worker", engine.url, "--model-path", str(made)]
    kvasir = Kvasir("frontend", *options)
    kvasir.url = "http://" + kvasir.wait_for(r"address\W+(127\.0\.0\.1:\d+)").group(1)
    assert httpx.get(f"{kvasir.url}/live", timeout=30).status_code == 200
    health = httpx.get(f"{kvasir.url}/health", timeout=30)
    assert (health.status_code, health.json()["stage"]) == (503, "loading")
    early = httpx.post(f"{kvasir.url}/v1/chat/completions", json=ASK, timeout=30)
    assert early.status_code == 503 and int(early.headers["retry-after"]) >= 1, early.text
    # Nobody reads it before it is open at both ends.
    (made / "tokenizer.json").write_bytes(tokenizer)
    until(lambda: httpx.get(f"{kvasir.url}/health", timeout=30).status_code == 200, seconds=60, told=kvasir.log)
    assert served(kvasir, engine, times=2) < 30
    assert kvasir.stop() == 0, kvasir.log()
    # A signal is heard while it still waits for the file.
    kvasir = Kvasir("frontend", *options)
    kvasir.wait_for("loading the tokenizer")
    assert kvasir.stop() == 0, kvasir.log()
    engine.stop()


def test_a_folder_that_cannot_be_used_ends_the_process(tmp_path):
    made = folder(tmp_path)
    (made / "tokenizer.json").write_text("{")
    kvasir = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--model-path", str(made))
    assert kvasir.process.wait(60) == 2, kvasir.log()
    until(lambda: "--model-path" in kvasir.log() and "tokenizer.json" in kvasir.log(), told=kvasir.log)
