//! The index as its users see it: ranks and events in, matches out.
//!
//! Lookups take no lock (see `view` for what they see meanwhile). A writer that meets nobody has the index to
//! itself for its event, a few microseconds. Writers that meet apply their events together (`tree::together`
//! says how), each for a rank of its own; what is not an ordinary event waits until it is alone. A removal
//! of a rank lets others in after each [`CLEAR_SLICE`] runs.

use std::cell::Cell;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, PoisonError};

use kvasir_types::{KvEvent, LocalHash, SequenceHash, Tier, Time, WorkerId, WorkerRank};
use sdd::Guard;

use crate::ranks::{RankTable, Ranks};
use crate::routing::Side;
use crate::sync::{Apart, AtomicU32, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::tree::{Again, Applied, Holder, NAMES_AT_ONCE, Tree, refuse};
use crate::view::View;
use crate::{ApplyError, Approximate, IndexOptions, Matches, Stats};

/// Events after which a writer frees what no reader can see any more.
const RECLAIM_EVERY: u32 = 32;

/// Events that are applied together after writers have met, before one looks again whether it is alone.
const MEET_FOR: u32 = 64;

/// Runs taken from a rank before other writers get a turn.
const CLEAR_SLICE: usize = 256;

/// Names of removed ranks that are forgotten when somebody asks for figures: some hundred microseconds.
const TIDY_WITH_STATS: usize = 128 * NAMES_AT_ONCE;

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
    /// What routing decisions taught: all there is in an approximate index, a side index otherwise.
    routing: Option<Side>,
    max_bytes: u64,
    /// Bytes of what events taught, when something was last stored. Kept if there is a budget.
    event_bytes: AtomicUsize,
    gate: Apart<Gate>,
    /// Counts events that were applied beside others.
    #[cfg(any(test, feature = "oracle"))]
    together: std::sync::atomic::AtomicU64,
}

/// How writers come in.
#[derive(Debug)]
struct Gate {
    writer: RwLock<Writer>,
    /// Counts down from [`MEET_FOR`] after writers have met.
    met: AtomicU32,
    /// Writers that are applying an event in company; tells whether they meet.
    inside: AtomicU32,
    /// How many wait to come in.
    waiting: AtomicU32,
}

thread_local! {
    /// Events that this thread has applied: what it replaced waits with it to be freed.
    static APPLIED: Cell<u32> = const { Cell::new(0) };
}

/// Everything that changes: exclusive to one writer, or shared by several that each apply an ordinary event.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) ranks: Ranks,
    pub(crate) events: Tree,
    evicted: u64,
}

impl Writer {
    /// Applies an event beside others that do the same; `None` if it is not one to be applied so.
    fn apply_together(&self, rank: WorkerRank, event: &KvEvent) -> Option<Applied> {
        if !self.events.is_shared() {
            return None;
        }
        let slot = self.ranks.get(rank)?;
        match event {
            KvEvent::Stored {
                tier,
                parent,
                blocks,
            } => self
                .events
                .store_together(holder(slot, *tier), *parent, blocks),
            KvEvent::Removed { tier, blocks } => {
                self.events.remove_together(holder(slot, *tier), blocks)
            }
            KvEvent::Cleared { .. } => None,
        }
    }
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
        let routing = options.approximate.or(predicted).map(Side::new);
        Self {
            ranks: RankTable::new(),
            events: Arc::clone(&events.view),
            routing,
            max_bytes: options.max_bytes,
            event_bytes: AtomicUsize::new(0),
            gate: Apart(Gate {
                writer: RwLock::new(Writer {
                    ranks: Ranks::default(),
                    events,
                    evicted: 0,
                }),
                met: AtomicU32::new(0),
                inside: AtomicU32::new(0),
                waiting: AtomicU32::new(0),
            }),
            #[cfg(any(test, feature = "oracle"))]
            together: std::sync::atomic::AtomicU64::new(0),
        }
    }

    /// Applies one event of one rank.
    ///
    /// Threads may apply events of different ranks at once, and those really run at once. Events of one rank
    /// must come one after the other, in the order in which it sent them. A caller that applies two events of
    /// a rank at once has that rank's blocks counted wrongly, until it is cleared; no other rank's.
    pub fn apply(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        reclaim();
        if let KvEvent::Cleared { tier } = event {
            self.clear(rank, *tier);
            return Ok(());
        }
        if self.gate.0.met.load(Ordering::Relaxed) == 0
            && let Ok(mut writer) = self.gate.0.writer.try_write()
        {
            return self.apply_alone(&mut writer, rank, event);
        }
        self.apply_in_company(rank, event)
    }

    #[inline(always)]
    fn apply_alone(
        &self,
        writer: &mut Writer,
        rank: WorkerRank,
        event: &KvEvent,
    ) -> Result<(), ApplyError> {
        let mut events = writer.events.alone();
        events.tidy(NAMES_AT_ONCE);
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
                let stored = events.store(holder(slot, *tier), *parent, blocks, Again::Counts);
                if self.max_bytes > 0 {
                    self.keep_budget(writer, blocks.len());
                }
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

    /// Applies an event while others may be at work: together with them if it is an ordinary one.
    #[inline(never)]
    fn apply_in_company(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        let others = self.gate.0.inside.fetch_add(1, Ordering::Relaxed);
        let outcome = self.apply_among(rank, event);
        self.gate.0.inside.fetch_sub(1, Ordering::Relaxed);
        let left = self.gate.0.met.load(Ordering::Relaxed);
        let next = match left.checked_sub(1) {
            Some(next) if others == 0 => next,
            _ => left.max(MEET_FOR),
        };
        if next != left {
            self.gate.0.met.store(next, Ordering::Relaxed);
        }
        outcome
    }

    fn apply_among(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        let mut among = self.enter();
        if !among.events.is_shared() {
            drop(among);
            self.write().events.share();
            among = self.enter();
        }
        let together = among.apply_together(rank, event);
        drop(among);
        let Some(applied) = together else {
            let mut writer = self.write();
            let outcome = self.apply_alone(&mut writer, rank, event);
            writer.events.share();
            return outcome;
        };
        #[cfg(any(test, feature = "oracle"))]
        self.together.fetch_add(1, Ordering::Relaxed);
        if applied.empty {
            self.write().events.alone().settle();
        }
        if let KvEvent::Stored { blocks, .. } = event
            && self.is_over_budget(applied.bytes)
        {
            self.keep_budget(&mut self.write(), blocks.len());
        }
        applied.outcome
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
        let Some(side) = &self.routing else {
            return;
        };
        reclaim();
        let left = match self.max_bytes {
            0 => usize::MAX,
            max => (max as usize).saturating_sub(self.event_bytes.load(Ordering::Relaxed)),
        };
        if !side.record(now, rank, locals, sequence, left) {
            let mut writer = self.write();
            let slot = writer.ranks.slot(rank, &self.ranks);
            side.admit(rank, slot);
            drop(writer);
            side.record(now, rank, locals, sequence, left);
        }
    }

    /// Forgets what routing decisions taught and is too old at `now` to be believed. Until then it is found.
    pub fn expire(&self, now: Time) {
        while self.expire_some(now) {}
    }

    /// As [`Index::expire`], a part that takes some tens of microseconds. Returns whether there may be more: to be
    /// called again after others that wait for a processor had their turn.
    pub fn expire_some(&self, now: Time) -> bool {
        (self.routing.as_ref()).is_some_and(|side| side.expire_some(now))
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
            writer.events.alone().clear(holder(slot, tier), usize::MAX);
        }
        if let Some(side) = &self.routing {
            side.remove(rank);
        }
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
                let more = writer.events.alone().clear(holder(slot, t), CLEAR_SLICE);
                if !more {
                    break;
                }
            }
        }
        if let (None, Some(side)) = (tier, &self.routing) {
            side.clear(rank, CLEAR_SLICE);
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
                self.routing.as_ref().map(|side| &*side.view),
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
        let mut events = writer.events.alone();
        events.tidy(TIDY_WITH_STATS);
        let mut stats = Stats {
            blocks: events.blocks(),
            entries: events.entries(),
            runs: events.runs(),
            bytes: events.bytes() as u64,
            evicted: writer.evicted,
            pruned: 0,
            repeated: events.repeated(),
        };
        if let Some(side) = &self.routing {
            side.add_to(&mut stats);
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
        let routed = self.routing.as_ref().map_or(0, Side::bytes);
        (bytes + routed) as u64 > self.max_bytes
    }

    /// Drops some of the least useful entries if the index is larger than it may be: what routing decisions taught,
    /// the next to expire first, then leaves that were stored long ago.
    #[inline(never)]
    fn keep_budget(&self, writer: &mut Writer, stored: usize) {
        if self.is_over_budget(writer.events.alone().bytes()) {
            self.evict(writer, EVICTED_AT_ONCE + 2 * stored);
        }
    }

    #[cold]
    fn evict(&self, writer: &mut Writer, most: usize) {
        let (max, mut routed) = (self.max_bytes as usize, 0);
        let mut events = writer.events.alone();
        if let Some(side) = &self.routing {
            let more = side.evict(max.saturating_sub(events.bytes()), most);
            // Then it is the next event's turn.
            routed = if more { 0 } else { side.bytes() };
        }
        writer.evicted += events.evict(max.saturating_sub(routed), most);
        self.event_bytes.store(events.bytes(), Ordering::Relaxed);
    }

    /// The index to oneself.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Writer> {
        let gate = &self.gate.0;
        if let Ok(writer) = gate.writer.try_write() {
            return writer;
        }
        gate.waiting.fetch_add(1, Ordering::Relaxed);
        // A writer that panicked has a bug; what it left may be wrong, and refusing to route would be worse.
        let writer = gate.writer.write();
        gate.waiting.fetch_sub(1, Ordering::Relaxed);
        writer.unwrap_or_else(PoisonError::into_inner)
    }

    /// The index among others.
    fn enter(&self) -> RwLockReadGuard<'_, Writer> {
        let gate = &self.gate.0;
        if let Ok(writer) = gate.writer.try_read() {
            return writer;
        }
        gate.waiting.fetch_add(1, Ordering::Relaxed);
        let writer = gate.writer.read();
        gate.waiting.fetch_sub(1, Ordering::Relaxed);
        writer.unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody waits to write.
    pub(crate) fn is_awaited(&self) -> bool {
        self.gate.0.waiting.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn rank_table(&self) -> &RankTable {
        &self.ranks
    }

    /// (rank, tier, block) triples, without the tidying that [`Index::stats`] does. For tests.
    #[cfg(any(test, feature = "oracle"))]
    #[must_use]
    pub fn entries(&self) -> u64 {
        let routed = self.routing.as_ref().map_or(0, Side::entries);
        self.write().events.alone().entries() + routed
    }

    /// Applies every event as if other writers were at work. For tests.
    #[cfg(any(test, feature = "oracle"))]
    pub fn expect_company(&self) {
        self.gate.0.met.store(u32::MAX, Ordering::Relaxed);
    }

    /// How many events were applied beside others, without the index to themselves. For tests.
    #[cfg(any(test, feature = "oracle"))]
    #[must_use]
    pub fn applied_together(&self) -> u64 {
        self.together.load(Ordering::Relaxed)
    }

    /// Panics if the structure contradicts itself. For tests.
    #[cfg(any(test, feature = "oracle"))]
    pub fn check_invariants(&self) {
        self.write().events.alone().check();
        if let Some(side) = &self.routing {
            side.check();
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
