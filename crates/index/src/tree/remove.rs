//! Blocks that went away, and names one by one.

use kvasir_types::EngineHash;
use sdd::Tag;

use super::store::Repeats;
use super::{Holder, ROOT, Tree};
use crate::ApplyError;
use crate::names::Place;
use crate::owners::Coverage;
use crate::run::LOWER;
use crate::sync::Ordering;
use crate::view::CHUNK;

/// Names that are looked at ahead of their removal.
pub(super) const AHEAD: usize = 16;

impl Tree {
    /// Takes blocks off what a holder holds; unknown names are passed over and the first one reported.
    pub(crate) fn remove(&mut self, h: Holder, names: &[EngineHash]) -> Result<(), ApplyError> {
        self.clock += 1;
        let mut unknown = None;
        let mut rest = names;
        let mut fetched = 0;
        while let Some((first, others)) = rest.split_first() {
            rest = others;
            let known = if self.holds_plainly(h) {
                let named = self.named(first.0);
                named.is_some_and(|place| self.remove_stretch(h, place, &mut rest))
            } else {
                self.remove_name(h, first.0)
            };
            if !known {
                unknown = unknown.or(Some(*first));
            }
            fetched += others.len() - rest.len() + 1;
            if fetched % AHEAD == 1 && others.len() == rest.len() && rest.len() > 1 {
                self.look_ahead(h, rest);
            }
        }
        self.settle();
        unknown.map_or(Ok(()), |name| Err(ApplyError::BlockNotFound(name)))
    }

    #[inline(never)]
    fn look_ahead(&self, h: Holder, names: &[EngineHash]) {
        let mut places = [None; AHEAD];
        for (place, name) in places.iter_mut().zip(names) {
            *place = self.names.guess(name.0);
        }
        self.fetch(h, &places);
    }

    /// Gives everything back if there is no run any more, once a writer has done what it was to do.
    #[inline]
    pub(crate) fn settle(&mut self) {
        if self.live == 0 {
            self.settle_empty();
        }
    }

    #[cold]
    fn settle_empty(&mut self) {
        self.drop_deferred();
        self.close();
    }

    /// Whether a holder, of which something was stored, has each of its blocks once and under its own name.
    #[inline]
    pub(super) fn holds_plainly(&self, h: Holder) -> bool {
        let tiers = self.holdings.get(h.slot as usize);
        tiers.is_some_and(|tiers| tiers[h.tier].alias_count == 0)
    }

    /// Looks at what the removal of the next names will look at, if they lie all over the tree: one kind of
    /// thing after the other, so that the processor waits for many of them at once.
    pub(super) fn fetch(&self, h: Holder, places: &[Option<Place>]) {
        let nodes = || {
            let node = |p: Place| Some((p.pos, self.nodes.get(p.run as usize)?.as_ref()?));
            places.iter().filter_map(move |p| node((*p)?))
        };
        let mut seen = 0;
        for (pos, node) in nodes() {
            seen ^= node.names.get(pos as usize).copied().unwrap_or(0);
        }
        for (_, node) in nodes() {
            seen ^= node.run.follows;
        }
        for (pos, node) in nodes() {
            if let Coverage::Bits(bits) = node.run.held(h.tier, h.slot) {
                seen ^= bits.word(pos as usize / 64);
            }
        }
        std::hint::black_box(seen);
    }

    /// The block that a rank's name stands for, if `named` is the block with that name: in the same tier
    /// first, then from the nearest tier on.
    pub(super) fn held_in_any_tier(
        &self,
        h: Holder,
        name: u64,
        named: Option<Place>,
    ) -> Option<Place> {
        let tiers = self.holdings.get(h.slot as usize)?;
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
        let has_aliases = self.holdings.get(h.slot as usize)?[h.tier].alias_count > 0;
        if has_aliases && let Some(place) = self.aliases.place(h, name) {
            return Some(place);
        }
        named.filter(|p| self.holds(*p, h) && !(has_aliases && self.aliases.lists(h, *p)))
    }

    /// Removes a block, and with it as many of the next names as go on from there in its run, either way.
    /// For holders without aliases. False if it does not hold the block.
    pub(super) fn remove_stretch(
        &mut self,
        h: Holder,
        place: Place,
        rest: &mut &[EngineHash],
    ) -> bool {
        let Place { run, pos } = place;
        let node = self.node(run);
        let held = node.run.held(h.tier, h.slot);
        if !held.has(pos) {
            return false;
        }
        if let Coverage::Bits(bits) = held
            && pos + 1 < node.names.len() as u32
            && bits.clear_one(pos)
        {
            self.tally(h, -1);
            return true;
        }
        let (mut low, mut high) = (pos as usize, pos as usize + 1);
        let mut more = node.clean && !rest.is_empty();
        while more {
            let since = held.since(low as u32) as usize;
            let down = common(node.names[since..low].iter().rev(), rest);
            *rest = &rest[down..];
            low -= down;
            let until = held.until(high as u32, node.names.len() as u32) as usize;
            let up = common(node.names[high..until].iter(), rest);
            *rest = &rest[up..];
            high += up;
            more = down + up > 0;
        }
        self.give_up(h, run, low as u32, high as u32);
        true
    }

    /// Makes a holder hold no more of `low..high` of a run.
    fn give_up(&mut self, h: Holder, run: u32, low: u32, high: u32) {
        let node = self.node(run);
        let end = high == node.names.len() as u32;
        let leaf = node.children.is_empty() && run != self.pinned;
        if end && leaf && node.run.is_sole(h.tier, h.slot) {
            return self.drop_end(h, run, low);
        }
        self.set_held(run, h, low, high, false);
        if end && leaf {
            self.trim(run);
        }
    }

    /// Takes the blocks from `low` on off a leaf that only this holder holds, and what is free before them.
    fn drop_end(&mut self, h: Holder, run: u32, low: u32) {
        let node = self.node(run);
        let len = node.names.len() as u32;
        let held = node.run.held(h.tier, h.slot);
        let keep = held.reach(low);
        let (before, after) = (held.count(0, len), held.count(0, low));
        if let Coverage::Bits(bits) = held {
            bits.write(low, len, false);
        }
        self.count(h, run, before, after);
        if keep == 0 {
            let parent = self.free_run(run);
            return self.trim(parent);
        }
        self.forget_names(run, keep);
        let run_now = &self.node(run).run;
        let filled = after == keep && matches!(run_now.held(h.tier, h.slot), Coverage::Bits(_));
        if filled || run_now.words() as u32 > keep.saturating_mul(2) {
            return self.publish_short(run, keep);
        }
        run_now.shorten(keep);
        self.account(run);
    }

    /// Shows readers a leaf that is shorter.
    fn publish_short(&mut self, run: u32, len: u32) {
        let old = &self.node(run).run;
        let mut draft = if old.words() as u32 <= len.saturating_mul(2) {
            old.draft()
        } else {
            let mut locals = Vec::with_capacity(len as usize);
            old.copy(0, len as usize, &mut locals);
            old.draft_with(locals.into())
        };
        for tier in 0..=LOWER {
            if draft.owners(tier).is_some() {
                draft.owners_mut(tier).shorten(len);
            }
        }
        draft.set_len(len);
        self.publish(run, draft);
    }

    /// Forgets the names of the blocks from `keep` on.
    fn forget_names(&mut self, run: u32, keep: u32) {
        let Some(Some(node)) = self.nodes.get_mut(run as usize) else {
            return;
        };
        self.blocks -= node.names.len() - keep as usize;
        let gone = &node.names[keep as usize..];
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
            self.forget_names(run, reach);
            self.publish_short(run, reach);
            return;
        }
    }

    /// Takes a leaf that nobody holds out of the tree; returns its parent.
    pub(super) fn free_run(&mut self, run: u32) -> u32 {
        let node = self.node(run);
        let (parent, place) = (node.parent, node.place);
        let (follows, first) = (node.run.follows, node.run.first());
        self.edges.remove(follows, first, run);
        self.remove_child(parent, place);
        if self.deferred_frees.collecting {
            self.unpublish(run);
            self.defer_free(run);
        } else {
            self.forget_names(run, 0);
            self.unpublish(run);
            self.nodes[run as usize] = None;
            self.release(run);
        }
        parent
    }

    /// Takes a run from the readers.
    fn unpublish(&mut self, run: u32) {
        let cell = &self.chunks[run as usize / CHUNK][run as usize % CHUNK];
        drop(cell.swap((None, Tag::None), Ordering::AcqRel));
        self.run_bytes -= self.node(run).bytes;
        self.live -= 1;
    }

    /// Removes everything of a holder, in slices: at most `runs` runs or aliases a call. Says whether more is left.
    pub(crate) fn clear(&mut self, h: Holder, runs: usize) -> bool {
        if self.holdings.len() <= h.slot as usize {
            return false;
        }
        self.clock += 1;
        let aliases: Vec<_> = self.aliases.of(h).take(runs).collect();
        for &(name, place) in &aliases {
            self.set_alias(h, place, name, 0);
        }
        if aliases.len() == runs {
            return true;
        }
        self.deferred_frees.collecting = true;
        for _ in 0..runs {
            let Some(run) = self.holding(h).log.pop() else {
                break;
            };
            if self.holds_any(run, h) {
                self.give_up(h, run, 0, self.len(run));
            }
        }
        self.deferred_frees.collecting = false;
        self.settle();
        let holding = self.holding(h);
        let more = !holding.log.is_empty();
        if !more {
            let freed = std::mem::take(&mut holding.log).capacity() * 4;
            self.log_bytes -= freed;
        }
        more
    }

    /// Sets how often a holder has announced a name of a block it does not hold plainly.
    fn set_alias(&mut self, h: Holder, place: Place, name: u64, count: u32) {
        let grown = self.aliases.set(h, place, name, count);
        let holding = self.holding(h);
        holding.alias_count = holding.alias_count.saturating_add_signed(grown);
    }

    /// Takes one announcement of a name back; false if the holder has no block of that name.
    fn remove_name(&mut self, h: Holder, name: u64) -> bool {
        let named = self.named(name);
        let Some(place) = self.held_as(h, name, named) else {
            return false;
        };
        match self.aliases.count(h, place, name) {
            0 => self.give_up(h, place.run, place.pos, place.pos + 1),
            1 => self.move_away(h, place, name),
            n => {
                self.set_alias(h, place, name, n - 1);
                self.make_plain(h, place);
            }
        }
        true
    }

    /// Takes a holder's only name for a block off the list of aliases, if that is the block's own, once.
    fn make_plain(&mut self, h: Holder, place: Place) {
        let mut names = self.aliases.names(h, place);
        let (Some((name, 1)), None) = (names.next(), names.next()) else {
            return;
        };
        drop(names);
        if self.named(name) == Some(place) {
            self.set_alias(h, place, name, 0);
        }
    }

    /// Makes a holder hold a block under a name.
    pub(super) fn hold(&mut self, h: Holder, place: Place, name: u64, repeats: Repeats) {
        let named = self.named(name);
        let held = self.held_as(h, name, named);
        if held == Some(place) {
            if repeats == Repeats::Count {
                let count = self.aliases.count(h, place, name).max(1);
                self.set_alias(h, place, name, count.saturating_add(1));
                self.repeated += 1;
            }
            self.pinned = ROOT;
            return;
        }
        self.pinned = place.run;
        if let Some(old) = held {
            self.move_away(h, old, name);
        }
        let named = self.named(name) == Some(place);
        if self.holds(place, h) {
            if !self.aliases.lists(h, place) {
                let own = self.node(place.run).names[place.pos as usize];
                self.set_alias(h, place, own, 1);
            }
            self.set_alias(h, place, name, 1);
        } else {
            self.set_held(place.run, h, place.pos, place.pos + 1, true);
            if !named {
                self.set_alias(h, place, name, 1);
            }
        }
        self.pinned = ROOT;
    }

    /// Takes a name off the block it stood for, however often it was announced.
    fn move_away(&mut self, h: Holder, old: Place, name: u64) {
        if self.aliases.count(h, old, name) > 0 {
            self.set_alias(h, old, name, 0);
            if self.aliases.lists(h, old) {
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
