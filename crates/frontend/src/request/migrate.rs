//! Requests that move to another worker: when that is allowed, and how it is counted.
//!
//! What always holds: a move that began is counted once as a success, a failure, or a client that left
//! meanwhile.

use std::sync::Arc;

use kvasir_telemetry::{Clock, Metrics};
use kvasir_types::Time;

use crate::observe::observer::Observer;

/// How far answers that have begun are continued elsewhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct MigrationOptions {
    /// Times that one answer may go on at another worker (`--migration-limit`); 0 is never.
    pub limit: u32,
    /// Tokens of prompt and answer past which an answer is not continued (`--migration-max-seq-len`).
    pub max_seq_len: Option<u32>,
}

impl MigrationOptions {
    /// Whether prompt and answer are too long together.
    pub(crate) fn is_too_long(&self, prompt_tokens: u32, generated: u32) -> bool {
        let length = prompt_tokens.saturating_add(generated);
        self.max_seq_len.is_some_and(|longest| length > longest)
    }
}

/// Whether the client has seen something of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It has not.
    New,
    /// It has.
    Ongoing,
}

impl Stage {
    const fn label(self) -> &'static str {
        match self {
            Self::New => "new_request",
            Self::Ongoing => "ongoing_request",
        }
    }
}

/// A request on its way from a worker that failed it to another. Dropped, its client has left.
#[derive(Debug)]
pub(crate) struct Move {
    metrics: Metrics,
    clock: Clock,
    model: Arc<str>,
    stage: Stage,
    since: Time,
    ended: bool,
}

impl Move {
    /// A worker failed a request of `model`.
    pub(crate) fn begin(observer: &Observer, model: &Arc<str>, stage: Stage) -> Self {
        Self {
            metrics: observer.metrics().clone(),
            clock: observer.clock(),
            model: Arc::clone(model),
            stage,
            since: observer.clock().now(),
            ended: false,
        }
    }

    /// Another worker is tried.
    pub(crate) fn attempt(&self) {
        let labels = [&*self.model, self.stage.label()];
        self.metrics
            .model_migration_total
            .with_label_values(&labels)
            .inc();
    }

    /// The other worker answers, or none does.
    pub(crate) fn settle(mut self, answers: bool) {
        self.end(if answers { "success" } else { "failure" });
    }

    fn end(&mut self, outcome: &str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let labels = [&*self.model, self.stage.label(), outcome];
        let took = (self.clock.now() - self.since).as_secs_f64();
        self.metrics
            .model_migration_duration_seconds
            .with_label_values(&labels)
            .observe(took);
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        self.end("cancelled");
    }
}

/// Why an answer that broke off was not continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stay {
    /// What the client asked for cannot be continued.
    NotLegal(&'static str),
    /// It is too long.
    TooLong,
    /// It has moved often enough.
    Limit,
}

impl Stay {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::NotLegal(why) => why,
            Self::TooLong => "max_seq_len",
            Self::Limit => "limit",
        }
    }
}

/// Counts an answer that breaks off for its client, where continuing was asked for: `limit` is not 0.
pub(crate) fn count_stay(observer: &Observer, limit: u32, model: &str, why: Stay) {
    if limit == 0 {
        return;
    }
    let labels = [model, why.label()];
    observer
        .metrics()
        .migration_refused_total
        .with_label_values(&labels)
        .inc();
    tracing::warn!(
        model,
        reason = why.label(),
        "an answer that broke off is not continued"
    );
}

/// Counts an answer that has grown past what may be continued.
pub(crate) fn count_too_long(observer: &Observer, model: &str) {
    observer
        .metrics()
        .model_migration_max_seq_len_exceeded_total
        .with_label_values(&[model])
        .inc();
}
