//! A running stream, seen by others than its owner.

use kvasir_ingest::{Kept, Resync};
use tokio::sync::{mpsc, oneshot, watch};

use crate::Snapshot;

/// What is asked of a stream.
#[derive(Debug)]
pub(crate) enum Ask {
    /// Mend the picture.
    Resync(Resync),
    /// End, forget nothing, and say what a later stream needs to go on.
    Freeze(oneshot::Sender<Option<Kept>>),
    /// Say the same, and stand still until the pause is over.
    Hold(oneshot::Sender<(Option<Kept>, Pause)>),
}

/// A stream that stands still: what it has told its cache is what it says of itself. It goes on when this is
/// dropped.
#[derive(Debug)]
pub struct Pause {
    pub(crate) _over: oneshot::Sender<()>,
}

/// Asks a stream and reads how it stands. Clones are one stream; none keeps it alive.
#[derive(Clone, Debug)]
pub struct IntakeHandle {
    pub(crate) asks: mpsc::Sender<Ask>,
    pub(crate) snapshot: watch::Receiver<Snapshot>,
}

impl IntakeHandle {
    /// Has a wrong picture mended.
    pub fn resync(&self, how: Resync) {
        let _ = self.asks.try_send(Ask::Resync(how));
    }

    /// How the stream stands.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.snapshot.borrow().clone()
    }

    /// A part of how the stream stands, without copying the rest.
    pub fn read<T>(&self, part: impl FnOnce(&Snapshot) -> T) -> T {
        part(&self.snapshot.borrow())
    }

    /// Ends the stream and leaves its ranks in the cache. `None` if it has ended before, or if its picture is
    /// not worth keeping.
    pub async fn freeze(&self) -> Option<Kept> {
        let (done, kept) = oneshot::channel();
        self.asks.send(Ask::Freeze(done)).await.ok()?;
        kept.await.ok()?
    }

    /// Lets the stream stand still for as long as the [`Pause`] is kept, even if its picture is not worth keeping. `None`
    /// if it has ended before.
    pub async fn hold(&self) -> Option<(Option<Kept>, Pause)> {
        let (done, held) = oneshot::channel();
        self.asks.send(Ask::Hold(done)).await.ok()?;
        held.await.ok()
    }
}
