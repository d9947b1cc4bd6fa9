//! The index as its users see it.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvasir_types::{KvEvent, LocalHash, SequenceHash, Time, WorkerId, WorkerRank};

use crate::oracle::{Oracle, RoutingOracle};
use crate::{ApplyError, Approximate, IndexOptions, Matches};

/// The index that the router asks. Every method may be called on any thread at any time.
///
/// ```
/// use kvasir_index::{Index, Matches};
/// use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
///
/// let index = Index::new();
/// let rank = WorkerRank::new(7, 0);
/// let block = |engine, local| StoredBlock { engine: EngineHash(engine), local: LocalHash(local) };
/// let blocks = vec![block(100, 1), block(101, 2)];
/// index.apply(rank, &KvEvent::Stored { tier: Tier::Device, parent: None, blocks })?;
///
/// let mut found = Matches::new();
/// index.find(&[LocalHash(1), LocalHash(2), LocalHash(3)], &mut found);
/// assert_eq!(found.get(rank).map(|m| m.device), Some(2));
/// # Ok::<(), kvasir_index::ApplyError>(())
/// ```
#[derive(Debug)]
pub struct Index {
    events: RwLock<Oracle>,
    /// What routing decisions taught: all there is in an approximate index, a side index otherwise.
    routing: Option<RwLock<RoutingOracle>>,
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

impl Index {
    /// An empty index that learns from KV events and has no limit.
    #[must_use]
    pub fn new() -> Self {
        Self::with_options(&IndexOptions::default())
    }

    /// An empty index.
    #[must_use]
    pub fn with_options(options: &IndexOptions) -> Self {
        let predicted = options.predicted_ttl.map(|ttl| Approximate {
            ttl,
            ..Approximate::default()
        });
        Self {
            events: RwLock::default(),
            routing: options
                .approximate
                .or(predicted)
                .map(|o| RwLock::new(RoutingOracle::new(o))),
        }
    }

    /// Applies one event of one rank. Events of a rank must come in the order in which it sent them;
    /// threads may apply events of different ranks at once.
    pub fn apply(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        write(&self.events).apply(rank, event)
    }

    /// Learns that a prompt was sent to a rank: its blocks will be cached there. `sequence` names the
    /// blocks of `locals` one to one. Does nothing unless the index is approximate or predicts.
    pub fn record_routing(
        &self,
        now: Time,
        rank: WorkerRank,
        locals: &[LocalHash],
        sequence: &[SequenceHash],
    ) {
        if let Some(routing) = &self.routing {
            write(routing).record(now, rank, locals, sequence);
        }
    }

    /// Forgets what routing decisions taught and `now` is too old to believe.
    pub fn expire(&self, now: Time) {
        if let Some(routing) = &self.routing {
            write(routing).expire(now);
        }
    }

    /// Forgets everything that one rank held.
    pub fn remove_rank(&self, rank: WorkerRank) {
        write(&self.events).remove_rank(rank);
        if let Some(routing) = &self.routing {
            write(routing).remove_rank(rank);
        }
    }

    /// Forgets everything that any rank of a worker held.
    pub fn remove_worker(&self, worker: WorkerId) {
        write(&self.events).remove_worker(worker);
        if let Some(routing) = &self.routing {
            write(routing).remove_worker(worker);
        }
    }

    /// Fills `out` with how many leading blocks of `prompt` each rank holds. Of what events and routing
    /// decisions say about a rank's device memory the larger counts.
    pub fn find(&self, prompt: &[LocalHash], out: &mut Matches) {
        read(&self.events).find(prompt, out);
        if let Some(routing) = &self.routing {
            let mut side = Matches::new();
            read(routing).find(prompt, &mut side);
            out.raise_device(&side);
        }
    }

    /// As [`Index::find`], but may stop as soon as only one rank is left that holds all blocks so far:
    /// that one is then listed with a lower bound of what it holds. For callers that need only the winner.
    pub fn find_winner(&self, prompt: &[LocalHash], out: &mut Matches) {
        self.find(prompt, out);
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
