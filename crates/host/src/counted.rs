//! An index that counts what becomes of each cache event.

use std::sync::Arc;

use kvasir_index::{ApplyError, Index};
use kvasir_kv_events::Cache;
use kvasir_telemetry::{IntCounter, Metrics};
use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::native::RouterEvent;

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

impl CountedIndex {
    fn applied(&self, event: &KvEvent) -> &IntCounter {
        match event {
            KvEvent::Stored { .. } => &self.stored,
            KvEvent::Removed { .. } => &self.removed,
            KvEvent::Cleared { .. } => &self.cleared,
        }
    }

    fn refused(&self, rank: WorkerRank, event: &KvEvent, error: &ApplyError) {
        let kind = match event {
            KvEvent::Stored { .. } => "stored",
            KvEvent::Removed { .. } => "removed",
            KvEvent::Cleared { .. } => "cleared",
        };
        let status = match error {
            ApplyError::ParentBlockNotFound(_) => "parent_block_not_found",
            ApplyError::BlockNotFound(_) => "block_not_found",
            _ => "invalid_block",
        };
        tracing::debug!(%rank, %error, "cache event not applied");
        let failed = &self.metrics.kv_cache_events_applied;
        failed.with_label_values(&[kind, status]).inc();
    }
}

impl Cache for CountedIndex {
    fn apply(&self, rank: WorkerRank, event: &KvEvent, copies: bool) -> Result<(), ApplyError> {
        let outcome = Cache::apply(&*self.index, rank, event, copies);
        match &outcome {
            Ok(()) => self.applied(event).inc(),
            Err(error) => self.refused(rank, event, error),
        }
        outcome
    }

    fn remove_rank(&self, rank: WorkerRank) {
        self.index.remove_rank(rank);
    }

    fn replace_rank(&self, rank: WorkerRank, events: &[RouterEvent]) -> Vec<(usize, ApplyError)> {
        let refused = Cache::replace_rank(&*self.index, rank, events);
        // What a dump brings are no events; what it could not bring is.
        for (at, error) in &refused {
            if let Some(event) = events.get(*at) {
                self.refused(rank, &event.event, error);
            }
        }
        refused
    }
}
