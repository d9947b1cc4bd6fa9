//! The request plane: one trait, however a worker is reached.

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
    /// The worker has as many requests as it takes.
    #[error("worker {0} is at capacity")]
    Overloaded(WorkerId),
    /// The worker vanished before the answer was complete.
    #[error("worker {0} closed the stream before the answer was complete")]
    Disconnected(WorkerId),
    /// The engine refused the request: it would refuse it anywhere.
    #[error("{0}")]
    Rejected(String),
    /// The engine failed.
    #[error("engine failed: {0}")]
    Engine(String),
}

impl AttemptError for PlaneError {
    fn failure_cause(&self) -> FailureCause {
        match self {
            Self::Gone(_) => FailureCause::Absent,
            Self::Overloaded(_) => FailureCause::Overloaded,
            Self::Disconnected(_) => FailureCause::WorkerLost,
            Self::Rejected(_) => FailureCause::Rejected,
            Self::Engine(_) => FailureCause::EngineFailed,
        }
    }
}
