//! A running stream, as others than its owner see it.

use kvasir_kv_events::{Resync, StreamCheckpoint};
use kvasir_types::WorkerId;
use tokio::sync::{mpsc, oneshot, watch};

use super::StreamState;

/// What is asked of a stream.
#[derive(Debug)]
pub(super) enum Command {
    /// Repair the cache view.
    Resync(Resync),
    /// End without forgetting anything, and give what a later stream needs to go on.
    Freeze(oneshot::Sender<Option<StreamCheckpoint>>),
    /// Give the same, and apply nothing until the guard is dropped.
    Pause(oneshot::Sender<(Option<StreamCheckpoint>, PauseGuard)>),
    /// Events of this worker count from now on.
    AddWorker(WorkerId),
    /// Forget this worker; answered when that is done.
    RemoveWorker(WorkerId, oneshot::Sender<()>),
}

/// A paused stream: the cache holds what its checkpoint says. It goes on when this is dropped.
#[derive(Debug)]
pub struct PauseGuard {
    pub(super) _over: oneshot::Sender<()>,
}

/// Commands a stream and reads its status. Clones are one stream; none keeps it alive.
#[derive(Clone, Debug)]
pub struct EventStreamHandle {
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) snapshot: watch::Receiver<StreamState>,
}

impl EventStreamHandle {
    /// Has a wrong cache view repaired.
    pub fn resync(&self, how: Resync) {
        let _ = self.commands.try_send(Command::Resync(how));
    }

    /// How the stream stands.
    #[must_use]
    pub fn snapshot(&self) -> StreamState {
        self.snapshot.borrow().clone()
    }

    /// A part of how the stream stands, without copying the rest.
    pub fn read<T>(&self, part: impl FnOnce(&StreamState) -> T) -> T {
        part(&self.snapshot.borrow())
    }

    /// Waits until `done` holds, or the stream has ended.
    pub async fn until(&self, done: impl FnMut(&StreamState) -> bool) {
        let _ = self.snapshot.clone().wait_for(done).await;
    }

    /// Ends the stream and leaves its ranks in the cache. `None` if it has ended before, or if its cache view is
    /// not worth saving.
    pub async fn freeze(&self) -> Option<StreamCheckpoint> {
        let (done, checkpoint) = oneshot::channel();
        self.commands.send(Command::Freeze(done)).await.ok()?;
        checkpoint.await.ok()?
    }

    /// Pauses the stream for as long as the [`PauseGuard`] is kept, even if its cache view is not worth saving. `None`
    /// if it has ended before.
    pub async fn pause(&self) -> Option<(Option<StreamCheckpoint>, PauseGuard)> {
        let (done, paused) = oneshot::channel();
        self.commands.send(Command::Pause(done)).await.ok()?;
        paused.await.ok()
    }

    /// Events of this worker count from now on, if the stream carries several.
    pub async fn add_worker(&self, worker: WorkerId) {
        let _ = self.commands.send(Command::AddWorker(worker)).await;
    }

    /// Forgets a worker that left and ignores what still comes of it. Returns when that is done.
    pub async fn remove_worker(&self, worker: WorkerId) {
        let (done, gone) = oneshot::channel();
        let command = Command::RemoveWorker(worker, done);
        if self.commands.send(command).await.is_ok() {
            let _ = gone.await;
        }
    }
}
