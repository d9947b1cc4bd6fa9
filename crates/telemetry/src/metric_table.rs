//! Every series that Kvasir exports, one row each.
//!
//! Labels are closed sets or names that we gave (a served model, a worker's id), never a client's text.
//! The reference page `docs/reference/metrics.md` is made from these rows.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, Registry, TextEncoder,
};

use crate::metrics::Series;
use crate::pools::name_pools;
use crate::{Buckets, Group, Kind, MetricOptions, Spec, TunableHistogram};

/// A row without labels is its series; one with labels is a family of series.
macro_rules! series_type {
    (counter) => {
        IntCounter
    };
    (gauge) => {
        Gauge
    };
    (histogram) => {
        Histogram
    };
    (counter $($label:literal)+) => {
        IntCounterVec
    };
    (gauge $($label:literal)+) => {
        GaugeVec
    };
    (histogram $($label:literal)+) => {
        HistogramVec
    };
}

macro_rules! kind {
    (counter) => {
        Kind::Counter
    };
    (gauge) => {
        Kind::Gauge
    };
    (histogram) => {
        Kind::Histogram
    };
}

macro_rules! buckets {
    () => {
        Buckets::None
    };
    ($buckets:expr) => {
        $buckets
    };
}

macro_rules! metrics {
    ($( $group:ident { $(
        #[doc = $help:literal]
        $kind:ident $field:ident = $suffix:literal [$($label:literal),*] $(in $buckets:expr)?;
    )* } )*) => {
        /// All series, registered. Clones are one set, and cheap: every request holds one.
        #[derive(Clone, Debug)]
        pub struct Metrics(Arc<MetricTable>);

        impl Deref for Metrics {
            type Target = MetricTable;

            fn deref(&self) -> &MetricTable {
                &self.0
            }
        }

        /// The series, by name.
        #[derive(Debug)]
        pub struct MetricTable {
            registry: Registry,
            $($(
                #[doc = $help]
                pub $field: series_type!($kind $($label)*),
            )*)*
        }

        /// The table, in order.
        pub const SPECS: &[Spec] = &[ $($(
            Spec {
                group: Group::$group,
                suffix: $suffix,
                kind: kind!($kind),
                labels: &[$($label),*],
                help: $help.trim_ascii(),
                buckets: buckets!($($buckets)?),
            },
        )*)* ];

        impl Metrics {
            /// Registers every row of the table. Fails only if a prefix is not a metric name.
            pub fn new(options: &MetricOptions) -> Result<Self, prometheus::Error> {
                let registry = Registry::new();
                let mut specs = SPECS.iter();
                let mut next = || specs.next().ok_or(prometheus::Error::Msg("table too short".into()));
                Ok(Self(Arc::new(MetricTable {
                    $($( $field: Series::register(next()?, options, &registry)?, )*)*
                    registry,
                })))
            }

            /// Takes out every series of models that are served no more, looking once at what there is of each kind.
            pub fn forget_models(&self, models: &BTreeSet<Arc<str>>) {
                if models.is_empty() {
                    return;
                }
                let mut specs = SPECS.iter();
                $($( if let Some(spec) = specs.next() {
                    self.$field.forget(spec, "model", models);
                } )*)*
            }
        }
    };
}

const TEMPLATE_SECONDS: Buckets = Buckets::List(&[1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2]);
const TOKENIZE_SECONDS: Buckets =
    Buckets::List(&[1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0]);
const LATENCY_TTFT: Buckets = Buckets::Log {
    min: 0.001,
    max: 480.0,
    count: 18,
};
const TOKENS_IN: Buckets = Buckets::Log {
    min: 50.0,
    max: 128_000.0,
    count: 12,
};
const TOKENS_OUT: Buckets = Buckets::Log {
    min: 50.0,
    max: 32_000.0,
    count: 10,
};
const COMPUTE_MS: Buckets = Buckets::Power {
    start: 0.001,
    factor: 2.0,
    count: 15,
};
const ASYNC_MS: Buckets = Buckets::Power {
    start: 0.01,
    factor: 3.0,
    count: 17,
};
const STAGE: Buckets = Buckets::List(&[
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0,
]);
const TOKENIZER_MS: Buckets = Buckets::Power {
    start: 0.5,
    factor: 2.0,
    count: 11,
};
const LOOP_DELAY: Buckets =
    Buckets::List(&[0.0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0]);
const BLOCKS: Buckets = Buckets::Power {
    start: 0.25,
    factor: 2.0,
    count: 16,
};

metrics! {
    Frontend {
        /// Requests that ended, by how.
        counter requests_total = "requests_total" ["model", "endpoint", "request_type", "status", "error_type"];
        /// Requests that began.
        counter requests_started_total = "requests_started_total" ["model", "endpoint", "request_type"];
        /// Requests between arrival and the end of their answer.
        gauge active_requests = "active_requests" ["model"];
        /// The same under its older name.
        gauge inflight_requests = "inflight_requests" ["model"];
        /// Requests that have no first token yet.
        gauge queued_requests = "queued_requests" ["model"];
        /// Clients that left before their answer was complete, since the start.
        gauge disconnected_clients = "disconnected_clients" [];
        /// Requests in each stage.
        gauge stage_requests = "stage_requests" ["stage", "phase"];
        /// Time spent in each stage.
        histogram stage_duration_seconds = "stage_duration_seconds" ["stage"] in STAGE;
        /// From the arrival of the head to the end of the answer; sending the body is part of it.
        histogram request_duration_seconds = "request_duration_seconds" ["model"] in Buckets::TunableHistogram(TunableHistogram::RequestDuration);
        /// From the arrival of the head to the first token; sending the body is part of it.
        histogram time_to_first_token_seconds = "time_to_first_token_seconds" ["model"] in Buckets::TunableHistogram(TunableHistogram::Ttft);
        /// Between tokens.
        histogram inter_token_latency_seconds = "inter_token_latency_seconds" ["model"] in Buckets::TunableHistogram(TunableHistogram::Itl);
        /// Prompt tokens per request.
        histogram input_sequence_tokens = "input_sequence_tokens" ["model"] in Buckets::TunableHistogram(TunableHistogram::InputSequence);
        /// Answer tokens per request.
        histogram output_sequence_tokens = "output_sequence_tokens" ["model"] in Buckets::TunableHistogram(TunableHistogram::OutputSequence);
        /// Prompt tokens that the engine found in its cache, per request.
        histogram cached_tokens = "cached_tokens" ["model"] in Buckets::TunableHistogram(TunableHistogram::InputSequence);
        /// From the arrival of a request for embeddings to the end of its answer.
        histogram embedding_latency_seconds = "embedding_latency_seconds" ["model"] in LATENCY_TTFT;
        /// Requests that failed, by class of the error and reason.
        counter failures_total = "failures_total" ["class", "reason"];
        /// How much later than asked for a timer of a serving thread went off: what else the thread had to do.
        histogram event_loop_delay_seconds = "event_loop_delay_seconds" [] in LOOP_DELAY;
        /// Times that this was more than 5 ms.
        counter event_loop_stall_total = "event_loop_stall_total" [];
        /// Answer tokens.
        counter output_tokens_total = "output_tokens_total" ["model"];
        /// Time to turn text into tokens and back.
        histogram tokenizer_latency_ms = "tokenizer_latency_ms" ["operation"] in TOKENIZER_MS;
        /// Time of the chat template.
        histogram template_seconds = "template_seconds" [] in TEMPLATE_SECONDS;
        /// Time of the tokenizer alone.
        histogram tokenize_seconds = "tokenize_seconds" [] in TOKENIZE_SECONDS;
        /// Prompts whose beginning had been turned into tokens before.
        counter tokenizer_cache_hits_total = "tokenizer_cache_hits_total" [];
        /// Prompts of which nothing had been, or that are shorter than what is kept.
        counter tokenizer_cache_misses_total = "tokenizer_cache_misses_total" [];
        /// Prompt tokens that were found in the tokenizer's cache.
        counter tokenizer_cache_cached_tokens_total = "tokenizer_cache_cached_tokens_total" ["model"];
        /// Prompt tokens that were made.
        counter tokenizer_cache_uncached_tokens_total = "tokenizer_cache_uncached_tokens_total" ["model"];
        /// Requests moved to another worker.
        counter model_migration_total = "model_migration_total" ["model", "migration_type"];
        /// From a worker's failure to the first token at another, by how that went.
        histogram model_migration_duration_seconds = "model_migration_duration_seconds" ["model", "migration_type", "outcome"] in LATENCY_TTFT;
        /// Answers that grew past the length up to which they are continued elsewhere.
        counter model_migration_max_seq_len_exceeded_total = "model_migration_max_seq_len_exceeded_total" ["model"];
        /// Requests whose client left.
        counter model_cancellation_total = "model_cancellation_total" ["model", "endpoint", "request_type"];
        /// Requests refused because every worker was busy.
        counter model_rejection_total = "model_rejection_total" ["model", "endpoint"];
        /// Whether the model has a worker that can be asked.
        gauge model_ready = "model_ready" ["model"];
        /// KV blocks of one worker.
        gauge model_total_kv_blocks = "model_total_kv_blocks" ["model"];
        /// Sequences that one worker runs at once.
        gauge model_max_num_seqs = "model_max_num_seqs" ["model"];
        /// Tokens that one worker computes in one step.
        gauge model_max_num_batched_tokens = "model_max_num_batched_tokens" ["model"];
        /// Longest sequence of the model; 0 if unknown.
        gauge model_context_length = "model_context_length" ["model"];
        /// Tokens in a block.
        gauge model_kv_cache_block_size = "model_kv_cache_block_size" ["model"];
        /// How often a request may move to another worker.
        gauge model_migration_limit = "model_migration_limit" ["model"];
        /// Blocks that running requests hold, as the router counts them.
        gauge worker_active_decode_blocks = "worker_active_decode_blocks" ["worker_id", "dp_rank", "worker_type"];
        /// Prompt tokens that wait for their first token, as the router counts them.
        gauge worker_active_prefill_tokens = "worker_active_prefill_tokens" ["worker_id", "dp_rank", "worker_type"];
        /// The last time to a first token.
        gauge worker_last_time_to_first_token_seconds = "worker_last_time_to_first_token_seconds" ["worker_id", "dp_rank", "worker_type"];
        /// The last prompt's length.
        gauge worker_last_input_sequence_tokens = "worker_last_input_sequence_tokens" ["worker_id", "dp_rank", "worker_type"];
        /// The last time between two tokens.
        gauge worker_last_inter_token_latency_seconds = "worker_last_inter_token_latency_seconds" ["worker_id", "dp_rank", "worker_type"];
    }
    Queue {
        /// Requests held back by the queue threshold.
        gauge router_queue_pending_requests = "router_queue_pending_requests" ["model", "worker_type", "policy_class"];
        /// Their prompt tokens.
        gauge router_queue_pending_isl_tokens = "router_queue_pending_isl_tokens" ["model", "worker_type", "policy_class"];
        /// Those of their prompt tokens that some worker had cached when they came.
        gauge router_queue_pending_cached_tokens = "router_queue_pending_cached_tokens" ["model", "worker_type", "policy_class"];
        /// Requests that asked the router for a worker, retries too.
        counter router_admission_received_total = "router_admission_received_total" ["model", "policy_class", "worker_type"];
        /// Requests that waited longer than their class may; nothing predicts that beforehand.
        counter router_admission_rejected_total = "router_admission_rejected_total" ["model", "policy_class", "worker_type", "reason"];
        /// Requests that a bound of the queue refused.
        counter router_queue_backpressure_total = "router_queue_backpressure_total" ["model", "worker_type", "policy_class", "reason"];
    }
    Router {
        /// Requests given to a worker.
        counter router_requests_started_total = "requests_started_total" [];
        /// Requests whose answer ended.
        counter router_requests_total = "requests_total" [];
        /// From routing to the first token.
        histogram router_time_to_first_token_seconds = "time_to_first_token_seconds" [] in LATENCY_TTFT;
        /// Between tokens.
        histogram router_inter_token_latency_seconds = "inter_token_latency_seconds" [] in Buckets::Log { min: 0.001, max: 2.0, count: 13 };
        /// Prompt tokens per request.
        histogram router_input_sequence_tokens = "input_sequence_tokens" ["model", "phase"] in TOKENS_IN;
        /// Answer tokens per request.
        histogram router_output_sequence_tokens = "output_sequence_tokens" [] in TOKENS_OUT;
        /// Share of the prompt's blocks that the chosen worker held, as predicted.
        histogram router_kv_hit_rate = "kv_hit_rate" [] in Buckets::Share { step: 0.05 };
        /// Blocks of overlap given up by not taking the worker that held most.
        histogram router_overlap_blocks_lost = "overlap_blocks_lost" ["worker_type"] in BLOCKS;
        /// Share of the prompt's blocks that the cache holds which all workers share.
        histogram router_shared_cache_hit_rate = "shared_cache_hit_rate" [] in Buckets::Share { step: 0.05 };
        /// Blocks in that cache beyond those that the chosen worker held in its device's memory.
        histogram router_shared_cache_beyond_blocks = "shared_cache_beyond_blocks" [] in Buckets::Power { start: 1.0, factor: 2.0, count: 12 };
        /// Choices that did not fall on the worker that held most.
        counter router_non_max_overlap_selections_total = "non_max_overlap_selections_total" ["worker_type"];
        /// Cached prompt tokens on the chosen workers, as predicted.
        counter router_kv_selected_cached_prefix_tokens_total = "kv_selected_cached_prefix_tokens_total" ["model", "phase"];
        /// Cached prompt tokens on the best eligible workers, as predicted.
        counter router_kv_best_eligible_cached_prefix_tokens_total = "kv_best_eligible_cached_prefix_tokens_total" ["model", "phase"];
        /// Cached prompt tokens that the engines reported.
        counter router_kv_worker_reused_tokens_total = "kv_worker_reused_tokens_total" ["model", "phase"];
    }
    RouterFleet {
        /// Workers that the router knows, by rank.
        gauge router_worker_registered = "worker_registered" ["router_worker_id", "dp_rank", "worker_type"];
        /// Workers of which some rank's cache events are not listened to, though the router goes by them.
        gauge router_kv_event_source_mismatch_workers = "kv_event_source_mismatch_workers" ["model", "target_namespace", "target_component", "target_endpoint", "worker_type"];
        /// Event sockets of engines: connected (active) or not yet, or not now (preconnected).
        gauge router_kv_zmq_ingress_sources = "kv_zmq_ingress_sources" ["state"];
        /// Batches of cache events taken from them.
        counter router_kv_zmq_ingress_batches_total = "kv_zmq_ingress_batches_total" [];
        /// What happened to them: started, activated (connected), disconnected.
        counter router_kv_zmq_ingress_lifecycle_total = "kv_zmq_ingress_lifecycle_total" ["action"];
    }
    Component {
        /// Cache events applied to the index, by outcome.
        counter kv_cache_events_applied = "kv_cache_events_applied" ["event_type", "status"];
        /// Cache events that are odd: blocks stored again by a rank that holds them.
        counter kv_cache_event_warnings = "kv_cache_event_warnings" ["warning_kind"];
    }
    Worker {
        /// Calls of this process's endpoints that were taken.
        counter worker_requests_total = "requests_total" ["dynamo_endpoint"];
        /// Calls that are being answered.
        gauge worker_inflight_requests = "inflight_requests" ["dynamo_endpoint"];
        /// Bytes of the calls.
        counter worker_request_bytes_total = "request_bytes_total" ["dynamo_endpoint"];
        /// How long answers took.
        histogram worker_request_duration_seconds = "request_duration_seconds" ["dynamo_endpoint"] in Buckets::List(&[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0]);
    }
    KvIndexer {
        /// Requests to the indexer.
        counter kvindexer_requests_total = "requests_total" ["endpoint", "method"];
        /// Requests that were refused.
        counter kvindexer_errors_total = "errors_total" ["endpoint", "status_class"];
        /// How long answers took.
        histogram kvindexer_request_duration_seconds = "request_duration_seconds" ["endpoint"] in Buckets::Power { start: 0.0001, factor: 2.0, count: 20 };
        /// Models with their routing groups.
        gauge kvindexer_models = "models" [];
        /// Engines that are registered.
        gauge kvindexer_workers = "workers" [];
        /// Event sockets that are listened to: pending, active, paused or failed.
        gauge kvindexer_listeners = "listeners" ["status"];
    }
    Overhead {
        /// Hashing the prompt's blocks.
        histogram overhead_block_hashing_ms = "block_hashing_ms" [] in COMPUTE_MS;
        /// Asking the index.
        histogram overhead_indexer_find_matches_ms = "indexer_find_matches_ms" [] in ASYNC_MS;
        /// Chaining the hashes.
        histogram overhead_seq_hashing_ms = "seq_hashing_ms" [] in COMPUTE_MS;
        /// Choosing a worker, with any wait in the queue.
        histogram overhead_scheduling_ms = "scheduling_ms" [] in ASYNC_MS;
        /// Asking the cache that all workers share, answered or not.
        histogram overhead_shared_cache_query_ms = "shared_cache_query_ms" [] in ASYNC_MS;
        /// All of it.
        histogram overhead_total_ms = "total_ms" [] in ASYNC_MS;
    }
    RouterTotal {
        /// Questions to the cache that all workers share without an answer, and failures of its events.
        counter shared_cache_errors_total = "shared_cache_errors_total" [];
    }
    Dynamo {
        /// Requests that came, whatever became of them.
        counter tasks_issued_total = "tasks_issued_total" [];
        /// Requests that a worker was chosen for.
        counter tasks_started_total = "tasks_started_total" [];
        /// Requests that were answered.
        counter tasks_success_total = "tasks_success_total" [];
        /// Requests whose client left.
        counter tasks_cancelled_total = "tasks_cancelled_total" [];
        /// Requests that failed otherwise than by overload.
        counter tasks_failed_total = "tasks_failed_total" [];
        /// Requests refused because every worker was busy.
        counter tasks_rejected_total = "tasks_rejected_total" [];
        /// Requests that have no first token yet.
        gauge dynamo_queued_requests = "queued_requests" [];
    }
    Kvasir {
        /// Always 1; carries the version.
        gauge build_info = "build_info" ["version"];
        /// Bytes that the index holds.
        gauge index_bytes = "index_bytes" ["model"];
        /// Blocks that the index believes cached, once for each rank and tier that holds them.
        gauge index_entries = "index_entries" ["model"];
        /// Blocks that the index forgot, since the start, because of its limits.
        gauge index_forgotten = "index_forgotten" ["model"];
        /// Placements that the shadow policy decided, too (`--shadow-policy`), by whether it would have placed them elsewhere.
        counter shadow_placements_total = "shadow_placements_total" ["model", "result"];
        /// Seconds of waiting of all requests, by the time model and since the start, that the shadow's choices would have cost less (`shadow`) or more (`live`) than the real ones. An estimate; no time to first token.
        gauge shadow_regret_seconds = "shadow_regret_seconds" ["model", "better"];
        /// Events that waited too long for the index and were dropped; the rank is resynchronised.
        counter kv_events_dropped_total = "kv_events_dropped_total" ["model"];
        /// What a block that a rank's events predict counts: 1 trusted, 0.5 unproven or discounted, 0 not at all.
        gauge worker_cache_credit = "worker_cache_credit" ["model", "worker_id", "dp_rank"];
        /// 1 for the state that a rank's cache view is in, with the cause of any doubt.
        gauge worker_cache_state = "worker_cache_state" ["model", "worker_id", "dp_rank", "state", "cause"];
        /// Share of lately predicted tokens that were wrong, by likely cause; the sum is the whole error.
        gauge worker_prediction_error = "worker_prediction_error" ["model", "worker_id", "dp_rank", "cause"];
        /// Answers compared with what events had predicted, by what that showed.
        counter worker_predictions_total = "worker_predictions_total" ["model", "worker_id", "dp_rank", "finding"];
        /// Whether a rank's event socket is connected.
        gauge worker_events_connected = "worker_events_connected" ["model", "worker_id", "dp_rank"];
        /// What went wrong with a rank's stream of events, by kind.
        counter kv_event_faults_total = "kv_event_faults_total" ["model", "worker_id", "dp_rank", "kind"];
        /// Whether the discovery backend is in reach; while it is not, the workers that were known go on serving.
        gauge discovery_up = "discovery_up" ["backend"];
        /// Other replicas of this router that are in reach.
        gauge replicas = "replicas" [];
        /// What replicas tell each other of bookings and sessions: `sent`, `received`, `dropped` for want of room, `refused` past a bound.
        counter replica_events_total = "replica_events_total" ["outcome"];
        /// What came of comparing a rank's part of the index with a peer's: `agreed`, `differed`, and `mended` by taking over the peer's.
        counter replica_index_checks_total = "replica_index_checks_total" ["outcome"];
        /// Ranks of which a connected peer holds something else at the same place of their events.
        gauge replica_ranks_differing = "replica_ranks_differing" [];
        /// Questions to the index of another router: answered, error, late, busy (too many), away (not asked for now), nobody (none is served).
        counter remote_index_queries_total = "remote_index_queries_total" ["result"];
        /// Routing decisions for the index of another router: recorded, failed, dropped (too many), nobody (none takes them).
        counter remote_index_records_total = "remote_index_records_total" ["result"];
        /// Questions of other routers about our index: answered, refused.
        counter index_queries_served_total = "index_queries_served_total" ["result"];
        /// Questions to the cache that all workers share: answered, error, late, busy (too many), away (not asked for now).
        counter shared_cache_queries_total = "shared_cache_queries_total" ["result"];
        /// Changes of the workers file that could not be taken over; the workers stayed as they were.
        counter workers_file_rejected_total = "workers_file_rejected_total" [];
        /// Prompts read for routing, by what they became tokens by: the client's ids, a folder, the engine, or bytes.
        counter prompts_read_total = "prompts_read_total" ["model", "source"];
        /// Whether a model's chat template or tokenizer took too long, so that its prompts are routed without it for a while.
        gauge tokenizer_resting = "tokenizer_resting" ["model"];
        /// Beginnings of next turns that clients asked to be computed ahead (`speculative_prefill`), by how that ended.
        counter speculative_prefills_total = "speculative_prefills_total" ["model", "outcome"];
        /// Answers that broke off and were not continued elsewhere although `--migration-limit` is set, by why.
        counter migration_refused_total = "migration_refused_total" ["model", "reason"];
        /// Prompts of models that have prefill workers, by who computed them and how: `answer` or `bootstrap` (a prefill worker, handed over so), `whole` (a prefill worker, whose token was all of the answer), `decode_worker` (after a prefill worker failed), `short_prompt` or `prefill_busy` (past the prefill workers).
        counter prefill_paths_total = "prefill_paths_total" ["model", "path"];
        /// Bytes that the bodies of requests in flight take; bodies up to 64 KiB are not counted.
        gauge http_body_bytes = "http_body_bytes" [];
        /// Requests that reached a limit of the server, by limit.
        counter limit_reached_total = "limit_reached_total" ["limit"];
        /// Log lines dropped because standard error was not read fast enough, or not at all.
        counter log_lines_dropped = "log_lines_dropped_total" [];
    }
}

impl Metrics {
    /// The page that `/metrics` answers with.
    pub fn render(&self, out: &mut String) -> Result<(), prometheus::Error> {
        let mut families = self.registry.gather();
        name_pools(&mut families);
        TextEncoder::new().encode_utf8(&families, out)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{Identity, LogBounds};

    fn prefixed(prefix: &str) -> MetricOptions {
        let identity = Identity {
            frontend_prefix: prefix.into(),
            ..Identity::default()
        };
        MetricOptions {
            identity,
            ..MetricOptions::default()
        }
    }

    #[test]
    fn every_name_is_registered_once_under_its_prefix() {
        let options = prefixed("mine");
        let metrics = Metrics::new(&options).unwrap();
        metrics.active_requests.with_label_values(&["m"]).set(1.0);
        let names: HashSet<String> = SPECS.iter().map(|s| s.name(&options.identity)).collect();
        assert_eq!(names.len(), SPECS.len());
        let mut page = String::new();
        metrics.render(&mut page).unwrap();
        assert!(
            page.contains("mine_active_requests{model=\"m\"} 1"),
            "{page}"
        );
        assert!(page.contains("dynamo_tasks_issued_total 0"), "{page}");
        assert!(
            page.contains("dynamo_component_router_requests_total{dynamo_component=\"backend\"")
        );
    }

    #[test]
    fn a_model_that_is_forgotten_has_no_series_and_others_keep_theirs() {
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        for model in ["m", "model", "m2", "m3"] {
            metrics.active_requests.with_label_values(&[model]).set(1.0);
            let ended = [model, "completions", "unary", "error", "internal"];
            metrics.requests_total.with_label_values(&ended).inc();
            let latency = &metrics.request_duration_seconds;
            latency.with_label_values(&[model]).observe(1.0);
            let state = ["m", model, "0", "exact", ""];
            metrics
                .worker_cache_state
                .with_label_values(&state)
                .set(1.0);
        }
        let of = |model: &str| {
            let mut page = String::new();
            metrics.render(&mut page).unwrap();
            let label = format!("model=\"{model}\"");
            page.lines().filter(|line| line.contains(&label)).count()
        };
        let before = (of("model"), of("m2"));
        assert!(of("m") > before.0 && before.0 > 10 && before.0 == before.1);
        metrics.forget_models(&["m".into(), "m3".into(), "never".into()].into());
        assert_eq!((of("m"), of("model"), of("m2")), (0, before.0, before.1));
        assert_eq!(of("m3"), 0);
    }

    /// Reference: what a router by cache measures is not on the page of one that does not go by cache, but for
    /// the router's own series, which stay at zero.
    #[test]
    fn without_routing_by_cache_its_series_are_not_shown() {
        let page = |by_cache| {
            let metrics = Metrics::new(&MetricOptions {
                by_cache,
                ..MetricOptions::default()
            });
            let metrics = metrics.unwrap();
            let class = ["m", "decode", "default"];
            let pending = &metrics.router_queue_pending_requests;
            pending.with_label_values(&class).set(1.0);
            let applied = &metrics.kv_cache_events_applied;
            applied.with_label_values(&["stored", "ok"]).inc();
            let mut page = String::new();
            metrics.render(&mut page).unwrap();
            page
        };
        let (with, without) = (page(true), page(false));
        for name in [
            "dynamo_router_overhead_total_ms_count",
            "dynamo_component_kv_cache_events_applied{",
            "dynamo_frontend_router_queue_pending_requests{",
        ] {
            assert!(with.contains(name), "{name}");
            assert!(!without.contains(name), "{name}");
        }
        for page in [with, without] {
            assert!(page.contains("dynamo_component_router_requests_total{"));
        }
    }

    #[test]
    fn an_operators_bounds_are_those_of_the_page() {
        let mut options = MetricOptions::default();
        options.bounds.ttft = LogBounds {
            min: 0.01,
            max: 10.0,
            count: 4,
        };
        let metrics = Metrics::new(&options).unwrap();
        let first = &metrics.time_to_first_token_seconds;
        first.with_label_values(&["m"]).observe(0.5);
        let mut page = String::new();
        metrics.render(&mut page).unwrap();
        let bounds: Vec<&str> = page
            .lines()
            .filter_map(|line| {
                line.strip_prefix("dynamo_frontend_time_to_first_token_seconds_bucket")
            })
            .filter_map(|line| line.split("le=\"").nth(1)?.split('"').next())
            .collect();
        assert_eq!(bounds, ["0", "0.1", "1", "10", "+Inf"]);
        // The router's own have bounds of their own.
        assert!(page.contains("dynamo_component_router_time_to_first_token_seconds_bucket"));
        assert!(page.contains("le=\"480\""));
    }

    #[test]
    fn a_bad_prefix_is_an_error_and_not_a_panic() {
        assert!(Metrics::new(&prefixed("not a name")).is_err());
    }
}
