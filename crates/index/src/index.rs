//! The index as its users see it: ranks and events in, matches out.
//!
//! Lookups take no lock (see `view` for what they see meanwhile). One lock orders writers; an event holds it for
//! about a microsecond, the removal of a rank for slices of [`CLEAR_SLICE`] runs, a snapshot in parts for some
//! thousand blocks.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvasir_types::{KvEvent, LocalHash, SequenceHash, Tier, Time, WorkerId, WorkerRank};
use sdd::Guard;

use crate::ranks::{RankTable, Ranks};
use crate::routing::RoutingIndex;
use crate::sync::{MutexGuard, Ordering, WriteLock};
use crate::tree::{Holder, NAMES_PER_EVENT, Repeats, Tree, refuse};
use crate::view::View;
use crate::{ApplyError, Approximate, IndexOptions, Matches, Stats};

/// Events after which a writer frees what no reader can see any more.
const RECLAIM_EVERY: u32 = 32;

/// Runs taken from a rank before other writers get a turn.
pub(crate) const CLEAR_SLICE: usize = 256;

/// Names of removed ranks that are forgotten when somebody asks for figures: some hundred microseconds.
const NAMES_PER_STATS: usize = 128 * NAMES_PER_EVENT;

/// All tiers, the nearest first.
pub(crate) const TIERS: [Tier; 4] = [Tier::Device, Tier::HostPinned, Tier::Disk, Tier::External];

/// Blocks that an event drops at most beside twice as many as it stored, once the index is larger than it may be.
const EVICTED_AT_ONCE: usize = 1024;

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
    /// What routing decisions taught: all there is in an approximate index, beside the events otherwise.
    routing: Option<RoutingIndex>,
    /// Whether routing decisions are all that it learns from.
    is_approximate: bool,
    max_bytes: u64,
    /// Bytes of what events taught, when something was last stored. Kept if there is a budget.
    event_bytes: AtomicUsize,
    writer: WriteLock<Writer>,
}

thread_local! {
    /// Events that this thread has applied: what it replaced waits with it to be freed.
    static APPLIED: Cell<u32> = const { Cell::new(0) };
}

/// Everything that changes, in the hands of one writer at a time.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) ranks: Ranks,
    pub(crate) events: Tree,
    evicted: u64,
}

/// Now and then frees what no reader can see any more, so that readers need not.
#[inline]
fn reclaim() {
    let applied = APPLIED.get().wrapping_add(1);
    APPLIED.set(applied);
    if applied.is_multiple_of(RECLAIM_EVERY) {
        Guard::new().accelerate();
        drop(Guard::new());
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
        let routing = options.approximate.or(predicted).map(RoutingIndex::new);
        Self {
            ranks: RankTable::new(),
            events: Arc::clone(&events.view),
            routing,
            is_approximate: options.approximate.is_some(),
            max_bytes: options.max_bytes,
            event_bytes: AtomicUsize::new(0),
            writer: WriteLock::new(Writer {
                ranks: Ranks::default(),
                events,
                evicted: 0,
            }),
        }
    }

    /// Applies one event of one rank.
    ///
    /// Any thread may call this at any time; events are applied one after the other. Events of one rank must
    /// come in the order in which it sent them.
    pub fn apply(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        self.apply_with(rank, event, Repeats::Count)
    }

    /// As [`Index::apply`], for publishers that take a block back once, however often they announced it: a block that is
    /// announced again is held once.
    pub fn apply_once(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        self.apply_with(rank, event, Repeats::Ignore)
    }

    #[inline]
    fn apply_with(
        &self,
        rank: WorkerRank,
        event: &KvEvent,
        repeats: Repeats,
    ) -> Result<(), ApplyError> {
        reclaim();
        if let KvEvent::Cleared { tier } = event {
            self.clear(rank, *tier);
            return Ok(());
        }
        let writer = &mut *self.write();
        let events = &mut writer.events;
        events.free_deferred(NAMES_PER_EVENT);
        match event {
            KvEvent::Stored {
                tier,
                parent,
                blocks,
            } => {
                let known = writer.ranks.get(rank);
                if let (None, Some(parent)) = (known, parent) {
                    // A rank that holds nothing has no parent; it gets no slot for asking.
                    return refuse(*parent, blocks);
                }
                let slot = writer.ranks.slot(rank, &self.ranks);
                let stored = events.store(holder(slot, *tier), *parent, blocks, repeats);
                self.keep_budget_after(writer, blocks.len());
                stored
            }
            KvEvent::Removed { tier, blocks } => match (writer.ranks.get(rank), blocks.first()) {
                (Some(slot), _) => events.remove(holder(slot, *tier), blocks),
                (None, Some(first)) => Err(ApplyError::BlockNotFound(*first)),
                (None, None) => Ok(()),
            },
            KvEvent::Cleared { .. } => Ok(()),
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
        let Some(routing) = &self.routing else {
            return;
        };
        reclaim();
        let left = match self.max_bytes {
            0 => usize::MAX,
            max => (max as usize).saturating_sub(self.event_bytes.load(Ordering::Relaxed)),
        };
        if !routing.record(now, rank, locals, sequence, left) {
            let mut writer = self.write();
            let slot = writer.ranks.slot(rank, &self.ranks);
            routing.admit(rank, slot);
            drop(writer);
            routing.record(now, rank, locals, sequence, left);
        }
    }

    /// Forgets what routing decisions taught and is too old at `now` to be believed. Until then it is found.
    pub fn expire(&self, now: Time) {
        while self.expire_some(now) {}
    }

    /// As [`Index::expire`], a part that takes some tens of microseconds. Returns whether there may be more: to be
    /// called again after others that wait for a processor had their turn.
    pub fn expire_some(&self, now: Time) -> bool {
        (self.routing.as_ref()).is_some_and(|routing| routing.expire_some(now))
    }

    /// When [`Index::expire`] may have something to do next; `None` if nothing waits.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Time> {
        self.routing.as_ref()?.next_expiry()
    }

    /// Forgets everything that one rank held.
    pub fn remove_rank(&self, rank: WorkerRank) {
        self.clear(rank, None);
        let writer = &mut *self.write();
        let Some(slot) = writer.ranks.get(rank) else {
            return;
        };
        // What came meanwhile, against the contract: nobody who gets the slot next is to have it.
        for tier in TIERS {
            writer.events.clear(holder(slot, tier), usize::MAX);
        }
        self.forget_routing(rank);
        writer.ranks.remove(rank);
    }

    /// Forgets everything that any rank of a worker held.
    pub fn remove_worker(&self, worker: WorkerId) {
        let ranks = self.write().ranks.of_worker(worker);
        for rank in ranks {
            self.remove_rank(rank);
        }
    }

    fn clear(&self, rank: WorkerRank, tier: Option<Tier>) {
        for t in TIERS {
            if tier.is_some_and(|only| only != t) {
                continue;
            }
            loop {
                let mut writer = self.write();
                let Some(slot) = writer.ranks.get(rank) else {
                    return;
                };
                let more = writer.events.clear(holder(slot, t), CLEAR_SLICE);
                if !more {
                    break;
                }
            }
        }
        if let (None, Some(routing)) = (tier, &self.routing) {
            routing.clear(rank, CLEAR_SLICE);
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
                self.routing.as_ref().map(|routing| &*routing.view),
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
        let events = &mut writer.events;
        events.free_deferred(NAMES_PER_STATS);
        let mut stats = Stats {
            blocks: events.blocks(),
            entries: events.entries(),
            runs: events.runs(),
            bytes: events.bytes() as u64,
            evicted: writer.evicted,
            pruned: 0,
            repeated: events.repeated(),
        };
        if let Some(routing) = &self.routing {
            routing.add_to(&mut stats);
        }
        stats
    }

    /// Whether all takes more than it may, with events' part of `bytes`.
    #[inline]
    fn is_over_budget(&self, bytes: usize) -> bool {
        if self.max_bytes == 0 {
            return false;
        }
        self.event_bytes.store(bytes, Ordering::Relaxed);
        let routed = self.routing.as_ref().map_or(0, RoutingIndex::bytes);
        (bytes + routed) as u64 > self.max_bytes
    }

    /// What a writer that stored so many blocks owes to the budget, if there is one.
    #[inline]
    pub(crate) fn keep_budget_after(&self, writer: &mut Writer, stored: usize) {
        if self.max_bytes > 0 {
            self.keep_budget(writer, stored);
        }
    }

    /// Forgets what routing decisions taught of a rank, and which slot it has.
    pub(crate) fn forget_routing(&self, rank: WorkerRank) {
        if let Some(routing) = &self.routing {
            routing.remove(rank);
        }
    }

    /// Drops some of the least useful entries if the index is larger than it may be: what routing decisions taught,
    /// the next to expire first, then leaves that were stored long ago.
    #[inline(never)]
    fn keep_budget(&self, writer: &mut Writer, stored: usize) {
        if self.is_over_budget(writer.events.bytes()) {
            self.evict(writer, EVICTED_AT_ONCE + 2 * stored);
        }
    }

    #[cold]
    fn evict(&self, writer: &mut Writer, most: usize) {
        let (max, mut routed) = (self.max_bytes as usize, 0);
        let events = &mut writer.events;
        if let Some(routing) = &self.routing {
            let more = routing.evict(max.saturating_sub(events.bytes()), most);
            // Then it is the next event's turn.
            routed = if more { 0 } else { routing.bytes() };
        }
        writer.evicted += events.evict(max.saturating_sub(routed), most);
        self.event_bytes.store(events.bytes(), Ordering::Relaxed);
    }

    /// Exclusive access for a writer.
    pub(crate) fn write(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock()
    }

    /// Whether somebody waits to write.
    pub(crate) fn has_waiting_writers(&self) -> bool {
        self.writer.has_waiters()
    }

    /// What routing decisions taught, if nothing else is believed in.
    pub(crate) fn approximate(&self) -> Option<&RoutingIndex> {
        self.routing.as_ref().filter(|_| self.is_approximate)
    }

    pub(crate) fn rank_table(&self) -> &RankTable {
        &self.ranks
    }

    /// (rank, tier, block) triples, without the tidying that [`Index::stats`] does. For tests.
    #[cfg(any(test, feature = "oracle"))]
    #[must_use]
    pub fn entries(&self) -> u64 {
        let routed = self.routing.as_ref().map_or(0, RoutingIndex::entries);
        self.write().events.entries() + routed
    }

    /// Panics if the structure contradicts itself. For tests.
    #[cfg(any(test, feature = "oracle"))]
    pub fn check_invariants(&self) {
        self.write().events.check();
        if let Some(routing) = &self.routing {
            routing.check();
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
