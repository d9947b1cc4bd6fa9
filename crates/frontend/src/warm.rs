//! Warm restarts: the index and its cursors, kept from one process to the next.
//!
//! A drain ends every event stream where it stands and writes the index down beside the last message of each. The
//! next process takes the index over and lets each stream go on from its cursor: the engine is asked for that very
//! message, so one that was restarted meanwhile is noticed and its ranks are emptied.
//!
//! What always holds: a rank without a cursor is not kept; what is loaded for a worker that is not there, or whose
//! events cannot be used, is forgotten; a file that cannot be read costs a log line and nothing else; a file that is
//! being written is not seen until it is whole.

mod format;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_index::RestoreError;
use kvasir_ingest::Kept;
use kvasir_trust::Standing;
use kvasir_types::WorkerRank;

use crate::App;
use crate::models::ServedModel;
use format::{KeptModel, KeptStream};

/// Largest file that is read.
const FILE_BYTES_MAX: u64 = 16 << 30;
/// A worker has this long to come back to what was kept of it.
const COME_BACK_MAX: Duration = Duration::from_secs(300);
/// A stream has this long to end where it stands.
const FREEZE_PATIENCE: Duration = Duration::from_secs(5);

/// Why a file was not taken over. The start is then a cold one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WarmError {
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

/// What a file said, until its models and workers come.
#[derive(Debug, Default)]
pub struct Warm {
    models: Mutex<BTreeMap<String, Waiting>>,
}

#[derive(Debug)]
struct Waiting {
    /// Taken when the model is made.
    index: Option<Vec<u8>>,
    block_size: u32,
    streams: BTreeMap<WorkerRank, KeptStream>,
}

/// What was saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Streams whose picture is in the file.
    pub streams: usize,
    /// Streams that will be learned anew.
    pub left_out: usize,
    /// Bytes of the file.
    pub bytes: usize,
}

impl Warm {
    /// Reads a file; `None` if there is none.
    pub fn load(path: &Path) -> Result<Option<Self>, WarmError> {
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let size = file.metadata()?.len();
        if size > FILE_BYTES_MAX {
            return Err(WarmError::TooLarge(size));
        }
        let mut bytes = Vec::with_capacity(size as usize);
        Read::take(&mut file, FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        let models = format::read(&bytes)?.into_iter().map(|model| {
            let waiting = Waiting {
                index: Some(model.index),
                block_size: model.block_size,
                streams: model.streams.into_iter().map(|s| (s.rank, s)).collect(),
            };
            (model.name, waiting)
        });
        Ok(Some(Self {
            models: Mutex::new(models.collect()),
        }))
    }

    /// Fills the index of a model that was just made. Who has not come back after a while is forgotten.
    pub(crate) fn restore(self: &Arc<Self>, app: &Arc<App>, model: &ServedModel) {
        let mut models = self.lock();
        let Some(waiting) = models.get_mut(&*model.name) else {
            return;
        };
        let Some(bytes) = waiting.index.take() else {
            return;
        };
        let restored = match waiting.block_size == model.block_size {
            true => model.host.index().restore(&bytes),
            false => Err(RestoreError::NoSnapshot),
        };
        if let Err(error) = restored {
            tracing::warn!(model = %model.name, %error, block_size = waiting.block_size,
                "kept index not taken over: starting cold");
            models.remove(&*model.name);
            return;
        }
        tracing::info!(model = %model.name, streams = waiting.streams.len(), "kept index taken over");
        let (this, name, tasks) = (
            Arc::clone(self),
            Arc::clone(&model.name),
            app.tasks().clone(),
        );
        let app = Arc::downgrade(app);
        tasks.spawn(async move {
            tokio::time::sleep(COME_BACK_MAX).await;
            if let Some(app) = app.upgrade() {
                this.forget(&app, |model, _| *model == *name);
            }
        });
    }

    /// Forgets models that nobody serves again, after a while.
    pub(crate) fn wait_for_models(self: &Arc<Self>, tasks: &kvasir_transport::Tasks) {
        if self.lock().is_empty() {
            return;
        }
        let this = Arc::clone(self);
        tasks.spawn(async move {
            tokio::time::sleep(COME_BACK_MAX).await;
            this.lock().retain(|_, waiting| waiting.index.is_none());
        });
    }

    /// How a rank stood, if its picture was kept.
    pub(crate) fn standing(&self, model: &str, rank: WorkerRank) -> Option<Standing> {
        let models = self.lock();
        Some(models.get(model)?.streams.get(&rank)?.standing)
    }

    /// Where a rank's stream goes on; asked once.
    pub(crate) fn resume(&self, model: &str, rank: WorkerRank) -> Option<Kept> {
        let mut models = self.lock();
        Some(models.get_mut(model)?.streams.remove(&rank)?.kept)
    }

    /// A worker does not come, or its events are of no use: its part of the index is forgotten.
    pub(crate) fn forget(&self, app: &App, gone: impl Fn(&str, WorkerRank) -> bool) {
        let mut models = self.lock();
        for (name, waiting) in models.iter_mut() {
            let streams = waiting.streams.extract_if(.., |rank, _| gone(name, *rank));
            let model = app.models().get(name).filter(|_| waiting.index.is_none());
            for (_, stream) in streams {
                if let Some(model) = &model {
                    drop_stream(model, &stream);
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Waiting>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn drop_stream(model: &ServedModel, stream: &KeptStream) {
    for (rank, _) in &stream.kept.ranks {
        let worker = stream.rank.worker;
        let rank = WorkerRank {
            worker,
            rank: *rank,
        };
        model.host.index().remove_rank(rank);
    }
}

/// Ends every event stream where it stands and writes all indexes to `path`.
pub async fn save(app: &App, path: &Path) -> io::Result<Saved> {
    let (mut models, mut saved) = (Vec::new(), Saved::default());
    for model in app.models().all() {
        let streams = freeze(&model, &mut saved).await;
        if !streams.is_empty() {
            models.push(KeptModel {
                name: model.name.to_string(),
                block_size: model.block_size,
                streams,
                index: model.host.index().snapshot(),
            });
        }
    }
    let path = path.to_owned();
    let written = tokio::task::spawn_blocking(move || {
        let bytes = format::write(&models);
        replace(&path, &bytes).map(|()| bytes.len())
    });
    saved.bytes = written.await.map_err(io::Error::other)??;
    Ok(saved)
}

/// Ends the streams of one model. Ranks whose picture is not worth keeping are forgotten.
async fn freeze(model: &Arc<ServedModel>, saved: &mut Saved) -> Vec<KeptStream> {
    let mut streams = Vec::new();
    for picture in model.host.pictures().all() {
        let frozen = tokio::time::timeout(FREEZE_PATIENCE, picture.freeze()).await;
        match frozen.ok().flatten() {
            Some(kept) => streams.push(KeptStream {
                rank: picture.rank(),
                standing: picture.standing(),
                kept,
            }),
            None => {
                saved.left_out += 1;
                model.host.index().remove_rank(picture.rank());
            }
        }
    }
    saved.streams += streams.len();
    streams
}

/// Puts a whole file in the place of an older one.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let beside = path.with_file_name(name);
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    let placed = written.and_then(|()| std::fs::rename(&beside, path));
    if placed.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    placed
}
