//! Why a request got no worker.

use kvasir_types::{DpRank, Fault, Retry, WorkerId};

/// Which bound of a queue was hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum LimitKind {
    /// Requests waiting.
    Requests,
    /// Prompt tokens waiting.
    RawIslTokens,
    /// Cached prompt tokens waiting.
    CachedTokens,
    /// Milliseconds that this request has waited.
    WaitMs,
}

impl LimitKind {
    /// As `details.limit_kind` spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::RawIslTokens => "raw_isl_tokens",
            Self::CachedTokens => "cached_tokens",
            Self::WaitMs => "wait_ms",
        }
    }
}

/// Why a request got no worker.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// No worker may serve it: none is there, or the constraints leave none.
    #[error("no worker can serve this request: {known} known, {down} marked down, none eligible")]
    NoEndpoints {
        /// Workers registered.
        known: u32,
        /// Of those, hidden after a fault.
        down: u32,
    },
    /// Every worker that could serve it is over a busy threshold.
    #[error("All workers are busy, please retry later")]
    AllEligibleWorkersOverloaded {
        /// How many would have been eligible.
        workers: u32,
        /// By when what they have to compute now is expected to be done, where that was learned.
        retry_after_ms: Option<u64>,
    },
    /// The worker that the request names is over a busy threshold.
    #[error(
        "worker {0}, which the request names, is busy; retry later or leave the choice to the router"
    )]
    PinnedWorkerOverloaded(WorkerId),
    /// The worker that the request names is not in its own allow-list.
    #[error("worker {0} is named by the request but not among its allowed workers")]
    PinnedWorkerNotAllowed(WorkerId),
    /// The worker that the request names is not there, or fails its required taints.
    #[error("worker {0}, which the request names, is not a member or lacks a required taint")]
    PinnedWorkerUnknown(WorkerId),
    /// The rank that the request names is not served by the worker it names.
    #[error("worker {worker} serves ranks {first}..{end}, not {rank}")]
    PinnedRankUnknown {
        /// The worker.
        worker: WorkerId,
        /// The rank asked for.
        rank: DpRank,
        /// First rank it serves.
        first: u32,
        /// One past the last.
        end: u32,
    },
    /// The request names a worker with several ranks and no rank. Never guessed.
    #[error("worker {worker} has {ranks} data-parallel ranks; name one with dp_rank")]
    PinnedRankMissing {
        /// The worker.
        worker: WorkerId,
        /// How many it has.
        ranks: u32,
    },
    /// `direct` mode and no worker named.
    #[error("router mode `direct` needs a worker id in each request")]
    WorkerIdMissing,
    /// A prompt of no tokens.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// An override that no setting could have.
    #[error("override `{name}` cannot be {value}: it must be finite and at least 0")]
    InvalidOverride {
        /// The field.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// A bound of the queue, not the threshold: that one only defers.
    #[error("queue of class `{policy_class}` is full: {current} of {limit} {}", limit_kind.name())]
    QueueLimit {
        /// Whose queue.
        policy_class: String,
        /// Which bound.
        limit_kind: LimitKind,
        /// Where it stands.
        current: u64,
        /// Where it ends.
        limit: u64,
        /// By when those who wait now are expected to be served, where that was learned.
        retry_after_ms: Option<u64>,
    },
    /// It would wait, or has waited, for too long.
    #[error("the queue is too slow: {expected_ms} ms to wait, {limit_ms} ms are allowed")]
    QueueTooSlow {
        /// How long it would have to wait, or has waited.
        expected_ms: u64,
        /// How long it may.
        limit_ms: u64,
        /// It did not wait: it was refused as it came.
        predicted: bool,
        /// By when those who wait now are expected to have a worker.
        retry_after_ms: u64,
    },
    /// Each eligible worker has failed this request already, the last one because it was full.
    #[error("every eligible worker refused the request as overloaded")]
    FailedWorkersOverloaded,
    /// Each eligible worker has failed this request already.
    #[error("every eligible worker has failed this request")]
    FailedWorkersUnavailable,
    /// A request with this id is running or waiting.
    #[error("request id is in use")]
    DuplicateRequest,
}

impl RouteError {
    /// When a client should come back after an overload.
    pub const RETRY_AFTER_MS: u64 = 1000;

    /// Who caused it.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::NoEndpoints { .. }
            | Self::AllEligibleWorkersOverloaded { .. }
            | Self::PinnedWorkerOverloaded(_)
            | Self::QueueLimit { .. }
            | Self::QueueTooSlow { .. } => Fault::Router,
            Self::FailedWorkersOverloaded | Self::FailedWorkersUnavailable => Fault::Worker,
            Self::PinnedWorkerNotAllowed(_)
            | Self::PinnedWorkerUnknown(_)
            | Self::PinnedRankUnknown { .. }
            | Self::PinnedRankMissing { .. }
            | Self::WorkerIdMissing
            | Self::EmptyPrompt
            | Self::InvalidOverride { .. }
            | Self::DuplicateRequest => Fault::Client,
        }
    }

    /// Whether another attempt makes sense.
    #[must_use]
    pub fn retry(&self) -> Retry {
        match self.fault() {
            Fault::Client => Retry::Never,
            Fault::Router => Retry::After(self.retry_after_ms()),
            Fault::Worker => Retry::After(Self::RETRY_AFTER_MS),
        }
    }

    /// When a client should come back after this overload.
    #[must_use]
    pub fn retry_after_ms(&self) -> u64 {
        match self {
            Self::QueueTooSlow { retry_after_ms, .. } => *retry_after_ms,
            Self::QueueLimit { retry_after_ms, .. }
            | Self::AllEligibleWorkersOverloaded { retry_after_ms, .. } => {
                retry_after_ms.unwrap_or(Self::RETRY_AFTER_MS)
            }
            _ => Self::RETRY_AFTER_MS,
        }
    }

    /// Whether it is overload (Dynamo's body), not absence.
    #[must_use]
    pub fn is_overload(&self) -> bool {
        matches!(
            self,
            Self::AllEligibleWorkersOverloaded { .. }
                | Self::PinnedWorkerOverloaded(_)
                | Self::QueueLimit { .. }
                | Self::QueueTooSlow { .. }
                | Self::FailedWorkersOverloaded
        )
    }
}
