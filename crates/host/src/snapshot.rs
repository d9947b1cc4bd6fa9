//! Warm restarts: the index and its cursors, kept in a file from one process to the next.
//!
//! Now and then, and at the end of a drain, every event stream stands still while the index is copied, and the copy is
//! written beside the last message of each ([`SnapshotWriter`]). The next process takes the index over and lets each
//! stream go on from its cursor: the engine is asked for that very message, so one that was restarted meanwhile is
//! noticed and its ranks are emptied.
//!
//! What always holds: a rank without a cursor is not kept; a cursor is used only with the index that it was kept beside;
//! what is loaded for a worker that is not there, or whose events cannot be used, is forgotten; a file that cannot be read
//! costs a log line and nothing else; a file that is being written is not seen until it is whole.

mod format;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvasir_index::RestoreError;
use kvasir_kv_events::{Cursor, StreamCheckpoint, TranslatorState};
use kvasir_router::LearnedRecord;
use kvasir_tasks::Tasks;
use kvasir_trust::{CacheState, TrustRecord};
use kvasir_types::WorkerRank;

use crate::models::Routers;
use crate::router_host::RouterHost;
use format::{RouterSnapshot, StreamSnapshot};
pub use writer::{SnapshotSummary, SnapshotWriter, probe as probe_snapshot};

/// Largest file that is read.
const FILE_BYTES_MAX: u64 = 16 << 30;
/// A worker has this long to come back to what was kept of it.
const COME_BACK_MAX: Duration = Duration::from_secs(300);

/// Why a file was not taken over. The start is then a cold one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotFileError {
    /// It cannot be read.
    #[error("it cannot be read")]
    Io(#[from] io::Error),
    /// It is none of ours.
    #[error("it is no index snapshot of kvasir")]
    Foreign,
    /// Another release wrote it.
    #[error("version {0} was written by another release")]
    Version(u16),
    /// Its checksum or its content is wrong.
    #[error("it is damaged")]
    Corrupt,
    /// It is larger than anything that we write.
    #[error("it has {0} bytes, more than this release ever writes")]
    TooLarge(u64),
}

/// The bytes of a file, read and written again: the same, if they can be read.
pub fn rewrite_snapshot(bytes: &[u8]) -> Result<Vec<u8>, SnapshotFileError> {
    let mut out = Vec::with_capacity(bytes.len());
    let routers = format::read(io::Cursor::new(bytes), bytes.len() as u64)?;
    format::write(&routers, &mut out)?;
    Ok(out)
}

/// What a file holds, until its models and workers come.
#[derive(Debug, Default)]
pub struct LoadedSnapshot {
    routers: Mutex<BTreeMap<String, Waiting>>,
}

#[derive(Debug)]
struct Waiting {
    /// Taken when the router is made.
    index: Option<Vec<u8>>,
    block_size: u32,
    streams: BTreeMap<WorkerRank, StreamSnapshot>,
    learned: Option<LearnedRecord>,
}

impl LoadedSnapshot {
    /// Reads a file; `None` if there is none.
    pub fn load(path: &Path) -> Result<Option<Self>, SnapshotFileError> {
        let about = match std::fs::metadata(path) {
            Ok(about) => about,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // To open a pipe would be to wait for its other end.
        if !about.is_file() {
            return Err(SnapshotFileError::Foreign);
        }
        Self::read(File::open(path)?).map(Some)
    }

    /// Reads an open file, from its beginning.
    pub fn read(file: File) -> Result<Self, SnapshotFileError> {
        let size = file.metadata()?.len();
        if size > FILE_BYTES_MAX {
            return Err(SnapshotFileError::TooLarge(size));
        }
        Self::of_routers(format::read(file, size)?)
    }

    /// The same from the bytes of a file.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, SnapshotFileError> {
        let size = bytes.len() as u64;
        Self::of_routers(format::read(io::Cursor::new(bytes), size)?)
    }

    fn of_routers(routers: Vec<RouterSnapshot>) -> Result<Self, SnapshotFileError> {
        let routers = routers.into_iter().map(|router| {
            let waiting = Waiting {
                index: Some(router.index),
                block_size: router.block_size,
                streams: router.streams.into_iter().map(|s| (s.rank, s)).collect(),
                learned: router.learned,
            };
            (router.name, waiting)
        });
        Ok(Self {
            routers: Mutex::new(routers.collect()),
        })
    }

    /// Fills the index of a router that was just made. What has not come back after a while is forgotten.
    pub fn restore(self: &Arc<Self>, host: &RouterHost, routers: Weak<dyn Routers>) {
        let mut kept = self.lock();
        let Some(waiting) = kept.get_mut(&**host.name()) else {
            return;
        };
        let Some(bytes) = waiting.index.take() else {
            return;
        };
        if let Some(learned) = waiting.learned.take()
            && host.resume_learned(&learned)
        {
            tracing::info!(model = %host.name(), ranks = learned.ranks.len(), "learned step times restored");
        }
        if bytes.is_empty() {
            return;
        }
        let restored = match waiting.block_size == host.block_size() {
            true => host.index().restore(&bytes),
            false => Err(RestoreError::NotASnapshot),
        };
        if let Err(error) = restored {
            tracing::warn!(model = %host.name(), %error, block_size = waiting.block_size,
                "index snapshot not restored: starting cold");
            kept.remove(&**host.name());
            return;
        }
        // What came while the file was written, of a worker that is not in it.
        let known: BTreeSet<WorkerRank> = waiting.streams.values().flat_map(ranks).collect();
        for rank in host.index().ranks() {
            if !known.contains(&rank) {
                host.index().remove_rank(rank);
            }
        }
        tracing::info!(model = %host.name(), streams = waiting.streams.len(), "index snapshot restored");
        let (this, name) = (Arc::clone(self), Arc::clone(host.name()));
        host.context().tasks.spawn(async move {
            tokio::time::sleep(COME_BACK_MAX).await;
            if let Some(routers) = routers.upgrade() {
                this.forget(&*routers, |router, _| *router == *name);
            }
        });
    }

    /// Forgets models that nobody serves again, after a while.
    pub fn wait_for_models(self: &Arc<Self>, tasks: &Tasks) {
        if self.lock().is_empty() {
            return;
        }
        let this = Arc::clone(self);
        tasks.spawn(async move {
            tokio::time::sleep(COME_BACK_MAX).await;
            this.lock().retain(|_, waiting| waiting.index.is_none());
        });
    }

    /// How far a rank was trusted, if its part was kept.
    #[must_use]
    pub fn trust(&self, router: &str, rank: WorkerRank) -> Option<TrustRecord> {
        let routers = self.lock();
        Some(routers.get(router)?.streams.get(&rank)?.trust)
    }

    /// Where a rank's stream goes on; asked once.
    #[must_use]
    pub fn resume(&self, router: &str, rank: WorkerRank) -> Option<StreamCheckpoint> {
        let mut routers = self.lock();
        Some(routers.get_mut(router)?.streams.remove(&rank)?.kept)
    }

    /// A worker does not come, or its events are of no use: its part of the index is forgotten.
    pub fn forget(&self, routers: &dyn Routers, gone: impl Fn(&str, WorkerRank) -> bool) {
        let mut kept = self.lock();
        for (name, waiting) in kept.iter_mut() {
            let streams = waiting.streams.extract_if(.., |rank, _| gone(name, *rank));
            let host = routers.named(name);
            let host = host.filter(|_| waiting.index.is_none());
            for (_, stream) in streams {
                if let Some(host) = &host {
                    ranks(&stream).for_each(|rank| host.index().remove_rank(rank));
                }
            }
        }
    }

    /// A router is gone, and the index that it took over with it: no stream goes on from where that ended.
    pub fn router_gone(&self, router: &str) {
        self.lock().remove(router);
    }

    /// Streams of a router that have not come back yet: nothing has changed of them.
    fn waiting(&self, router: &str) -> BTreeMap<WorkerRank, StreamSnapshot> {
        let routers = self.lock();
        routers
            .get(router)
            .map(|waiting| waiting.streams.clone())
            .unwrap_or_default()
    }

    /// Routers that have not come back yet.
    fn waiting_routers(&self) -> Vec<RouterSnapshot> {
        let routers = self.lock();
        let router = |(name, waiting): (&String, &Waiting)| {
            Some(RouterSnapshot {
                name: name.clone(),
                block_size: waiting.block_size,
                streams: waiting.streams.values().cloned().collect(),
                learned: waiting.learned.clone(),
                index: waiting.index.clone()?,
            })
        };
        routers.iter().filter_map(router).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Waiting>> {
        self.routers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As if a file held this index of a router, beside the streams of these ranks: for tests.
    #[must_use]
    pub fn of(router: &str, block_size: u32, index: Vec<u8>, ranks: &[WorkerRank]) -> Self {
        let stream = |rank: &WorkerRank| {
            let kept = StreamCheckpoint {
                cursor: Cursor {
                    sequence: 9,
                    digest: 5,
                    at: 1.5,
                },
                ranks: vec![(rank.rank, TranslatorState::default())],
            };
            let trust = TrustRecord {
                state: CacheState::Exact,
                demotions: 0,
            };
            let stream = StreamSnapshot {
                rank: *rank,
                trust,
                kept,
            };
            (*rank, stream)
        };
        let waiting = Waiting {
            index: Some(index),
            block_size,
            streams: ranks.iter().map(stream).collect(),
            learned: None,
        };
        Self {
            routers: Mutex::new([(router.to_owned(), waiting)].into()),
        }
    }
}

/// The ranks that a stream is about.
fn ranks(stream: &StreamSnapshot) -> impl Iterator<Item = WorkerRank> {
    let worker = stream.rank.worker;
    let ranks = stream.kept.ranks.iter();
    ranks.map(move |(rank, _)| WorkerRank {
        worker,
        rank: *rank,
    })
}
