//! The index as its users see it: ranks and events in, matches out.
//!
//! One lock orders writers; an event holds it for a few microseconds, the removal of a rank for slices of
//! [`CLEAR_SLICE`] runs. Lookups take no lock (see `view` for what they see meanwhile).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_types::{KvEvent, LocalHash, SequenceHash, Tier, Time, WorkerId, WorkerRank};
use sdd::Guard;

use crate::ranks::{RankTable, Ranks};
use crate::routing::Routing;
use crate::tree::{Again, Holder, NAMES_AT_ONCE, Tree};
use crate::view::View;
use crate::{ApplyError, Approximate, IndexOptions, Matches, Stats};

/// Events after which a writer frees what no reader can see any more.
const RECLAIM_EVERY: u32 = 32;

/// Runs taken from a rank before other writers get a turn.
const CLEAR_SLICE: usize = 256;

/// Names of removed ranks that are forgotten when somebody asks for figures: some hundred microseconds.
const TIDY_WITH_STATS: usize = 128 * NAMES_AT_ONCE;

/// What is left of the byte budget after entries were dropped because of it, in percent.
const BUDGET_TARGET_PERCENT: u64 = 90;

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
    ranks: RankTable,
    events: Arc<View>,
    routing: Option<Arc<View>>,
    max_bytes: u64,
    pub(crate) writer: Mutex<Writer>,
}

/// Everything that changes, in the hands of one writer at a time.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) ranks: Ranks,
    pub(crate) events: Tree,
    /// What routing decisions taught: all there is in an approximate index, a side index otherwise.
    pub(crate) routing: Option<Routing>,
    /// Bytes of `routing` when it was last changed.
    routing_bytes: usize,
    evicted: u64,
    /// Counts events.
    events_applied: u32,
}

impl Writer {
    /// Drops entries until all takes at most `target` bytes.
    #[cold]
    fn evict(&mut self, target: usize) {
        if let Some(routing) = &mut self.routing {
            let left = target.saturating_sub(self.events.bytes());
            self.evicted += routing.evict(left, self.ranks.by_slot());
            self.routing_bytes = routing.bytes();
        }
        let left = target.saturating_sub(self.routing_bytes);
        self.evicted += self.events.evict(left);
    }

    /// Now and then frees what no reader can see any more, so that readers need not.
    #[inline]
    fn reclaim(&mut self) {
        self.events_applied = self.events_applied.wrapping_add(1);
        if self.events_applied.is_multiple_of(RECLAIM_EVERY) {
            Guard::new().accelerate();
            drop(Guard::new());
        }
    }
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
        let events = Tree::new();
        let routing = options.approximate.or(predicted).map(Routing::new);
        Self {
            ranks: RankTable::new(),
            events: Arc::clone(&events.view),
            routing: routing.as_ref().map(|r| Arc::clone(&r.tree.view)),
            max_bytes: options.max_bytes,
            writer: Mutex::new(Writer {
                ranks: Ranks::default(),
                events,
                routing,
                routing_bytes: 0,
                evicted: 0,
                events_applied: 0,
            }),
        }
    }

    /// Applies one event of one rank. Events of a rank must come in the order in which it sent them;
    /// threads may apply events of different ranks at once.
    pub fn apply(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        let mut writer = self.write();
        writer.reclaim();
        writer.events.tidy(NAMES_AT_ONCE);
        match event {
            KvEvent::Stored {
                tier,
                parent,
                blocks,
            } => {
                let known = writer.ranks.get(rank);
                if let (None, Some(parent)) = (known, parent) {
                    // A rank that holds nothing has no parent; it gets no slot for asking.
                    return writer.events.refuse(*parent, blocks);
                }
                let slot = writer.ranks.slot(rank, &self.ranks);
                let stored =
                    writer
                        .events
                        .store(holder(slot, *tier), *parent, blocks, Again::Counts);
                self.keep_budget(&mut writer);
                stored
            }
            KvEvent::Removed { tier, blocks } => match (writer.ranks.get(rank), blocks.first()) {
                (Some(slot), _) => writer.events.remove(holder(slot, *tier), blocks),
                (None, Some(first)) => Err(ApplyError::BlockNotFound(*first)),
                (None, None) => Ok(()),
            },
            KvEvent::Cleared { tier } => {
                drop(writer);
                self.clear(rank, *tier);
                Ok(())
            }
        }
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
        if self.routing.is_none() {
            return;
        }
        let writer = &mut *self.write();
        let slot = writer.ranks.slot(rank, &self.ranks);
        if let Some(routing) = &mut writer.routing {
            routing.record(now, slot, locals, sequence);
            routing.prune(writer.ranks.by_slot());
            if self.max_bytes > 0 {
                writer.routing_bytes = routing.bytes();
                self.keep_budget(writer);
            }
        }
    }

    /// Forgets what routing decisions taught and is too old at `now` to be believed.
    pub fn expire(&self, now: Time) {
        if self.routing.is_none() {
            return;
        }
        let writer = &mut *self.write();
        if let Some(routing) = &mut writer.routing {
            routing.expire(now);
            writer.routing_bytes = routing.bytes();
        }
    }

    /// When [`Index::expire`] may have something to do next; `None` if nothing waits.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Time> {
        self.routing.as_ref()?;
        self.write().routing.as_ref()?.next_expiry()
    }

    /// Forgets everything that one rank held.
    pub fn remove_rank(&self, rank: WorkerRank) {
        self.clear(rank, None);
        self.write().ranks.remove(rank);
    }

    /// Forgets everything that any rank of a worker held.
    pub fn remove_worker(&self, worker: WorkerId) {
        let ranks = self.write().ranks.of_worker(worker);
        for rank in ranks {
            self.remove_rank(rank);
        }
    }

    fn clear(&self, rank: WorkerRank, tier: Option<Tier>) {
        for t in [Tier::Device, Tier::HostPinned, Tier::Disk, Tier::External] {
            if tier.is_some_and(|only| only != t) {
                continue;
            }
            loop {
                let mut writer = self.write();
                let Some(slot) = writer.ranks.get(rank) else {
                    return;
                };
                if !writer.events.clear(holder(slot, t), CLEAR_SLICE) {
                    break;
                }
            }
        }
        if tier.is_none() && self.routing.is_some() {
            let writer = &mut *self.write();
            if let (Some(slot), Some(routing)) = (writer.ranks.get(rank), &mut writer.routing) {
                routing.remove_slot(slot);
            }
        }
    }

    /// Fills `out` with how many leading blocks of `prompt` each rank holds. Of what events and routing
    /// decisions say about a rank's device memory the larger counts.
    pub fn find(&self, prompt: &[LocalHash], out: &mut Matches) {
        self.look_up(prompt, false, out);
    }

    /// As [`Index::find`], but may stop as soon as only one rank is left that holds all blocks so far:
    /// that one is then listed with a lower bound of what it holds. For callers that need only the winner.
    pub fn find_winner(&self, prompt: &[LocalHash], out: &mut Matches) {
        self.look_up(prompt, true, out);
    }

    #[inline]
    fn look_up(&self, prompt: &[LocalHash], winner: bool, out: &mut Matches) {
        loop {
            let reused = self.ranks.reused();
            out.look_up(
                &self.events,
                self.routing.as_deref(),
                &self.ranks,
                prompt,
                winner,
            );
            if self.ranks.reused() == reused {
                return;
            }
        }
    }

    /// How much there is, and what was dropped.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let writer = &mut *self.write();
        // Figures are asked for now and then: an index without events gives its memory back all the same.
        writer.events.tidy(TIDY_WITH_STATS);
        let routing = writer.routing.as_ref();
        let routed = routing.map(|r| &r.tree);
        Stats {
            blocks: writer.events.blocks() + routed.map_or(0, Tree::blocks),
            entries: writer.events.entries() + routed.map_or(0, Tree::entries),
            runs: writer.events.runs() + routed.map_or(0, Tree::runs),
            bytes: (writer.events.bytes() + routing.map_or(0, Routing::bytes)) as u64,
            evicted: writer.evicted,
            pruned: routing.map_or(0, |r| r.pruned),
        }
    }

    /// Drops the least useful entries if the index is larger than it may be: what routing decisions taught,
    /// the next to expire first, then leaves that were stored longest ago.
    #[inline]
    fn keep_budget(&self, writer: &mut Writer) {
        if self.max_bytes > 0
            && (writer.events.bytes() + writer.routing_bytes) as u64 > self.max_bytes
        {
            let target = (self.max_bytes * BUDGET_TARGET_PERCENT / 100) as usize;
            writer.evict(target);
        }
    }

    pub(crate) fn write(&self) -> MutexGuard<'_, Writer> {
        // A writer that panicked has a bug; what it left may be wrong, and refusing to route would be worse.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rank_table(&self) -> &RankTable {
        &self.ranks
    }

    /// (rank, tier, block) triples, without the tidying that [`Index::stats`] does. For tests.
    #[cfg(any(test, feature = "oracle"))]
    #[must_use]
    pub fn entries(&self) -> u64 {
        let writer = self.write();
        let routed = writer.routing.as_ref().map_or(0, |r| r.tree.entries());
        writer.events.entries() + routed
    }

    /// Panics if the structure contradicts itself. For tests.
    #[cfg(any(test, feature = "oracle"))]
    pub fn check_invariants(&self) {
        let writer = self.write();
        writer.events.check();
        if let Some(routing) = &writer.routing {
            routing.tree.check();
        }
    }
}

pub(crate) fn holder(slot: u32, tier: Tier) -> Holder {
    let tier = match tier {
        Tier::Device => 0,
        Tier::HostPinned => 1,
        Tier::Disk => 2,
        Tier::External => 3,
    };
    Holder { slot, tier }
}
