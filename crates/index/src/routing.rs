//! What our own routing decisions say about caches: blocks that are believed in for a while.
//!
//! A prompt that was sent to a rank will be cached there. Each (rank, block) has an expiry that the next
//! such decision moves on; expired blocks leave, and past a number of blocks the next to expire leave too,
//! the deepest first among equals, so that leaves go before what they hang on.
//!
//! What always holds:
//! - the blocks of a rank are a set of paths from the start on, cut into *spans* (`spans`): one for what a decision
//!   added. A prompt is followed from span to span, by the name of the first block of each;
//! - a span waits in exactly one bucket, of the tick in which its last block goes or of an earlier one; when that
//!   comes due and the block was confirmed since, it moves on;
//! - whatever hangs on a block goes before it.
//!
//! No call does more than a little ([`BLOCKS_AT_ONCE`]): who has more to do lets others in between (`routing_index`).

mod dump;
mod routing_index;
mod spans;

pub(crate) use routing_index::RoutingIndex;

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BinaryHeap};

use kvasir_types::{EngineHash, LocalHash, SequenceHash, StoredBlock, Time, WorkerRank};

use crate::Approximate;
use crate::mix::IdMap;
use crate::tree::{Holder, NAMES_PER_EVENT, Repeats, Tree};
use spans::{Span, SpanId, Spans, Step};

/// A count of [`Approximate::EXPIRY_TICK`]s.
type ExpiryTick = u64;

/// Blocks that are added or forgotten before others get their turn: some tens of microseconds. Few in tests,
/// whose prompts are short and shall be recorded and forgotten in parts.
const BLOCKS_AT_ONCE: usize = if cfg!(any(test, feature = "oracle")) {
    3
} else {
    256
};

/// Blocks with expiries.
#[derive(Debug)]
pub(crate) struct RoutingTree {
    tree: Tree,
    options: Approximate,
    /// Ranks of which something was recorded, by the slots that the index gave them.
    slots: IdMap<WorkerRank, u32>,
    spans: Spans,
    /// By slot: spans by the names of their first blocks.
    heads: Vec<IdMap<u64, SpanId>>,
    buckets: BTreeMap<ExpiryTick, Bucket>,
    blocks: usize,
    /// Bytes of what spans point to, of their places in buckets and of their heads.
    span_bytes: usize,
    /// There were too many blocks, and are still more than were to be left.
    pruning: bool,
    pruned: u64,
    evicted: u64,
}

/// Spans that wait for the same tick.
#[derive(Debug, Default)]
struct Bucket {
    /// The deepest first.
    waiting: BinaryHeap<ExpiryEntry>,
    /// How many blocks they have.
    blocks: usize,
}

/// A span in its bucket, in the order in which its last block goes: the deepest first, then by rank and name, to be
/// definite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ExpiryEntry {
    depth: u32,
    rank: Reverse<WorkerRank>,
    name: Reverse<u64>,
    len: u32,
    span: SpanId,
}

/// How far a path is recorded: so many blocks, the last of them at the end of a span.
#[derive(Clone, Copy, Debug)]
struct PathEnd {
    blocks: usize,
    span: SpanId,
}

/// What is to be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forget {
    /// Blocks that go in this tick or before.
    Expired(ExpiryTick),
    /// The next to expire, until so many are left.
    Down(usize),
}

fn device(slot: u32) -> Holder {
    Holder { slot, tier: 0 }
}

/// Bytes of a span beside its own: where it waits, and an entry of a map that is half full.
const PER_SPAN: usize = size_of::<ExpiryEntry>() + 2 * size_of::<(u64, SpanId)>();

impl RoutingTree {
    pub(crate) fn new(options: Approximate) -> Self {
        Self {
            tree: Tree::new(),
            options,
            slots: IdMap::default(),
            spans: Spans::default(),
            heads: Vec::new(),
            buckets: BTreeMap::new(),
            blocks: 0,
            span_bytes: 0,
            pruning: false,
            pruned: 0,
            evicted: 0,
        }
    }

    /// Believes from now on that a rank caches these blocks, of which it adds at most [`BLOCKS_AT_ONCE`]. Returns
    /// how many were added, and whether it is to be called again for the others: then with `done` as it was left, so that
    /// what was recorded already is not followed again.
    fn record(
        &mut self,
        now: Time,
        slot: u32,
        rank: WorkerRank,
        locals: &[LocalHash],
        sequence: &[SequenceHash],
        done: &mut Option<PathEnd>,
    ) -> (usize, bool) {
        self.tree.free_deferred(NAMES_PER_EVENT);
        let expiry = (now + self.options.ttl).as_nanos().div_ceil(tick_nanos());
        let all = locals.len().min(sequence.len());
        // Others had their turn: what is gone or has become shorter is looked for from the start.
        let from = done.take().filter(|end| self.is_end(*end, slot));
        let Some((known, parent)) = self.confirm(slot, &sequence[..all], expiry, from) else {
            return (0, false); // Two blocks of one name: no chain of ours.
        };
        let until = all.min(known + BLOCKS_AT_ONCE);
        let named = locals[known..until].iter().zip(&sequence[known..until]);
        let blocks: Vec<StoredBlock> = named
            .map(|(&local, name)| StoredBlock {
                engine: EngineHash(name.0),
                local,
            })
            .collect();
        if blocks.is_empty() {
            return (0, false);
        }
        let above = known
            .checked_sub(1)
            .map(|last| EngineHash(sequence[last].0));
        let tree = &mut self.tree;
        if (tree.store(device(slot), above, &blocks, Repeats::Ignore)).is_err() {
            return (0, false); // As above.
        }
        let len = blocks.len() as u32;
        let span = self.add_span(Span {
            rank,
            slot,
            start: known as u32,
            names: blocks.iter().map(|b| b.engine.0).collect(),
            steps: vec![Step { len, expiry }],
            parent,
            children: 0,
        });
        *done = Some(PathEnd {
            blocks: until,
            span,
        });
        (blocks.len(), until < all)
    }

    /// Whether a path of a slot still ends there.
    fn is_end(&self, end: PathEnd, slot: u32) -> bool {
        let span = self.spans.get(end.span);
        span.is_some_and(|span| {
            span.slot == slot && (span.start + span.len()) as usize == end.blocks
        })
    }

    /// Moves the expiries of those blocks of a path on that are believed in already: the first ones. Returns how
    /// many these are and the span that they end in; `None` if names repeat. Those up to `from` were moved on before.
    fn confirm(
        &mut self,
        slot: u32,
        sequence: &[SequenceHash],
        expiry: ExpiryTick,
        from: Option<PathEnd>,
    ) -> Option<(usize, Option<SpanId>)> {
        let mut known = from.map_or(0, |end| end.blocks);
        let mut last = from.map(|end| end.span);
        let Some(heads) = self.heads.get(slot as usize) else {
            return Some((known, last));
        };
        while let Some(name) = sequence.get(known)
            && let Some(&id) = heads.get(&name.0)
        {
            let span = self.spans.get_mut(id)?;
            if span.start as usize != known || span.parent != last {
                return None;
            }
            let rest = sequence[known..].iter();
            let same = rest.zip(&span.names).take_while(|(s, n)| s.0 == **n);
            let same = same.count();
            self.span_bytes -= span.heap();
            span.confirm(same as u32, expiry);
            self.span_bytes += span.heap();
            (known, last) = (known + same, Some(id));
        }
        Some((known, last))
    }

    fn add_span(&mut self, span: Span) -> SpanId {
        let (slot, len) = (span.slot as usize, span.names.len());
        if self.heads.len() <= slot {
            self.heads.resize_with(slot + 1, IdMap::default);
        }
        if let Some(parent) = span.parent.and_then(|id| self.spans.get_mut(id)) {
            parent.children += 1;
        }
        self.blocks += len;
        self.span_bytes += span.heap() + PER_SPAN;
        let first = span.names[0];
        let id = self.spans.insert(span);
        self.heads[slot].insert(first, id);
        self.wait(id);
        id
    }

    /// Puts a span into the bucket of its last block.
    fn wait(&mut self, id: SpanId) {
        let Some(span) = self.spans.get(id) else {
            return;
        };
        let (Some(name), (tick, _)) = (span.names.last(), span.due()) else {
            return;
        };
        let bucket = self.buckets.entry(tick).or_default();
        bucket.blocks += span.names.len();
        bucket.waiting.push(ExpiryEntry {
            depth: span.start + span.len() - 1,
            rank: Reverse(span.rank),
            name: Reverse(*name),
            len: span.len(),
            span: id,
        });
    }

    /// When the next block may expire.
    fn next_expiry(&self) -> Option<Time> {
        let tick = *self.buckets.keys().next()?;
        Some(Time::from_nanos(tick.saturating_mul(tick_nanos())))
    }

    /// Forgets blocks that have expired at `now`, at most [`BLOCKS_AT_ONCE`]. Returns whether there may be more.
    fn expire(&mut self, now: Time) -> bool {
        self.tree.free_deferred(NAMES_PER_EVENT);
        let due = now.as_nanos() / tick_nanos();
        self.sweep(Forget::Expired(due), BLOCKS_AT_ONCE)
    }

    /// Forgets blocks if there are too many, at most [`BLOCKS_AT_ONCE`]. Returns whether there are more to go.
    fn prune(&mut self) -> bool {
        self.pruning |= self.blocks > self.options.max_blocks;
        if self.pruning {
            let before = self.blocks;
            let target = self.options.prune_target();
            self.pruning = self.sweep(Forget::Down(target), BLOCKS_AT_ONCE) && self.blocks > target;
            self.pruned += (before - self.blocks) as u64;
        }
        self.pruning
    }

    /// Forgets blocks, in the order of [`RoutingTree::prune`], until all takes at most `target` bytes, or as many as are
    /// forgotten at once. Returns whether there are more to go.
    fn evict(&mut self, target: usize) -> bool {
        // Usually there is nothing to evict, and the sum visits every part of the name table.
        if self.bytes() <= target {
            return false;
        }
        let before = self.blocks;
        self.tree.free_deferred(BLOCKS_AT_ONCE);
        // A block is some tens of bytes: so few at a time that not many more go than have to.
        let step = BLOCKS_AT_ONCE.div_ceil(8);
        for _ in 0..8 {
            if self.bytes() <= target || self.blocks == 0 {
                break;
            }
            self.sweep(Forget::Down(0), step);
        }
        self.evicted += (before - self.blocks) as u64;
        self.bytes() > target && self.blocks > 0
    }

    /// Forgets blocks; looks at `most` spans and blocks. Returns whether there may be more to forget.
    fn sweep(&mut self, what: Forget, most: usize) -> bool {
        let mut left = most;
        while left > 0 {
            let Some(first) = self.buckets.first_entry() else {
                return false;
            };
            let tick = *first.key();
            match what {
                Forget::Expired(due) if tick > due => return false,
                Forget::Down(target) if self.blocks <= target => return false,
                _ => {}
            }
            left -= 1;
            let Some(next) = first.into_mut().waiting.pop() else {
                self.buckets.remove(&tick);
                continue;
            };
            left = left.saturating_sub(self.shorten(tick, next, what, left));
        }
        true
    }

    /// Forgets blocks from the end of the span that was the first in the first bucket, as many as may go before those
    /// of any other, but about `most`. Returns how many.
    fn shorten(
        &mut self,
        tick: ExpiryTick,
        waiting: ExpiryEntry,
        what: Forget,
        most: usize,
    ) -> usize {
        let Entry::Occupied(mut bucket) = self.buckets.entry(tick) else {
            return 0;
        };
        let bucket = bucket.get_mut();
        let (in_bucket, next) = (bucket.blocks, bucket.waiting.peek().map(|w| w.depth));
        bucket.blocks -= waiting.len as usize;
        let Some(span) = self.spans.get_mut(waiting.span) else {
            return 0; // It went with its rank.
        };
        let ((due, from), len) = (span.due(), span.len());
        if due > tick {
            self.wait(waiting.span);
            return 0;
        }
        let (all, excess) = match what {
            Forget::Expired(_) => (true, usize::MAX),
            Forget::Down(target) => {
                let excess = self.blocks - target;
                (in_bucket <= excess, excess)
            }
        };
        let mut keep = from.max(len.saturating_sub(excess.min(most.max(1)) as u32));
        // Where order counts, or where something may hang on it, it does not go on past the next one's end.
        if let Some(next) = next.filter(|_| !all || span.children > 0) {
            keep = keep.max(len.saturating_sub((waiting.depth - next).max(1)));
        }
        self.drop_end(waiting.span, keep);
        (len - keep) as usize
    }

    /// Forgets the blocks of a span from `keep` on.
    fn drop_end(&mut self, id: SpanId, keep: u32) {
        let Some(span) = self.spans.get_mut(id) else {
            return;
        };
        let gone = span.names[keep as usize..].iter().rev();
        let names: Vec<EngineHash> = gone.map(|name| EngineHash(*name)).collect();
        // Crafted names may repeat, and then some are gone already.
        let _unknown = self.tree.remove(device(span.slot), &names);
        self.blocks -= names.len();
        if keep == 0 {
            self.free(id);
        } else {
            self.span_bytes -= span.heap();
            span.shorten(keep);
            self.span_bytes += span.heap();
            self.wait(id);
        }
        self.settle();
    }

    /// Gives up a span whose blocks are not counted any more.
    fn free(&mut self, id: SpanId) {
        let Some(span) = self.spans.remove(id) else {
            return;
        };
        self.span_bytes -= span.heap() + PER_SPAN;
        if let Some(parent) = span.parent.and_then(|id| self.spans.get_mut(id)) {
            parent.children -= 1;
        }
        if let Some(heads) = self.heads.get_mut(span.slot as usize)
            && heads.get(&span.names[0]) == Some(&id)
        {
            heads.remove(&span.names[0]);
            if heads.len() * 8 < heads.capacity() {
                heads.shrink_to(heads.len() * 2);
            }
        }
    }

    /// Gives everything back if nothing is believed in.
    fn settle(&mut self) {
        if self.blocks == 0 {
            self.spans.clear();
            self.heads = Vec::new();
            self.buckets.clear();
            self.span_bytes = 0;
        }
    }

    /// Forgets who hung where on a rank; its spans are to be given to [`Self::forget`].
    fn take_spans(&mut self, slot: u32) -> Vec<SpanId> {
        let heads = self.heads.get_mut(slot as usize);
        let heads = heads.map(std::mem::take).unwrap_or_default();
        heads.into_values().collect()
    }

    /// Forgets blocks of a rank, at most some. Returns whether there are more.
    fn forget(&mut self, slot: u32, spans: &mut Vec<SpanId>, runs: usize) -> bool {
        for id in spans.drain(spans.len().saturating_sub(runs)..) {
            self.blocks -= self.spans.get(id).map_or(0, |span| span.names.len());
            self.free(id);
        }
        let more = self.tree.clear(device(slot), runs);
        self.settle();
        more || !spans.is_empty()
    }

    /// Forgets all blocks of a rank.
    fn forget_all(&mut self, slot: u32) {
        let mut spans = self.take_spans(slot);
        self.forget(slot, &mut spans, usize::MAX);
    }

    /// Bytes of the tree and the spans, near enough.
    fn bytes(&self) -> usize {
        self.tree.bytes() + self.spans.bytes() + self.span_bytes
    }

    /// Panics if it contradicts itself. For tests.
    #[cfg(any(test, feature = "oracle"))]
    fn check(&self) {
        let tree = &self.tree;
        tree.check();
        assert_eq!(tree.entries(), self.blocks as u64);
        let (mut blocks, mut bytes, mut count) = (0, 0, 0);
        let mut children: BTreeMap<SpanId, u32> = BTreeMap::new();
        for (id, span) in self.spans.iter() {
            (blocks, count) = (blocks + span.names.len(), count + 1);
            bytes += span.heap() + PER_SPAN;
            assert_eq!(self.heads[span.slot as usize][&span.names[0]], id);
            assert_eq!(span.steps.last().map(|s| s.len), Some(span.len()));
            let Some(parent) = span.parent else {
                assert_eq!(span.start, 0);
                continue;
            };
            *children.entry(parent).or_default() += 1;
            let expiry = self.spans.get(parent).and_then(|above| {
                let at = span.start - above.start;
                above.steps.iter().find(|s| at > 0 && s.len >= at)
            });
            let later = |above: &Step| above.expiry >= span.steps[0].expiry;
            assert!(expiry.is_some_and(later), "it hangs on nothing that stays");
        }
        for (id, span) in self.spans.iter() {
            assert_eq!(children.get(&id).copied().unwrap_or(0), span.children);
        }
        assert_eq!((self.blocks, self.span_bytes), (blocks, bytes));
        let mut waiting = 0;
        for (tick, bucket) in &self.buckets {
            let lens = bucket.waiting.iter().map(|w| w.len as usize);
            assert_eq!(lens.sum::<usize>(), bucket.blocks);
            for w in &bucket.waiting {
                let span = self.spans.get(w.span);
                waiting += usize::from(span.is_some());
                assert!(span.is_none_or(|s| s.len() == w.len && s.due().0 >= *tick));
            }
        }
        assert_eq!(waiting, count, "each span waits once");
        let heads: usize = self.heads.iter().map(IdMap::len).sum();
        assert_eq!(heads, count);
    }
}

fn tick_nanos() -> u64 {
    Approximate::EXPIRY_TICK.as_nanos() as u64
}
