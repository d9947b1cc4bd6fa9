"""Writes the four boards. `python3 boards.py` writes them anew; ./test fails if they differ, or if a query finds no data.

The rate window is $__rate_interval, which Grafana chooses by the scrape interval; `$model` is a variable of every board.
"""

import json
import pathlib

HERE = pathlib.Path(__file__).parent
M = '{model=~"$model"}'


def quantiles(series, by="le"):
    rate = f"sum by ({by}) (rate({series}_bucket{M}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", name) for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))]


def rate(series, labels="", selector=M, zero=False):
    text = f"sum{f' by ({labels})' if labels else ''} (rate({series}{selector}[$__rate_interval]))"
    return f"{text} or vector(0)" if zero else text


# Board: title, panels of (title, unit, [(query, legend)]).
BOARDS = {
    "overview": ("Kvasir: overview", [
        ("Requests per second", "reqps", [(rate("dynamo_frontend_requests_started_total", "model"), "{{model}}")]),
        ("Failed and rejected per second", "reqps", [
            (rate("dynamo_frontend_requests_total", selector='{model=~"$model", status="error", error_type!~"cancelled|overload"}', zero=True), "failed"),
            (rate("dynamo_frontend_model_rejection_total", zero=True), "rejected"),
            (rate("dynamo_frontend_model_cancellation_total", zero=True), "client left"),
        ]),
        ("Time to first token", "s", quantiles("dynamo_frontend_time_to_first_token_seconds")),
        ("Time between tokens", "s", quantiles("dynamo_frontend_inter_token_latency_seconds")),
        ("Requests under way", "short", [(f"sum(dynamo_frontend_active_requests{M})", "running"), (f"sum(dynamo_frontend_queued_requests{M})", "without a token yet")]),
        ("Answer tokens per second", "short", [(rate("dynamo_frontend_output_tokens_total", "model"), "{{model}}")]),
    ]),
    "cache-trust": ("Kvasir: cache trust", [
        ("Prompt tokens from cache", "percentunit", [
            (f"{rate('dynamo_component_router_kv_selected_cached_prefix_tokens_total')} / {rate('dynamo_frontend_input_sequence_tokens_sum')}", "predicted"),
            (f"{rate('dynamo_frontend_cached_tokens_sum')} / {rate('dynamo_frontend_input_sequence_tokens_sum')}", "reported"),
        ]),
        ("Share of predictions that were wrong, by cause", "percentunit", [(f"avg by (cause) (kvasir_worker_prediction_error{M})", "{{cause}}")]),
        ("What a predicted block counts", "percentunit", [(f"kvasir_worker_cache_credit{M}", "worker {{worker_id}}/{{dp_rank}}")]),
        ("State of cache views", "short", [(f"count by (state, cause) (kvasir_worker_cache_state{M} == 1)", "{{state}} {{cause}}")]),
        ("Event sockets connected", "short", [(f"sum(kvasir_worker_events_connected{M})", "connected")]),
        ("Faults of event streams per second", "short", [(f"{rate('kvasir_kv_event_faults_total', 'kind')}", "{{kind}}")]),
    ]),
    "routing": ("Kvasir: routing", [
        ("Time of a routing decision, p99", "ms", [(f"histogram_quantile(0.99, sum by (le) (rate(dynamo_router_overhead_{part}_ms_bucket[$__rate_interval])))", name) for part, name in (("total", "all"), ("indexer_find_matches", "index"), ("scheduling", "choice"))]),
        ("Share of a prompt's blocks held by the chosen worker", "percentunit", [("sum(rate(dynamo_component_router_kv_hit_rate_sum[$__rate_interval])) / sum(rate(dynamo_component_router_kv_hit_rate_count[$__rate_interval]))", "mean")]),
        ("Requests held back", "short", [(f"sum by (model) (dynamo_frontend_router_queue_pending_requests{M})", "{{model}}")]),
        ("Choices against the best cache, per second", "short", [("sum(rate(dynamo_component_router_non_max_overlap_selections_total[$__rate_interval])) or vector(0)", "choices")]),
        ("Blocks in the index", "short", [(f"kvasir_index_entries{M}", "{{model}}")]),
        ("Bytes of the index", "bytes", [(f"kvasir_index_bytes{M}", "{{model}}")]),
    ]),
    "engines": ("Kvasir: engines", [
        ("Prompt tokens waiting, by rank", "short", [("dynamo_frontend_worker_active_prefill_tokens", "worker {{worker_id}}/{{dp_rank}}")]),
        ("KV blocks in use, by rank", "short", [("dynamo_frontend_worker_active_decode_blocks", "worker {{worker_id}}/{{dp_rank}}")]),
        ("Last time to first token, by rank", "s", [("dynamo_frontend_worker_last_time_to_first_token_seconds", "worker {{worker_id}}/{{dp_rank}}")]),
        ("Last time between tokens, by rank", "s", [("dynamo_frontend_worker_last_inter_token_latency_seconds", "worker {{worker_id}}/{{dp_rank}}")]),
        ("Workers that the router knows", "short", [("count(dynamo_component_router_worker_registered)", "ranks")]),
        ("Answers moved to another worker per second", "short", [(rate("dynamo_frontend_model_migration_total", zero=True), "moved")]),
    ]),
}


def board(uid, title, panels):
    made = []
    for at, (name, unit, queries) in enumerate(panels):
        made.append({
            "id": at + 1, "type": "timeseries", "title": name, "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {"h": 8, "w": 12, "x": at % 2 * 12, "y": at // 2 * 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 5, "showPoints": "never"}}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
            "targets": [{"refId": chr(65 + index), "expr": expr, "legendFormat": legend} for index, (expr, legend) in enumerate(queries)],
        })
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {"name": "model", "type": "query", "label": "Model", "datasource": {"type": "prometheus", "uid": "${datasource}"}, "multi": True, "includeAll": True,
         "allValue": ".*", "refresh": 2, "query": "label_values(dynamo_frontend_requests_started_total, model)", "current": {"text": "All", "value": "$__all"}},
    ]
    return {
        "uid": f"kvasir-{uid}", "title": title, "tags": ["kvasir"], "schemaVersion": 39, "version": 1, "editable": True, "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"}, "templating": {"list": variables}, "panels": made,
        "links": [{"type": "dashboards", "tags": ["kvasir"], "title": "Kvasir", "asDropdown": True}],
    }


def files():
    """Each board's file name and text."""
    return {f"{uid}.json": json.dumps(board(uid, *told), indent=1) + "\n" for uid, told in BOARDS.items()}


def queries():
    """Every query as it is sent for all models, with a window for a scrape each second."""
    for _, panels in BOARDS.values():
        for title, _, targets in panels:
            for expr, _ in targets:
                yield title, expr.replace("$__rate_interval", "15s").replace("$model", ".*")


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text)
