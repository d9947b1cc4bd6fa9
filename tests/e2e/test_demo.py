"""`kvasir demo` through the real `openai` client: what a newcomer would try first, and what can go wrong."""

import json
import os
import re
import subprocess
import threading
from pathlib import Path

import httpx
import openai
import pytest

from conftest import Kvasir, until

MODEL = "kvasir-demo"
LONG = "When does my parcel leave if I bring it at noon? Please explain the whole schedule of the depot to me. " * 3
WHERE = {"nvext": {"extra_fields": ["worker_id", "timing"]}}


def ask(client, messages, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, **more)


def worker_of(answer):
    return answer.nvext["worker_id"]["decode_worker_id"]


def test_a_chat_answer_is_whole(client):
    answer = ask(client, [{"role": "user", "content": "Hello, who are you?"}])
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content.strip()
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_says_the_same_as_the_whole_answer(client):
    messages = [{"role": "user", "content": "Who do I call when the driver cannot find the door?"}]
    whole = ask(client, messages)
    chunks = list(ask(client, messages, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5, "it came as one piece"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_raw_stream_ends_with_done(http):
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_second_turn_goes_to_the_worker_that_has_its_prefix(client, demo):
    """Several conversations at once, on every worker, so that going back to one's own is no accident."""
    conversations = []
    for topic in range(6):
        messages = [{"role": "user", "content": f"Case {topic}. {LONG}"}]
        home = {"nvext": {**WHERE["nvext"], "backend_instance_id": topic % 4 + 1}}
        first = ask(client, messages, extra_body=home)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "user", "content": "And if I bring it in the evening?"})
        conversations.append((worker_of(first), messages))
    for worker, messages in conversations:
        second = ask(client, messages, extra_body=WHERE)
        assert worker_of(second) == worker
        assert second.nvext["timing"]["kv_hit_rate"] > 0.5
        assert second.usage.prompt_tokens_details.cached_tokens > 0.5 * second.usage.prompt_tokens
    assert {worker for worker, _ in conversations} == {1, 2, 3, 4}
    formula = r"Formula for worker_\d+: [\d.]+ = [\d.]+ \* [\d.]+ \+ [\d.]+ \(cached_blocks: \d+\)"
    until(lambda: len(re.findall(formula, demo.log())) >= 12, told=demo.log)


def test_completions_in_every_form(client):
    text = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5)
    assert text.id.startswith("cmpl-") and text.usage.completion_tokens == 5
    assert text.choices[0].finish_reason == "length"
    batch = client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=4, n=2)
    assert [c.index for c in batch.choices] == [0, 1, 2, 3]
    tokens = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=3)
    assert tokens.usage.prompt_tokens == 3
    echo = client.completions.create(model=MODEL, prompt="Once", max_tokens=3, echo=True)
    assert echo.choices[0].text.startswith("Once")
    stream = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=6, stream=True)
    assert "".join(c.choices[0].text for c in stream if c.choices)


def test_stop_strings_and_limits(client):
    messages = [{"role": "user", "content": "Please sum up what we have agreed on."}]
    whole = ask(client, messages).choices[0].message.content
    word = whole.split()[2]
    stopped = ask(client, messages, stop=[word]).choices[0]
    assert stopped.message.content == whole[: whole.index(word)] and stopped.finish_reason == "stop"
    short = ask(client, messages, max_tokens=3)
    assert short.usage.completion_tokens == 3 and short.choices[0].finish_reason == "length"
    two = ask(client, messages, n=2)
    assert [c.index for c in two.choices] == [0, 1]


def test_pins_and_queries(client, http):
    messages = [{"role": "user", "content": LONG}]
    for worker in (1, 3):
        pinned = ask(client, messages, extra_body={"nvext": {**WHERE["nvext"], "backend_instance_id": worker}})
        assert worker_of(pinned) == worker
    by_header = ask(client, messages, extra_body=WHERE, extra_headers={"x-dynamo-worker-instance-id": "2"})
    assert worker_of(by_header) == 2
    body = {"model": MODEL, "messages": messages, "nvext": {"annotations": ["query_instance_id:"]}}
    query = http.post("/v1/chat/completions", json=body).json()
    assert query["nvext"]["worker_id"]["decode_worker_id"] in (1, 2, 3, 4) and query["nvext"]["token_ids"]


def test_models_health_and_metrics(client, http):
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert http.get("/live").json() == {"status": "live", "message": "Service is live"}
    health = http.get("/health").json()
    assert health["status"] == "healthy" and len(health["instances"]) == 4
    ask(client, [{"role": "user", "content": "counted"}], max_tokens=1)
    page = http.get("/metrics")
    assert page.status_code == 200 and "dynamo_frontend_requests_total{" in page.text
    assert "dynamo_component_router_kv_hit_rate_count" in page.text


def promtool_complaints(page):
    """What promtool says of the page."""
    run = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    return sorted(run.stderr.splitlines())


def promtool_expected(page):
    """What it may say: exactly the names that docs/reference/metrics.md lists, all of them Dynamo's, if they are on the page."""
    reference = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    listed = re.findall(r"^- `(\w+)`: (.+)$", reference.split("`promtool check metrics`")[1], re.MULTILINE)
    assert len(listed) == 9, listed
    return sorted(f"{name} {complaint}" for name, complaint in listed if f"# TYPE {name} " in page)


def test_promtool_complains_only_of_names_that_dynamo_chose(client, http):
    ask(client, [{"role": "user", "content": "counted"}], max_tokens=1)
    page = http.get("/metrics").text
    try:
        complaints = promtool_complaints(page)
    except FileNotFoundError:
        pytest.skip("NO promtool here: the page of metrics is NOT checked")
    assert complaints == promtool_expected(page) and len(complaints) == 9


@pytest.mark.parametrize(
    "case, status, message",
    [
        ({"content": b'{"model": '}, 400, "Failed to deserialize the JSON body"),
        ({"json": {"model": MODEL}}, 400, "messages"),
        ({"json": {"model": MODEL, "messages": []}}, 400, "'messages' field cannot be empty"),
        ({"json": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "wrong": 1}}, 400, "Unsupported parameter(s): `wrong`"),
        ({"json": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "temperature": 9}}, 400, "emperature"),
        ({"json": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "nvext": {"nope": 1}}}, 400, "nope"),
        ({"json": {"model": "other", "messages": [{"role": "user", "content": "x"}]}}, 404, "Model not found"),
        ({"json": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "nvext": {"backend_instance_id": 99}}}, 400, "Invalid request"),
        ({"json": {"model": MODEL, "messages": [{"role": "user", "content": "word " * 20000}]}}, 400, "maximum context length"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "Content-Type application/json"),
    ],
)
def test_what_is_wrong_is_said(http, case, status, message):
    case.setdefault("headers", {"content-type": "application/json"})
    answer = http.post("/v1/chat/completions", **case)
    body = answer.json()
    assert answer.status_code == status, body
    assert body["code"] == status and message in body["message"] and body["type"], body


def test_empty_prompts_and_wrong_routes(http):
    empty = http.post("/v1/completions", json={"model": MODEL, "prompt": ""})
    assert empty.status_code == 400 and "empty" in empty.json()["message"].lower()
    missing = http.get("/nope")
    assert missing.json() == {"message": "Route not found: GET /nope", "type": "Not Found", "code": 404}
    method = http.get("/v1/chat/completions")
    assert method.status_code == 405 and method.headers["allow"] == "POST"
    assert method.json()["message"] == "GET is not allowed here; this path has POST"
    assert http.get("/v1/models/other").status_code == 404


def test_a_body_past_the_limit_is_refused(tmp_path):
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", env={"DYN_HTTP_BODY_LIMIT_MB": "1"})
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * (1 << 20)}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    told = "Request body exceeds the limit of 1 MB set by --http-body-limit-mb (DYN_HTTP_BODY_LIMIT_MB)"
    assert answer.status_code == 413 and answer.json()["message"] == told
    assert answer.headers["connection"] == "close"
    # curl sees the answer whether it asks first or sends at once, by HTTP/1.1 and by HTTP/2; who asks sends nothing.
    large = tmp_path / "large"
    large.write_bytes(b" " * (20 << 20))
    write = ["-o", "-", "-w", "\n%{http_code} %{size_upload}"]
    for version in ["--http1.1", "--http2-prior-knowledge"]:
        for expect in ["expect:", "expect: 100-continue"]:
            curl = ["curl", "-sS", version, "--max-time", "30", "--expect100-timeout", "30", "-H", expect, *write,
                    "-H", "content-type: application/json", "--data-binary", f"@{large}", f"{url}/v1/chat/completions"]
            done = subprocess.run(curl, capture_output=True, text=True, timeout=60)
            body, result = done.stdout.rsplit("\n", 1)
            assert done.returncode == 0 and json.loads(body)["message"] == told, (curl, done)
            status, sent = result.split()
            assert status == "413", result
            if "100" in expect and version == "--http1.1":
                assert sent == "0", result
    assert kvasir.stop() == 0


def test_what_the_tokenizer_remembers_is_counted(http):
    def counts():
        page = http.get("/metrics").text
        names = ["hits_total", "misses_total", f'cached_tokens_total{{model="{MODEL}"}}', f'uncached_tokens_total{{model="{MODEL}"}}']
        return [int(re.search(rf"^dynamo_frontend_tokenizer_cache_{re.escape(name)} (\d+)$", page, re.M).group(1)) for name in names]

    before = counts()
    prompt = " ".join(f"Parcel {n} of 4711 left the depot by the second lorry." for n in range(100))
    usage = [http.post("/v1/completions", json={"model": MODEL, "prompt": prompt + end, "max_tokens": 1}).json()["usage"]
             for end in [" Where is it?", " Who has it?"]]  # fmt: skip
    hits, misses, cached, made = (now - then for now, then in zip(counts(), before))
    tokens = [one["prompt_tokens"] for one in usage]
    assert (hits, misses) == (1, 1)
    assert cached + made == sum(tokens)
    assert tokens[1] * 0.5 < cached < tokens[1], "all but the end of the second"
    assert counts() == counts(), "looking changes nothing"


def test_openai_errors_have_their_types(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])


def test_a_client_that_leaves_frees_its_place(client, http):
    """Reads one chunk and goes; the worker's load, which it had raised, returns to nothing."""

    def figures():
        """Requests under way, and the loads of all workers."""
        page = http.get("/metrics").text
        [active] = re.findall(r'^dynamo_frontend_active_requests\{model="kvasir-demo"\} (\S+)$', page, re.M)
        loads = re.findall(r"^dynamo_frontend_worker_active_(?:decode_blocks|prefill_tokens)\{.*\} (\S+)$", page, re.M)
        assert len(loads) == 2 * 4, page
        return active, set(loads)

    messages = [{"role": "user", "content": LONG}]
    stream = ask(client, messages, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    until(lambda: figures()[0] == "1" and figures()[1] > {"0"}, told=lambda: http.get("/metrics").text)
    stream.close()
    until(lambda: figures() == ("0", {"0"}), told=lambda: http.get("/metrics").text)


def test_sigterm_lets_a_stream_finish():
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0")
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": LONG}]
    stream = iter(ask(client, messages, stream=True, max_tokens=200, extra_body={"ignore_eos": True}))
    next(stream)
    code = []
    stopper = threading.Thread(target=lambda: code.append(kvasir.stop()))
    stopper.start()
    rest = list(stream)
    stopper.join()
    assert code == [0], kvasir.log()
    assert rest[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "mode", ["round-robin", "random", "power-of-two", "least-loaded", "device-aware-weighted", "kv"]
)
def test_every_mode_serves(mode):
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", mode, "--workers", "2")
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    workers = []
    # Among equals a worker is drawn by chance, so that both may take a while to come.
    while len(workers) < 8 or (mode == "kv" and len(set(workers)) < 2 and len(workers) < 60):
        content = f"{len(workers)} {LONG}"
        answer = ask(client, [{"role": "user", "content": content}], max_tokens=2, extra_body=WHERE)
        workers.append(worker_of(answer))
    assert set(workers) <= {1, 2}
    if mode in ("round-robin", "kv"):
        assert set(workers) == {1, 2}
    assert kvasir.stop() == 0


def test_a_demo_is_for_this_machine_unless_asked():
    """No address given: it listens on loopback alone, and warns of nothing."""
    kvasir = Kvasir("demo", "--http-port", "0", "--workers", "1")
    port = int(kvasir.wait_for(r"at http://127\.0\.0\.1:(\d+)").group(1))
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [line.split()[1] for lines in tables for line in lines if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    assert httpx.get(f"http://127.0.0.1:{port}/live", timeout=30).status_code == 200
    assert kvasir.stop() == 0, kvasir.log()
    assert "WARN" not in kvasir.log(), kvasir.log()


def test_traffic_shows_a_summary():
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--traffic", "--log-level", "warn")
    kvasir.wait_for(r"^worker +requests +hit share")
    kvasir.wait_for(r"^all +[1-9]\d* +\d")
    assert kvasir.stop() == 0, kvasir.log()
    assert "failed" not in kvasir.log(), kvasir.log()


def test_config_is_shown_with_its_origin():
    command = [os.environ["KVASIR_BIN"], "config", "show", "--json", "--router-mode", "kv"]
    env = {**os.environ, "DYN_ROUTER_TEMPERATURE": "0.5"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=True)
    options = json.loads(shown.stdout)["options"]
    assert options["router-mode"]["value"] == "kv" and options["router-mode"]["from"] == "flag --router-mode"
    assert options["router-temperature"]["value"] == 0.5
    assert options["router-temperature"]["from"] == "variable DYN_ROUTER_TEMPERATURE"
    assert options["http-port"]["origin"] == "default"


def test_bad_values_and_unknown_names_end_with_2():
    for args, words in [
        (["demo", "--router-mod", "kv"], ["--router-mod", "--router-mode"]),
        (["demo", "--router-temperature", "hot"], ["--router-temperature", "hot"]),
        (["frontend", "--worker", "nonsense"], ["--worker", "nonsense"]),
    ]:
        run = subprocess.run([os.environ["KVASIR_BIN"], *args], capture_output=True, text=True, timeout=20)
        assert run.returncode == 2 and all(word in run.stderr for word in words), run.stderr


def test_policy_classes_and_profiles_are_read_at_start(tmp_path):
    good = tmp_path / "policy.yaml"
    good.write_text("classes: [{name: every, policy_family: default, cache_bucket: all, quantum: 4096}]\n")
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--router-policy-config", str(good))
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    assert 'policy_class="every"' in httpx.get(f"{url}/metrics").text
    assert kvasir.stop() == 0
    bad = tmp_path / "bad.yaml"
    bad.write_text("classes: [{name: all, quantum: 0}]\n")
    aic = ["--router-prefill-load-model", "aic", "--aic-backend", "vllm", "--aic-model-path", "some/model"]
    for args, words in [
        (["--router-policy-config", str(bad)], ["--router-policy-config", "quantum"]),
        (["--router-policy-config", str(tmp_path / "none")], ["--router-policy-config", "none"]),
        ([*aic, "--aic-system", "b300"], ["--aic-system b300", "h200-llama-8b", "h200-qwen-32b"]),
    ]:
        command = [os.environ["KVASIR_BIN"], "demo", "--http-port", "0", *args]
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert run.returncode == 2 and all(word in run.stderr for word in words), run.stderr


def test_direct_mode_goes_where_it_is_told():
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "direct", "--workers", "2")
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for worker in (2, 1, 2):
        extra = {"nvext": {**WHERE["nvext"], "backend_instance_id": worker}}
        assert worker_of(ask(client, [{"role": "user", "content": "x"}], extra_body=extra)) == worker
    with pytest.raises(openai.BadRequestError, match="needs a worker id"):
        ask(client, [{"role": "user", "content": "x"}])
    assert kvasir.stop() == 0


def test_engines_in_processes_of_their_own_answer_and_end_with_the_demo():
    """Over real sockets, with nothing installed: a folder, TCP, ZeroMQ."""
    demo = Kvasir("demo", "--processes", "--workers", "2", "--http-port", "0")
    url = demo.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    engines = children(demo.process.pid)
    assert len(engines) == 2, engines
    with httpx.Client(base_url=url, timeout=30) as http:
        rows = http.get("/workers").json()["workers"]
        assert [row["origins"] for row in rows] == [["discovery"]] * 2 and all(row["address"].startswith("tcp:127.0.0.1:") for row in rows), rows
        text = "When does my parcel leave if I bring it at noon, and who drives the van on Sundays? " * 4
        ask = {"model": "kvasir-demo", "messages": [{"role": "user", "content": text}], "nvext": {"extra_fields": ["worker_id"]}}
        answers = lambda: [http.post("/v1/chat/completions", json=ask).json() for _ in range(2)]  # noqa: E731
        cached = lambda: answers()[1]["usage"]["prompt_tokens_details"]["cached_tokens"]  # noqa: E731
        until(lambda: cached() >= 64, 30, demo.log)
    # As a machine that loses its power: nobody is told anything.
    demo.process.kill()
    until(lambda: not any(is_running(engine) for engine in engines), 30)


def children(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = open(f"/proc/{entry}/stat").read()
            except OSError:
                continue
            if stat.rsplit(")", 1)[1].split()[1] == str(pid):
                found.append(int(entry))
    return found


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
