//! What a service tells of its indexes to one that starts, and what it began with itself.
//!
//! `GET /dump` writes them as the events that would make them, for programs. `GET /snapshot` writes them whole, with the message that each
//! engine's events stood at, for another service of ours ([`LoadedSnapshot`]): it goes on from there, so that nothing is counted twice and
//! what an engine took out meanwhile is not believed.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use kvasir_host::{HostContext, LoadedSnapshot, RouterHost, Routers, SnapshotWriter, dump_index};
use tokio::sync::{Semaphore, mpsc};

use crate::api::{Answer, AnswerBody};
use crate::group::{Group, GroupKey, Groups};

/// Parts of a dump that wait for their reader, and bytes of each.
const PARTS_MAX: usize = 4;
const PART_BYTES: usize = 64 << 10;
/// Snapshots that are written at once: each is as large as the indexes.
const SNAPSHOTS_MAX: usize = 1;

/// The indexes of a service, for others and from another.
pub(crate) struct Takeover {
    routers: Weak<dyn Routers>,
    loaded: Arc<LoadedSnapshot>,
    writer: Arc<SnapshotWriter>,
    turns: Semaphore,
}

impl Takeover {
    /// Of these groups, which begin with what `loaded` holds of them.
    pub(crate) fn new<G: Group + Send + Sync + 'static>(
        groups: &Arc<Groups<G>>,
        context: &HostContext,
        loaded: LoadedSnapshot,
    ) -> Self {
        let routers: Arc<dyn Routers> = Arc::<Groups<G>>::clone(groups);
        let loaded = Arc::new(loaded);
        loaded.wait_for_models(&context.tasks);
        Self {
            routers: Arc::downgrade(&routers),
            // Nothing is written to a file.
            writer: SnapshotWriter::new(context, routers, Arc::clone(&loaded), PathBuf::new()),
            loaded,
            turns: Semaphore::new(SNAPSHOTS_MAX),
        }
    }

    /// Fills the index of a group that may be new, once. Not while groups are locked: whoever forgets what was loaded reads them.
    pub(crate) fn restore(&self, host: &RouterHost) {
        self.loaded.restore(host, Weak::clone(&self.routers));
    }

    /// What was loaded, for streams that go on.
    pub(crate) fn loaded(&self) -> &LoadedSnapshot {
        &self.loaded
    }

    /// All indexes, with the place of each stream.
    pub(crate) async fn snapshot(&self) -> Answer {
        let Ok(_turn) = self.turns.try_acquire() else {
            return Answer::error(503, "another snapshot is being written; ask again");
        };
        match self.writer.collect().await {
            Ok(bytes) => Answer {
                status: 200,
                body: AnswerBody::Bytes(bytes.into()),
            },
            Err(error) => {
                tracing::warn!(%error, "no snapshot could be written for a peer");
                Answer::error(503, error)
            }
        }
    }
}

/// All indexes as events, written while they are read.
pub(crate) fn dump<G: Group + Send + Sync + 'static>(groups: &Groups<G>) -> Answer {
    let groups = groups.all();
    let groups: Vec<(GroupKey, Arc<G>)> = groups
        .iter()
        .map(|(key, group)| (key.clone(), Arc::clone(group)))
        .collect();
    let (sender, parts) = mpsc::channel(PARTS_MAX);
    // The only error is that the reader left.
    tokio::task::spawn_blocking(move || write_dump(&groups, &sender));
    Answer {
        status: 200,
        body: AnswerBody::JsonParts(parts),
    }
}

/// Writes all indexes as the events that would make them, and the end if somebody still reads.
fn write_dump<G: Group>(groups: &[(GroupKey, Arc<G>)], to: &mpsc::Sender<Option<Bytes>>) {
    let mut part = Vec::with_capacity(PART_BYTES);
    let mut write = |text: &[u8], is_end: bool| -> io::Result<()> {
        part.extend_from_slice(text);
        if part.len() < PART_BYTES && !is_end {
            return Ok(());
        }
        let full = std::mem::replace(&mut part, Vec::with_capacity(PART_BYTES));
        let gone = |_| io::ErrorKind::BrokenPipe.into();
        to.blocking_send(Some(full.into())).map_err(gone)
    };
    let mut write_all = || -> io::Result<()> {
        let mut before = "{";
        for (key, group) in groups {
            let name = format!("{}:{}", key.model_name, key.routing_group);
            let name = serde_json::Value::from(name);
            let block_size = group.host().block_size();
            let head = format!("{before}{name}:{{\"block_size\":{block_size},\"events\":[");
            write(head.as_bytes(), false)?;
            dump_index(group.host().index(), |text| write(text, false))?;
            write(b"]}", false)?;
            before = ",";
        }
        write(if groups.is_empty() { b"{}" } else { b"}" }, true)
    };
    if write_all().is_ok() {
        let _ = to.blocking_send(None);
    }
}
