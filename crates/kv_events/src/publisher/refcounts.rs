//! How many copies of a block an engine holds: a block is taken back with its last one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use kvasir_types::{EngineHash, KvEvent, Tier};

/// Blocks of a tier that are counted; far above any engine's cache. What is past it passes as it comes.
const COUNTED_BLOCKS_MAX: usize = 1 << 24;

/// Copies by tier.
#[derive(Debug, Default)]
pub(super) struct Refcounts {
    tiers: BTreeMap<Tier, Copies>,
}

/// Copies of one tier. Nearly all blocks have one: they are a name in a set, and take a third of what a count beside it would.
#[derive(Debug, Default)]
struct Copies {
    held: HashSet<EngineHash, BuildHasherDefault<NameHasher>>,
    /// How many a block has beside the first, where it has more.
    more: HashMap<EngineHash, u32, BuildHasherDefault<NameHasher>>,
}

impl Copies {
    fn count(&mut self, name: EngineHash) {
        if self.held.len() >= COUNTED_BLOCKS_MAX && !self.held.contains(&name) {
            return;
        }
        if !self.held.insert(name) {
            *self.more.entry(name).or_default() += 1;
        }
    }

    /// Takes one away; whether none is left.
    fn is_last(&mut self, name: EngineHash) -> bool {
        let Some(more) = self.more.get_mut(&name) else {
            self.held.remove(&name);
            return true;
        };
        *more -= 1;
        if *more == 0 {
            self.more.remove(&name);
        }
        false
    }
}

/// Names are 64 bits of our own engine's choice: one multiplication spreads them, and nobody wants them to collide.
#[derive(Clone, Copy, Debug, Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let wide = u128::from(self.0 ^ number ^ 0x2545_f491_4f6c_dd1d) * 0x9e37_79b9_7f4a_7c15;
        self.0 = wide as u64 ^ (wide >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Refcounts {
    /// What of a change is to be told: stores always, removals of last copies and of blocks that are not known.
    pub(super) fn pass(&mut self, event: KvEvent) -> Option<KvEvent> {
        match event {
            KvEvent::Stored {
                tier, ref blocks, ..
            } => {
                let copies = self.tiers.entry(tier).or_default();
                blocks.iter().for_each(|block| copies.count(block.engine));
                (!blocks.is_empty()).then_some(event)
            }
            KvEvent::Removed { tier, mut blocks } => {
                if let Some(copies) = self.tiers.get_mut(&tier) {
                    blocks.retain(|name| copies.is_last(*name));
                }
                (!blocks.is_empty()).then_some(KvEvent::Removed { tier, blocks })
            }
            KvEvent::Cleared { tier } => {
                match tier {
                    None => self.tiers.clear(),
                    Some(tier) => drop(self.tiers.remove(&tier)),
                }
                Some(event)
            }
        }
    }
}
