//! What was last seen of each rank of a model's workers.
//!
//! What always holds: a rank that has left has no series, though answers of it may still end.

use std::collections::HashMap;
use std::sync::{OnceLock, PoisonError, RwLock};

use kvasir_telemetry::{Gauge, GaugeVec, Metrics};
use kvasir_types::WorkerRank;

/// The series of ranks.
#[derive(Debug)]
pub(super) struct Ranks {
    metrics: Metrics,
    /// What their workers are called.
    worker_type: &'static str,
    members: RwLock<HashMap<WorkerRank, RankGauges>>,
}

/// Made when there is something to show.
#[derive(Debug, Default)]
struct RankGauges {
    input_tokens: OnceLock<Gauge>,
    latencies: OnceLock<[Gauge; 2]>,
}

impl Ranks {
    pub(super) fn new(metrics: &Metrics, worker_type: &'static str) -> Self {
        Self {
            metrics: metrics.clone(),
            worker_type,
            members: RwLock::default(),
        }
    }

    /// A rank is there; `routed`: it is one that a router by cache knows.
    pub(super) fn join(&self, rank: WorkerRank, routed: bool) {
        if routed {
            let registered = &self.metrics.router_worker_registered;
            self.gauge(registered, rank).set(1.0);
        }
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.entry(rank).or_default();
    }

    /// It is gone.
    pub(super) fn leave(&self, rank: WorkerRank) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.remove(&rank);
        let (id, number) = names(rank);
        for series in [
            &self.metrics.router_worker_registered,
            &self.metrics.worker_active_decode_blocks,
            &self.metrics.worker_active_prefill_tokens,
            &self.metrics.worker_last_time_to_first_token_seconds,
            &self.metrics.worker_last_input_sequence_tokens,
            &self.metrics.worker_last_inter_token_latency_seconds,
        ] {
            let _ = series.remove_label_values(&[&*id, &*number, self.worker_type]);
        }
    }

    /// An answer of `rank` ended, with seconds to its first token and between tokens where they were seen.
    pub(super) fn last(&self, rank: WorkerRank, input: u32, latencies: Option<(f64, f64)>) {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = members.get(&rank) else {
            return;
        };
        let tokens = &self.metrics.worker_last_input_sequence_tokens;
        let tokens = last.input_tokens.get_or_init(|| self.gauge(tokens, rank));
        tokens.set(input.into());
        let Some((first, between)) = latencies else {
            return;
        };
        let [first_token, between_tokens] = last.latencies.get_or_init(|| {
            [
                self.gauge(&self.metrics.worker_last_time_to_first_token_seconds, rank),
                self.gauge(&self.metrics.worker_last_inter_token_latency_seconds, rank),
            ]
        });
        first_token.set(first);
        between_tokens.set(between);
    }

    fn gauge(&self, series: &GaugeVec, rank: WorkerRank) -> Gauge {
        let (id, number) = names(rank);
        series.with_label_values(&[&*id, &*number, self.worker_type])
    }

    /// What a rank has to do now.
    pub(super) fn load(&self, rank: WorkerRank, blocks: f64, tokens: f64) {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        if !members.contains_key(&rank) {
            return;
        }
        self.gauge(&self.metrics.worker_active_decode_blocks, rank)
            .set(blocks);
        self.gauge(&self.metrics.worker_active_prefill_tokens, rank)
            .set(tokens);
    }
}

fn names(rank: WorkerRank) -> (String, String) {
    (rank.worker.to_string(), rank.rank.to_string())
}
