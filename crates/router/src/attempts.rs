//! The attempts at one request: what follows when a worker fails it.
//!
//! Answers one question: may another worker be asked, and what is it told? [`Attempts`] is a value without I/O and without a
//! clock; the table in its tests lists every cause, phase and kind of request.
//!
//! What always holds: a request that may have been run and is not idempotent is not sent again; a worker that failed it is not
//! chosen again while others are left; a request is sent at most `1 + retries + resumes` times. A request under which two workers
//! failed, one after the other, is not sent to a third: it may be what kills them.

use kvasir_types::{FailureCause, Retry, WorkerId};

use crate::input::{Arrival, Outcome};

/// Tokens after which a worker that goes on with an answer has shown that it can run the request. If it fails later, that is held
/// against the worker, not against the request.
pub const PROGRESS_TOKENS: u32 = 16;

/// How far an answer has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// No worker has begun to answer; the client has received nothing.
    #[default]
    Opening,
    /// A worker is answering.
    Streaming,
    /// A worker failed while it was answering, and another is asked for the rest.
    Resuming,
}

/// How often a request may be sent again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttemptLimits {
    /// Times before an answer has begun (`--retry-limit`).
    pub retries: u32,
    /// Times after it has begun (`--migration-limit`).
    pub resumes: u32,
}

/// What follows when a worker fails a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NextStep {
    /// Another worker is asked. In [`Phase::Resuming`] it is asked for the rest of the answer.
    TryNext,
    /// No other worker is asked.
    GiveUp(GiveUp),
}

/// Why no other worker is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GiveUp {
    /// Every worker would fail alike.
    Rejected,
    /// The request may have been run, and must not be run twice.
    MayHaveRun,
    /// Two workers failed under the request, one after the other: it may be what made them fail.
    FailedTwice,
    /// The limit is reached.
    Limit,
}

/// The attempts at one request, from its first one to the end of its answer.
///
/// ```
/// use kvasir_router::{AttemptLimits, Attempts, GiveUp, NextStep, Outcome};
/// use kvasir_types::{FailureCause, WorkerId};
///
/// let limits = AttemptLimits { retries: 1, resumes: 0 };
/// let mut attempts = Attempts::new(limits, true);
/// let (outcome, next) = attempts.fail(WorkerId(1), FailureCause::Connect);
/// assert_eq!((outcome, next), (Outcome::Unreachable, NextStep::TryNext));
/// let (_, next) = attempts.fail(WorkerId(2), FailureCause::Connect);
/// assert_eq!(next, NextStep::GiveUp(GiveUp::Limit));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    /// What is left of the limits.
    left: AttemptLimits,
    /// A second run does no harm.
    idempotent: bool,
    phase: Phase,
    /// Workers that failed it, oldest first.
    failed: Vec<WorkerId>,
    last_failure: Option<Outcome>,
    again: bool,
    /// The last worker failed under it, and the request may be why.
    suspect: bool,
    /// Its prompt comes from another worker.
    transfers: bool,
    /// A worker that failed it is not asked again.
    once_each: bool,
}

impl Attempts {
    /// No attempt was made yet. `idempotent`: running the request twice does no harm.
    #[must_use]
    pub const fn new(limits: AttemptLimits, idempotent: bool) -> Self {
        Self {
            left: limits,
            idempotent,
            phase: Phase::Opening,
            failed: Vec::new(),
            last_failure: None,
            again: false,
            suspect: false,
            transfers: false,
            once_each: false,
        }
    }

    /// The next attempts take the prompt over from another worker: what may have been taken is not taken twice, and an engine that
    /// fails then may be in want of what it was to take.
    pub const fn begin_transfer(&mut self) {
        (self.idempotent, self.transfers) = (false, true);
    }

    /// No worker is asked twice, though no other is left: somebody else does what it does not.
    pub const fn ask_once_each(&mut self) {
        self.once_each = true;
    }

    /// A worker has the prompt, and answers.
    pub const fn end_transfer(&mut self) {
        if self.transfers {
            (self.idempotent, self.transfers) = (true, false);
        }
    }

    /// How far the answer has come.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// A worker has begun to answer.
    pub const fn first_byte(&mut self) {
        self.phase = Phase::Streaming;
    }

    /// A worker that goes on with the answer has generated `tokens` of it. After [`PROGRESS_TOKENS`] the failure before it was not the
    /// request's fault.
    pub const fn progressed(&mut self, tokens: u32) {
        if tokens >= PROGRESS_TOKENS {
            self.suspect = false;
        }
    }

    /// Workers that failed the request, oldest first.
    #[must_use]
    pub fn failed_workers(&self) -> &[WorkerId] {
        &self.failed
    }

    /// Times that a worker has failed the request.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.failed.len()
    }

    /// Tells the router what it must know to choose the next worker.
    pub fn describe(&self, arrival: &mut Arrival) {
        arrival.failed.clone_from(&self.failed);
        arrival.last_failure = self.last_failure;
        arrival.again = self.again;
        arrival.resumed = self.phase == Phase::Resuming;
    }

    /// What would follow a failure. Nothing changes.
    #[must_use]
    pub const fn next_step(&self, cause: FailureCause) -> NextStep {
        let give_up = match cause.retry() {
            Retry::Never | Retry::After(_) => Some(GiveUp::Rejected),
            Retry::Elsewhere | Retry::IfIdempotent if self.idempotent => None,
            Retry::Elsewhere if !matches!(self.phase, Phase::Streaming) => None,
            Retry::Elsewhere | Retry::IfIdempotent => Some(GiveUp::MayHaveRun),
        };
        let left = match self.phase {
            Phase::Opening => self.left.retries,
            Phase::Streaming | Phase::Resuming => self.left.resumes,
        };
        match (give_up, left) {
            (Some(why), _) => NextStep::GiveUp(why),
            (None, _) if self.suspect && cause.suspects_request() => {
                NextStep::GiveUp(GiveUp::FailedTwice)
            }
            (None, 0) => NextStep::GiveUp(GiveUp::Limit),
            (None, _) => NextStep::TryNext,
        }
    }

    /// How an attempt ends for the router that fails so. An error that two workers answer with is the request's, and not held against the
    /// second.
    #[must_use]
    pub const fn outcome(&self, cause: FailureCause) -> Outcome {
        match Outcome::of_failure(cause) {
            Outcome::Broken if self.suspect => Outcome::Failed,
            // A worker that waits for another's cache breaks off when that one is gone.
            _ if self.transfers && cause.suspects_request() => Outcome::Failed,
            outcome => outcome,
        }
    }

    /// `worker` failed the request: how its attempt ended for the router, and what follows. [`NextStep::TryNext`] uses up one of
    /// the attempts that are left.
    pub fn fail(&mut self, worker: WorkerId, cause: FailureCause) -> (Outcome, NextStep) {
        let outcome = self.outcome(cause);
        let next = self.next_step(cause);
        self.suspect |= cause.suspects_request();
        self.failed.push(worker);
        self.last_failure = Some(outcome);
        self.again = self.phase == Phase::Opening && may_recover(cause) && !self.once_each;
        let left = match self.phase {
            Phase::Opening => &mut self.left.retries,
            Phase::Streaming | Phase::Resuming => {
                self.phase = Phase::Resuming;
                &mut self.left.resumes
            }
        };
        if next == NextStep::TryNext {
            *left = left.saturating_sub(1);
        }
        (outcome, next)
    }
}

impl Outcome {
    /// How an attempt ended that failed so.
    #[must_use]
    pub const fn of_failure(cause: FailureCause) -> Self {
        match cause {
            FailureCause::Rejected => Self::Failed,
            FailureCause::EngineFailed | FailureCause::BadGateway | FailureCause::ErrorEvent => {
                Self::Broken
            }
            FailureCause::Local => Self::NotSent,
            FailureCause::Overloaded => Self::Overloaded,
            FailureCause::Absent
            | FailureCause::Connect
            | FailureCause::Disconnected
            | FailureCause::WorkerLost
            | FailureCause::Timeout => Self::Unreachable,
        }
    }
}

/// Whether the worker may take the request after all, if nobody else is left. A worker that is gone does not, and one that was
/// silent has had its time.
const fn may_recover(cause: FailureCause) -> bool {
    matches!(
        cause,
        FailureCause::Connect
            | FailureCause::Disconnected
            | FailureCause::ErrorEvent
            | FailureCause::Local
    )
}

#[cfg(test)]
mod tests;
