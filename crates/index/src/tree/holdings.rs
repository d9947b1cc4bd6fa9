//! Who holds which blocks of a run, and how many in all.

use std::ops::Range;

use super::{Holder, Holding, Tree};
use crate::owners::Coverage;
use crate::sync::Ordering;

impl Tree {
    /// Whether a holder holds anything of what may be a run.
    pub(super) fn holds_any(&self, run: u32, h: Holder) -> bool {
        matches!(self.nodes.get(run as usize), Some(Some(n)) if !n.run.held(h.tier, h.slot).is_nothing())
    }

    pub(super) fn holding(&mut self, h: Holder) -> &mut Holding {
        let slot = h.slot as usize;
        if self.holdings.len() <= slot {
            self.holdings.resize_with(slot + 1, Default::default);
        }
        &mut self.holdings[slot][h.tier]
    }

    /// Notes that a holder holds something of a run of which it held nothing.
    pub(super) fn log(&mut self, h: Holder, run: u32) {
        let holding = self.holding(h);
        holding.runs += 1;
        let before = holding.log.capacity();
        if holding.log.len() > 2 * holding.runs + 16 {
            let mut log = std::mem::take(&mut holding.log);
            log.sort_unstable();
            log.dedup();
            log.retain(|run| self.holds_any(*run, h));
            log.shrink_to_fit();
            self.holding(h).log = log;
        }
        let log = &mut self.holding(h).log;
        log.push(run);
        self.log_bytes = log.capacity() * 4 + self.log_bytes - before * 4;
    }

    /// Makes a holder hold (`on`), or hold no more, the blocks `from..to` of a run.
    ///
    /// Where it has gaps already this writes bits in place; readers are shown a new version only when its
    /// first gap appears and when the last one is filled or nothing is left.
    pub(super) fn set_held(&mut self, id: u32, h: Holder, from: u32, to: u32, on: bool) {
        let len = self.len(id);
        let run = &self.node(id).run;
        let held = run.held(h.tier, h.slot);
        let (before, after) = match (held, on) {
            (Coverage::Bits(bits), _) => {
                let changed = bits.write(from, to, on);
                if on && bits.first_clear(0, len) < len {
                    return self.tally(h, i64::from(changed));
                }
                if !on && bits.reach(len) > 0 {
                    return self.tally(h, -i64::from(changed));
                }
                match on {
                    true => (len - changed, len),
                    false => (changed, 0),
                }
            }
            (Coverage::Head(extent), true) if from <= extent => (extent, extent.max(to)),
            (Coverage::Head(extent), false) if to >= extent => (extent, extent.min(from)),
            (Coverage::Head(extent), _) => return self.open_gap(id, h, extent, from..to, on),
        };
        if before == after {
            return;
        }
        let mut draft = run.draft();
        draft.owners_mut(h.tier).set(h.slot, after, len);
        draft.tidy();
        self.publish(id, draft);
        self.count(h, id, before, after);
    }

    /// As [`Tree::set_held`], for a holder of the first `extent` blocks that is left with a gap.
    pub(super) fn open_gap(&mut self, id: u32, h: Holder, extent: u32, span: Range<u32>, on: bool) {
        let len = self.len(id);
        let mut draft = self.node(id).run.draft();
        let bits = Coverage::Head(extent).to_bits(len);
        bits.write(span.start, span.end, on);
        let after = bits.count(0, len);
        let owners = draft.owners_mut(h.tier);
        owners.set_bits(h.slot, bits, len);
        self.publish(id, draft);
        self.count(h, id, extent, after);
    }

    /// Keeps the counts when a holder holds `new` and no more `old` blocks of a run.
    pub(super) fn count(&mut self, h: Holder, id: u32, old: u32, new: u32) {
        match (old, new) {
            (0, 0) => return,
            (0, _) => self.log(h, id),
            (_, 0) => self.holding(h).runs -= 1,
            _ => {}
        }
        self.tally(h, i64::from(new) - i64::from(old));
    }

    /// Keeps the counts of blocks.
    pub(super) fn tally(&mut self, h: Holder, change: i64) {
        let holding = self.holding(h);
        let was_empty = holding.blocks == 0;
        holding.blocks = holding.blocks.saturating_add_signed(change);
        let is_empty = holding.blocks == 0;
        self.entries = self.entries.saturating_add_signed(change);
        if h.tier > 0 && was_empty != is_empty {
            let lower = &self.view.lower_holders;
            match is_empty {
                true => lower.fetch_sub(1, Ordering::Release),
                false => lower.fetch_add(1, Ordering::Release),
            };
        }
    }
}
