//! Requests that migrate to another worker: when that is allowed, and how it is counted.
//!
//! What always holds: a migration that began is counted once, as a success, as a failure, or as cancelled by the client.

use std::sync::Arc;

use kvasir_host::Model;
use kvasir_router::Phase;
use kvasir_telemetry::{Clock, Metrics};
use kvasir_types::Time;

use crate::observe::observer::Observer;

/// Limits on resuming answers at another worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct MigrationOptions {
    /// Times that one answer may be resumed at another worker (`--migration-limit`); 0 is never.
    pub limit: u32,
    /// Nobody set that limit: a model whose workers announce one has theirs.
    pub follows_cards: bool,
    /// Tokens of prompt and answer past which an answer is not resumed (`--migration-max-seq-len`).
    pub max_seq_len: Option<u32>,
}

impl MigrationOptions {
    /// Times that one answer of a model may be resumed at another worker.
    pub(crate) fn limit_of(&self, model: &Model) -> u32 {
        match self.follows_cards {
            true => model.migration_limit.max(self.limit),
            false => self.limit,
        }
    }

    /// Whether prompt and answer are too long together.
    pub(crate) fn is_too_long(&self, prompt_tokens: u32, generated: u32) -> bool {
        let length = prompt_tokens.saturating_add(generated);
        self.max_seq_len.is_some_and(|longest| length > longest)
    }
}

/// A request that migrates from a worker that failed it. Dropped before it is settled, its client has left.
#[derive(Debug)]
pub(crate) struct Migration {
    metrics: Metrics,
    clock: Clock,
    model: Arc<str>,
    /// The label of its kind.
    kind: &'static str,
    since: Time,
    ended: bool,
}

impl Migration {
    /// A worker failed a request of `model`, whose answer has come as far as `phase`.
    pub(crate) fn begin(observer: &Observer, model: &Arc<str>, phase: Phase) -> Self {
        Self {
            metrics: observer.metrics().clone(),
            clock: observer.clock(),
            model: Arc::clone(model),
            kind: match phase {
                Phase::Opening => "new_request",
                Phase::Streaming | Phase::Resuming => "ongoing_request",
            },
            since: observer.clock().now(),
            ended: false,
        }
    }

    /// Another worker is tried.
    pub(crate) fn attempt(&self) {
        let labels = [&*self.model, self.kind];
        self.metrics
            .model_migration_total
            .with_label_values(&labels)
            .inc();
    }

    /// Another worker answers, or none does.
    pub(crate) fn settle(mut self, answers: bool) {
        self.end(if answers { "success" } else { "failure" });
    }

    fn end(&mut self, outcome: &str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let labels = [&*self.model, self.kind, outcome];
        let took = (self.clock.now() - self.since).as_secs_f64();
        self.metrics
            .model_migration_duration_seconds
            .with_label_values(&labels)
            .observe(took);
    }
}

impl Drop for Migration {
    fn drop(&mut self) {
        self.end("cancelled");
    }
}

/// Why an answer whose worker failed is not resumed at another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResumeObstacle {
    /// What the client asked for cannot be resumed.
    NotLegal(&'static str),
    /// It is too long.
    TooLong,
    /// Two workers failed under it, one after the other.
    FailedTwice,
    /// The limit of `--migration-limit`, or of the model's card, is reached.
    Limit,
}

impl ResumeObstacle {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::NotLegal(why) => why,
            Self::TooLong => "max_seq_len",
            Self::FailedTwice => "failed_twice",
            Self::Limit => "limit",
        }
    }
}

/// Counts an answer that is not resumed, where migration is enabled: `limit` is not 0.
pub(crate) fn count_obstacle(observer: &Observer, limit: u32, model: &str, why: ResumeObstacle) {
    if limit == 0 {
        return;
    }
    let labels = [model, why.label()];
    observer
        .metrics()
        .migration_refused_total
        .with_label_values(&labels)
        .inc();
    tracing::warn!(model, reason = why.label(), "answer is not resumed");
}

/// Counts an answer that has grown too long to be resumed.
pub(crate) fn count_too_long(observer: &Observer, model: &str) {
    observer
        .metrics()
        .model_migration_max_seq_len_exceeded_total
        .with_label_values(&[model])
        .inc();
}
