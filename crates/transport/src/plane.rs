//! The request plane: one trait, however a worker is reached.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use kvasir_types::{AttemptError, FailureCause, TokenRequest, WorkerId};

use crate::TokenStream;

/// What [`RequestPlane::send`] returns.
pub type SendFuture<'a> =
    Pin<Box<dyn Future<Output = Result<TokenStream, PlaneError>> + Send + 'a>>;

/// A way to reach token workers.
pub trait RequestPlane: Send + Sync + 'static {
    /// Hands `request` to `worker`. `Ok` means that the worker has it; its tokens follow in the stream.
    /// Dropping the future or the stream cancels the request.
    fn send(&self, worker: WorkerId, request: TokenRequest) -> SendFuture<'_>;
}

/// Why a worker's answer failed, before its first token or after.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlaneError {
    /// Nothing is registered under this id (any more).
    #[error("worker {0} is not there")]
    Gone(WorkerId),
    /// No connection could be made; nothing was sent.
    #[error("worker {worker} cannot be reached: {why}")]
    Connect {
        /// Which worker.
        worker: WorkerId,
        /// What the connection failed with.
        why: String,
    },
    /// The worker does not serve the endpoint; nothing was run.
    #[error("worker {worker} refused the request: {why}")]
    Refused {
        /// Which worker.
        worker: WorkerId,
        /// Its own words.
        why: String,
    },
    /// The worker has as many requests as it takes.
    #[error("worker {0} is at capacity")]
    Overloaded(WorkerId),
    /// The worker took the request and could not begin to answer it.
    #[error("worker {worker} could not begin its answer: {why}")]
    NotStarted {
        /// Which worker.
        worker: WorkerId,
        /// Its own words.
        why: String,
    },
    /// The worker was silent for too long.
    #[error("worker {worker} did not {step} in time")]
    Timeout {
        /// Which worker.
        worker: WorkerId,
        /// What was waited for.
        step: AnswerStep,
    },
    /// The worker vanished before the answer was complete.
    #[error("worker {0} closed the stream before the answer was complete")]
    Disconnected(WorkerId),
    /// The worker sent what cannot be understood.
    #[error("worker {worker} broke the protocol: {why}")]
    Protocol {
        /// Which worker.
        worker: WorkerId,
        /// What it did.
        why: String,
    },
    /// The engine refused the request: it would refuse it anywhere.
    #[error("{0}")]
    Rejected(String),
    /// The engine failed.
    #[error("engine failed: {0}")]
    Engine(String),
    /// This machine could not send the request; it says nothing about the worker.
    #[error("the request could not be sent: {0}")]
    Local(String),
}

/// What is waited for between a request and the first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AnswerStep {
    /// The worker says that it has the request.
    Ack,
    /// The worker connects to bring the answer.
    CallHome,
    /// The worker says that it has begun.
    Prologue,
}

impl fmt::Display for AnswerStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ack => "accept the request",
            Self::CallHome => "connect to bring its answer",
            Self::Prologue => "begin its answer",
        })
    }
}

impl AttemptError for PlaneError {
    fn failure_cause(&self) -> FailureCause {
        match self {
            Self::Gone(_) => FailureCause::Absent,
            Self::Connect { .. } | Self::Refused { .. } => FailureCause::Connect,
            Self::Overloaded(_) => FailureCause::Overloaded,
            Self::Timeout { .. } => FailureCause::Timeout,
            Self::Disconnected(_) => FailureCause::WorkerLost,
            Self::Rejected(_) => FailureCause::Rejected,
            Self::Engine(_) | Self::NotStarted { .. } | Self::Protocol { .. } => {
                FailureCause::EngineFailed
            }
            Self::Local(_) => FailureCause::Local,
        }
    }
}
