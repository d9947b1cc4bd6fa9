//! The writer's side of the tree of runs: its nodes, and what connects them.
//!
//! What always holds between calls:
//! - a run is 1 to [`RUN_MAX`] blocks; the last block of every leaf is held by somebody;
//! - `names` points to a block exactly if it is *named*: the block's name in its run, claimed by no block
//!   before it. All runs are *clean* (all blocks named) unless one rank's name means another block for
//!   another rank;
//! - a rank that holds a block holds it once and under the block's own name, or else `aliases` lists every
//!   name it has for it;
//! - what readers see follows the order that `view` asks for.
//!
//! Elsewhere: events (`store`, `remove`), slots and what readers are shown (`slots`), who holds what
//! (`holdings`), lookups (`view`), the lock of the writers (`index`).

mod aliases;
#[cfg(any(test, feature = "oracle"))]
mod check;
mod deferred_frees;
mod dump;
mod evict;
mod holdings;
mod pack;
mod remove;
mod slots;
mod store;

pub(crate) use deferred_frees::NAMES_PER_EVENT;
pub(crate) use dump::DumpEvent;
pub(crate) use pack::RunRecord;
pub(crate) use store::{Repeats, refuse};

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use sdd::Shared;

use crate::edges::Edges;
#[cfg(doc)]
use crate::names::RUN_MAX;
use crate::names::{Names, Place};
use crate::owners::Coverage;
use crate::run::Run;
use crate::view::{Chunk, Directory, ROOT_END, View};
use aliases::Aliases;
use deferred_frees::DeferredFrees;

pub(crate) const ROOT: u32 = 0;

/// One rank's cache in one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Holder {
    pub(crate) slot: u32,
    pub(crate) tier: usize,
}

/// What the writer keeps about a [`Holder`].
#[derive(Debug, Default)]
struct Holding {
    /// Runs of which it holds something, and some of which it does not any more, in no order.
    log: Vec<u32>,
    /// Runs of which it holds something.
    runs: usize,
    /// Blocks it holds.
    blocks: u64,
    /// Its entries in `aliases`.
    alias_count: usize,
}

/// The writer's view of a run.
#[derive(Debug)]
struct Node {
    run: Shared<Run>,
    /// The blocks' own names.
    names: Vec<u64>,
    parent: u32,
    /// Which of its parent's children it is.
    place: u32,
    children: Vec<u32>,
    /// Words ever written under this run's `end`.
    written: u32,
    /// Whether all its blocks are named.
    clean: bool,
    /// When something was last stored here, by the tree's clock.
    touched: u64,
    /// Bytes accounted for.
    bytes: usize,
}
/// The tree of one index.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) view: Arc<View>,
    names: Names,
    nodes: Vec<Option<Node>>,
    free: BinaryHeap<Reverse<u32>>,
    /// Freed runs whose names are still to be forgotten.
    deferred_frees: DeferredFrees,
    aliases: Aliases,
    holdings: Vec<[Holding; 4]>,
    /// Bytes of the logs in them.
    log_bytes: usize,
    edges: Arc<Edges>,
    /// Slots of `edges` in use or used once.
    edges_used: usize,
    chunks: Vec<Arc<Chunk>>,
    /// Slots of each chunk that are in use.
    in_use: Vec<usize>,
    next_end: u64,
    /// Counts changes of what is held.
    clock: u64,
    /// A run that must not be trimmed now.
    pinned: u32,
    /// Where eviction looks next.
    hand: usize,
    blocks: usize,
    entries: u64,
    /// Blocks announced again by a holder that held them, ever.
    repeated: u64,
    /// How many runs there are.
    live: usize,
    run_bytes: usize,
}

impl Tree {
    pub(crate) fn new() -> Self {
        let edges = Arc::new(Edges::with_room(0));
        let directory = Directory {
            edges: Arc::clone(&edges),
            chunks: Vec::new(),
        };
        let root = Node::new(Run::new(ROOT_END, ROOT_END, 0, Arc::new([])), ROOT);
        Self {
            view: Arc::new(View::new(directory)),
            nodes: vec![Some(root)],
            free: BinaryHeap::new(),
            names: Names::default(),
            deferred_frees: DeferredFrees::default(),
            aliases: Aliases::default(),
            holdings: Vec::new(),
            log_bytes: 0,
            edges,
            edges_used: 0,
            chunks: Vec::new(),
            in_use: Vec::new(),
            next_end: ROOT_END + 1,
            clock: 0,
            pinned: ROOT,
            hand: 0,
            blocks: 0,
            entries: 0,
            repeated: 0,
            live: 0,
            run_bytes: 0,
        }
    }

    /// Different blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// (rank, tier, block) triples.
    pub(crate) fn entries(&self) -> u64 {
        self.entries
    }

    /// Blocks announced again by a holder that held them, ever.
    pub(crate) fn repeated(&self) -> u64 {
        self.repeated
    }

    /// How many runs there are.
    pub(crate) fn runs(&self) -> usize {
        self.live
    }

    /// Bytes of everything, readers' side included; not what readers still keep from being freed.
    pub(crate) fn bytes(&self) -> usize {
        self.names.bytes()
            + self.run_bytes
            + self.deferred_frees.bytes()
            + self.aliases.bytes()
            + self.edges.bytes()
            + self.chunks.len() * size_of::<Chunk>()
            + self.nodes.capacity() * size_of::<Option<Node>>()
            + self.log_bytes
    }

    #[inline]
    fn node(&self, run: u32) -> &Node {
        match self.nodes.get(run as usize) {
            Some(Some(node)) => node,
            _ => unreachable!("run {run} is not in use"),
        }
    }

    #[inline]
    fn node_mut(&mut self, run: u32) -> &mut Node {
        match self.nodes.get_mut(run as usize) {
            Some(Some(node)) => node,
            _ => unreachable!("run {run} is not in use"),
        }
    }

    #[inline]
    fn len(&self, run: u32) -> u32 {
        self.node(run).names.len() as u32
    }

    /// What a holder holds of a run.
    #[inline]
    fn held(&self, run: u32, h: Holder) -> Coverage<'_> {
        self.node(run).run.held(h.tier, h.slot)
    }

    #[inline]
    fn holds(&self, place: Place, h: Holder) -> bool {
        self.held(place.run, h).has(place.pos)
    }

    /// Whether the block at `place` has this name.
    #[inline]
    fn has_name(nodes: &[Option<Node>], place: Place, name: u64) -> bool {
        match nodes.get(place.run as usize) {
            Some(Some(node)) => node.names.get(place.pos as usize) == Some(&name),
            _ => false,
        }
    }

    /// The named block with this name.
    #[inline]
    fn named(&self, name: u64) -> Option<Place> {
        let nodes = &self.nodes;
        self.names.find(name, |p| Self::has_name(nodes, p, name))
    }

    /// The run that goes on from the end of `run` with `local`.
    fn child(&self, run: u32, local: u64) -> Option<u32> {
        let node = self.node(run);
        let (end, depth) = (node.run.end, node.run.start + node.names.len() as u32);
        self.edges.find(end, local, |id| {
            let child = self.nodes.get(id as usize)?.as_ref()?;
            let fits = child.run.follows == end && child.run.start == depth;
            (fits && child.run.first() == local).then_some(id)
        })
    }

    fn new_end(&mut self) -> u64 {
        self.next_end += 1;
        self.next_end - 1
    }

    /// Adds `id` to the children of `parent`, for the writer alone.
    fn add_child(&mut self, parent: u32, id: u32) {
        let siblings = &mut self.node_mut(parent).children;
        siblings.push(id);
        let place = siblings.len() as u32 - 1;
        let node = self.node_mut(id);
        (node.parent, node.place) = (parent, place);
    }

    fn remove_child(&mut self, parent: u32, place: u32) {
        let siblings = &mut self.node_mut(parent).children;
        siblings.swap_remove(place as usize);
        if siblings.len() * 4 < siblings.capacity() {
            siblings.shrink_to(siblings.len() * 2);
        }
        if let Some(&moved) = siblings.get(place as usize) {
            self.node_mut(moved).place = place;
        }
        if parent != ROOT {
            self.account(parent);
        }
    }

    /// Cuts a run in two before position `at`. The head stays where it is; the tail's new slot is returned.
    fn split(&mut self, id: u32, at: u32) -> u32 {
        self.make_room_for_edge();
        let tail = self.reserve();
        let head_end = self.new_end();
        let node = self.node_mut(id);
        let old = node.run.clone();
        let mut locals = Vec::with_capacity(old.len() as usize);
        old.copy(0, old.len() as usize, &mut locals);
        let mut head_run = old.draft_with(locals[..at as usize].into());
        let mut tail_run = old.draft_with(locals[at as usize..].into());
        (tail_run.follows, tail_run.start) = (head_end, old.start + at);
        head_run.end = head_end;
        for tier in 0..4 {
            if let Some(owners) = old.owners(tier) {
                let (head, tail) = owners.split(at, old.len());
                (*head_run.owners_mut(tier), *tail_run.owners_mut(tier)) = (head, tail);
            }
        }
        let mut tail_node = Node::new(Run::new(0, 0, 0, Arc::new([])), id);
        tail_node.names = node.names.split_off(at as usize);
        node.names.shrink_to_fit();
        tail_node.children = std::mem::take(&mut node.children);
        tail_node.written = node.written - at;
        (tail_node.clean, tail_node.touched) = (node.clean, node.touched);
        node.written = at;
        self.nodes[tail as usize] = Some(tail_node);
        self.live += 1;
        self.rename(id, at, tail);
        // Readers: the tail first, then its edge, then the head in the place of the whole.
        self.publish(tail, tail_run);
        self.link(head_end, locals[at as usize], tail);
        self.publish(id, head_run);
        self.add_child(id, tail);
        self.account(id);
        tail
    }

    /// Points names, children and logs to the tail of a run that is being cut.
    fn rename(&mut self, id: u32, at: u32, tail: u32) {
        let (from, to) = (Place { run: id, pos: at }, Place { run: tail, pos: 0 });
        if let Some(Some(node)) = self.nodes.get(tail as usize) {
            self.names.relocate(&node.names, from, to);
        }
        self.aliases.split(id, at, tail);
        for i in 0..self.node(tail).children.len() {
            let child = self.node(tail).children[i];
            self.node_mut(child).parent = tail;
        }
        let (old, len) = (self.node(id).run.clone(), at + self.len(tail));
        for (tier, slot, held) in old.each_owner() {
            let h = Holder { slot, tier };
            if held.count(0, at) == 0 {
                self.holding(h).runs -= 1;
            }
            if held.count(at, len) > 0 {
                self.log(h, tail);
            }
        }
    }
}

impl Node {
    fn new(run: Run, parent: u32) -> Self {
        Self {
            run: Shared::new(run),
            names: Vec::new(),
            parent,
            place: 0,
            children: Vec::new(),
            written: 0,
            clean: true,
            touched: 0,
            bytes: 0,
        }
    }
}
