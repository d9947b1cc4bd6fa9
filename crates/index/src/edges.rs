//! Which run goes on where another ends? A table that readers probe while a writer changes it.
//!
//! An edge is keyed by the identity of a run's end and by the next local hash; its entry holds 32 bits of
//! that key's hash and the slot of the run. A reader checks the run it finds, so a slot that was reused or
//! a false agreement of the 32 bits costs a step and never an answer. Entries never move inside a table: a
//! reader finds every edge that is there for the whole of its probe. A full table is replaced by its owner.

use crate::mix::mix;
use crate::sync::{AtomicU64, Ordering};

const EMPTY: u64 = 0;
/// A removed edge. Slot `u32::MAX` is never used, slot 0 is the root and has no edge to it.
const GONE: u64 = u32::MAX as u64;
const SIZE_MIN: usize = 16;

#[inline]
fn key(end: u64, local: u64) -> u64 {
    mix(end.rotate_left(32) ^ local)
}

/// One table; its size never changes.
#[derive(Debug)]
pub(crate) struct Edges {
    slots: Box<[AtomicU64]>,
}

impl Edges {
    /// A table with room for `edges` before it has to be replaced.
    pub(crate) fn with_room(edges: usize) -> Self {
        let size = (edges * 2).next_power_of_two().max(SIZE_MIN);
        Self {
            slots: (0..size).map(|_| AtomicU64::new(EMPTY)).collect(),
        }
    }

    /// Slots that may be in use, removed edges among them, before the table has to be replaced.
    pub(crate) fn room(&self) -> usize {
        self.slots.len() * 3 / 4
    }

    pub(crate) fn bytes(&self) -> usize {
        self.slots.len() * size_of::<AtomicU64>()
    }

    /// The first run whose edge may be the wanted one and of which `is` says that it is.
    #[inline]
    pub(crate) fn find<R>(&self, end: u64, local: u64, is: impl Fn(u32) -> Option<R>) -> Option<R> {
        let key = key(end, local);
        let mask = self.slots.len() - 1;
        let mut at = key as usize & mask;
        for _ in 0..=mask {
            let entry = self.slots[at].load(Ordering::Acquire);
            if entry == EMPTY {
                return None;
            }
            if entry >> 32 == key >> 32
                && entry != GONE
                && let Some(run) = is(entry as u32)
            {
                return Some(run);
            }
            at = (at + 1) & mask;
        }
        None
    }

    /// Adds an edge that is not there. Only the writer calls this, and only while there is room; says
    /// whether a slot was used that never was before.
    pub(crate) fn insert(&self, end: u64, local: u64, run: u32) -> bool {
        let key = key(end, local);
        let mask = self.slots.len() - 1;
        let mut at = key as usize & mask;
        loop {
            let entry = self.slots[at].load(Ordering::Relaxed);
            if entry == EMPTY || entry == GONE {
                let packed = key >> 32 << 32 | u64::from(run);
                self.slots[at].store(packed, Ordering::Release);
                return entry == EMPTY;
            }
            at = (at + 1) & mask;
        }
    }

    /// Removes the edge to `run`. Only the writer calls this.
    pub(crate) fn remove(&self, end: u64, local: u64, run: u32) {
        let key = key(end, local);
        let wanted = key >> 32 << 32 | u64::from(run);
        let mask = self.slots.len() - 1;
        let mut at = key as usize & mask;
        loop {
            let entry = self.slots[at].load(Ordering::Relaxed);
            if entry == EMPTY {
                return;
            }
            if entry == wanted {
                self.slots[at].store(GONE, Ordering::Release);
                return;
            }
            at = (at + 1) & mask;
        }
    }
}
