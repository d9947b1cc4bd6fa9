//! How many copies of a block an engine holds: a block is taken back with its last one.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use kvasir_types::{EngineHash, KvEvent, Tier};

/// Blocks that are counted; far above any engine's cache. What is past it passes as it comes.
const COUNTED_BLOCKS_MAX: usize = 1 << 24;

/// Copies by tier and name.
#[derive(Debug, Default)]
pub(super) struct Refcounts {
    copies: HashMap<(Tier, EngineHash), u32, BuildHasherDefault<NameHasher>>,
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

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
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
                for block in blocks {
                    self.count(tier, block.engine);
                }
                (!blocks.is_empty()).then_some(event)
            }
            KvEvent::Removed { tier, mut blocks } => {
                blocks.retain(|name| self.is_last(tier, *name));
                (!blocks.is_empty()).then_some(KvEvent::Removed { tier, blocks })
            }
            KvEvent::Cleared { tier } => {
                match tier {
                    None => self.copies.clear(),
                    Some(tier) => self.copies.retain(|(of, _), _| *of != tier),
                }
                Some(event)
            }
        }
    }

    fn count(&mut self, tier: Tier, name: EngineHash) {
        if self.copies.len() < COUNTED_BLOCKS_MAX || self.copies.contains_key(&(tier, name)) {
            *self.copies.entry((tier, name)).or_default() += 1;
        }
    }

    fn is_last(&mut self, tier: Tier, name: EngineHash) -> bool {
        let Some(copies) = self.copies.get_mut(&(tier, name)) else {
            return true;
        };
        *copies -= 1;
        if *copies > 0 {
            return false;
        }
        self.copies.remove(&(tier, name));
        true
    }
}
