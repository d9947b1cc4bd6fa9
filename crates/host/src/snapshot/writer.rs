//! Writing the index to a file while it is in use, and at the end.
//!
//! Answers one question: what would the next process have to know if this one ended now? What always holds: a cursor and
//! the index beside it are of one moment, because streams are paused while the index is copied, all at once, those
//! that are not worth keeping as well: no longer than that takes and the slowest of them to come to rest.
//! Lookups wait for nothing of it, other writers for a few thousand blocks at a time. If the index changes all the same
//! it is not written this time; only at the end it is then copied in one go. The file is whole or not there; it is
//! written by one at a time, and only when something changed.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::events::PauseGuard;
use kvasir_index::{Index, SnapshotError};
use kvasir_kv_events::{Cursor, StreamCheckpoint};
use kvasir_router::LearnedRecord;
use kvasir_trust::TrustRecord;
use kvasir_types::WorkerRank;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::LoadedSnapshot;
use super::format::{self, RouterSnapshot, StreamSnapshot};
use crate::context::HostContext;
use crate::models::Routers;
use crate::router_host::RouterHost;
use crate::view::CacheView;

/// Streams have this long to pause, all of them together: those that have paused wait for the others.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Streams have this long to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// After a write of some length nothing is written for so many times as long: a large index costs a small share of a
/// core and of a disk.
const REST: u32 = 20;

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotSummary {
    /// Streams that are in the file.
    pub streams: usize,
    /// Streams that will be learned anew.
    pub left_out: usize,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Keeps the indexes of a process in a file.
pub struct SnapshotWriter {
    context: HostContext,
    routers: Arc<dyn Routers>,
    loaded: Arc<LoadedSnapshot>,
    path: PathBuf,
    /// What the file is of; held while it is written.
    written: Mutex<Marks>,
    /// Only the last write is left.
    paused: AtomicBool,
}

/// What a file is of.
#[derive(Clone, Debug, Default, PartialEq)]
struct Marks {
    streams: Vec<Mark>,
    /// What each router has learned of its engines.
    learned: Vec<Option<LearnedRecord>>,
}

/// How far a stream is, and how far it is trusted.
#[derive(Clone, Debug, PartialEq)]
struct Mark {
    router: Arc<str>,
    rank: WorkerRank,
    cursor: Option<Cursor>,
    trust: TrustRecord,
}

/// Whether streams continue after they were asked.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Continue,
    End,
}

/// Why the file is as it was.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Index(#[from] SnapshotError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<WriteError> for io::Error {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Index(error) => Self::other(error),
            WriteError::Io(error) => error,
        }
    }
}

impl SnapshotWriter {
    /// Keeps the indexes of `routers` at `path`. What was loaded and has not come back yet stays in the file.
    #[must_use]
    pub fn new(
        context: &HostContext,
        routers: Arc<dyn Routers>,
        loaded: Arc<LoadedSnapshot>,
        path: PathBuf,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            routers,
            loaded,
            path,
            written: Mutex::default(),
            paused: AtomicBool::new(false),
        })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file from now on, at most every `every`, whenever something changed.
    pub fn start(self: &Arc<Self>, every: Duration) {
        let (this, tasks) = (Arc::clone(self), self.context.tasks.clone());
        let clock = self.context.clock;
        self.context.tasks.spawn(async move {
            let (mut pause, mut failed) = (every, false);
            loop {
                tokio::select! {
                    () = tasks.draining() => return,
                    () = tokio::time::sleep(pause) => {}
                }
                let begun = clock.now();
                let path = this.path.display();
                match this.write(Then::Continue).await {
                    Ok(saved) => {
                        failed = false;
                        if let Some(saved) = saved {
                            tracing::debug!(%path, ?saved, "index snapshot written");
                        }
                    }
                    Err(error @ WriteError::Index(SnapshotError::Changed)) => {
                        tracing::debug!(%path, %error, "index snapshot skipped");
                    }
                    Err(error) => {
                        if !std::mem::replace(&mut failed, true) {
                            tracing::error!(%path, %error, "index snapshot failed; will retry");
                        }
                    }
                }
                pause = every.max((clock.now() - begun) * REST);
            }
        });
    }

    /// Writes nothing more until [`Self::finish`]: the process is about to end.
    pub fn pause(&self) {
        self.paused.store(true, Ordering::Relaxed);
    }

    /// Writes again: the process goes on after all.
    pub fn resume(&self) {
        self.paused.store(false, Ordering::Relaxed);
    }

    /// Ends every event stream where it stands and writes the file for the last time.
    pub async fn finish(&self) -> io::Result<SnapshotSummary> {
        Ok(self.write(Then::End).await?.unwrap_or_default())
    }

    /// What a file would hold, for another process; written nowhere.
    pub async fn collect(&self) -> io::Result<Vec<u8>> {
        let _turn = self.written.lock().await;
        let (parts, _) = self.parts(Then::Continue).await?;
        let collect = move || {
            let mut bytes = Vec::new();
            format::write(&parts, &mut bytes).map(|_| bytes)
        };
        let collected = tokio::task::spawn_blocking(collect).await;
        collected.map_err(io::Error::other)?
    }

    /// Writes the file; `None` if it says all that there is to say already.
    async fn write(&self, then: Then) -> Result<Option<SnapshotSummary>, WriteError> {
        let mut written = self.written.lock().await;
        let marks = self.marks();
        if then == Then::Continue && (marks == *written || self.paused.load(Ordering::Relaxed)) {
            return Ok(None);
        }
        let (parts, mut saved) = self.parts(then).await?;
        let path = self.path.clone();
        let writing = tokio::task::spawn_blocking(move || replace(&path, &parts));
        saved.bytes = writing.await.map_err(io::Error::other)??;
        *written = marks;
        Ok(Some(saved))
    }

    /// Writes what a file would hold to `out`, and goes on: for a process that takes over from this one.
    pub async fn copy_to(&self, mut out: File) -> io::Result<SnapshotSummary> {
        let _turn = self.written.lock().await;
        let (parts, mut saved) = self.parts(Then::Continue).await?;
        let writing = tokio::task::spawn_blocking(move || format::write(&parts, &mut out));
        saved.bytes = writing.await.map_err(io::Error::other)??;
        Ok(saved)
    }

    /// The parts of all routers.
    async fn parts(
        &self,
        then: Then,
    ) -> Result<(Vec<RouterSnapshot>, SnapshotSummary), WriteError> {
        let (mut parts, mut saved) = (self.loaded.waiting_routers(), SnapshotSummary::default());
        for host in self.routers.all() {
            parts.extend(self.part_of(&host, then, &mut saved).await?);
        }
        Ok((parts, saved))
    }

    /// How far all streams are, and what was learned.
    fn marks(&self) -> Marks {
        let hosts = self.routers.all();
        let of = |host: Arc<RouterHost>| {
            let views = host.views().all().into_iter();
            let mark = move |view: Arc<CacheView>| Mark {
                router: Arc::clone(host.name()),
                rank: view.rank(),
                cursor: view.cursor(),
                trust: view.record(),
            };
            views.map(mark).collect::<Vec<_>>()
        };
        let learned = |host: &Arc<RouterHost>| host.ask(|router| router.learned_record());
        Marks {
            learned: hosts.iter().map(learned).collect(),
            streams: hosts.into_iter().flat_map(of).collect(),
        }
    }

    /// One router's part: its index, and its streams at that very moment.
    async fn part_of(
        &self,
        host: &RouterHost,
        then: Then,
        saved: &mut SnapshotSummary,
    ) -> Result<Option<RouterSnapshot>, WriteError> {
        let mut streams = self.loaded.waiting(host.name());
        let mut pauses = Vec::new();
        for (view, paused) in pause_all(host.views().all(), then).await {
            let (rank, trust) = (view.rank(), view.record());
            pauses.extend(paused.pause);
            match paused.kept {
                Some(kept) => {
                    streams.insert(rank, StreamSnapshot { rank, trust, kept });
                }
                None => saved.left_out += usize::from(!streams.contains_key(&rank)),
            }
        }
        let learned = host.ask(|router| router.learned_record());
        if streams.is_empty() {
            drop(pauses);
            return Ok(learned.map(|learned| RouterSnapshot {
                name: host.name().to_string(),
                block_size: host.block_size(),
                streams: Vec::new(),
                learned: Some(learned),
                index: Vec::new(),
            }));
        }
        saved.streams += streams.len();
        let index = Arc::clone(host.index());
        let copied = tokio::task::spawn_blocking(move || {
            let bytes = copy(&index, then, std::thread::yield_now);
            drop(pauses);
            bytes
        });
        Ok(Some(RouterSnapshot {
            name: host.name().to_string(),
            block_size: host.block_size(),
            streams: streams.into_values().collect(),
            learned,
            index: copied.await.map_err(io::Error::other)??,
        }))
    }
}

/// Copies an index whose streams are paused. While it is in use nobody waits for all of it: if others change it all the
/// time it is left for later.
fn copy(index: &Index, then: Then, give_way: impl FnMut()) -> Result<Vec<u8>, SnapshotError> {
    match then {
        Then::Continue => index.snapshot_in_parts(give_way),
        Then::End => index.snapshot(),
    }
}

/// A stream that was asked to pause.
#[derive(Debug, Default)]
struct PausedStream {
    /// What a later one needs to go on, if it is worth keeping.
    kept: Option<StreamCheckpoint>,
    /// It goes on when this is dropped; `None` if it has ended, or did not pause in time.
    pause: Option<PauseGuard>,
}

/// Pauses all streams at once. Those that do not in time go on.
async fn pause_all(views: Vec<Arc<CacheView>>, then: Then) -> Vec<(Arc<CacheView>, PausedStream)> {
    let timeout = match then {
        Then::Continue => PAUSE_TIMEOUT,
        Then::End => END_TIMEOUT,
    };
    let deadline = Instant::now() + timeout;
    let mut asked = JoinSet::new();
    for view in views {
        asked.spawn(async move {
            let paused = tokio::time::timeout_at(deadline, pause(&view, then)).await;
            (view, paused.unwrap_or_default())
        });
    }
    asked.join_all().await
}

async fn pause(view: &CacheView, then: Then) -> PausedStream {
    match then {
        Then::Continue => {
            let (kept, pause) = view.hold().await.unzip();
            let kept = kept.flatten();
            PausedStream { kept, pause }
        }
        Then::End => PausedStream {
            kept: view.freeze().await,
            pause: None,
        },
    }
}

/// Whether an index could be kept at `path`: a folder that is missing or not ours is better known at the start.
pub fn probe(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let beside = beside(path);
    File::create(&beside)?;
    std::fs::remove_file(&beside)
}

/// Where the file is written before it takes its place.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

/// Puts a whole file in the place of an older one. Returns its size. What is no file (a device, a pipe, a folder) is not replaced.
fn replace(path: &Path, routers: &[RouterSnapshot]) -> io::Result<u64> {
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        let text = format!("{} is there and is not a regular file", path.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
    }
    let beside = beside(path);
    let written = File::create(&beside).and_then(|mut file| {
        let bytes = format::write(routers, &mut file)?;
        file.sync_all()?;
        Ok(bytes)
    });
    let placed = written.and_then(|bytes| std::fs::rename(&beside, path).map(|()| bytes));
    if placed.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    placed
}

#[cfg(test)]
mod tests;
