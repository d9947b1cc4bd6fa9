//! A tree as events that make it again.
//!
//! Only stored events where a rank's blocks have no gaps above them. A block below a gap cannot be stored
//! without its parent, so the gap is stored too and taken back at the end: whoever applies all events in
//! order has the same holdings, counts and names included.

use std::collections::BTreeMap;
use std::ops::Range;

use kvasir_types::{EngineHash, LocalHash, StoredBlock};

use super::{Holder, ROOT, Tree};
use crate::mix::mix;
use crate::names::Place;

/// One change of a holder.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DumpEvent {
    Stored(Option<EngineHash>, Vec<StoredBlock>),
    Removed(Vec<EngineHash>),
}

impl Tree {
    /// What makes a holder's part of the tree again, parents before children. For tiers below the device,
    /// after the device's part.
    pub(crate) fn dump(&self, h: Holder) -> Vec<DumpEvent> {
        let mut out = Vec::new();
        let mut gaps = Vec::new();
        for (run, spans) in self.plan(h) {
            for span in spans {
                let first = Place {
                    run,
                    pos: span.start,
                };
                let places = span.map(|pos| Place { run, pos });
                let blocks = places.clone().map(|place| self.block(h, place));
                out.push(DumpEvent::Stored(
                    self.parent_name(h, first),
                    blocks.collect(),
                ));
                let not_held = places.filter(|place| !self.holds(*place, h));
                gaps.extend(not_held.map(|place| self.name_for(h, place)));
            }
        }
        self.dump_aliases(h, &mut out);
        if !gaps.is_empty() {
            out.push(DumpEvent::Removed(gaps));
        }
        out
    }

    /// The local hash of the block that a holder knows by this name.
    pub(crate) fn local_of(&self, h: Holder, name: u64) -> Option<LocalHash> {
        let place = self.held_as(h, name, self.named(name))?;
        Some(LocalHash(
            self.node(place.run).run.local(place.pos as usize),
        ))
    }

    /// The blocks to store, run by run from the root on: those that a holder holds, and those above them
    /// that it must go through.
    fn plan(&self, h: Holder) -> Vec<(u32, Vec<Range<u32>>)> {
        let Some(holding) = self.holdings.get(h.slot as usize) else {
            return Vec::new();
        };
        let log = holding[h.tier].log.iter();
        let held = log.filter(|run| self.holds_any(**run, h));
        // By depth; whether the last block is needed because of one below it.
        let mut open: BTreeMap<(u32, u32), bool> = held
            .map(|&run| ((self.node(run).run.start, run), false))
            .collect();
        let mut plan = Vec::new();
        while let Some(((_, run), to_end)) = open.pop_last() {
            let spans = self.spans(h, run, to_end);
            let first = Place { run, pos: 0 };
            let to_start = spans.first().is_some_and(|span| span.start == 0);
            plan.push((run, spans));
            let parent = self.node(run).parent;
            if to_start && parent != ROOT && !self.hangs_on_device(h, first) {
                open.insert((self.node(parent).run.start, parent), true);
            }
        }
        plan.reverse();
        plan
    }

    /// As [`Tree::plan`], of one run.
    fn spans(&self, h: Holder, run: u32, to_end: bool) -> Vec<Range<u32>> {
        let held = self.held(run, h);
        let mut spans: Vec<Range<u32>> = Vec::new();
        let mut needed = to_end;
        for pos in (0..self.len(run)).rev() {
            if !needed && !held.has(pos) {
                continue;
            }
            match spans.last_mut() {
                Some(span) if span.start == pos + 1 => span.start = pos,
                _ => spans.push(pos..pos + 1),
            }
            needed = !self.hangs_on_device(h, Place { run, pos });
        }
        spans.reverse();
        spans
    }

    /// The block before this one; none before the first of a sequence.
    fn before(&self, place: Place) -> Option<Place> {
        if let Some(pos) = place.pos.checked_sub(1) {
            return Some(Place { pos, ..place });
        }
        let run = self.node(place.run).parent;
        (run != ROOT).then(|| Place {
            run,
            pos: self.len(run) - 1,
        })
    }

    /// Whether a block hangs on one that only the rank's device holds, for a tier below it.
    fn hangs_on_device(&self, h: Holder, place: Place) -> bool {
        let device = Holder { tier: 0, ..h };
        let Some(before) = self.before(place).filter(|_| h.tier > 0) else {
            return false;
        };
        if self.holds(before, h) || !self.holds(before, device) {
            return false;
        }
        let name = self.name_for(device, before).0;
        self.held_as(h, name, self.named(name)).is_none()
    }

    fn block(&self, h: Holder, place: Place) -> StoredBlock {
        StoredBlock {
            engine: self.name_for(h, place),
            local: LocalHash(self.node(place.run).run.local(place.pos as usize)),
        }
    }

    /// A holder's name for a block. For one that it does not hold a name that it has for no other block, if
    /// it can be the block's own.
    fn name_for(&self, h: Holder, place: Place) -> EngineHash {
        let own = self.node(place.run).names[place.pos as usize];
        if self.holds(place, h) {
            let listed = self.aliases.names(h, place).next();
            return EngineHash(listed.map_or(own, |(listed, _)| listed));
        }
        let mut name = own;
        // Of no other block, whether held by the rank or not: all gaps of a dump have different names.
        while self.named(name).is_some_and(|p| p != place || name != own)
            || self.named(name).is_none() && name == own
            || self.held_in_any_tier(h, name, self.named(name)).is_some()
        {
            name = mix(mix(name) ^ (u64::from(place.run) << 32 | u64::from(place.pos)));
        }
        EngineHash(name)
    }

    /// What a holder calls the block before this one.
    fn parent_name(&self, h: Holder, place: Place) -> Option<EngineHash> {
        let before = self.before(place)?;
        let tier = match self.hangs_on_device(h, place) {
            true => 0,
            false => h.tier,
        };
        Some(self.name_for(Holder { tier, ..h }, before))
    }

    /// Further names and counts.
    fn dump_aliases(&self, h: Holder, out: &mut Vec<DumpEvent>) {
        for (name, place) in self.aliases.of(h) {
            let announced = u32::from(self.name_for(h, place).0 == name);
            let parent = self.parent_name(h, place);
            let block = StoredBlock {
                engine: EngineHash(name),
                ..self.block(h, place)
            };
            for _ in announced..self.aliases.count(h, place, name) {
                out.push(DumpEvent::Stored(parent, vec![block]));
            }
        }
    }
}
