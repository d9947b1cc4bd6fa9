//! A tree as runs, to be written down and made again.

use std::sync::Arc;

use super::{Holder, Node, ROOT, Tree};
use crate::SnapshotError;
use crate::bits::Bits;
use crate::names::{Place, RUN_MAX};
use crate::owners::Coverage;
use crate::run::Run;

/// A run by itself. Runs are numbered from 1 in the order in which they are packed; 0 is the root.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RunRecord {
    pub(crate) parent: u32,
    pub(crate) locals: Vec<u64>,
    pub(crate) names: Vec<u64>,
    /// Positions of blocks whose name is another block's.
    pub(crate) unnamed: Vec<u32>,
    /// (slot, tier, extent) of those that hold the first blocks.
    pub(crate) owners: Vec<(u32, usize, u32)>,
    /// (slot, tier, a bit for each block) of the others.
    pub(crate) patches: Vec<(u32, usize, Vec<u64>)>,
    /// (slot, tier, position, name, count).
    pub(crate) aliases: Vec<(u32, usize, u32, u64, u32)>,
}

/// How far a tree is packed.
#[derive(Debug)]
pub(crate) struct PackCursor {
    /// By slot: the number of each run that is packed.
    number: Vec<u32>,
    /// Runs whose parents are packed.
    open: Vec<u32>,
    count: u32,
    /// When it was begun: only a tree that has not changed since can be packed further.
    clock: u64,
    packed: RunRecord,
}

impl Tree {
    /// Begins to pack every run, parents before children.
    pub(crate) fn begin_packing(&self) -> PackCursor {
        PackCursor {
            number: vec![0; self.nodes.len()],
            open: self.node(ROOT).children.clone(),
            count: 0,
            clock: self.clock,
            packed: RunRecord::default(),
        }
    }

    /// Hands the next runs, some `blocks` blocks, to `write`. Returns whether there are more. After an error what was
    /// packed is of no use.
    pub(crate) fn pack_some(
        &self,
        cursor: &mut PackCursor,
        blocks: usize,
        mut write: impl FnMut(&RunRecord),
    ) -> Result<bool, SnapshotError> {
        if cursor.clock != self.clock {
            return Err(SnapshotError::Changed);
        }
        let mut left = blocks;
        while left > 0
            && let Some(id) = cursor.open.pop()
        {
            let node = self
                .pack_next(cursor, id)
                .ok_or(SnapshotError::Damaged(id))?;
            write(&cursor.packed);
            left = left.saturating_sub(node.names.len());
        }
        match cursor.open.is_empty() {
            true if cursor.count as usize != self.live => Err(SnapshotError::Damaged(ROOT)),
            empty => Ok(!empty),
        }
    }

    /// Packs a run whose parent is packed; `None` if there is no such run.
    fn pack_next(&self, cursor: &mut PackCursor, id: u32) -> Option<&Node> {
        let node = self.nodes.get(id as usize)?.as_ref()?;
        cursor.packed.parent = *cursor.number.get(node.parent as usize)?;
        cursor.count += 1;
        *cursor.number.get_mut(id as usize)? = cursor.count;
        cursor.open.extend(&node.children);
        self.pack(id, node, &mut cursor.packed);
        Some(node)
    }

    /// Packs a run, all but its parent.
    fn pack(&self, id: u32, node: &Node, packed: &mut RunRecord) {
        packed.locals.clear();
        node.run.copy(0, node.names.len(), &mut packed.locals);
        packed.names.clone_from(&node.names);
        packed.unnamed.clear();
        if !node.clean {
            let places = (0u32..).zip(&node.names);
            let unnamed =
                places.filter(|(pos, n)| self.named(**n) != Some(Place { run: id, pos: *pos }));
            packed.unnamed.extend(unnamed.map(|(pos, _)| pos));
        }
        packed.owners.clear();
        packed.patches.clear();
        for (tier, slot, held) in node.run.each_owner() {
            match held {
                Coverage::Head(extent) => packed.owners.push((slot, tier, extent)),
                Coverage::Bits(bits) => {
                    let words = (0..node.names.len().div_ceil(64)).map(|i| bits.word(i));
                    packed.patches.push((slot, tier, words.collect()));
                }
            }
        }
        packed.aliases.clear();
        for (h, name, place) in self.aliases.in_run(id) {
            let count = self.aliases.count(h, place, name);
            packed
                .aliases
                .push((h.slot, h.tier, place.pos, name, count));
        }
    }

    /// Adds a run as it was packed; `ids` are those of the runs before it, the root first. Says whether it
    /// fits: what was written down may be damaged in ways that a checksum does not show.
    pub(crate) fn unpack(&mut self, packed: &RunRecord, ids: &mut Vec<u32>) -> bool {
        self.clock += 1;
        let len = packed.names.len();
        let (Some(&parent), true) = (
            ids.get(packed.parent as usize),
            (1..=RUN_MAX).contains(&len) && packed.locals.len() == len,
        ) else {
            return false;
        };
        let first = packed.locals[0];
        let held =
            |&(_, tier, extent): &(u32, usize, u32)| tier < 4 && (1..=len as u32).contains(&extent);
        if self.child(parent, first).is_some()
            || !packed.owners.iter().all(held)
            || !packed
                .patches
                .iter()
                .all(|patch| is_patch(patch, len as u32))
        {
            return false;
        }
        let Some(id) = self.new_run(parent, packed) else {
            return false;
        };
        ids.push(id);
        for &(slot, tier, extent) in &packed.owners {
            self.count(Holder { slot, tier }, id, 0, extent);
        }
        for &(slot, tier, ref words) in &packed.patches {
            let blocks = words.iter().map(|w| w.count_ones()).sum();
            self.count(Holder { slot, tier }, id, 0, blocks);
        }
        packed
            .aliases
            .iter()
            .all(|&(slot, tier, pos, name, count)| {
                let (h, place) = (Holder { slot, tier }, Place { run: id, pos });
                let fits = tier < 4 && count > 0 && self.holds(place, h);
                let fits = fits && self.aliases.place(h, name).is_none();
                if fits {
                    let grown = self.aliases.set(h, place, name, count);
                    let holding = self.holding(h);
                    holding.alias_count = holding.alias_count.saturating_add_signed(grown);
                }
                fits
            })
    }

    /// `None` if a name is another block's against what was packed.
    fn new_run(&mut self, parent: u32, packed: &RunRecord) -> Option<u32> {
        self.make_room_for_edge();
        let (id, end) = (self.reserve(), self.new_end());
        let above = self.node(parent);
        let (follows, start) = (above.run.end, above.run.start + above.names.len() as u32);
        let len = packed.names.len() as u32;
        let mut run = Run::new(end, follows, start, Arc::from(packed.locals.as_slice()));
        for &(slot, tier, extent) in &packed.owners {
            run.owners_mut(tier).set(slot, extent, len);
        }
        for &(slot, tier, ref words) in &packed.patches {
            let bits = Bits::from_words(words);
            run.owners_mut(tier).set_bits(slot, bits, len);
        }
        let mut node = Node::new(Run::new(0, 0, 0, Arc::new([])), parent);
        node.names.clone_from(&packed.names);
        (node.written, node.clean) = (len, packed.unnamed.is_empty());
        self.nodes[id as usize] = Some(node);
        if !self.claim_packed(id, packed) {
            self.unreserve(id);
            return None;
        }
        self.live += 1;
        self.blocks += packed.names.len();
        self.publish(id, run);
        self.link(follows, packed.locals[0], id);
        self.add_child(parent, id);
        if parent != ROOT {
            self.account(parent);
        }
        Some(id)
    }

    fn claim_packed(&mut self, id: u32, packed: &RunRecord) -> bool {
        let nodes = &self.nodes;
        if packed.unnamed.is_empty() {
            let first = Place { run: id, pos: 0 };
            let has_name = |p, name| Self::has_name(nodes, p, name);
            return self
                .names
                .claim(&packed.names, |name| *name, first, has_name);
        }
        for (pos, &name) in (0u32..).zip(&packed.names) {
            let place = Place { run: id, pos };
            let named = !packed.unnamed.contains(&pos);
            if named
                && self
                    .names
                    .insert(name, place, |p| Self::has_name(nodes, p, name))
                    .is_err()
            {
                let claimed = &packed.names[..pos as usize];
                self.names.forget(claimed, Place { run: id, pos: 0 });
                return false;
            }
        }
        true
    }

    /// Whether every leaf is held to its end, as it is between calls.
    pub(crate) fn is_trim(&self) -> bool {
        let leaves = self.nodes.iter().flatten().skip(1);
        leaves
            .filter(|n| n.children.is_empty())
            .all(|n| n.run.reach() == n.names.len() as u32)
    }
}

/// Whether these bits say that some blocks of a run of `len` are held.
fn is_patch((_, tier, words): &(u32, usize, Vec<u64>), len: u32) -> bool {
    let bits = Bits::from_words(words);
    let fits = bits.room() == len.div_ceil(64) * 64 && bits.count(len, bits.room()) == 0;
    *tier < 4 && fits && bits.reach(len) > 0
}

#[cfg(test)]
mod tests {
    use kvasir_types::{EngineHash, LocalHash, StoredBlock};

    use super::super::Repeats;
    use super::super::Tree;
    use super::*;

    /// Three prompts with a beginning in common, of two blocks each.
    fn three() -> Tree {
        let mut tree = Tree::new();
        for leaf in [10, 20, 30] {
            let blocks = [1, 2, leaf, leaf + 1].map(|i| StoredBlock {
                engine: EngineHash(i),
                local: LocalHash(i),
            });
            let h = Holder {
                slot: leaf as u32,
                tier: 0,
            };
            tree.store(h, None, &blocks, Repeats::Count).unwrap();
        }
        tree
    }

    /// What is stored and what is dropped for it may be two turns, with the beginning of a copy between them.
    #[test]
    fn a_tree_that_is_evicted_from_is_not_packed_further() {
        let mut tree = three();
        let mut cursor = tree.begin_packing();
        assert_eq!(tree.pack_some(&mut cursor, 1, |_| {}), Ok(true));
        assert!(tree.evict(0, 1) > 0);
        let more = tree.pack_some(&mut cursor, 1, |_| {});
        assert_eq!(more, Err(SnapshotError::Changed));
    }

    #[test]
    fn a_reference_to_no_run_is_an_error() {
        let mut events = three();
        let mut cursor = events.begin_packing();
        assert_eq!(events.pack_some(&mut cursor, 1, |_| {}), Ok(true));
        let leaf = *cursor.open.last().unwrap();
        events.nodes[leaf as usize] = None;
        let more = events.pack_some(&mut cursor, usize::MAX, |_| {});
        assert_eq!(more, Err(SnapshotError::Damaged(leaf)));
    }

    #[test]
    fn a_tree_that_does_not_reach_all_its_runs_is_an_error() {
        let mut events = three();
        events.node_mut(ROOT).children.clear();
        let mut cursor = events.begin_packing();
        let more = events.pack_some(&mut cursor, usize::MAX, |_| {});
        assert_eq!(more, Err(SnapshotError::Damaged(ROOT)));
    }
}
