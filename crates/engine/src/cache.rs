//! The pool as sequences use it: find, grow, announce, release.
//!
//! Events come in the order of the changes: what an allocation evicts before what it stores.

use kvasir_types::{EngineHash, KvEvent, StoredBlock, Tier};

use crate::pool::{BlockId, BlockPool};
use crate::sequence::Sequence;
use crate::{CacheEvent, EngineConfig, EngineFamily};

/// Blocks and their announcements.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    pub(crate) pool: BlockPool,
    /// Changes that no step has reported yet.
    pub(crate) events: Vec<CacheEvent>,
    family: EngineFamily,
    block_size: u32,
    sharing: bool,
    event_tokens: bool,
    evicted: Vec<EngineHash>,
}

impl Cache {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            pool: BlockPool::new(config.usable_blocks()),
            events: Vec::new(),
            family: config.family,
            block_size: config.block_size,
            sharing: config.prefix_caching,
            event_tokens: config.event_tokens,
            evicted: Vec::new(),
        }
    }

    /// Fills `found` with the leading blocks of `sequence` that can be found. At least one token is
    /// always left to compute.
    pub(crate) fn find(&self, sequence: &mut Sequence, found: &mut Vec<BlockId>) {
        found.clear();
        if !self.sharing {
            return;
        }
        let most = (sequence.known().saturating_sub(1) / self.block_size) as usize;
        let hashes = sequence.hashes().iter().take(most);
        found.extend(hashes.map_while(|hash| self.pool.find(*hash)));
    }

    /// Gives `sequence` the blocks in `found` and the blocks that `new` more tokens need; false, and
    /// nothing happens, if there are too few.
    pub(crate) fn grow(&mut self, sequence: &mut Sequence, new: u32, found: &[BlockId]) -> bool {
        let computed = sequence.computed + found.len() as u32 * self.block_size;
        let needed = (computed + new).div_ceil(self.block_size) as usize;
        let fresh = needed.saturating_sub(sequence.blocks.len() + found.len());
        if fresh == 0 && found.is_empty() {
            self.store_scheduled(sequence, computed + new);
            return true;
        }
        let taken_from_queue = found.iter().filter(|id| self.pool.is_free(**id)).count();
        if fresh + taken_from_queue > self.pool.free() as usize {
            return false;
        }
        self.take_found(sequence, found);
        self.evicted.clear();
        for _ in 0..fresh {
            sequence
                .blocks
                .extend(self.pool.allocate(&mut self.evicted));
        }
        if !self.evicted.is_empty() {
            let blocks = self.evicted.clone();
            self.push(
                KvEvent::Removed {
                    tier: Tier::Device,
                    blocks,
                },
                None,
            );
        }
        self.store_scheduled(sequence, computed + new);
        true
    }

    /// Whether the pool has room for all that `sequence` is known to be, beside all that the batch is
    /// known to become.
    pub(crate) fn fits_whole(
        &self,
        sequence: &Sequence,
        found: &[BlockId],
        batch: &[Box<Sequence>],
    ) -> bool {
        let whole = |s: &Sequence| s.known().div_ceil(self.block_size) as usize;
        let promised: usize = batch
            .iter()
            .map(|s| whole(s).saturating_sub(s.blocks.len()))
            .sum();
        let held = found.iter().filter(|id| !self.pool.is_free(**id)).count();
        whole(sequence) - held + promised <= self.pool.free() as usize
    }

    fn take_found(&mut self, sequence: &mut Sequence, found: &[BlockId]) {
        for id in found {
            self.pool.acquire(*id);
        }
        sequence.blocks.extend_from_slice(found);
        if sequence.announce_hits && !found.is_empty() {
            self.announce(sequence, 0, found.len());
        }
        sequence.stored += found.len();
    }

    /// vLLM makes blocks findable while they are being computed.
    fn store_scheduled(&mut self, sequence: &mut Sequence, tokens: u32) {
        if self.family == EngineFamily::Vllm {
            self.store(sequence, tokens);
        }
    }

    /// The others do so after the pass that computed them.
    pub(crate) fn store_computed(&mut self, sequence: &mut Sequence) {
        let prompt = sequence.prompt_len();
        match self.family {
            EngineFamily::Vllm => {}
            EngineFamily::Sglang => self.store(sequence, sequence.computed.min(prompt)),
            EngineFamily::Trtllm if sequence.computed < prompt => {}
            EngineFamily::Trtllm => self.store(sequence, sequence.computed),
        }
    }

    /// Ends a sequence: SGLang makes its output blocks findable, then its blocks are released, last one first.
    pub(crate) fn end(&mut self, sequence: &mut Sequence) {
        if self.family == EngineFamily::Sglang {
            self.store(sequence, sequence.computed);
        }
        self.release_blocks(sequence);
    }

    /// Releases the blocks of a sequence, the last one first.
    pub(crate) fn release_blocks(&mut self, sequence: &mut Sequence) {
        for id in sequence.blocks.drain(..).rev() {
            self.pool.release(id);
        }
    }

    /// Empties the cache; false, and nothing happens, while a block is held.
    pub(crate) fn clear(&mut self) -> bool {
        let cleared = self.pool.clear();
        if cleared && self.sharing {
            self.push(KvEvent::Cleared { tier: None }, None);
        }
        cleared
    }

    /// Hashes the complete blocks of the first `tokens` tokens and announces what is new.
    fn store(&mut self, sequence: &mut Sequence, tokens: u32) {
        let complete = (tokens / self.block_size) as usize;
        if !self.sharing || sequence.stored >= complete {
            return;
        }
        let mut new_from = sequence.stored;
        for at in sequence.stored..complete {
            let hash = sequence.hashes()[at];
            let there = match self.family {
                EngineFamily::Vllm => None,
                EngineFamily::Sglang | EngineFamily::Trtllm => self.pool.find(hash),
            };
            match there {
                None => self.pool.set_hash(sequence.blocks[at], hash),
                Some(existing) => {
                    self.announce(sequence, new_from, at);
                    new_from = at + 1;
                    self.pool.acquire(existing);
                    let own = std::mem::replace(&mut sequence.blocks[at], existing);
                    self.pool.release(own);
                }
            }
        }
        self.announce(sequence, new_from, complete);
        sequence.stored = complete;
    }

    /// Announces blocks `first..end` of a sequence as stored.
    fn announce(&mut self, sequence: &mut Sequence, first: usize, end: usize) {
        if first >= end {
            return;
        }
        let hashes = sequence.hashes();
        let parent = first.checked_sub(1).and_then(|at| hashes.get(at).copied());
        let hashes = hashes[first..end].to_vec();
        let block = |(at, engine)| {
            let local = sequence.local(first + at)?;
            Some(StoredBlock { engine, local })
        };
        let blocks = hashes.into_iter().enumerate().filter_map(block).collect();
        let stored = KvEvent::Stored {
            tier: Tier::Device,
            parent,
            blocks,
        };
        self.push(stored, Some((sequence, first, end)));
    }

    fn push(&mut self, event: KvEvent, of: Option<(&Sequence, usize, usize)>) {
        let tokens = match of {
            Some((sequence, first, end)) if self.event_tokens => sequence.tokens(first, end),
            _ => Vec::new(),
        };
        let request = of.map(|(sequence, ..)| sequence.id);
        self.events.push(CacheEvent {
            event,
            tokens,
            request,
        });
    }
}
