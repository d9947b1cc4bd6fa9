//! The request plane: one trait, however a worker is reached.

use std::future::Future;
use std::pin::Pin;

use kvasir_types::{TokenRequest, WorkerId};

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

/// Who caused a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client asked for something that cannot be.
    Client,
    /// The worker, or the way to it.
    Worker,
}

/// Whether another attempt makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// On another worker.
    Elsewhere,
    /// Nowhere: it would fail alike.
    Never,
}

/// Why a worker gave no answer, or not all of it.
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

impl PlaneError {
    /// Who caused it.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Rejected(_) => Fault::Client,
            Self::Gone(_) | Self::Overloaded(_) | Self::Disconnected(_) | Self::Engine(_) => {
                Fault::Worker
            }
        }
    }

    /// Whether to try again. Says nothing of tokens that the client has already seen.
    #[must_use]
    pub fn retry(&self) -> Retry {
        match self {
            Self::Gone(_) | Self::Overloaded(_) | Self::Disconnected(_) => Retry::Elsewhere,
            Self::Rejected(_) | Self::Engine(_) => Retry::Never,
        }
    }
}
