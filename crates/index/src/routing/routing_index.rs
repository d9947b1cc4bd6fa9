//! What routing decisions taught, behind its lock: who writes when.
//!
//! A lock of its own, so that requests and events do not wait for each other, held for a few blocks at a time.
//! A decision does a share of the work in proportion to what it adds; what expires is swept by whoever keeps the
//! time, who gives way to requests.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use kvasir_types::{LocalHash, SequenceHash, Time, WorkerRank};

use super::{BLOCKS_AT_ONCE, RoutingTree};
use crate::sync::{MutexGuard, Ordering, WriteLock};
use crate::tree::DumpEvent;
use crate::view::View;
use crate::{Approximate, Stats};

/// Blocks that a decision forgets at least once there are too many. The oracle of tests forgets them all.
const PRUNED_AT_ONCE: usize = if cfg!(any(test, feature = "oracle")) {
    4096
} else {
    2 * BLOCKS_AT_ONCE
};

/// What is known from routing decisions.
#[derive(Debug)]
pub(crate) struct RoutingIndex {
    pub(crate) view: Arc<View>,
    routing: WriteLock<RoutingTree>,
    bytes: AtomicUsize,
}

impl RoutingIndex {
    pub(crate) fn new(options: Approximate) -> Self {
        let routing = RoutingTree::new(options);
        Self {
            view: Arc::clone(&routing.tree.view),
            routing: WriteLock::new(routing),
            bytes: AtomicUsize::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RoutingTree> {
        self.routing.lock()
    }

    /// Bytes after the last change.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Notes that these are the slots that the index has given to ranks.
    pub(crate) fn admit(&self, rank: WorkerRank, slot: u32) {
        self.lock().slots.insert(rank, slot);
    }

    /// See [`crate::Index::record_routing`]; false if the rank has no slot here. Leaves at most `max_bytes` of what
    /// was there before.
    pub(crate) fn record(
        &self,
        now: Time,
        rank: WorkerRank,
        locals: &[LocalHash],
        sequence: &[SequenceHash],
        max_bytes: usize,
    ) -> bool {
        let (mut added, mut more) = (0, true);
        let mut done = None;
        let mut routing = self.lock();
        while more {
            let Some(&slot) = routing.slots.get(&rank) else {
                return added > 0; // It was removed meanwhile.
            };
            let new;
            (new, more) = routing.record(now, slot, rank, locals, sequence, &mut done);
            added += new;
            if more {
                drop(routing);
                routing = self.lock();
            }
        }
        let quota = PRUNED_AT_ONCE.max(2 * added);
        let mut seen = 0;
        while routing.prune() && seen < quota {
            seen += BLOCKS_AT_ONCE;
            drop(routing);
            routing = self.lock();
        }
        while max_bytes < usize::MAX && routing.evict(max_bytes) && seen < quota {
            seen += BLOCKS_AT_ONCE;
            drop(routing);
            routing = self.lock();
        }
        self.note_bytes(&routing);
        true
    }

    /// Forgets some of what has expired. Says whether there may be more; also if others wait, to whom it gives way.
    pub(crate) fn expire_some(&self, now: Time) -> bool {
        if self.routing.has_waiters() {
            return true;
        }
        let mut routing = self.lock();
        let more = routing.expire(now);
        self.note_bytes(&routing);
        more
    }

    /// Forgets the next to expire until `target` bytes are left or some `most` blocks are gone. Says whether there is
    /// more to forget.
    pub(crate) fn evict(&self, target: usize, most: usize) -> bool {
        let mut seen = 0;
        loop {
            let mut routing = self.lock();
            let more = routing.evict(target);
            self.note_bytes(&routing);
            seen += BLOCKS_AT_ONCE;
            if !more || seen >= most {
                return more;
            }
        }
    }

    pub(crate) fn next_expiry(&self) -> Option<Time> {
        self.lock().next_expiry()
    }

    /// Forgets what a rank is believed to hold, `runs` runs at a time.
    pub(crate) fn clear(&self, rank: WorkerRank, runs: usize) {
        let mut routing = self.lock();
        let Some(&slot) = routing.slots.get(&rank) else {
            return;
        };
        let mut spans = routing.take_spans(slot);
        while routing.forget(slot, &mut spans, runs) {
            drop(routing);
            routing = self.lock();
        }
        // What was recorded meanwhile.
        routing.forget_all(slot);
        self.note_bytes(&routing);
    }

    /// Forgets a rank whose slot is given up, and what was recorded of it since it was cleared.
    pub(crate) fn remove(&self, rank: WorkerRank) {
        let mut routing = self.lock();
        if let Some(slot) = routing.slots.remove(&rank) {
            routing.forget_all(slot);
            self.note_bytes(&routing);
        }
    }

    /// What a rank is believed to hold, parents before children. Requests get their turn after every few spans, so it is
    /// not of one moment: what is forgotten or added meanwhile may be missing, and nothing hangs on what is.
    pub(crate) fn dump(&self, rank: WorkerRank) -> Vec<DumpEvent> {
        let spans = self.lock().spans_by_depth(rank);
        let mut out = Vec::new();
        let mut left = spans.into_iter().peekable();
        while left.peek().is_some() {
            let routing = self.lock();
            let mut blocks = 0;
            while blocks < BLOCKS_AT_ONCE
                && let Some(id) = left.next()
            {
                let stored = routing.dump(id);
                blocks += stored.as_ref().map_or(1, |(_, blocks)| blocks.len());
                out.extend(stored.map(|(parent, blocks)| DumpEvent::Stored(parent, blocks)));
            }
        }
        out
    }

    fn note_bytes(&self, routing: &RoutingTree) {
        self.bytes.store(routing.bytes(), Ordering::Relaxed);
    }

    /// Adds its figures.
    pub(crate) fn add_to(&self, stats: &mut Stats) {
        let routing = self.lock();
        let tree = &routing.tree;
        stats.blocks += tree.blocks();
        stats.entries += tree.entries();
        stats.runs += tree.runs();
        stats.bytes += routing.bytes() as u64;
        stats.pruned = routing.pruned;
        stats.evicted += routing.evicted;
    }

    #[cfg(any(test, feature = "oracle"))]
    pub(crate) fn entries(&self) -> u64 {
        self.lock().tree.entries()
    }

    #[cfg(any(test, feature = "oracle"))]
    pub(crate) fn check(&self) {
        self.lock().check();
    }
}
