//! The paged memory of one rank: which blocks are free, which are shared, which can be found.
//!
//! Free blocks stand in a queue; an allocation takes from its head, so the head is evicted first. A
//! sequence returns its blocks last one first, so the end of a prefix goes before its beginning; a block
//! without a name (partly filled) goes to the head, so that it is used before anything is evicted. A free
//! block keeps its name, and can be found and taken out of the queue again, until it is allocated anew.
//!
//! Invariants: `references == 0` exactly while the block is in the queue; a block has a name exactly
//! while the table lists it under that name.

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
    /// The next block of the same name, older ones first.
    twin: BlockId,
    name: Option<EngineHash>,
}

/// Names are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AsIs(u64);

impl Hasher for AsIs {
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

/// The pool.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    blocks: Vec<Block>,
    head: BlockId,
    tail: BlockId,
    free: u32,
    /// Name to the oldest block that has it.
    named: HashMap<EngineHash, BlockId, BuildHasherDefault<AsIs>>,
    /// Free blocks that have a name.
    cached: u32,
}

impl Pool {
    /// A pool of `blocks` free, nameless blocks.
    pub(crate) fn new(blocks: u32) -> Self {
        let mut pool = Self {
            blocks: Vec::with_capacity(blocks as usize),
            head: NONE,
            tail: NONE,
            free: 0,
            named: HashMap::default(),
            cached: 0,
        };
        for id in 0..blocks {
            pool.blocks.push(Block {
                references: 0,
                previous: NONE,
                next: NONE,
                twin: NONE,
                name: None,
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

    /// The oldest block called `name`.
    pub(crate) fn find(&self, name: EngineHash) -> Option<BlockId> {
        self.named.get(&name).copied()
    }

    /// Whether nobody holds the block.
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

    /// Takes the free block that went unused longest. If it had a name, pushes that to `evicted`.
    pub(crate) fn allocate(&mut self, evicted: &mut Vec<EngineHash>) -> Option<BlockId> {
        let id = Some(self.head).filter(|id| *id != NONE)?;
        self.unlink(id);
        evicted.extend(self.forget(id));
        self.blocks[id as usize].references = 1;
        Some(id)
    }

    /// One holder less; the last one puts the block at the end of the queue, or, if nobody can find it
    /// again, at the head.
    pub(crate) fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.references > 0, "block {id} is released twice");
        block.references -= 1;
        match block.references {
            0 if block.name.is_none() => self.enqueue_first(id),
            0 => self.enqueue(id),
            _ => {}
        }
    }

    /// Gives a held, nameless block a name under which it can be found.
    pub(crate) fn name(&mut self, id: BlockId, name: EngineHash) {
        debug_assert!(!self.is_free(id), "block {id} is named while free");
        debug_assert!(
            self.blocks[id as usize].name.is_none(),
            "block {id} has a name"
        );
        self.blocks[id as usize].name = Some(name);
        match self.named.entry(name) {
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

    /// Forgets all names; false, and nothing happens, while a block is held.
    pub(crate) fn clear(&mut self) -> bool {
        if self.free != self.total() {
            return false;
        }
        for block in &mut self.blocks {
            (block.name, block.twin) = (None, NONE);
        }
        self.named.clear();
        self.cached = 0;
        true
    }

    /// Takes a block's name away.
    fn forget(&mut self, id: BlockId) -> Option<EngineHash> {
        let block = &mut self.blocks[id as usize];
        let name = block.name.take()?;
        let twin = std::mem::replace(&mut block.twin, NONE);
        if self.named.get(&name) == Some(&id) {
            if twin == NONE {
                self.named.remove(&name);
            } else {
                self.named.insert(name, twin);
            }
            return Some(name);
        }
        let mut at = self.named.get(&name).copied().unwrap_or(NONE);
        while at != NONE && self.blocks[at as usize].twin != id {
            at = self.blocks[at as usize].twin;
        }
        debug_assert_ne!(at, NONE, "block {id} is not listed under its name");
        if at != NONE {
            self.blocks[at as usize].twin = twin;
        }
        Some(name)
    }

    fn enqueue(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        (block.previous, block.next) = (self.tail, NONE);
        self.cached += u32::from(block.name.is_some());
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
            name,
            ..
        } = self.blocks[id as usize];
        self.cached -= u32::from(name.is_some());
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
            cached += u32::from(block.name.is_some());
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
        for (name, first) in &self.named {
            let mut at = *first;
            while at != NONE {
                assert_eq!(
                    self.blocks[at as usize].name,
                    Some(*name),
                    "name of block {at}"
                );
                listed += 1;
                at = self.blocks[at as usize].twin;
            }
        }
        assert_eq!(
            listed,
            self.blocks.iter().filter(|b| b.name.is_some()).count()
        );
    }
}
