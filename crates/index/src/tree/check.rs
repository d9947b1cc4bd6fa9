//! What must hold between calls, as assertions. For tests.

use std::collections::BTreeMap;

use super::{Holder, Node, ROOT, Tree};
use crate::names::{Place, RUN_MAX};
use crate::owners::Patch;

impl Tree {
    pub(crate) fn check(&self) {
        let nodes = || {
            (0u32..)
                .zip(&self.nodes)
                .filter_map(|(id, n)| Some((id, n.as_ref()?)))
        };
        let (mut blocks, mut bytes, mut runs) = (0, 0, 0);
        let mut held: BTreeMap<Holder, (u64, usize)> = BTreeMap::new();
        for (id, node) in nodes().filter(|(id, _)| *id != ROOT) {
            self.check_node(id, node);
            blocks += node.names.len();
            bytes += node.bytes;
            runs += 1;
            for (tier, slot, part) in node.run.each_owner() {
                let sum = held.entry(Holder { slot, tier }).or_default();
                let blocks = part.count(0, node.run.len());
                *sum = (sum.0 + u64::from(blocks), sum.1 + 1);
            }
        }
        assert_eq!(self.blocks, blocks, "blocks");
        assert_eq!(self.live, runs, "runs");
        assert_eq!(self.run_bytes, bytes, "bytes");
        assert_eq!(self.entries, held.values().map(|h| h.0).sum(), "entries");
        assert_eq!(self.pinned, ROOT, "a pin is left");
        self.check_holdings(&held);
    }

    fn check_holdings(&self, held: &BTreeMap<Holder, (u64, usize)>) {
        let (mut lower, mut log_bytes) = (0, 0);
        for (slot, tiers) in (0u32..).zip(&self.holdings) {
            for (tier, holding) in tiers.iter().enumerate() {
                let h = Holder { slot, tier };
                let sum = held.get(&h).copied().unwrap_or_default();
                assert_eq!((holding.blocks, holding.runs), sum, "{h:?}");
                assert_eq!(
                    holding.alias_count,
                    self.aliases.of(h).count(),
                    "aliases of {h:?}"
                );
                for (_, place) in self.aliases.of(h) {
                    assert!(self.holds(place, h), "an alias but not held");
                }
                log_bytes += holding.log.capacity() * 4;
                lower += u64::from(tier > 0 && holding.blocks > 0);
            }
        }
        assert_eq!(self.log_bytes, log_bytes, "bytes of logs");
        assert_eq!(
            self.view.lower_holders.load(crate::sync::Ordering::Relaxed),
            lower
        );
    }

    fn check_node(&self, id: u32, node: &Node) {
        let run = &node.run;
        let len = run.len();
        assert_eq!(len as usize, node.names.len());
        assert!((1..=RUN_MAX).contains(&(len as usize)));
        assert!(node.written >= len);
        if node.children.is_empty() {
            assert_eq!(run.reach(), len, "leaf {id} is not held to its end");
        }
        let parent = self.node(node.parent);
        assert_eq!(parent.children[node.place as usize], id);
        assert_eq!(parent.run.end, run.follows);
        assert_eq!(parent.run.start + parent.names.len() as u32, run.start);
        assert_eq!(
            self.child(node.parent, run.first()),
            Some(id),
            "edge to {id}"
        );
        for (pos, name) in (0u32..).zip(&node.names) {
            let named = self.named(*name) == Some(Place { run: id, pos });
            assert!(named || !node.clean, "block {pos} of {id} is not named");
        }
        for owners in (0..4).filter_map(|tier| run.owners(tier)) {
            for cut in &owners.cuts {
                assert!(0 < cut.len && cut.len < len && !owners.full.has(cut.slot));
            }
            let mut before = None;
            for Patch { slot, bits } in &owners.patches {
                assert!(before.replace(*slot) < Some(*slot), "patches by slot");
                assert!(!owners.full.has(*slot) && owners.cuts.iter().all(|c| c.slot != *slot));
                let held = bits.count(0, len);
                assert!(0 < held && held < len && bits.room() >= len);
                assert_eq!(
                    bits.count(0, bits.room()),
                    held,
                    "bits beyond the end of {id}"
                );
            }
        }
        for (tier, slot, _) in run.each_owner() {
            let log = &self.holdings[slot as usize][tier].log;
            assert!(log.contains(&id), "run {id} is missing in a log");
        }
    }
}
