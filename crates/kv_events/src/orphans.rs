//! Blocks that came before their parents, kept until the parents come.
//!
//! After a late join the engine stores children of blocks that it announced before we listened. When such
//! a parent is announced again (evicted and refilled), its children are still there, silently: they must not
//! be forgotten. Bounded in blocks; the oldest go first.

use std::collections::{HashMap, VecDeque};

use kvasir_types::{EngineHash, KvEvent, StoredBlock, Tier};

/// A stored event that waits, with what was removed of it meanwhile.
#[derive(Clone, Debug)]
struct Orphan {
    tier: Tier,
    blocks: Vec<StoredBlock>,
    removed: Vec<EngineHash>,
}

/// Stored events that wait for their parents.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orphans {
    waiting: HashMap<EngineHash, Vec<Orphan>>,
    /// Parents in the order in which their first child was parked.
    order: VecDeque<EngineHash>,
    /// Parked blocks by name: parent of the event that they are in.
    names: HashMap<EngineHash, EngineHash>,
    blocks: usize,
}

impl Orphans {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) const fn blocks(&self) -> usize {
        self.blocks
    }

    pub(crate) fn clear(&mut self) -> usize {
        let dropped = self.blocks;
        *self = Self::default();
        dropped
    }

    /// Keeps an event whose parent is unknown. Returns how many blocks had to go to make room for it.
    pub(crate) fn park(
        &mut self,
        tier: Tier,
        parent: EngineHash,
        blocks: &[StoredBlock],
        blocks_max: usize,
    ) -> usize {
        if blocks.len() > blocks_max {
            return blocks.len();
        }
        let mut dropped = 0;
        while self.blocks + blocks.len() > blocks_max {
            let Some(oldest) = self.order.front().copied() else {
                break;
            };
            dropped += self
                .take(oldest)
                .iter()
                .map(|o| o.blocks.len())
                .sum::<usize>();
        }
        self.blocks += blocks.len();
        for block in blocks {
            self.names.insert(block.engine, parent);
        }
        let waiting = self.waiting.entry(parent).or_default();
        if waiting.is_empty() {
            self.order.push_back(parent);
        }
        waiting.push(Orphan {
            tier,
            blocks: blocks.to_vec(),
            removed: Vec::new(),
        });
        dropped
    }

    fn take(&mut self, parent: EngineHash) -> Vec<Orphan> {
        let Some(orphans) = self.waiting.remove(&parent) else {
            return Vec::new();
        };
        self.order.retain(|p| *p != parent);
        for block in orphans.iter().flat_map(|o| &o.blocks) {
            self.blocks -= 1;
            if self.names.get(&block.engine) == Some(&parent) {
                self.names.remove(&block.engine);
            }
        }
        orphans
    }

    /// The events that waited for `parent`, as they are to be applied now.
    pub(crate) fn adopt(&mut self, parent: EngineHash) -> Vec<KvEvent> {
        let mut events = Vec::new();
        if !self.waiting.contains_key(&parent) {
            return events;
        }
        for orphan in self.take(parent) {
            let tier = orphan.tier;
            events.push(KvEvent::Stored {
                tier,
                parent: Some(parent),
                blocks: orphan.blocks,
            });
            if !orphan.removed.is_empty() {
                let blocks = orphan.removed;
                events.push(KvEvent::Removed { tier, blocks });
            }
        }
        events
    }

    /// Notes removals. Returns how many names were parked ones.
    pub(crate) fn remove(&mut self, tier: Tier, names: &[EngineHash]) -> usize {
        names
            .iter()
            .filter(|name| self.remove_one(tier, **name))
            .count()
    }

    fn remove_one(&mut self, tier: Tier, name: EngineHash) -> bool {
        let Some(&parent) = self.names.get(&name) else {
            return false;
        };
        let Some(orphans) = self.waiting.get_mut(&parent) else {
            return false;
        };
        let holds = |orphan: &&mut Orphan| {
            let stored = orphan.blocks.iter().filter(|b| b.engine == name).count();
            let removed = orphan.removed.iter().filter(|n| **n == name).count();
            orphan.tier == tier && removed < stored
        };
        let Some(orphan) = orphans.iter_mut().find(holds) else {
            return false;
        };
        orphan.removed.push(name);
        if orphans.iter().all(|o| o.removed.len() == o.blocks.len()) {
            self.take(parent);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_types::LocalHash;

    fn block(name: u64) -> StoredBlock {
        StoredBlock {
            engine: EngineHash(name),
            local: LocalHash(name),
        }
    }

    fn park(orphans: &mut Orphans, parent: u64, names: &[u64]) -> usize {
        let blocks: Vec<StoredBlock> = names.iter().map(|n| block(*n)).collect();
        orphans.park(Tier::Device, EngineHash(parent), &blocks, 4)
    }

    #[test]
    fn what_was_removed_meanwhile_is_removed_after_placing() {
        let mut orphans = Orphans::default();
        assert_eq!(park(&mut orphans, 1, &[2, 3]), 0);
        let names = [EngineHash(3), EngineHash(9)];
        assert_eq!(orphans.remove(Tier::Device, &names), 1);
        let events = orphans.adopt(EngineHash(1));
        let removed = KvEvent::Removed {
            tier: Tier::Device,
            blocks: vec![EngineHash(3)],
        };
        assert!(matches!(&events[0], KvEvent::Stored { blocks, .. } if blocks.len() == 2));
        assert_eq!(events[1], removed);
        assert!(orphans.is_empty() && orphans.blocks() == 0);
    }

    #[test]
    fn an_event_of_which_all_is_removed_is_forgotten() {
        let mut orphans = Orphans::default();
        park(&mut orphans, 1, &[2, 3]);
        orphans.remove(Tier::Device, &[EngineHash(2), EngineHash(3)]);
        assert!(orphans.is_empty());
        assert_eq!(orphans.blocks(), 0);
        assert!(orphans.names.is_empty() && orphans.order.is_empty());
    }

    #[test]
    fn at_the_limit_the_oldest_go() {
        let mut orphans = Orphans::default();
        assert_eq!(park(&mut orphans, 1, &[2, 3]), 0);
        assert_eq!(park(&mut orphans, 5, &[6, 7]), 0);
        assert_eq!(park(&mut orphans, 8, &[9]), 2);
        assert_eq!(orphans.blocks(), 3);
        assert!(orphans.adopt(EngineHash(1)).is_empty());
        assert_eq!(park(&mut orphans, 1, &[1, 2, 3, 4, 5]), 5);
        assert_eq!(orphans.blocks(), 3);
    }
}
