"""The metrics page of a running frontend, in each router mode."""

import re

import httpx
import pytest

from conftest import until
from engines import Fleet

MODEL = "measured"
PROMPT = "The depot opens at six and closes at nine, every day of the year but one. " * 12


def samples(page):
    """Name with labels, and value, of each line."""
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return [(series, float(value)) for series, value in lines]


def total(page, name, *labels):
    found = [value for series, value in samples(page) if series.split("{")[0] == name and all(x in series for x in labels)]
    return sum(found)


def talk(fleet, count=3):
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    for stream in (False, True) * count:
        answer = httpx.post(f"{fleet.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=30)
        assert answer.status_code == 200, answer.text
    assert httpx.post(f"{fleet.url}/v1/chat/completions", json={**body, "model": "none"}).status_code == 404


def page_with(fleet, holds):
    """The page, once this holds of it: what is counted behind an answer or beside it."""
    read = lambda: httpx.get(f"{fleet.url}/metrics", timeout=30).text  # noqa: E731
    return until(lambda: next((page for page in [read()] if holds(page)), None), told=read)


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded", "kv"])
def test_what_each_mode_exports(mode):
    free = "tcp://127.0.0.1:0"
    fleet = Fleet(MODEL, mocker=["--events", free, "--replay", free], frontend=["--router-mode", mode])
    by_cache = mode == "kv"

    def heard(page):
        """Serving threads have looked at their clocks, and events have come where they are listened to."""
        sources = total(page, "dynamo_component_router_kv_zmq_ingress_sources", 'state="active"')
        events = sources == 2 and total(page, "dynamo_component_router_kv_zmq_ingress_batches_total") > 0
        return total(page, "dynamo_frontend_event_loop_delay_seconds_count") > 0 and (events or not by_cache)

    talk(fleet)
    page = page_with(fleet, heard)
    fleet.stop()
    router = [(series, value) for series, value in samples(page) if series.startswith("dynamo_component_router_")]
    assert any("requests_total" in series for series, _ in router), "registered in every mode"
    written = {series.split("{")[0] for series, value in router if value}
    if by_cache:
        assert total(page, "dynamo_component_router_requests_total") == 6
        assert total(page, "dynamo_component_router_overlap_blocks_lost_count") == 6
        assert total(page, "dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total") > 0
        assert total(page, "dynamo_component_router_worker_registered") == 2
        assert total(page, "dynamo_component_router_kv_event_source_mismatch_workers") == 0
        assert total(page, "dynamo_frontend_router_admission_received_total", 'policy_class="default"') == 6
    else:
        assert written == set()
    for name in ("dynamo_router_overhead_", "dynamo_component_kv_cache_events_applied", "dynamo_frontend_router_queue_"):
        assert (f"# TYPE {name}" in page) == by_cache, name
    assert total(page, "dynamo_frontend_worker_active_decode_blocks", 'worker_type="decode"') >= 0
    assert len(re.findall(r"^dynamo_frontend_worker_active_decode_blocks\{", page, re.MULTILINE)) == 2
    tasks = {kind: total(page, f"dynamo_tasks_{kind}_total") for kind in ("issued", "started", "success", "failed", "cancelled", "rejected")}
    assert tasks == {"issued": 7, "started": 6, "success": 6, "failed": 1, "cancelled": 0, "rejected": 0}
    assert total(page, "dynamo_frontend_failures_total", 'class="NotFound"', 'reason="request.not_found"') == 1
    for stage in ("preprocess", "route", "transport_roundtrip"):
        assert total(page, "dynamo_frontend_stage_duration_seconds_count", f'stage="{stage}"') == 6, stage
    assert total(page, "dynamo_frontend_stage_requests") == 0


def test_buckets_models_and_health_are_as_asked_for():
    said = {"DYN_METRICS_TTFT_MIN": "0.01", "DYN_METRICS_TTFT_MAX": "10", "DYN_METRICS_TTFT_COUNT": "4"}
    fleet = Fleet(MODEL, mocker=["--max-model-len", "3000"], frontend=["--router-mode", "kv"], env=said)
    talk(fleet, count=1)
    page = httpx.get(f"{fleet.url}/metrics", timeout=30).text
    bounds = re.findall(r'^dynamo_frontend_time_to_first_token_seconds_bucket\{.*le="(.+?)"\}', page, re.MULTILINE)
    assert bounds[:5] == ["0", "0.1", "1", "10", "+Inf"]
    models = httpx.get(f"{fleet.url}/v1/models").json()["data"]
    assert [(m["owned_by"], m["max_model_len"], m["context_window"]) for m in models] == [("nvidia", 3000, 3000)]
    health = httpx.get(f"{fleet.url}/health").json()
    assert health["endpoints"] == ["dyn://dynamo.backend.generate"]
    assert sorted(i["transport"]["http"] for i in health["instances"]) == sorted(fleet.engines)
    fleet.stop()
