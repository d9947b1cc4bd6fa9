//! The steps that a router takes with a log. It may die after any of them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// What was done last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LogStep {
    /// All messages were taken away, because it was asked for.
    ResetStream,
    /// All snapshots were taken away, because it was asked for.
    ResetSnapshots,
    /// The others know that this router is there.
    Registered,
    /// There is a stream.
    StreamReady,
    /// There is a bucket for snapshots.
    BucketReady,
    /// There is a consumer of this router.
    ConsumerReady,
    /// The last snapshot was read.
    SnapshotRead,
    /// What the stream held since was read, too.
    CaughtUp,
    /// The server was told how far this router is.
    Acknowledged,
    /// No other router takes a snapshot now.
    Locked,
    /// The snapshot that is to be replaced was read.
    HeadRead,
    /// What all ranks hold was written down.
    Captured,
    /// It was sent to the server, where nobody sees it yet.
    Uploaded,
    /// It is the snapshot from now on.
    Published,
    /// What is left of earlier ones was taken away.
    Swept,
    /// Messages that it tells, and that everybody has read, were taken away.
    Purged,
    /// Others may take a snapshot again.
    Unlocked,
    /// The consumer of a router that is gone was taken away.
    ConsumerRemoved,
}

impl LogStep {
    /// All of them.
    pub const ALL: [Self; 18] = [
        Self::ResetStream,
        Self::ResetSnapshots,
        Self::Registered,
        Self::StreamReady,
        Self::BucketReady,
        Self::ConsumerReady,
        Self::SnapshotRead,
        Self::CaughtUp,
        Self::Acknowledged,
        Self::Locked,
        Self::HeadRead,
        Self::Captured,
        Self::Uploaded,
        Self::Published,
        Self::Swept,
        Self::Purged,
        Self::Unlocked,
        Self::ConsumerRemoved,
    ];
}

/// What [`StepHook::after`] returns.
pub type StepFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Is told of each step, and waited for.
pub trait StepHook: Send + Sync + 'static {
    /// A step was taken.
    fn after(&self, step: LogStep) -> StepFuture<'_>;
}

/// The hook, if there is one.
#[derive(Clone)]
pub(super) struct Steps(Option<Arc<dyn StepHook>>);

impl Steps {
    pub(super) const fn new(hook: Option<Arc<dyn StepHook>>) -> Self {
        Self(hook)
    }

    pub(super) async fn after(&self, step: LogStep) {
        if let Some(hook) = &self.0 {
            hook.after(step).await;
        }
    }
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steps").finish_non_exhaustive()
    }
}
