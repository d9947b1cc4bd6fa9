//! Ranks as small numbers: which slot stands for which rank.
//!
//! A rank keeps its slot until it is removed; only then is the slot given to another one. A lookup that
//! overlapped such a change could put one rank's blocks on another's account: it notices and asks again.

use std::sync::Arc;

use kvasir_types::{DpRank, WorkerId, WorkerRank};
use sdd::{AtomicShared, Guard, Shared, Tag};

use crate::mix::IdMap;
use crate::sync::{AtomicU64, Ordering};

/// Whoever has a slot that stands for no rank: what is stored there is nobody's.
pub(crate) const NOBODY: WorkerRank = WorkerRank {
    worker: WorkerId(u64::MAX),
    rank: DpRank(u32::MAX),
};

/// The readers' side.
#[derive(Debug)]
pub(crate) struct RankTable {
    ranks: AtomicShared<Arc<[WorkerRank]>>,
    /// Counts slots that were given to another rank.
    reused: AtomicU64,
}

impl RankTable {
    pub(crate) fn new() -> Self {
        Self {
            ranks: AtomicShared::new(Arc::new([])),
            reused: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn reused(&self) -> u64 {
        self.reused.load(Ordering::Acquire)
    }

    /// The ranks by slot.
    #[inline]
    pub(crate) fn get<'g>(&self, guard: &'g Guard) -> Option<&'g Arc<[WorkerRank]>> {
        self.ranks.load(Ordering::Acquire, guard).as_ref()
    }
}

/// The writer's side.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    slots: IdMap<WorkerRank, u32>,
    by_slot: Vec<WorkerRank>,
    free: Vec<u32>,
}

impl Ranks {
    pub(crate) fn get(&self, rank: WorkerRank) -> Option<u32> {
        self.slots.get(&rank).copied()
    }

    pub(crate) fn by_slot(&self) -> &[WorkerRank] {
        &self.by_slot
    }

    pub(crate) fn sorted(&self) -> Vec<WorkerRank> {
        let mut all: Vec<_> = self.slots.keys().copied().collect();
        all.sort_unstable();
        all
    }

    pub(crate) fn of_worker(&self, worker: WorkerId) -> Vec<WorkerRank> {
        let all = self.slots.keys().copied();
        all.filter(|rank| rank.worker == worker).collect()
    }

    /// The slot of a rank, new if need be.
    #[inline]
    pub(crate) fn slot(&mut self, rank: WorkerRank, table: &RankTable) -> u32 {
        match self.slots.get(&rank) {
            Some(slot) => *slot,
            None => self.add(rank, table),
        }
    }

    #[cold]
    fn add(&mut self, rank: WorkerRank, table: &RankTable) -> u32 {
        let slot = self.take_slot(rank, table);
        self.slots.insert(rank, slot);
        slot
    }

    /// A slot that stands for no rank yet.
    pub(crate) fn reserve(&mut self, table: &RankTable) -> u32 {
        self.take_slot(NOBODY, table)
    }

    fn take_slot(&mut self, rank: WorkerRank, table: &RankTable) -> u32 {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.by_slot[slot as usize] = rank;
                table.reused.fetch_add(1, Ordering::AcqRel);
                slot
            }
            None => {
                self.by_slot.push(rank);
                self.by_slot.len() as u32 - 1
            }
        };
        self.publish(table);
        slot
    }

    /// From now on `slot` stands for `rank`. Returns the one that did, which stands for nobody now.
    pub(crate) fn exchange(
        &mut self,
        rank: WorkerRank,
        slot: u32,
        table: &RankTable,
    ) -> Option<u32> {
        let old = self.slots.insert(rank, slot);
        self.by_slot[slot as usize] = rank;
        if let Some(old) = old {
            self.by_slot[old as usize] = NOBODY;
        }
        // Counted on both sides of the change: whoever began between the two may have the ranks of before, and the
        // slot of before is emptied from now on.
        table.reused.fetch_add(1, Ordering::AcqRel);
        self.publish(table);
        table.reused.fetch_add(1, Ordering::AcqRel);
        old
    }

    /// Frees a slot that stands for nobody and holds nothing.
    pub(crate) fn release(&mut self, slot: u32) {
        self.free.push(slot);
    }

    fn publish(&self, table: &RankTable) {
        let new = (Some(Shared::new(self.by_slot.as_slice().into())), Tag::None);
        drop(table.ranks.swap(new, Ordering::AcqRel));
    }

    /// Frees the slot of a rank that holds nothing any more.
    pub(crate) fn remove(&mut self, rank: WorkerRank) {
        if let Some(slot) = self.slots.remove(&rank) {
            self.free.push(slot);
        }
    }
}
