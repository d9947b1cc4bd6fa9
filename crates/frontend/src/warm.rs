//! Warm restarts: the index and its cursors, kept from one process to the next.
//!
//! Now and then, and at the end of a drain, every event stream stands still while the index is copied, and the copy is
//! written down beside the last message of each ([`Keeper`]). The next process takes the index over and lets each stream
//! go on from its cursor: the engine is asked for that very message, so one that was restarted meanwhile is noticed and
//! its ranks are emptied.
//!
//! What always holds: a rank without a cursor is not kept; a cursor is used only with the index that it was kept beside;
//! what is loaded for a worker that is not there, or whose events cannot be used, is forgotten; a file that cannot be read
//! costs a log line and nothing else; a file that is being written is not seen until it is whole.

mod format;
mod keeper;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
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
pub use keeper::{Keeper, Saved, probe};

/// Largest file that is read.
const FILE_BYTES_MAX: u64 = 16 << 30;
/// A worker has this long to come back to what was kept of it.
const COME_BACK_MAX: Duration = Duration::from_secs(300);

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

    /// Fills the index of a model that was just made, with a router of its own. Who has not come back after a while is forgotten.
    pub(crate) fn restore(self: &Arc<Self>, app: &Arc<App>, model: &ServedModel) {
        let mut models = self.lock();
        let Some(waiting) = models.get_mut(&**model.host.name()) else {
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
            models.remove(&**model.host.name());
            return;
        }
        // What came while the file was written, of a worker that is not in it.
        let known: BTreeSet<WorkerRank> = waiting.streams.values().flat_map(ranks).collect();
        for rank in model.host.index().ranks() {
            if !known.contains(&rank) {
                model.host.index().remove_rank(rank);
            }
        }
        tracing::info!(model = %model.name, streams = waiting.streams.len(), "kept index taken over");
        let (this, name, tasks) = (
            Arc::clone(self),
            Arc::clone(model.host.name()),
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
            let model = app.models().of_router(name);
            let model = model.filter(|_| waiting.index.is_none());
            for (_, stream) in streams {
                if let Some(model) = &model {
                    drop_stream(model, &stream);
                }
            }
        }
    }

    /// A router is gone, and the index that it took over with it: no stream goes on from where that ended.
    pub(crate) fn router_gone(&self, router: &str) {
        self.lock().remove(router);
    }

    /// Streams of a model that have not come back yet: nothing has changed of them.
    fn waiting(&self, model: &str) -> BTreeMap<WorkerRank, KeptStream> {
        let models = self.lock();
        models
            .get(model)
            .map(|waiting| waiting.streams.clone())
            .unwrap_or_default()
    }

    /// Models that have not come back yet.
    fn waiting_models(&self) -> Vec<KeptModel> {
        let models = self.lock();
        let model = |(name, waiting): (&String, &Waiting)| {
            Some(KeptModel {
                name: name.clone(),
                block_size: waiting.block_size,
                streams: waiting.streams.values().cloned().collect(),
                index: waiting.index.clone()?,
            })
        };
        models.iter().filter_map(model).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Waiting>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl Warm {
    /// As if a file said that a router's index was this, beside the streams of these ranks.
    pub(crate) fn of(router: &str, block_size: u32, index: Vec<u8>, ranks: &[WorkerRank]) -> Self {
        let stream = |rank: &WorkerRank| {
            let kept = Kept {
                cursor: kvasir_ingest::Cursor {
                    sequence: 9,
                    print: 5,
                    at: 1.5,
                },
                ranks: vec![(rank.rank, kvasir_ingest::Learned::default())],
            };
            let standing = Standing {
                level: kvasir_trust::Level::Exact,
                flaps: 0,
            };
            let stream = KeptStream {
                rank: *rank,
                standing,
                kept,
            };
            (*rank, stream)
        };
        let waiting = Waiting {
            index: Some(index),
            block_size,
            streams: ranks.iter().map(stream).collect(),
        };
        Self {
            models: Mutex::new([(router.to_owned(), waiting)].into()),
        }
    }
}

fn drop_stream(model: &ServedModel, stream: &KeptStream) {
    ranks(stream).for_each(|rank| model.host.index().remove_rank(rank));
}

/// The ranks that a stream tells of.
fn ranks(stream: &KeptStream) -> impl Iterator<Item = WorkerRank> {
    let worker = stream.rank.worker;
    let ranks = stream.kept.ranks.iter();
    ranks.map(move |(rank, _)| WorkerRank {
        worker,
        rank: *rank,
    })
}
