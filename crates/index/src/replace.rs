//! A rank's blocks, all replaced at once.
//!
//! Answers one question: how does a dump of a whole cache take the place of what was known, while others look things up? The
//! new blocks are stored under a slot that stands for no rank; then the rank gets that slot and the old one is emptied. A lookup that
//! overlaps the change asks again, as it does when a slot is reused.
//!
//! What always holds: a lookup sees what the rank held before or what it holds after, never a part of either; other writers
//! wait for one event at most.

use kvasir_types::{KvEvent, WorkerRank};

use crate::index::{CLEAR_SLICE, TIERS, Writer, holder};
use crate::tree::{NAMES_PER_EVENT, Repeats};
use crate::{ApplyError, Index};

impl Index {
    /// Replaces everything that a rank holds by what `events` make of an empty cache. Returns which events were refused,
    /// by their place, and why. A block that is announced again is held once. What routing decisions taught of the rank is
    /// forgotten.
    ///
    /// ```
    /// use kvasir_index::{Index, Matches};
    /// use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
    ///
    /// let (index, rank) = (Index::new(), WorkerRank::new(7, 0));
    /// let stored = |name| KvEvent::Stored {
    ///     tier: Tier::Device,
    ///     parent: None,
    ///     blocks: vec![StoredBlock { engine: EngineHash(name), local: LocalHash(name) }],
    /// };
    /// index.apply(rank, &stored(1))?;
    /// assert_eq!(index.replace_rank(rank, [&stored(2)]), []);
    /// let mut found = Matches::new();
    /// index.find(&[LocalHash(1)], &mut found);
    /// assert!(found.is_empty());
    /// index.find(&[LocalHash(2)], &mut found);
    /// assert_eq!(found.get(rank).map(|m| m.device), Some(1));
    /// # Ok::<(), kvasir_index::ApplyError>(())
    /// ```
    pub fn replace_rank<'e>(
        &self,
        rank: WorkerRank,
        events: impl IntoIterator<Item = &'e KvEvent>,
    ) -> Vec<(usize, ApplyError)> {
        let slot = self.write().ranks.reserve(self.rank_table());
        let mut refused = Vec::new();
        for (at, event) in events.into_iter().enumerate() {
            let mut writer = self.write();
            if let Err(error) = store(&mut writer, slot, event) {
                refused.push((at, error));
            }
            if let KvEvent::Stored { blocks, .. } = event {
                self.keep_budget_after(&mut writer, blocks.len());
            }
        }
        let old = {
            let mut writer = self.write();
            self.forget_routing(rank);
            writer.ranks.exchange(rank, slot, self.rank_table())
        };
        if let Some(old) = old {
            self.empty_slot(old);
        }
        refused
    }

    /// Empties a slot that stands for no rank, in slices, and frees it.
    fn empty_slot(&self, slot: u32) {
        for tier in TIERS {
            while self.write().events.clear(holder(slot, tier), CLEAR_SLICE) {}
        }
        self.write().ranks.release(slot);
    }
}

fn store(writer: &mut Writer, slot: u32, event: &KvEvent) -> Result<(), ApplyError> {
    let events = &mut writer.events;
    events.free_deferred(NAMES_PER_EVENT);
    match event {
        KvEvent::Stored {
            tier,
            parent,
            blocks,
        } => events.store(holder(slot, *tier), *parent, blocks, Repeats::Ignore),
        KvEvent::Removed { tier, blocks } => events.remove(holder(slot, *tier), blocks),
        KvEvent::Cleared { tier } => {
            let tiers = TIERS
                .into_iter()
                .filter(|t| tier.is_none_or(|only| only == *t));
            tiers.for_each(|tier| while events.clear(holder(slot, tier), CLEAR_SLICE) {});
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use kvasir_types::{EngineHash, LocalHash, StoredBlock, Tier};

    use super::*;
    use crate::Matches;

    const RANK: WorkerRank = WorkerRank {
        worker: kvasir_types::WorkerId(1),
        rank: kvasir_types::DpRank(0),
    };

    /// A chain of `len` blocks; its locals are the same for every `life`, its names are not.
    fn chain(life: u64, len: u64) -> Vec<KvEvent> {
        let name = |at: u64| EngineHash(life << 32 | at);
        let stored = |at: u64| KvEvent::Stored {
            tier: Tier::Device,
            parent: (at > 1).then(|| name(at - 1)),
            blocks: vec![StoredBlock {
                engine: name(at),
                local: LocalHash(at),
            }],
        };
        (1..=len).map(stored).collect()
    }

    fn depth(index: &Index, matches: &mut Matches, rank: WorkerRank) -> u32 {
        let locals: Vec<LocalHash> = (1..=100).map(LocalHash).collect();
        index.find(&locals, matches);
        matches.get(rank).map_or(0, |m| m.device)
    }

    #[test]
    fn a_replaced_rank_holds_the_new_and_nothing_of_the_old() {
        let (index, mut matches) = (Index::new(), Matches::new());
        let other = WorkerRank::new(2, 0);
        for event in chain(7, 9) {
            index.apply(RANK, &event).unwrap();
            index.apply(other, &event).unwrap();
        }
        assert_eq!(index.replace_rank(RANK, &chain(8, 5)), []);
        assert_eq!(depth(&index, &mut matches, RANK), 5);
        assert_eq!(depth(&index, &mut matches, other), 9);
        assert_eq!(matches.sorted().len(), 2);
        assert_eq!(index.stats().entries, 14);
        // Old names mean nothing any more, new ones do.
        let removed = |name| KvEvent::Removed {
            tier: Tier::Device,
            blocks: vec![EngineHash(name)],
        };
        assert!(index.apply(RANK, &removed(7 << 32 | 5)).is_err());
        index.apply(RANK, &removed(8 << 32 | 5)).unwrap();
        assert_eq!(depth(&index, &mut matches, RANK), 4);
        // By nothing, too; and a rank that was not there.
        assert_eq!(index.replace_rank(RANK, []), []);
        assert_eq!(index.replace_rank(WorkerRank::new(3, 0), &chain(9, 2)), []);
        assert_eq!(depth(&index, &mut matches, RANK), 0);
        assert_eq!(depth(&index, &mut matches, WorkerRank::new(3, 0)), 2);
        index.remove_rank(other);
        index.remove_rank(WorkerRank::new(3, 0));
        assert_eq!(index.stats().entries, 0);
        index.check_invariants();
    }

    #[test]
    fn what_has_no_parent_is_refused_by_its_place() {
        let index = Index::new();
        let mut events = chain(7, 3);
        events.remove(1);
        let refused = index.replace_rank(RANK, &events);
        let parent = EngineHash(7 << 32 | 2);
        assert_eq!(refused, [(1, ApplyError::ParentBlockNotFound(parent))]);
        assert_eq!(depth(&index, &mut Matches::new(), RANK), 1);
    }

    /// Readers on other threads see one of the two chains in whole, never less and never a rank that nobody knows.
    #[test]
    fn lookups_see_the_old_or_the_new() {
        let index = Index::new();
        index.replace_rank(RANK, &chain(0, 40));
        let done = AtomicBool::new(false);
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    let mut matches = Matches::new();
                    while !done.load(Ordering::Relaxed) {
                        let found = depth(&index, &mut matches, RANK);
                        assert!(matches!(found, 40 | 30), "{found}");
                        assert_eq!(matches.sorted().len(), 1, "{matches:?}");
                    }
                });
            }
            for life in 1..400 {
                let len = if life % 2 == 0 { 40 } else { 30 };
                index.replace_rank(RANK, &chain(life, len));
            }
            done.store(true, Ordering::Relaxed);
        });
        index.check_invariants();
    }
}
