//! An index that counts what becomes of each cache event.

use std::sync::Arc;

use kvasir_index::{ApplyError, Index};
use kvasir_kv_events::Cache;
use kvasir_telemetry::{IntCounter, Metrics};
use kvasir_types::{KvEvent, WorkerRank};

/// What an event that was applied is counted as.
const OK: &str = "ok";

/// An index and its counters. Those of events that went well are looked up once, here, and not for each of a
/// hundred thousand events a second.
#[derive(Debug)]
pub struct CountedIndex {
    index: Arc<Index>,
    metrics: Metrics,
    stored: IntCounter,
    removed: IntCounter,
    cleared: IntCounter,
}

impl CountedIndex {
    /// Counts what is applied to `index`.
    #[must_use]
    pub fn new(index: &Arc<Index>, metrics: &Metrics) -> Self {
        let counter = |event: &str| {
            let applied = &metrics.kv_cache_events_applied;
            applied.with_label_values(&[event, OK])
        };
        Self {
            index: Arc::clone(index),
            metrics: metrics.clone(),
            stored: counter("stored"),
            removed: counter("removed"),
            cleared: counter("cleared"),
        }
    }
}

impl Cache for CountedIndex {
    fn apply(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        let outcome = self.index.apply(rank, event);
        let (kind, applied) = match event {
            KvEvent::Stored { .. } => ("stored", &self.stored),
            KvEvent::Removed { .. } => ("removed", &self.removed),
            KvEvent::Cleared { .. } => ("cleared", &self.cleared),
        };
        let status = match &outcome {
            Ok(_) => {
                applied.inc();
                return outcome;
            }
            Err(ApplyError::ParentBlockNotFound(_)) => "parent_block_not_found",
            Err(ApplyError::BlockNotFound(_)) => "block_not_found",
            Err(_) => "invalid_block",
        };
        if let Err(error) = &outcome {
            tracing::debug!(%rank, %error, "cache event not applied");
        }
        let failed = &self.metrics.kv_cache_events_applied;
        failed.with_label_values(&[kind, status]).inc();
        outcome
    }

    fn remove_rank(&self, rank: WorkerRank) {
        self.index.remove_rank(rank);
    }
}
