//! What an engine does, as reports of a worker.

use std::sync::Arc;

use kvasir_engine::{CacheEvent, Load, Step};
use kvasir_types::{RequestId, WorkerRank};
use kvasir_wire::native::{QueuedWork, ScheduledWork};
use kvasir_worker::Reports;

use crate::Observer;

/// Tells the reports of a worker what its engine does.
pub struct PlaneReporter {
    reports: Arc<Reports>,
}

impl PlaneReporter {
    /// Tells these reports.
    #[must_use]
    pub const fn new(reports: Arc<Reports>) -> Self {
        Self { reports }
    }
}

impl Observer for PlaneReporter {
    fn cache_event(&self, rank: WorkerRank, _: u64, event: &CacheEvent) {
        self.reports.cache_event(rank.rank, event.event.clone());
    }

    fn step_ended(&self, rank: WorkerRank) {
        self.reports.step_ended(rank.rank);
    }

    fn first_token(&self, rank: WorkerRank, request: RequestId) {
        self.reports.first_token(rank.rank, request);
    }

    fn stepped(&self, rank: WorkerRank, step: &Step, load: &Load) {
        let scheduled = ScheduledWork {
            work: QueuedWork {
                prefill_requests: step.started.len() as u64,
                prefill_tokens: u64::from(step.prefill_tokens),
                decode_requests: u64::from(step.decodes),
                ..QueuedWork::default()
            },
            ..ScheduledWork::default()
        };
        let queued = QueuedWork {
            prefill_requests: u64::from(load.waiting),
            prefill_tokens: load.pending_prefill_tokens,
            ..QueuedWork::default()
        };
        self.reports
            .forward_pass(rank.rank, step.duration, scheduled, queued);
    }

    fn load(&self, rank: WorkerRank, load: &Load) {
        let used = u64::from(load.used_blocks);
        self.reports.used_blocks(rank.rank, used);
    }

    fn restarted(&self, rank: WorkerRank) {
        self.reports.restarted(rank.rank);
    }
}
