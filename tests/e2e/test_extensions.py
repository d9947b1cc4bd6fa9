"""Every field of `nvext` and every header form of it, before unmodified engines: what it does, and what the engine gets."""

import json

import httpx
import openai
import pytest

from engines import Fleet

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "Which ship came in first, and who saw it from the harbour wall? " * 8}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def fleet():
    fleet = Fleet(MODEL, frontend=["--router-session-affinity-ttl-secs", "60"])
    fleet.ids = sorted(row["worker_id"] for row in httpx.get(f"{fleet.url}/workers").json()["workers"])
    yield fleet
    fleet.stop()


def post(fleet, nvext=None, headers=None, path=CHAT, **fields):
    """Sends a request; its answer, who served it, and the body that the engine got."""
    fleet.forget()
    what = {"prompt": "Once upon a time"} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {"model": MODEL, "max_tokens": 2, **what, **fields}
    if nvext is not None:
        body["nvext"] = nvext
    answer = httpx.post(fleet.url + path, json=body, headers=headers or {}, timeout=30)
    got = [json.loads(request["body"]) for request in fleet.received()]
    assert all("nvext" not in body for body in got), got
    return answer, got[0] if got else None


def served_by(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["nvext"]["worker_id"]["decode_worker_id"]


WHO = {"extra_fields": ["worker_id"]}


@pytest.mark.parametrize("form", [
    "backend_instance_id", "decode_worker_id", "x-dynamo-worker-instance-id", "x-worker-instance-id",
])  # fmt: skip
def test_a_pin_is_obeyed(fleet, form):
    for worker in fleet.ids * 2:
        nvext, headers = ({**WHO, form: worker}, {}) if "_" in form else (WHO, {form: str(worker)})
        assert served_by(post(fleet, nvext, headers)[0]) == worker
    nvext, headers = ({form: 7}, {}) if "_" in form else ({}, {form: "7"})
    answer, got = post(fleet, nvext, headers)
    assert (answer.status_code, got) == (400, None)
    assert answer.json()["message"].startswith("Invalid request: worker 7, which the request names,")


def test_a_header_beats_the_body_and_one_that_is_no_number_says_nothing(fleet):
    one, other = fleet.ids
    pinned = {**WHO, "backend_instance_id": one}
    assert served_by(post(fleet, pinned, {"x-dynamo-worker-instance-id": str(other)})[0]) == other
    assert served_by(post(fleet, pinned, {"x-dynamo-worker-instance-id": "soon"})[0]) == one


@pytest.mark.parametrize("form", ["dp_rank", "x-dynamo-dp-rank", "x-dp-rank", "x-data-parallel-rank"])
def test_a_rank_that_nobody_has_is_refused(fleet, form):
    for rank, status in ((0, 200), (3, 503)):
        nvext, headers = ({form: rank}, {}) if "_" in form else (None, {form: str(rank)})
        assert post(fleet, nvext, headers)[0].status_code == status


@pytest.mark.parametrize("nvext, headers, salt", [
    ({"cache_salt": "a"}, {}, "a"),
    ({"cache_salt": "a"}, {"x-tenant-id": "b"}, "b"),
    (None, {"x-tenant-id": "b"}, "b"),
    ({"cache_salt": ""}, {}, None),
    (None, {"x-tenant-id": ""}, None),
])  # fmt: skip
def test_the_salt_becomes_the_engines(fleet, nvext, headers, salt):
    answer, got = post(fleet, nvext, headers)
    assert answer.status_code == 200 and got.get("cache_salt") == salt
    assert post(fleet, nvext, headers, cache_salt="top")[1]["cache_salt"] == (salt or "top")


@pytest.mark.parametrize("nvext, headers, priority", [
    ({"agent_hints": {"priority": 4}}, {}, -4),
    ({"agent_hints": {"priority": 4}}, {"x-dynamo-request-priority": "6"}, -6),
    ({"agent_hints": {"latency_sensitivity": 2.5}}, {}, None),
    ({"agent_hints": {"strict_priority": 1, "osl": 64, "kv_overlap_score_credit": 0.5}}, {}, None),
    ({"agent_hints": {"kv_overlap_score_weight": 2.0, "speculative_prefill": False}}, {}, None),
    (None, {"x-dynamo-request-strict-priority": "2"}, None),
])  # fmt: skip
def test_hints(fleet, nvext, headers, priority):
    answer, got = post(fleet, nvext, headers)
    assert answer.status_code == 200 and got.get("priority") == priority


def test_sampling_and_tokens_become_the_engines_fields(fleet):
    answer, got = post(fleet, {"greed_sampling": True}, temperature=1.5, seed=3)
    assert answer.status_code == 200 and (got["temperature"], got["seed"]) == (0, 3)
    answer, got = post(fleet, {"token_data": [5, 6, 7]}, path="/v1/completions")
    assert answer.json()["usage"]["prompt_tokens"] == 3 and got["prompt"] == [5, 6, 7]
    answer, got = post(fleet, {"token_data": [5, 6, 7]})
    assert answer.status_code == 200 and got["messages"] == MESSAGES


def test_what_only_dynamos_workers_use_is_taken_and_not_passed_on(fleet):
    nvext = {
        "prefill_worker_id": fleet.ids[0], "prefill_dp_rank": 0, "use_raw_prompt": True, "max_thinking_tokens": 5,
        "request_timestamp_ms": 1.5, "router": {"a": [1]}, "metadata_upload": {"b": 2},
    }  # fmt: skip
    headers = {"x-dynamo-prefill-instance-id": "1", "x-prefill-dp-rank": "0", "x-dynamo-meta-team": "a"}
    answer, got = post(fleet, nvext, headers)
    assert answer.status_code == 200
    assert got == {"model": MODEL, "max_tokens": 2, "messages": MESSAGES}


@pytest.mark.parametrize("headers", [
    {"x-dynamo-session-id": "s1"}, {"x-claude-code-session-id": "s2"}, {"x-claude-code-agent-id": "s3"}, {"thread-id": "s4"},
    {"x-session-id": "s5"},
])  # fmt: skip
def test_a_session_stays_with_its_worker(fleet, headers):
    first = served_by(post(fleet, WHO, headers)[0])
    other = next(worker for worker in fleet.ids if worker != first)
    # What it would find elsewhere does not draw it away.
    text = [{"role": "user", "content": f"{headers} Quite another question about the tide. " * 40}]
    for _ in range(2):
        post(fleet, {"backend_instance_id": other}, messages=text)
    assert served_by(post(fleet, WHO, headers, messages=text)[0]) == first


def test_a_session_that_is_bound(fleet):
    bind = {"session_id": "bound", "action": "bind", "timeout": 60}
    first = served_by(post(fleet, {**WHO, "session_control": bind})[0])
    other = next(worker for worker in fleet.ids if worker != first)
    text = [{"role": "user", "content": "A third question, about the lighthouse and its keeper. " * 40}]
    for _ in range(2):
        post(fleet, {"backend_instance_id": other}, messages=text)
    use = {**WHO, "session_control": {"session_id": "bound"}}
    assert served_by(post(fleet, use, messages=text)[0]) == first
    post(fleet, {"session_control": {"session_id": "bound", "action": "close"}})
    text = [{"role": "user", "content": "A fourth question, about the keeper's boat in winter. " * 40}]
    for _ in range(2):
        post(fleet, {"backend_instance_id": other}, messages=text)
    assert served_by(post(fleet, use, messages=text)[0]) == other, "where its beginning is cached"


def test_constraints(fleet):
    assert post(fleet, {"routing_constraints": {"required_taints": ["h200"]}})[0].status_code == 503
    assert post(fleet, {"routing_constraints": {"preferred_taints": {"h200": 0.5}}})[0].status_code == 200


@pytest.mark.parametrize("nvext, word", [
    ({"speed": 1}, "nvext: unknown field `speed`, expected one of"),
    ({"agent_hints": {"speed": 1}}, "nvext.agent_hints: unknown field `speed`, expected one of"),
    ({"dp_rank": -1}, "nvext.dp_rank"),
    ({"token_data": []}, "nvext.token_data cannot be empty"),
    ({"session_control": {"session_id": "s", "action": "swap"}}, "unknown variant `swap`"),
    ({"agent_hints": {"kv_overlap_score_credit": 2}}, "kv_overlap_score_credit"),
    ([], "nvext"),
    ("x", "nvext"),
])  # fmt: skip
def test_what_is_wrong_is_named(fleet, nvext, word):
    answer, got = post(fleet, nvext)
    assert answer.status_code == 400 and word in answer.json()["message"] and got is None, answer.text


def test_nothing_is_nothing(fleet):
    for nvext in ({}, {"extra_fields": ["unheard_of"]}, {"annotations": []}, {"agent_hints": {}}):
        answer, got = post(fleet, nvext)
        assert answer.status_code == 200 and "nvext" not in answer.json()
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "nvext": None}
    assert httpx.post(fleet.url + CHAT, json=body).status_code == 200


def test_the_older_name_of_a_request_is_its_answers(fleet):
    uuid = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, extra_headers={"x-dynamo-request-id": uuid})
    assert answer.id == f"chatcmpl-{uuid}"
    answer, _ = post(fleet, None, {"x-dynamo-request-id": uuid})
    assert answer.headers["x-request-id"] == uuid
    answer, _ = post(fleet, None, {"x-dynamo-request-id": "mine"})
    assert answer.headers["x-request-id"] != "mine" and "mine" not in answer.json()["id"]
    assert httpx.get(f"{fleet.url}/decisions/{uuid}").status_code == 200


def test_extensions_can_be_turned_off():
    fleet = Fleet(MODEL, env={"DYN_DISABLE_FRONTEND_NVEXT": "1"})
    try:
        nvext = {"backend_instance_id": 7, "cache_salt": "a", "speed": 1, "greed_sampling": True, **WHO}
        answer, got = post(fleet, nvext, {"x-dynamo-worker-instance-id": "7", "x-tenant-id": "b"})
        assert answer.status_code == 200 and "nvext" not in answer.json()
        assert got == {"model": MODEL, "max_tokens": 2, "messages": MESSAGES}
    finally:
        fleet.stop()
