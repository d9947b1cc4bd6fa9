//! What our own routing decisions say about caches: blocks that are believed in for a while.
//!
//! A prompt that was sent to a rank will be cached there. Each (rank, block) has an expiry that the next
//! such decision moves on; expired blocks leave, and past a number of blocks the next to expire leave too,
//! the deepest first among equals, so that leaves go before what they hang on.
//!
//! A block waits in exactly one bucket; when that comes due and the block was confirmed since, it moves on.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use kvasir_types::{EngineHash, LocalHash, SequenceHash, StoredBlock, Time, WorkerRank};

use crate::Approximate;
use crate::mix::IdMap;
use crate::tree::{Again, Holder, NAMES_AT_ONCE, Tree};

/// A count of [`Approximate::GRAIN`]s.
type Grain = u64;

/// Blocks that one decision looks at in order to forget some, once there are too many: about a millisecond.
const PRUNED_AT_ONCE: usize = 4096;

/// Waits in no bucket just now.
const TAKEN: Grain = Grain::MAX;

#[derive(Clone, Copy, Debug)]
struct Timer {
    expiry: Grain,
    /// The bucket it waits in.
    waits: Grain,
    depth: u32,
}

/// Blocks with expiries.
#[derive(Debug)]
pub(crate) struct Routing {
    pub(crate) tree: Tree,
    options: Approximate,
    /// By slot and name.
    timers: Vec<IdMap<u64, Timer>>,
    /// (slot, name) by the grain they wait for.
    buckets: BTreeMap<Grain, Vec<(u32, u64)>>,
    blocks: usize,
    /// There were too many blocks, and are still more than were to be left.
    pruning: bool,
    pub(crate) pruned: u64,
}

fn device(slot: u32) -> Holder {
    Holder { slot, tier: 0 }
}

impl Routing {
    pub(crate) fn new(options: Approximate) -> Self {
        Self {
            tree: Tree::new(),
            options,
            timers: Vec::new(),
            buckets: BTreeMap::new(),
            blocks: 0,
            pruning: false,
            pruned: 0,
        }
    }

    /// Believes from now on that a rank caches these blocks.
    pub(crate) fn record(
        &mut self,
        now: Time,
        slot: u32,
        locals: &[LocalHash],
        sequence: &[SequenceHash],
    ) {
        self.tree.alone().tidy(NAMES_AT_ONCE);
        let expiry = (now + self.options.ttl).as_nanos().div_ceil(grain_nanos());
        let known = self.confirmed(slot, sequence, expiry);
        let named = locals.iter().zip(sequence).skip(known);
        let blocks: Vec<StoredBlock> = named
            .map(|(&local, name)| StoredBlock {
                engine: EngineHash(name.0),
                local,
            })
            .collect();
        if blocks.is_empty() {
            return;
        }
        let parent = known
            .checked_sub(1)
            .map(|last| EngineHash(sequence[last].0));
        if self
            .tree
            .alone()
            .store(device(slot), parent, &blocks, Again::Confirms)
            .is_err()
        {
            return; // Two blocks of one name: no chain of ours.
        }
        if self.timers.len() <= slot as usize {
            self.timers.resize_with(slot as usize + 1, IdMap::default);
        }
        let timers = &mut self.timers[slot as usize];
        for (depth, block) in (known as u32..).zip(&blocks) {
            let name = block.engine.0;
            let mut fresh = false;
            let timer = timers.entry(name).or_insert_with(|| {
                fresh = true;
                Timer {
                    expiry,
                    waits: expiry,
                    depth,
                }
            });
            (timer.expiry, timer.depth) = (expiry, depth);
            if fresh {
                self.blocks += 1;
                self.buckets.entry(expiry).or_default().push((slot, name));
            }
        }
    }

    /// How many leading blocks already expire at `expiry`.
    ///
    /// Every decision confirms a prompt from its first block on and a name stands for all that precedes
    /// it, so along a prompt expiries never grow: a hot prefix costs a bisection, not a visit per block.
    fn confirmed(&self, slot: u32, sequence: &[SequenceHash], expiry: Grain) -> usize {
        let Some(timers) = self.timers.get(slot as usize) else {
            return 0;
        };
        sequence.partition_point(|name| timers.get(&name.0).is_some_and(|t| t.expiry == expiry))
    }

    /// When the next block may expire.
    pub(crate) fn next_expiry(&self) -> Option<Time> {
        let grain = *self.buckets.keys().next()?;
        Some(Time::from_nanos(grain.saturating_mul(grain_nanos())))
    }

    /// Forgets what has expired, a bucket at a time. Returns whether there may be more.
    pub(crate) fn expire(&mut self, now: Time) -> bool {
        self.tree.alone().tidy(NAMES_AT_ONCE);
        let due = now.as_nanos() / grain_nanos();
        let Some(bucket) = self.buckets.first_entry().filter(|b| *b.key() <= due) else {
            return false;
        };
        let (grain, waiting) = bucket.remove_entry();
        let expired = self.sift(grain, waiting);
        self.drop_blocks(&expired);
        true
    }

    /// Forgets blocks if there are too many: some now and the others with the next decisions, so that no request
    /// waits for all of them. `ranks` by slot, to make the order definite.
    pub(crate) fn prune(&mut self, ranks: &[WorkerRank]) {
        let (before, target) = (self.blocks, self.options.prune_target());
        // More than a prompt can add, or many long ones would outrun it.
        let over = before.saturating_sub(self.options.max_blocks);
        let quota = PRUNED_AT_ONCE.max(2 * over);
        self.pruning |= over > 0;
        let mut seen = 0;
        while self.pruning && seen < quota {
            let looked_at = self.prune_bucket(target, ranks);
            seen += looked_at.unwrap_or(0);
            self.pruning = looked_at.is_some() && self.blocks > target;
        }
        self.pruned += (before - self.blocks) as u64;
    }

    /// Forgets blocks, in the order of [`Routing::prune`], until all takes at most `target` bytes. Returns
    /// how many went.
    pub(crate) fn evict(&mut self, target: usize, ranks: &[WorkerRank]) -> u64 {
        let before = self.blocks;
        self.tree.alone().tidy(usize::MAX);
        while self.bytes() > target && self.blocks > 0 {
            self.prune_to(self.blocks * 7 / 8, ranks);
            self.timers.iter_mut().for_each(IdMap::shrink_to_fit);
        }
        (before - self.blocks) as u64
    }

    fn prune_to(&mut self, target: usize, ranks: &[WorkerRank]) {
        while self.blocks > target && self.prune_bucket(target, ranks).is_some() {}
    }

    /// Forgets blocks of the next bucket until `target` are left. Returns how many it looked at; none if there is
    /// no bucket.
    fn prune_bucket(&mut self, target: usize, ranks: &[WorkerRank]) -> Option<usize> {
        let (grain, waiting) = self.buckets.pop_first()?;
        let seen = waiting.len();
        let mut due = self.sift(grain, waiting);
        due.sort_by_cached_key(|&(slot, name)| {
            let depth = self.timers[slot as usize].get(&name).map_or(0, |t| t.depth);
            (Reverse(depth), ranks.get(slot as usize), name)
        });
        let excess = self.blocks.saturating_sub(target).min(due.len());
        let left = due.split_off(excess);
        self.drop_blocks(&due);
        self.wait_again(grain, left);
        Some(seen)
    }

    fn wait_again(&mut self, grain: Grain, blocks: Vec<(u32, u64)>) {
        for (slot, name) in &blocks {
            if let Some(timer) = self.timers[*slot as usize].get_mut(name) {
                timer.waits = grain;
            }
        }
        if !blocks.is_empty() {
            self.buckets.insert(grain, blocks);
        }
    }

    /// Of those that waited for `grain`, the ones whose time it is; the others go on waiting.
    fn sift(&mut self, grain: Grain, waiting: Vec<(u32, u64)>) -> Vec<(u32, u64)> {
        let mut due = Vec::new();
        for (slot, name) in waiting {
            match self.timers[slot as usize].get_mut(&name) {
                Some(timer) if timer.waits == grain && timer.expiry == grain => {
                    // A rank that was removed and came back may be listed twice.
                    timer.waits = TAKEN;
                    due.push((slot, name));
                }
                Some(timer) if timer.waits == grain => {
                    timer.waits = timer.expiry;
                    self.buckets
                        .entry(timer.expiry)
                        .or_default()
                        .push((slot, name));
                }
                _ => {}
            }
        }
        due
    }

    fn drop_blocks(&mut self, blocks: &[(u32, u64)]) {
        for group in blocks.chunk_by(|a, b| a.0 == b.0) {
            let slot = group[0].0;
            let names: Vec<EngineHash> = group.iter().map(|b| EngineHash(b.1)).collect();
            for name in &names {
                self.timers[slot as usize].remove(&name.0);
            }
            self.blocks -= names.len();
            let gone = self.tree.alone().remove(device(slot), &names);
            debug_assert!(gone.is_ok(), "timers and tree disagree: {gone:?}");
        }
        if self.blocks == 0 {
            self.timers = Vec::new();
            self.buckets.clear();
        }
    }

    /// Forgets a rank.
    pub(crate) fn remove_slot(&mut self, slot: u32) {
        if let Some(timers) = self.timers.get_mut(slot as usize) {
            self.blocks -= std::mem::take(timers).len();
        }
        self.tree.alone().clear(device(slot), usize::MAX);
    }

    /// Bytes of the tree and the timers.
    pub(crate) fn bytes(&mut self) -> usize {
        let timer = size_of::<(u64, Timer)>() + 1;
        let timers: usize = self.timers.iter().map(|t| t.capacity() * timer).sum();
        let waiting: usize = self.buckets.values().map(|b| b.capacity() * 16 + 32).sum();
        self.tree.alone().bytes() + timers + waiting
    }
}

fn grain_nanos() -> u64 {
    Approximate::GRAIN.as_nanos() as u64
}
