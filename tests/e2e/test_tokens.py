"""What prompts become tokens by: a named folder, the folder that the engine names, or the engine itself.

Whoever says, the tokens must be the engine's own: only then does the index that its cache events fill find
what a second request shares with the first.
"""

import os

import httpx
import pytest

from conftest import Kvasir, until

FOLDER = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../crates/text/src/builtin"))
TEXT = " ".join(f"Line {n} of the harbour log: ship {n * 7} came in with the tide." for n in range(40))


@pytest.fixture(params=["tokenize", "announced", "model_path"])
def fleet(request):
    """Two mock engines with cache events behind a frontend that learns tokens in one of the ways."""
    # An engine without a folder names none; one that has one says so in its list of models.
    own = ["--model-path", FOLDER] if request.param == "announced" else []
    engines = [Kvasir("mocker", "--http-host", "127.0.0.1", "--http-port", "0", "--model-name", "tiny", "--block-size",
                      "16", "--speedup", "50", "--kv-events-port", "0", *own) for _ in range(2)]
    urls = [engine.wait_for(r"on (http://127\.0\.0\.1:\d+)").group(1) for engine in engines]
    workers = [word for url in urls for word in ("--worker", url)]
    folder = ["--model-path", f"tiny={FOLDER}"] if request.param == "model_path" else []
    frontend = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0", *workers, *folder)
    frontend.url = "http://" + frontend.wait_for(r"address=(127\.0\.0\.1:\d+)").group(1)
    frontend.source = request.param
    with httpx.Client(base_url=frontend.url, timeout=30) as http:
        frontend.http = http
        until(lambda: len(http.get("/workers").json()["workers"]) == 2)
        yield frontend
    assert frontend.stop() == 0, frontend.log()
    for engine in engines:
        engine.stop()


def metric(http, name, *labels):
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


def ask(http, kind, question):
    if kind == "chat":
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": question}]
        path, body = "/v1/chat/completions", {"messages": messages}
    else:
        path, body = "/v1/completions", {"prompt": f"{TEXT} {question}"}
    answer = http.post(path, json={"model": "tiny", "max_tokens": 4, "nvext": {"extra_fields": ["worker_id"]}, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_tokens_are_the_engines(fleet):
    http, source = fleet.http, fleet.source
    if source == "announced":
        until(lambda: http.get("/workers").json()["workers"][0]["tokens_from"] == "announced")
    applied = lambda: metric(http, "dynamo_component_kv_cache_events_applied", 'event_type="stored"')  # noqa: E731
    for kind in ["chat", "completion"]:
        known = applied()
        first = ask(http, kind, "Which ship came first?")
        # Once the events have come, the second request finds its beginning where the first one left it.
        until(lambda: applied() > known)
        before = metric(http, "dynamo_component_router_kv_hit_rate_sum")

        def found():
            again = ask(http, kind, "And which came last?")
            assert again["nvext"]["worker_id"] == first["nvext"]["worker_id"]
            return again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100

        until(found)
        assert metric(http, "dynamo_component_router_kv_hit_rate_sum") - before > 0.5
    assert metric(http, "kvasir_prompts_read_total", f'source="{source}"') >= 4
    assert metric(http, "kvasir_prompts_read_total", 'source="bytes"') == 0
    assert {row["tokens_from"] for row in http.get("/workers").json()["workers"]} == {source}
    fleet.until_logged(source)
    # Every answer was compared with what the router had foretold.
    assert metric(http, "kvasir_worker_prediction_error", 'cause="tokenization"') == 0
