//! What goes when there is too much: leaves that were stored longest ago.

use super::{Alone, Holder, ROOT};

impl Alone<'_> {
    /// Drops leaves, those first in which something was stored longest ago, until the tree takes at most
    /// `target` bytes. Returns how many entries went.
    pub(crate) fn evict(&mut self, target: usize) -> u64 {
        self.tidy(usize::MAX);
        let before = self.entries;
        while self.bytes() > target {
            let mut leaves: Vec<(u64, u32)> = (0u32..)
                .zip(&self.nodes)
                .filter_map(|(id, node)| Some((id, node.as_ref()?)))
                .filter(|(id, node)| *id != ROOT && node.children.is_empty())
                .map(|(id, node)| (node.touched, id))
                .collect();
            if leaves.is_empty() {
                break;
            }
            leaves.sort_unstable();
            for (_, id) in leaves {
                if self.bytes() <= target {
                    break;
                }
                self.evict_leaf(id);
            }
        }
        self.settle();
        before - self.entries
    }

    /// Takes a leaf from all who hold it.
    fn evict_leaf(&mut self, id: u32) {
        for (h, name, place) in self.odd.in_run(id) {
            let grown = self.odd.set(h, place, name, 0);
            let holding = self.holding(h);
            holding.odd = holding.odd.saturating_add_signed(grown);
        }
        let run = self.node(id).run.clone();
        for (tier, slot, held) in run.each_owner() {
            self.count(Holder { slot, tier }, id, held.count(0, run.len()), 0);
        }
        let parent = self.free_run(id);
        self.trim(parent);
    }
}
