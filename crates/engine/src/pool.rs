//! The paged memory of one rank: which blocks are free, which are shared, which can be found.
//!
//! Free blocks are in a queue; an allocation takes from its head, so the head is evicted first. A
//! sequence returns its blocks last one first, so the end of a prefix goes before its beginning; a block
//! without a hash (partly filled) goes to the head, so that it is used before anything is evicted. A free
//! block keeps its hash, and can be found and taken out of the queue again, until it is allocated anew.
//!
//! Invariants: `references == 0` exactly while the block is in the queue; a block has a hash exactly
//! while the table lists it under that hash.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use kvasir_types::EngineHash;

/// A block of the pool.
pub(crate) type BlockId = u32;

/// No block.
const NONE: BlockId = BlockId::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    references: u32,
    /// Neighbours in the free queue.
    previous: BlockId,
    next: BlockId,
    /// The next block of the same hash, older ones first.
    twin: BlockId,
    hash: Option<EngineHash>,
}

/// Keys are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The blocks of one rank.
#[derive(Clone, Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    head: BlockId,
    tail: BlockId,
    free: u32,
    /// Hash to the oldest block that has it.
    by_hash: HashMap<EngineHash, BlockId, BuildHasherDefault<IdentityHasher>>,
    /// Free blocks that have a hash.
    cached: u32,
}

impl BlockPool {
    /// A pool of `blocks` free, unhashed blocks.
    pub(crate) fn new(blocks: u32) -> Self {
        let mut pool = Self {
            blocks: Vec::with_capacity(blocks as usize),
            head: NONE,
            tail: NONE,
            free: 0,
            by_hash: HashMap::default(),
            cached: 0,
        };
        for id in 0..blocks {
            pool.blocks.push(Block {
                references: 0,
                previous: NONE,
                next: NONE,
                twin: NONE,
                hash: None,
            });
            pool.enqueue(id);
        }
        pool
    }

    pub(crate) fn total(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    pub(crate) fn cached(&self) -> u32 {
        self.cached
    }

    /// The oldest block with this hash.
    pub(crate) fn find(&self, hash: EngineHash) -> Option<BlockId> {
        self.by_hash.get(&hash).copied()
    }

    /// Whether no sequence holds the block.
    pub(crate) fn is_free(&self, id: BlockId) -> bool {
        self.blocks[id as usize].references == 0
    }

    /// One more holder of a block that was found.
    pub(crate) fn acquire(&mut self, id: BlockId) {
        if self.is_free(id) {
            self.unlink(id);
        }
        self.blocks[id as usize].references += 1;
    }

    /// Takes the free block that went unused longest. If it had a hash, pushes that to `evicted`.
    pub(crate) fn allocate(&mut self, evicted: &mut Vec<EngineHash>) -> Option<BlockId> {
        let id = Some(self.head).filter(|id| *id != NONE)?;
        self.unlink(id);
        evicted.extend(self.forget(id));
        self.blocks[id as usize].references = 1;
        Some(id)
    }

    /// One holder less; the last one puts the block at the end of the queue, or, if it has no hash,
    /// at the head.
    pub(crate) fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.references > 0, "block {id} is released twice");
        block.references -= 1;
        match block.references {
            0 if block.hash.is_none() => self.enqueue_first(id),
            0 => self.enqueue(id),
            _ => {}
        }
    }

    /// Gives a held, unhashed block a hash under which it can be found.
    pub(crate) fn set_hash(&mut self, id: BlockId, hash: EngineHash) {
        debug_assert!(!self.is_free(id), "block {id} gets a hash while free");
        debug_assert!(
            self.blocks[id as usize].hash.is_none(),
            "block {id} has a hash"
        );
        self.blocks[id as usize].hash = Some(hash);
        match self.by_hash.entry(hash) {
            Entry::Vacant(entry) => drop(entry.insert(id)),
            Entry::Occupied(entry) => {
                let mut last = *entry.get();
                while self.blocks[last as usize].twin != NONE {
                    last = self.blocks[last as usize].twin;
                }
                self.blocks[last as usize].twin = id;
            }
        }
    }

    /// Forgets all hashes; false, and nothing happens, while a block is held.
    pub(crate) fn clear(&mut self) -> bool {
        if self.free != self.total() {
            return false;
        }
        for block in &mut self.blocks {
            (block.hash, block.twin) = (None, NONE);
        }
        self.by_hash.clear();
        self.cached = 0;
        true
    }

    /// Removes a block's hash.
    fn forget(&mut self, id: BlockId) -> Option<EngineHash> {
        let block = &mut self.blocks[id as usize];
        let hash = block.hash.take()?;
        let twin = std::mem::replace(&mut block.twin, NONE);
        if self.by_hash.get(&hash) == Some(&id) {
            if twin == NONE {
                self.by_hash.remove(&hash);
            } else {
                self.by_hash.insert(hash, twin);
            }
            return Some(hash);
        }
        let mut at = self.by_hash.get(&hash).copied().unwrap_or(NONE);
        while at != NONE && self.blocks[at as usize].twin != id {
            at = self.blocks[at as usize].twin;
        }
        debug_assert_ne!(at, NONE, "block {id} is not listed under its hash");
        if at != NONE {
            self.blocks[at as usize].twin = twin;
        }
        Some(hash)
    }

    fn enqueue(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        (block.previous, block.next) = (self.tail, NONE);
        self.cached += u32::from(block.hash.is_some());
        match self.tail {
            NONE => self.head = id,
            tail => self.blocks[tail as usize].next = id,
        }
        self.tail = id;
        self.free += 1;
    }

    fn enqueue_first(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        (block.previous, block.next) = (NONE, self.head);
        match self.head {
            NONE => self.tail = id,
            head => self.blocks[head as usize].previous = id,
        }
        self.head = id;
        self.free += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let Block {
            previous,
            next,
            hash,
            ..
        } = self.blocks[id as usize];
        self.cached -= u32::from(hash.is_some());
        match previous {
            NONE => self.head = next,
            previous => self.blocks[previous as usize].next = next,
        }
        match next {
            NONE => self.tail = previous,
            next => self.blocks[next as usize].previous = previous,
        }
        self.free -= 1;
    }

    /// Panics unless the pool's own invariants hold and its references are exactly those in `held`.
    pub(crate) fn verify(&self, held: impl Iterator<Item = BlockId>) {
        let mut references = vec![0; self.blocks.len()];
        for id in held {
            references[id as usize] += 1;
        }
        let mut queued = vec![false; self.blocks.len()];
        let (mut at, mut previous, mut cached) = (self.head, NONE, 0);
        while at != NONE {
            let block = self.blocks[at as usize];
            assert!(!queued[at as usize], "block {at} is queued twice");
            assert_eq!(block.previous, previous, "block {at} has a wrong neighbour");
            queued[at as usize] = true;
            cached += u32::from(block.hash.is_some());
            (previous, at) = (at, block.next);
        }
        assert_eq!((previous, cached), (self.tail, self.cached));
        assert_eq!(queued.iter().filter(|q| **q).count(), self.free as usize);
        for (id, block) in self.blocks.iter().enumerate() {
            assert_eq!(block.references, references[id], "references of block {id}");
            assert_eq!(
                queued[id],
                block.references == 0,
                "block {id} and the queue"
            );
        }
        let mut listed = 0;
        for (hash, first) in &self.by_hash {
            let mut at = *first;
            while at != NONE {
                assert_eq!(
                    self.blocks[at as usize].hash,
                    Some(*hash),
                    "hash of block {at}"
                );
                listed += 1;
                at = self.blocks[at as usize].twin;
            }
        }
        assert_eq!(
            listed,
            self.blocks.iter().filter(|b| b.hash.is_some()).count()
        );
    }
}
