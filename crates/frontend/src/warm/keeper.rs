//! Writing the index down while it is in use, and at the end.
//!
//! Answers one question: what would the next process have to know if this one ended now? What always holds: a cursor and
//! the index beside it are of one moment, because streams stand still while the index is copied: all at once, and no
//! longer than that takes and the slowest of them to come to rest. Requests and other writers wait for nothing of it. The
//! file is whole or not there; it is written by one at a time, and only when something changed.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvasir_ingest::{Cursor, Kept};
use kvasir_intake::Pause;
use kvasir_trust::Standing;
use kvasir_types::WorkerRank;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Warm;
use super::format::{self, KeptModel, KeptStream};
use crate::App;
use crate::models::ServedModel;
use crate::picture::Picture;

/// Streams have this long to stand still, all of them together: those that do wait for the others.
const STILL_PATIENCE: Duration = Duration::from_secs(1);
/// Streams have this long to end.
const END_PATIENCE: Duration = Duration::from_secs(5);
/// After a write of some length nothing is written for so many times as long: a large index costs a small share of a
/// core and of a disk.
const REST: u32 = 20;

/// What was saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Streams whose picture is in the file.
    pub streams: usize,
    /// Streams that will be learned anew.
    pub left_out: usize,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Keeps the indexes of an application in a file.
pub struct Keeper {
    app: Arc<App>,
    warm: Arc<Warm>,
    path: PathBuf,
    /// What the file is of; held while it is written.
    written: Mutex<Vec<Mark>>,
}

/// How far a stream is, and how far it is believed.
#[derive(Clone, Debug, PartialEq)]
struct Mark {
    model: Arc<str>,
    rank: WorkerRank,
    cursor: Option<Cursor>,
    standing: Standing,
}

/// Whether streams go on after they were asked.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    GoOn,
    End,
}

impl Keeper {
    pub(crate) fn new(app: Arc<App>, warm: Arc<Warm>, path: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            app,
            warm,
            path,
            written: Mutex::default(),
        })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file from now on, at most every `every`, whenever something changed.
    pub fn start(self: &Arc<Self>, every: Duration) {
        let (this, tasks) = (Arc::clone(self), self.app.tasks().clone());
        let clock = self.app.clock();
        self.app.tasks().spawn(async move {
            let (mut pause, mut failed) = (every, false);
            loop {
                tokio::select! {
                    () = tasks.draining() => return,
                    () = tokio::time::sleep(pause) => {}
                }
                let begun = clock.now();
                let path = this.path.display();
                let outcome = this.write(Then::GoOn).await;
                match &outcome {
                    Ok(Some(saved)) => tracing::debug!(%path, ?saved, "index kept"),
                    Err(error) if !failed => {
                        tracing::error!(%path, %error, "index not kept; it is tried again");
                    }
                    _ => {}
                }
                failed = outcome.is_err();
                pause = every.max((clock.now() - begun) * REST);
            }
        });
    }

    /// Ends every event stream where it stands and writes the file for the last time.
    pub async fn finish(&self) -> io::Result<Saved> {
        Ok(self.write(Then::End).await?.unwrap_or_default())
    }

    /// Writes the file; `None` if it says all that there is to say already.
    async fn write(&self, then: Then) -> io::Result<Option<Saved>> {
        let mut written = self.written.lock().await;
        let marks = self.marks();
        if then == Then::GoOn && (marks == *written || self.app.is_draining()) {
            return Ok(None);
        }
        let (mut models, mut saved) = (self.warm.waiting_models(), Saved::default());
        for model in self.app.models().of_routers() {
            models.extend(self.kept(&model, then, &mut saved).await?);
        }
        let path = self.path.clone();
        let writing = tokio::task::spawn_blocking(move || replace(&path, &models));
        saved.bytes = writing.await.map_err(io::Error::other)??;
        *written = marks;
        Ok(Some(saved))
    }

    /// How far all streams are.
    fn marks(&self) -> Vec<Mark> {
        let models = self.app.models().of_routers();
        let of = |model: Arc<ServedModel>| {
            let pictures = model.host.pictures().all().into_iter();
            let mark = move |picture: Arc<Picture>| Mark {
                model: Arc::clone(model.host.name()),
                rank: picture.rank(),
                cursor: picture.cursor(),
                standing: picture.standing(),
            };
            pictures.map(mark).collect::<Vec<_>>()
        };
        models.into_iter().flat_map(of).collect()
    }

    /// One router's part: its index, and its streams at that very moment.
    async fn kept(
        &self,
        model: &Arc<ServedModel>,
        then: Then,
        saved: &mut Saved,
    ) -> io::Result<Option<KeptModel>> {
        let mut streams = self.warm.waiting(model.host.name());
        let mut pauses = Vec::new();
        for (picture, still) in all_still(model.host.pictures().all(), then).await {
            let (rank, standing) = (picture.rank(), picture.standing());
            match still {
                Some((kept, pause)) => {
                    pauses.extend(pause);
                    let stream = KeptStream {
                        rank,
                        standing,
                        kept,
                    };
                    streams.insert(rank, stream);
                }
                None => saved.left_out += usize::from(!streams.contains_key(&rank)),
            }
        }
        if streams.is_empty() {
            return Ok(None);
        }
        saved.streams += streams.len();
        let index = Arc::clone(model.host.index());
        let copied = tokio::task::spawn_blocking(move || {
            let bytes = index.snapshot_in_parts(std::thread::yield_now);
            drop(pauses);
            bytes
        });
        Ok(Some(KeptModel {
            name: model.host.name().to_string(),
            block_size: model.block_size,
            streams: streams.into_values().collect(),
            index: copied.await.map_err(io::Error::other)?,
        }))
    }
}

/// A stream that stands still, and its pause if it is to go on.
type Still = Option<(Kept, Option<Pause>)>;

/// Lets all streams stand still at once. `None` for those that do not in time, or whose pictures are not worth keeping:
/// they go on.
async fn all_still(pictures: Vec<Arc<Picture>>, then: Then) -> Vec<(Arc<Picture>, Still)> {
    let patience = match then {
        Then::GoOn => STILL_PATIENCE,
        Then::End => END_PATIENCE,
    };
    let deadline = Instant::now() + patience;
    let mut asked = JoinSet::new();
    for picture in pictures {
        asked.spawn(async move {
            let still = tokio::time::timeout_at(deadline, still(&picture, then)).await;
            (picture, still.ok().flatten())
        });
    }
    asked.join_all().await
}

async fn still(picture: &Picture, then: Then) -> Still {
    match then {
        Then::GoOn => picture
            .hold()
            .await
            .map(|(kept, pause)| (kept, Some(pause))),
        Then::End => picture.freeze().await.map(|kept| (kept, None)),
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

/// Puts a whole file in the place of an older one. Returns its size.
fn replace(path: &Path, models: &[KeptModel]) -> io::Result<u64> {
    let beside = beside(path);
    let written = File::create(&beside).and_then(|mut file| {
        let bytes = format::write(models, &mut file)?;
        file.sync_all()?;
        Ok(bytes)
    });
    let placed = written.and_then(|bytes| std::fs::rename(&beside, path).map(|()| bytes));
    if placed.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    placed
}
