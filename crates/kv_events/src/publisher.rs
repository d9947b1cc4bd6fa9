//! What a worker tells of its cache, and what it answers when it is asked.
//!
//! Answers one question: given what an engine did to its cache, in order, which router events go out, under which
//! numbers, and what may a router that missed some of them be told? [`RankPublisher`] is a state machine without I/O, one per rank.
//!
//! What always holds: numbers are consecutive from 1 and a change that is not told uses none; an event is in the rank's own
//! index before it goes out, so that an answer is never behind what was published; a block is taken back once, when its last copy is gone.
//!
//! Elsewhere: bytes (`kvasir-wire`), sockets and timers (the worker).

mod coalesce;
mod local_index;
mod refcounts;

pub use coalesce::COALESCED_BLOCKS_MAX;
pub use local_index::RING_EVENTS;

use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::native::{RecoveryReply, RecoveryRequest, Residency, RouterEvent};

use coalesce::Coalescer;
use local_index::LocalIndex;
use refcounts::Refcounts;

/// Turns what an engine does to the cache of one rank into router events.
///
/// ```
/// use kvasir_kv_events::publisher::RankPublisher;
/// use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
///
/// let stored = |name, parent: Option<u64>| KvEvent::Stored {
///     tier: Tier::Device,
///     parent: parent.map(EngineHash),
///     blocks: vec![StoredBlock { engine: EngineHash(name), local: LocalHash(name) }],
/// };
/// let mut publisher = RankPublisher::new(WorkerRank::new(7, 0));
/// let mut out = Vec::new();
/// publisher.push(stored(1, None), &mut out);
/// publisher.push(stored(2, Some(1)), &mut out);
/// publisher.flush(&mut out);
/// assert_eq!((out.len(), out[0].id), (1, 1), "one chain, one event");
/// ```
#[derive(Debug)]
pub struct RankPublisher {
    rank: WorkerRank,
    last: u64,
    refcounts: Refcounts,
    pending: Coalescer,
    index: Option<LocalIndex>,
}

impl RankPublisher {
    /// A rank whose cache is empty and that can be asked.
    #[must_use]
    pub fn new(rank: WorkerRank) -> Self {
        Self {
            index: Some(LocalIndex::new(rank)),
            ..Self::unanswering(rank)
        }
    }

    /// A rank whose cache is empty and that keeps no index of its own: questions get an error.
    #[must_use]
    pub fn unanswering(rank: WorkerRank) -> Self {
        Self {
            rank,
            last: 0,
            refcounts: Refcounts::default(),
            pending: Coalescer::default(),
            index: None,
        }
    }

    /// Whose events it publishes.
    #[must_use]
    pub const fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// The number of the newest event; 0 if there was none.
    #[must_use]
    pub const fn last_id(&self) -> u64 {
        self.last
    }

    /// Whether something waits for [`Self::flush`].
    #[must_use]
    pub fn has_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Takes the next change of the cache. What it cannot be joined with goes to `out`.
    pub fn push(&mut self, event: KvEvent, out: &mut Vec<RouterEvent>) {
        let Some(event) = self.refcounts.pass(event) else {
            return;
        };
        if let Some(before) = self.pending.push(event) {
            self.emit(before, out);
        }
    }

    /// Takes a change that an engine told itself, copies and all: it is told on as it is. An engine that tells of a block again, without a
    /// second copy, takes it back once.
    pub fn relay(&mut self, event: KvEvent, out: &mut Vec<RouterEvent>) {
        let says_nothing = match &event {
            KvEvent::Stored { blocks, .. } => blocks.is_empty(),
            KvEvent::Removed { blocks, .. } => blocks.is_empty(),
            KvEvent::Cleared { .. } => false,
        };
        if says_nothing {
            return;
        }
        if let Some(before) = self.pending.push(event) {
            self.emit(before, out);
        }
    }

    /// What waits goes to `out`: at the end of an engine's step, or when its time has come.
    pub fn flush(&mut self, out: &mut Vec<RouterEvent>) {
        if let Some(event) = self.pending.take() {
            self.emit(event, out);
        }
    }

    /// What a router is told that asks this. Whatever waits is not part of it.
    #[must_use]
    pub fn answer(&self, request: &RecoveryRequest) -> RecoveryReply {
        if request.rank != self.rank {
            let reason = format!(
                "rank mismatch: asked for {}, this is {}",
                request.rank, self.rank
            );
            return RecoveryReply::Error(reason);
        }
        match &self.index {
            Some(index) => index.answer(request, self.last),
            None => RecoveryReply::Error("this worker keeps no index of its own".to_owned()),
        }
    }

    fn emit(&mut self, event: KvEvent, out: &mut Vec<RouterEvent>) {
        self.last += 1;
        // A clear of everything has no domain: with one it would be of its tier alone.
        let residency = match event {
            KvEvent::Cleared { tier: None } => None,
            _ => Some(Residency::Worker),
        };
        let event = RouterEvent {
            rank: self.rank,
            id: self.last,
            residency,
            position: None,
            event,
        };
        if let Some(index) = &mut self.index {
            index.apply(&event);
        }
        out.push(event);
    }
}
