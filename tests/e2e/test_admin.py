"""What operators ask a running frontend: thresholds, workers, why a request went where it went."""

import httpx
import openai
import pytest

from conftest import Kvasir, until

MODEL = "kvasir-demo"
OVERLOAD = {
    "message": "Service temporarily unavailable: All workers are busy, please retry later",
    "type": "service_unavailable",
    "code": 503,
}


@pytest.fixture
def one_worker():
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", "1")
    kvasir.url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    yield kvasir
    assert kvasir.stop() == 0, kvasir.log()


def body(text="hello", **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def test_thresholds_are_read_and_changed_one_by_one(http):
    row = {
        "model": MODEL,
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": None,
        "active_prefill_tokens_threshold_frac": None,
    }
    assert http.get("/busy_threshold").json() == {"thresholds": [row]}
    row["active_prefill_tokens_threshold"] = 10_000
    set_one = {"model": MODEL, "active_prefill_tokens_threshold": 10_000}
    assert http.post("/busy_threshold", json=set_one).json() == row
    row["active_decode_blocks_threshold"] = 0.85
    set_other = {"model": MODEL, "active_decode_blocks_threshold": 0.85, "unknown": 1}
    assert http.post("/busy_threshold", json=set_other).json() == row
    assert http.post("/busy_threshold", json={"model": MODEL}).json() == row
    assert http.get("/busy_threshold").json() == {"thresholds": [row]}


def test_thresholds_that_cannot_be(http):
    unknown = http.post("/busy_threshold", json={"model": "zz", "active_decode_blocks_threshold": 0.5})
    assert unknown.status_code == 404 and "Model 'zz' not found" in unknown.json()["error"]
    assert http.post("/busy_threshold", json={"model": "zz"}).json()["active_decode_blocks_threshold"] is None
    out_of_range = http.post("/busy_threshold", json={"model": MODEL, "active_decode_blocks_threshold": 1.5})
    assert out_of_range.status_code == 400 and "error" in out_of_range.json()
    mistyped = http.post("/busy_threshold", json={"model": MODEL, "active_prefill_tokens_threshold": -1})
    assert mistyped.status_code == 422 and "error" in mistyped.json()
    broken = http.post("/busy_threshold", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400


def test_a_busy_fleet_refuses_and_recovers(one_worker):
    with httpx.Client(base_url=one_worker.url, timeout=30) as http:
        http.post("/busy_threshold", json={"model": MODEL, "active_decode_blocks_threshold": 0.0})
        long = body("word " * 200, stream=True, max_tokens=2000, ignore_eos=True)
        with http.stream("POST", "/v1/chat/completions", json=long) as running:
            lines = running.iter_lines()  # kept: a dropped iterator closes the stream
            next(lines)
            refused = httpx.post(f"{one_worker.url}/v1/chat/completions", json=body("word " * 100))
            assert refused.status_code == 503 and refused.json() == OVERLOAD
            assert refused.headers["content-type"] == "application/json" and "retry-after" in refused.headers
            streamed = httpx.post(f"{one_worker.url}/v1/chat/completions", json=body(stream=True))
            assert streamed.status_code == 503 and streamed.json() == OVERLOAD
        until(lambda: http.post("/v1/chat/completions", json=body()).status_code == 200, told=one_worker.log)
        page = http.get("/metrics").text
    rejected = [line for line in page.splitlines() if line.startswith("dynamo_tasks_rejected_total")]
    assert float(rejected[0].split()[-1]) >= 2


def test_the_overload_status_can_be_chosen():
    env = {"DYN_HTTP_OVERLOAD_STATUS_CODE": "529", "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.0"}
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", "1", env=env)
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    long = body("word " * 200, stream=True, max_tokens=2000, ignore_eos=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=long) as running:
        lines = running.iter_lines()
        next(lines)
        refused = httpx.post(f"{url}/v1/chat/completions", json=body())
    assert refused.status_code == 529 and refused.json()["code"] == 529
    assert refused.headers["retry-after"] == "1"
    assert kvasir.stop() == 0


def test_workers_and_decisions(http, client):
    rows = http.get("/workers").json()["workers"]
    assert sorted(row["worker_id"] for row in rows) == [1, 2, 3, 4]
    assert all(row["model"] == MODEL and not row["busy"] and not row["down"] for row in rows)
    answer = client.chat.completions.create(
        **{**body("why here? " * 40), "extra_body": {"nvext": {"extra_fields": ["worker_id"]}}}
    )
    decision = http.get(f"/decisions/{answer.id}").json()
    winner = decision["winner"][0]["worker"]
    assert winner == answer.nvext["worker_id"]["decode_worker_id"]
    assert decision["model"] == MODEL and decision["eligible"] == 4 and len(decision["candidates"]) == 4
    assert all(formula.startswith("Formula for worker_") for formula in decision["formulas"])
    latest = http.get("/decisions").json()["decisions"]
    assert latest[0]["id"] == answer.id.removeprefix("chatcmpl-")
    assert http.get("/decisions/nonsense").status_code == 404
    assert http.get("/decisions/00000000-0000-4000-8000-000000000000").status_code == 404


def test_the_admin_api_can_be_switched_off():
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", env={"DYN_DISABLE_FRONTEND_ADMIN_API": "1"})
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    for path in ("/busy_threshold", "/workers", "/decisions"):
        assert httpx.get(url + path).status_code == 404
    assert httpx.get(url + "/health").status_code == 200
    assert kvasir.stop() == 0


def test_extensions_can_be_switched_off():
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", env={"DYN_DISABLE_FRONTEND_NVEXT": "true"})
    url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    extra = {"nvext": {"extra_fields": ["worker_id"], "backend_instance_id": 99}}
    answer = client.chat.completions.create(**body(), extra_body=extra)
    assert answer.choices[0].message.content and "nvext" not in answer.model_extra
    assert kvasir.stop() == 0
