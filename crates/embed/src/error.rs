//! Why a router or its planes cannot be had inside a program.

use kvasir_discovery::StoreError;
use kvasir_planes::SetupError;
use kvasir_worker::JoinError;

/// What went wrong, in words for whoever runs the program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// An option cannot be followed, or this machine stands in the way.
    #[error("{0}")]
    Setup(#[from] SetupError),
    /// The process cannot join a fleet.
    #[error("{0}")]
    Join(#[from] JoinError),
    /// The store gives no lease.
    #[error(
        "{cause}: no place to announce this process; is {backend} up, or is another one meant (DYN_DISCOVERY_BACKEND)?"
    )]
    Announce {
        /// Which store.
        backend: &'static str,
        /// What it said.
        cause: StoreError,
    },
    /// Requests are to come over NATS, whose server was not reached in time.
    #[error(
        "the NATS server {0} is not reached; is it up and the right one (NATS_SERVER), or are requests to come another way (DYN_REQUEST_PLANE)?"
    )]
    Nats(String),
    /// The process was forked from one that had a runtime.
    #[error(
        "this process was forked from one that had begun to use kvasir, whose threads and sockets do not come along; use kvasir only \
         after the fork"
    )]
    Forked,
    /// The system gives no threads.
    #[error("no threads for kvasir: {0}")]
    Threads(std::io::Error),
}

impl EmbedError {
    /// Whether an option is to be changed.
    #[must_use]
    pub const fn is_option(&self) -> bool {
        matches!(self, Self::Setup(error) if error.is_option())
    }
}
