//! Names that `promtool check metrics` complains of, all of them Dynamo's and mandatory.

const ABBREVIATED: &str = "metric names should not contain abbreviated units";
const TOTAL: &str = "counter metrics should have \"_total\" suffix";

/// Each with what it says.
pub const PROMTOOL: &[(&str, &str)] = &[
    ("dynamo_component_kv_cache_event_warnings", TOTAL),
    ("dynamo_component_kv_cache_events_applied", TOTAL),
    ("dynamo_frontend_tokenizer_latency_ms", ABBREVIATED),
    ("dynamo_router_overhead_block_hashing_ms", ABBREVIATED),
    (
        "dynamo_router_overhead_indexer_find_matches_ms",
        ABBREVIATED,
    ),
    ("dynamo_router_overhead_scheduling_ms", ABBREVIATED),
    ("dynamo_router_overhead_seq_hashing_ms", ABBREVIATED),
    ("dynamo_router_overhead_shared_cache_query_ms", ABBREVIATED),
    ("dynamo_router_overhead_total_ms", ABBREVIATED),
];
