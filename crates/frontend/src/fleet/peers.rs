//! Peers that are named (`--router-peers`): what links to other replicas need of this process, and what operators see of them.
//!
//! Answers one question: what do replicas without a broker share beside load? The index, for one that starts; and what operators say of
//! workers at run time: of two words about a worker the later one counts, wherever it was said.
//!
//! What always holds: a worker whose key this process holds is told to nobody; a removal from before this process began changes
//! nothing here: its flags and files are newer than that.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvasir_host::{
    LoadedSnapshot, PeerLinks, PeerOptions, PeerRow, ReplicaFleet, SnapshotFuture, SnapshotWriter,
    WorkerNote,
};
use kvasir_router::ReplicaId;
use kvasir_telemetry::Clock;
use kvasir_types::{Time, WorkerId, WorkerRecord};

use super::Fleet;
use super::members::{Members, SourceName, WorkerSource};

/// Words about workers that are kept; the oldest goes first.
const NOTES_MAX: usize = Members::MAX;
/// What fetching a peer's index may take.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// How a word about a worker becomes one; as the admin API reads it.
pub(crate) type ReadWorker = fn(&str) -> Option<WorkerRecord>;

/// Links to named peers, once there are any, and what operators said. Clones are one.
#[derive(Clone, Default)]
pub struct Peers {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    links: OnceLock<PeerLinks>,
    /// By URL.
    notes: Mutex<BTreeMap<String, WorkerNote>>,
}

impl Peers {
    fn notes(&self) -> MutexGuard<'_, BTreeMap<String, WorkerNote>> {
        self.inner
            .notes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The peers that are connected; none if none are named.
    pub(crate) fn rows(&self) -> Option<Vec<PeerRow>> {
        self.inner.links.get().map(PeerLinks::rows)
    }

    /// An operator added a worker here, by these words, or removed one.
    pub(crate) fn said(&self, url: String, added: Option<String>, clock: &Clock) {
        let Some(links) = self.inner.links.get() else {
            return;
        };
        let at = clock.unix_nanos(clock.now());
        let note = WorkerNote { url, added, at };
        if !self.keep(vec![note.clone()]).is_empty() {
            links.tell_notes(&[note]);
        }
    }

    /// Keeps what is newer than what is known; that of it.
    fn keep(&self, told: Vec<WorkerNote>) -> Vec<WorkerNote> {
        let mut notes = self.notes();
        let mut news = Vec::new();
        for note in told {
            let known = notes.get(&note.url);
            if known.is_some_and(|known| (known.at, &known.added) >= (note.at, &note.added)) {
                continue;
            }
            notes.insert(note.url.clone(), note.clone());
            news.push(note);
        }
        while notes.len() > NOTES_MAX {
            let oldest = notes.values().min_by_key(|note| note.at);
            let Some(url) = oldest.map(|note| note.url.clone()) else {
                break;
            };
            notes.remove(&url);
        }
        news
    }
}

impl Fleet {
    /// Links this process with its peers, and takes over the index of one of them. Peers that are not reached hold up nothing.
    pub async fn link_peers(
        &self,
        options: PeerOptions,
        index_bytes_max: u64,
    ) -> std::io::Result<Option<LoadedSnapshot>> {
        let Some(known) = &self.replicas else {
            return Ok(None);
        };
        let has_peers = !options.peers.is_empty() || options.store.is_some();
        let links = PeerLinks::start(known.replicas(), options).await?;
        let _ = self.context.peers.inner.links.set(links.clone());
        if !has_peers {
            return Ok(None);
        }
        let Some(bytes) = links.fetch_index(FETCH_TIMEOUT, index_bytes_max).await else {
            tracing::info!("no peer has an index to begin with");
            return Ok(None);
        };
        let size = bytes.len();
        match LoadedSnapshot::from_bytes(bytes) {
            Ok(snapshot) => {
                tracing::info!(bytes = size, "the index of a peer is taken over");
                Ok(Some(snapshot))
            }
            Err(error) => {
                tracing::warn!(%error, bytes = size, "the index of a peer cannot be used: starting cold");
                Ok(None)
            }
        }
    }

    /// The links to peers, if there are any.
    #[must_use]
    pub fn peer_links(&self) -> Option<&PeerLinks> {
        self.context.peers.inner.links.get()
    }

    /// The name of this process among replicas, if it is one.
    #[must_use]
    pub fn replica_id(&self) -> Option<ReplicaId> {
        self.replicas.as_ref().map(|known| known.replicas().id())
    }

    /// Answers peers from now on; to be called when the fleet has what it begins with.
    pub fn serve_peers(&self, read: fn(&str) -> Option<WorkerRecord>) {
        let peers = &self.context.peers;
        let Some(links) = peers.inner.links.get() else {
            return;
        };
        let name = SourceName::new("peer", "--router-peers");
        links.serve(Arc::new(PeerFleet {
            peers: peers.clone(),
            writer: self.snapshot_writer(std::path::PathBuf::new()),
            members: self.members().clone(),
            source: self.members().source(name),
            clock: self.context.host.clock,
            read,
        }));
    }
}

/// This process, as its links see it.
struct PeerFleet {
    peers: Peers,
    /// Writes no file.
    writer: Arc<SnapshotWriter>,
    members: Members,
    source: WorkerSource,
    clock: Clock,
    read: ReadWorker,
}

impl ReplicaFleet for PeerFleet {
    fn snapshot(&self) -> SnapshotFuture<'_> {
        Box::pin(async { self.writer.collect().await.ok() })
    }

    fn notes(&self) -> Vec<WorkerNote> {
        self.peers.notes().values().cloned().collect()
    }

    fn heard(&self, notes: Vec<WorkerNote>) -> Vec<WorkerNote> {
        let news = self.peers.keep(notes);
        let began = self.clock.unix_nanos(Time::ZERO);
        for note in &news {
            match &note.added {
                Some(words) => match (self.read)(words) {
                    Some(worker) => {
                        tracing::info!(
                            worker = note.url,
                            "added by an operator at another replica"
                        );
                        if let Err(error) = self.source.join(worker) {
                            tracing::error!(worker = note.url, %error, "a worker of another replica is left out");
                        }
                    }
                    None => tracing::warn!(
                        worker = note.url,
                        "what another replica says of this worker cannot be read"
                    ),
                },
                None if note.at > began => {
                    if let Some(id) = self.id_of(&note.url) {
                        tracing::info!(
                            worker = note.url,
                            "removed by an operator at another replica"
                        );
                        let _ = self.members.remove(id, false);
                    }
                }
                None => {}
            }
        }
        news
    }
}

impl PeerFleet {
    fn id_of(&self, url: &str) -> Option<WorkerId> {
        let mut all = self.members.list().into_iter();
        let at_url = |member: &super::members::Member| member.record.transport.to_string() == url;
        all.find(|(_, member)| at_url(member)).map(|(id, _)| id)
    }
}
