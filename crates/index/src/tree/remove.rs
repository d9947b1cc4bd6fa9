//! Blocks that went away, and names one by one.

use kvasir_types::EngineHash;
use sdd::Tag;

use super::store::Again;
use super::{Holder, ROOT, Tree};
use crate::ApplyError;
use crate::names::Place;
use crate::sync::Ordering;
use crate::view::CHUNK;

impl Tree {
    /// Takes blocks off what a holder holds; unknown names are passed over and the first one reported.
    pub(crate) fn remove(&mut self, h: Holder, names: &[EngineHash]) -> Result<(), ApplyError> {
        let mut unknown = None;
        let mut rest = names;
        while let Some((first, others)) = rest.split_first() {
            let plain = self
                .holdings
                .get(h.slot as usize)
                .is_some_and(|t| t[h.tier].odd == 0);
            rest = others;
            let known = if plain {
                self.remove_stretch(h, first.0, &mut rest)
            } else {
                self.remove_name(h, first.0)
            };
            if !known {
                unknown = unknown.or(Some(*first));
            }
        }
        unknown.map_or(Ok(()), |name| Err(ApplyError::BlockNotFound(name)))
    }

    /// Removes a block, and with it as many of the next names as go on from there in its run, either way.
    /// For holders that have nothing odd.
    fn remove_stretch(&mut self, h: Holder, name: u64, rest: &mut &[EngineHash]) -> bool {
        let Some(Place { run, pos }) = self.named(name) else {
            return false;
        };
        let node = self.node(run);
        let extent = node.run.extent(h.tier, h.slot);
        if pos >= extent {
            return false;
        }
        let (mut low, mut high) = (pos as usize, pos as usize + 1);
        let mut more = node.clean;
        while more {
            let down = common(node.names[..low].iter().rev(), rest);
            *rest = &rest[down..];
            low -= down;
            let up = common(node.names[high..extent as usize].iter(), rest);
            *rest = &rest[up..];
            high += up;
            more = down + up > 0;
        }
        self.give_up(h, run, low as u32, high as u32);
        true
    }

    /// Makes a holder hold no more of `low..high` of a run, of which it holds at least so much.
    fn give_up(&mut self, h: Holder, run: u32, low: u32, high: u32) {
        let node = self.node(run);
        let len = node.names.len() as u32;
        let leaf = node.children.is_empty() && run != self.pinned;
        if high == len && leaf && node.run.is_sole(h.tier, h.slot) {
            return self.drop_end(h, run, low);
        }
        if high < self.extent(run, h) {
            self.split(run, high);
        }
        self.set_extent(run, h, low);
        self.trim(run);
    }

    /// Takes the blocks from `keep` on off a leaf that only this holder holds.
    fn drop_end(&mut self, h: Holder, run: u32, keep: u32) {
        let len = self.len(run);
        self.count(h, run, len, keep);
        if keep == 0 {
            let parent = self.free_run(run);
            return self.trim(parent);
        }
        self.forget_names(run, keep);
        let node = self.node(run);
        if node.run.words() as u32 <= keep.saturating_mul(2) {
            node.run.shorten(keep);
            self.account(run);
        } else {
            let mut locals = Vec::with_capacity(keep as usize);
            node.run.copy(0, keep as usize, &mut locals);
            let draft = node.run.draft_with(locals.into());
            self.publish(run, draft);
        }
    }

    /// Forgets the names of the blocks from `keep` on.
    fn forget_names(&mut self, run: u32, keep: u32) {
        let Some(Some(node)) = self.nodes.get_mut(run as usize) else {
            return;
        };
        self.blocks -= node.names.len() - keep as usize;
        let gone = node.names[keep as usize..].iter().copied();
        self.names.forget(gone, Place { run, pos: keep });
        node.names.truncate(keep as usize);
        if node.names.capacity() > 2 * keep as usize + 2 * crate::run::TAIL_MAX {
            node.names.shrink_to_fit();
        }
    }

    /// Drops what nobody holds at the end of a leaf, and leaves of which nobody holds anything.
    pub(super) fn trim(&mut self, mut run: u32) {
        while run != ROOT && run != self.pinned {
            let node = self.node(run);
            let (reach, len) = (node.run.reach(), node.names.len() as u32);
            if !node.children.is_empty() || reach == len {
                return;
            }
            if reach == 0 {
                run = self.free_run(run);
                continue;
            }
            let mut draft = node.run.draft();
            for tier in 0..4 {
                let complete: Vec<u32> = match draft.owners(tier) {
                    Some(o) => o
                        .cuts
                        .iter()
                        .filter(|c| c.len == reach)
                        .map(|c| c.slot)
                        .collect(),
                    None => continue,
                };
                for slot in complete {
                    draft.owners_mut(tier).set(slot, reach, reach);
                }
            }
            draft.set_len(reach);
            self.forget_names(run, reach);
            self.publish(run, draft);
            return;
        }
    }

    /// Takes a leaf that nobody holds out of the tree; returns its parent.
    pub(super) fn free_run(&mut self, run: u32) -> u32 {
        let node = self.node(run);
        let (parent, place) = (node.parent, node.place);
        let (follows, first) = (node.run.follows, node.run.first());
        self.edges.remove(follows, first, run);
        self.forget_names(run, 0);
        self.disown(parent, place);
        self.unpublish(run);
        parent
    }

    /// Takes a run from the readers and gives its slot back.
    fn unpublish(&mut self, run: u32) {
        let cell = &self.chunks[run as usize / CHUNK][run as usize % CHUNK];
        drop(cell.swap((None, Tag::None), Ordering::AcqRel));
        self.run_bytes -= self.node(run).bytes;
        self.runs -= 1;
        self.unreserve(run);
    }

    /// Removes everything of a holder, in slices: at most `runs` runs a call. Says whether more is left.
    pub(crate) fn clear(&mut self, h: Holder, runs: usize) -> bool {
        if self.holdings.len() <= h.slot as usize {
            return false;
        }
        let odd: Vec<_> = self.odd.of(h).collect();
        for (name, place) in odd {
            self.odd.set(h, place, name, 0);
        }
        self.holding(h).odd = 0;
        for _ in 0..runs {
            let Some(run) = self.holding(h).log.pop() else {
                break;
            };
            let extent = match self.nodes.get(run as usize) {
                Some(Some(node)) => node.run.extent(h.tier, h.slot),
                _ => 0,
            };
            if extent > 0 {
                self.give_up(h, run, 0, extent);
            }
        }
        let holding = self.holding(h);
        if holding.log.is_empty() {
            holding.log = Vec::new();
        }
        !holding.log.is_empty()
    }

    /// The block that a rank's name stands for: in the same tier first, then from the nearest tier on.
    pub(super) fn held_in_any_tier(&self, h: Holder, name: u64) -> Option<Place> {
        let tiers = self.holdings.get(h.slot as usize)?;
        let named = self.named(name);
        std::iter::once(h.tier).chain(0..4).find_map(|tier| {
            let h = Holder { tier, ..h };
            if tiers[tier].blocks == 0 {
                return None;
            }
            self.held_as(h, name, named)
        })
    }

    /// The block that a holder holds under this name, if `named` is the block with that name.
    pub(super) fn held_as(&self, h: Holder, name: u64, named: Option<Place>) -> Option<Place> {
        let odd = self.holdings.get(h.slot as usize)?[h.tier].odd > 0;
        if odd && let Some(place) = self.odd.place(h, name) {
            return Some(place);
        }
        named.filter(|p| p.pos < self.extent(p.run, h) && !(odd && self.odd.lists(h, *p)))
    }

    /// Sets how often a holder has announced a name of a block it does not hold plainly.
    fn set_odd(&mut self, h: Holder, place: Place, name: u64, count: u32) {
        let grown = self.odd.set(h, place, name, count);
        let holding = self.holding(h);
        holding.odd = holding.odd.saturating_add_signed(grown);
    }

    /// Takes one announcement of a name back; false if the holder has no block of that name.
    fn remove_name(&mut self, h: Holder, name: u64) -> bool {
        let Some(place) = self.held_as(h, name, self.named(name)) else {
            return false;
        };
        match self.odd.count(h, place, name) {
            0 => self.give_up(h, place.run, place.pos, place.pos + 1),
            1 => self.move_away(h, place, name),
            n => {
                self.set_odd(h, place, name, n - 1);
                self.make_plain(h, place);
            }
        }
        true
    }

    /// Takes a holder's only name for a block off the odd list, if that is the block's own, once.
    fn make_plain(&mut self, h: Holder, place: Place) {
        let mut names = self.odd.names(h, place);
        let (Some((name, 1)), None) = (names.next(), names.next()) else {
            return;
        };
        drop(names);
        if self.named(name) == Some(place) {
            self.set_odd(h, place, name, 0);
        }
    }

    /// Makes a holder hold a block under a name; returns where the block is afterwards.
    pub(super) fn hold(&mut self, h: Holder, mut place: Place, name: u64, again: Again) -> Place {
        let held = self.held_as(h, name, self.named(name));
        if held == Some(place) {
            if again == Again::Counts {
                let count = self.odd.count(h, place, name).max(1);
                self.set_odd(h, place, name, count.saturating_add(1));
            }
            self.pinned = ROOT;
            return place;
        }
        self.pinned = place.run;
        if let Some(old) = held {
            self.move_away(h, old, name);
            while place.pos >= self.len(place.run) {
                // The run was cut before this block: its head has one child, the tail.
                place.pos -= self.len(place.run);
                place.run = self.node(place.run).children[0];
            }
        }
        let named = self.named(name) == Some(place);
        if place.pos < self.extent(place.run, h) {
            if !self.odd.lists(h, place) {
                let own = self.node(place.run).names[place.pos as usize];
                self.set_odd(h, place, own, 1);
            }
            self.set_odd(h, place, name, 1);
        } else {
            if place.pos > self.extent(place.run, h) {
                place = Place {
                    run: self.split(place.run, place.pos),
                    pos: 0,
                };
            }
            self.set_extent(place.run, h, place.pos + 1);
            if !named {
                self.set_odd(h, place, name, 1);
            }
        }
        self.pinned = ROOT;
        place
    }

    /// Takes a name off the block it stood for, however often it was announced.
    fn move_away(&mut self, h: Holder, old: Place, name: u64) {
        if self.odd.count(h, old, name) > 0 {
            self.set_odd(h, old, name, 0);
            if self.odd.lists(h, old) {
                self.make_plain(h, old);
                return;
            }
        }
        self.give_up(h, old.run, old.pos, old.pos + 1);
    }
}

/// How many names are the same.
#[inline]
fn common<'a>(own: impl Iterator<Item = &'a u64>, names: &[EngineHash]) -> usize {
    own.zip(names)
        .take_while(|(own, name)| **own == name.0)
        .count()
}
