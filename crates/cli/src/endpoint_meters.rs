//! What is counted of calls to the endpoints of this process.

use std::sync::Arc;

use kvasir_telemetry::{Clock, Gauge, Histogram, Metrics};
use kvasir_transport::{CallObserver, CallWatch};
use kvasir_types::Time;

/// What the endpoints of our processes are called; anything else is `other`.
const NAMES: [&str; 6] = [
    "generate",
    "best_worker_id",
    "get_overlap_scores",
    "clear_kv_blocks",
    "kv_indexer_query",
    "kv_indexer_record_routing_decision",
];
/// Each publisher of cache events has an endpoint of its own that is asked what a cache holds.
const CACHE_QUERY: &str = "worker_kv_query";

/// Counts calls by endpoint.
pub(crate) struct EndpointMeters {
    metrics: Metrics,
    clock: Clock,
}

impl EndpointMeters {
    /// In these series.
    pub(crate) fn new(metrics: &Metrics, clock: Clock) -> Arc<Self> {
        Arc::new(Self {
            metrics: metrics.clone(),
            clock,
        })
    }
}

/// A call that is being answered.
struct Answering {
    inflight: Gauge,
    duration: Histogram,
    clock: Clock,
    began: Time,
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.inflight.dec();
        let took = self.clock.now() - self.began;
        self.duration.observe(took.as_secs_f64());
    }
}

impl CallObserver for EndpointMeters {
    fn begun(&self, path: &str, bytes: usize) -> CallWatch {
        let (metrics, label) = (&self.metrics, [endpoint_of(path)]);
        metrics
            .worker_requests_total
            .with_label_values(&label)
            .inc();
        let received = metrics.worker_request_bytes_total.with_label_values(&label);
        received.inc_by(bytes as u64);
        let inflight = metrics.worker_inflight_requests.with_label_values(&label);
        inflight.inc();
        let duration = &metrics.worker_request_duration_seconds;
        Box::new(Answering {
            inflight,
            duration: duration.with_label_values(&label),
            clock: self.clock,
            began: self.clock.now(),
        })
    }
}

/// The endpoint that a path or a subject names: `7b/dynamo/backend/generate`, `dynamo_backend.generate-7b`.
fn endpoint_of(path: &str) -> &'static str {
    let last = path.rsplit(['/', '.']).next().unwrap_or_default();
    let name = match path.contains('/') {
        true => last,
        false => last.rsplit_once('-').map_or(last, |(name, _)| name),
    };
    let known = NAMES.into_iter().find(|known| *known == name);
    match known {
        Some(known) => known,
        None if name.starts_with(CACHE_QUERY) => CACHE_QUERY,
        None => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_one_of_a_few_names() {
        assert_eq!(endpoint_of("7b/dynamo/backend/generate"), "generate");
        assert_eq!(endpoint_of("dynamo_backend.generate-7b"), "generate");
        let query = "7b/dynamo/backend/worker_kv_query_source_13cfd43a190a3c";
        assert_eq!(endpoint_of(query), "worker_kv_query");
        assert_eq!(
            endpoint_of("dynamo_router.best_worker_id-7b"),
            "best_worker_id"
        );
        assert_eq!(endpoint_of("what/ever"), "other");
    }
}
