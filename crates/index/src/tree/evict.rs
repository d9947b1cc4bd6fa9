//! What goes when there is too much: leaves that were stored long ago.
//!
//! A little with each event that is one too many, so no list of all leaves: a hand goes round the runs, and of the
//! next [`LEAVES_COMPARED`] leaves the one goes in which nothing was stored for longest.

use super::{Holder, ROOT, Tree};

/// Leaves of which the oldest goes.
const LEAVES_COMPARED: usize = 64;

/// Slots of runs that are looked at in order to find them, most of which may be free after much has gone.
const SLOTS_LOOKED_AT: usize = 4096;

impl Tree {
    /// Drops leaves until the tree takes at most `target` bytes or some `most` blocks are gone. Returns how many entries
    /// went.
    pub(crate) fn evict(&mut self, target: usize, most: usize) -> u64 {
        self.clock += 1;
        self.free_deferred(most);
        let (before, mut left) = (self.entries, most);
        while self.bytes() > target
            && left > 0
            && let Some(leaf) = self.next_leaf()
        {
            left = left.saturating_sub(self.len(leaf) as usize);
            self.evict_leaf(leaf);
        }
        self.settle();
        before - self.entries
    }

    /// The oldest of the next leaves.
    fn next_leaf(&mut self) -> Option<u32> {
        let (slots, mut leaves, mut oldest) = (self.nodes.len(), 0, None);
        for _ in 0..slots.min(SLOTS_LOOKED_AT) {
            self.hand = (self.hand + 1) % slots;
            let Some(node) = &self.nodes[self.hand] else {
                continue;
            };
            if self.hand != ROOT as usize && node.children.is_empty() {
                leaves += 1;
                let this = (node.touched, self.hand as u32);
                oldest = Some(oldest.map_or(this, |oldest| this.min(oldest)));
            }
            if leaves == LEAVES_COMPARED {
                break;
            }
        }
        oldest.map(|(_, leaf)| leaf)
    }

    /// Takes a leaf from all who hold it.
    fn evict_leaf(&mut self, id: u32) {
        for (h, name, place) in self.aliases.in_run(id) {
            let grown = self.aliases.set(h, place, name, 0);
            let holding = self.holding(h);
            holding.alias_count = holding.alias_count.saturating_add_signed(grown);
        }
        let run = self.node(id).run.clone();
        for (tier, slot, held) in run.each_owner() {
            self.count(Holder { slot, tier }, id, held.count(0, run.len()), 0);
        }
        let parent = self.free_run(id);
        self.trim(parent);
    }
}
