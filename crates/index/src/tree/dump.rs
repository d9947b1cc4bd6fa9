//! A tree as events that make it again.
//!
//! Only stored events where a rank's blocks have no gaps above them. A block below a gap cannot be stored
//! without its parent, so the gap is stored too and taken back at the end: whoever applies all events in
//! order has the same holdings, counts and names included.

use std::collections::BTreeSet;

use kvasir_types::{EngineHash, LocalHash, StoredBlock};

use super::{Holder, ROOT, Tree};
use crate::mix::mix;
use crate::names::Place;

/// One change of a holder.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Dumped {
    Stored(Option<EngineHash>, Vec<StoredBlock>),
    Removed(Vec<EngineHash>),
}

impl Tree {
    /// What makes a holder's part of the tree again, parents before children. For tiers below the device,
    /// after the device's part.
    pub(crate) fn dump(&self, h: Holder) -> Vec<Dumped> {
        let mut out = Vec::new();
        let mut gaps = Vec::new();
        let needed = self.needed(h);
        for &(_, id) in &needed {
            let extent = self.extent(id, h);
            let below = self.node(id).children.iter().any(|c| {
                needed.contains(&(self.node(*c).run.start, *c)) && !self.hangs_on_device(h, *c)
            });
            let end = if below { self.len(id) } else { extent };
            let blocks = (0..end).map(|pos| self.block(h, Place { run: id, pos }));
            out.push(Dumped::Stored(self.parent_name(h, id), blocks.collect()));
            gaps.extend((extent..end).map(|pos| self.name_for(h, Place { run: id, pos })));
        }
        self.dump_odd(h, &mut out);
        if !gaps.is_empty() {
            out.push(Dumped::Removed(gaps));
        }
        out
    }

    /// Runs of which a holder holds something, and those above them that it must go through, by depth.
    fn needed(&self, h: Holder) -> BTreeSet<(u32, u32)> {
        let mut needed = BTreeSet::new();
        let Some(holding) = self.holdings.get(h.slot as usize) else {
            return needed;
        };
        for &run in &holding[h.tier].log {
            let mut at = run;
            let held = matches!(self.nodes.get(at as usize), Some(Some(n)) if n.run.extent(h.tier, h.slot) > 0);
            while held && at != ROOT && needed.insert((self.node(at).run.start, at)) {
                if self.hangs_on_device(h, at) {
                    break;
                }
                at = self.node(at).parent;
            }
        }
        needed
    }

    /// Whether a run hangs on a block that only the rank's device holds, for a tier below it.
    fn hangs_on_device(&self, h: Holder, id: u32) -> bool {
        let parent = self.node(id).parent;
        let device = Holder { tier: 0, ..h };
        if h.tier == 0
            || parent == ROOT
            || self.extent(parent, device) < self.len(parent)
            || self.extent(parent, h) == self.len(parent)
        {
            return false;
        }
        let name = self.name_for(device, self.last(parent)).0;
        self.held_as(h, name, self.named(name)).is_none()
    }

    fn last(&self, run: u32) -> Place {
        Place {
            run,
            pos: self.len(run) - 1,
        }
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
        if place.pos < self.extent(place.run, h) {
            let listed = self.odd.names(h, place).next();
            return EngineHash(listed.map_or(own, |(listed, _)| listed));
        }
        let mut name = own;
        // Of no other block, whether held by the rank or not: all gaps of a dump have different names.
        while self.named(name).is_some_and(|p| p != place || name != own)
            || self.named(name).is_none() && name == own
            || self.held_in_any_tier(h, name).is_some()
        {
            name = mix(mix(name) ^ (u64::from(place.run) << 32 | u64::from(place.pos)));
        }
        EngineHash(name)
    }

    fn parent_name(&self, h: Holder, id: u32) -> Option<EngineHash> {
        let parent = self.node(id).parent;
        (parent != ROOT).then(|| {
            let last = self.last(parent);
            let h = if self.hangs_on_device(h, id) {
                Holder { tier: 0, ..h }
            } else {
                h
            };
            self.name_for(h, last)
        })
    }

    /// Further names and counts.
    fn dump_odd(&self, h: Holder, out: &mut Vec<Dumped>) {
        for (name, place) in self.odd.of(h) {
            let announced = u32::from(self.name_for(h, place).0 == name);
            let parent = match place.pos {
                0 => self.parent_name(h, place.run),
                pos => Some(self.name_for(
                    h,
                    Place {
                        pos: pos - 1,
                        ..place
                    },
                )),
            };
            let block = StoredBlock {
                engine: EngineHash(name),
                ..self.block(h, place)
            };
            for _ in announced..self.odd.count(h, place, name) {
                out.push(Dumped::Stored(parent, vec![block]));
            }
        }
    }
}
