//! The writer's side of the tree of runs: its nodes, and the few steps that change them.
//!
//! What always holds between calls:
//! - a run is 1 to [`RUN_MAX`] blocks; the last block of every leaf is held by somebody;
//! - `names` points to a block exactly if it is *named*: the block's name in its run, claimed by no block
//!   before it. All runs are *clean* (all blocks named) unless one rank's name means another block for
//!   another rank;
//! - a rank that holds a block holds it once and under the block's own name, or else `odd` lists every
//!   name it has for it;
//! - what readers see follows the order that `view` asks for.
//!
//! Two ways to write. Who is *alone* (`Tree::alone`, by `&mut`) has runs and names to itself and takes no
//! lock. Several *together* (`together`, by `&`) take turns at the runs, behind one lock, for as short as
//! they can, and look for, claim and forget names between their turns, behind the locks of the table. A
//! [`Pen`] is what either writes with: it knows whether names are forgotten at once or after the turn.
//!
//! Elsewhere: events (`store`, `remove`), lookups (`view`), who may write how (`index`).

#[cfg(any(test, feature = "oracle"))]
mod check;
mod dump;
mod evict;
mod graves;
mod odd;
mod pack;
mod remove;
mod store;
mod together;

pub(crate) use dump::Dumped;
pub(crate) use graves::NAMES_AT_ONCE;
pub(crate) use pack::Packed;
pub(crate) use store::{Again, refuse};
pub(crate) use together::Applied;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, PoisonError};

use sdd::{AtomicShared, Shared, Tag};

use crate::edges::Edges;
#[cfg(doc)]
use crate::names::RUN_MAX;
use crate::names::{Names, Place};
use crate::owners::Held;
use crate::run::Run;
use crate::sync::{Apart, Mutex, Ordering};
use crate::view::{CHUNK, Chunk, Directory, ROOT_END, View};
use graves::Graves;
use odd::Odd;

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
    /// Its entries in `odd`.
    odd: usize,
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
    runs: Apart<Mutex<Runs>>,
    names: Names,
}

/// What a writer writes with. Alone, `N` is the table of names; in a turn among others, what becomes of names
/// until the turn has ended.
#[derive(Debug)]
pub(crate) struct Pen<'a, N> {
    runs: &'a mut Runs,
    names: &'a mut N,
}

/// Has all to itself.
pub(crate) type Alone<'a> = Pen<'a, Names>;

/// What runs need of names as they change.
pub(crate) trait Book {
    /// Forgets the names of the blocks from `first` on.
    fn forget(&mut self, names: &[u64], first: Place);
    /// Points the names of the blocks from `from` on to those from `to` on.
    fn relocate(&mut self, names: &[u64], from: Place, to: Place);
    /// Whether the slot of a run that is gone must stay taken for now, as its names are still to be
    /// forgotten. Who says so gives it back.
    fn keeps(&mut self, run: u32) -> bool;
}

impl Book for Names {
    #[inline]
    fn forget(&mut self, names: &[u64], first: Place) {
        Names::forget(self, names, first);
    }

    fn relocate(&mut self, names: &[u64], from: Place, to: Place) {
        Names::relocate(self, names, from, to);
    }

    #[inline]
    fn keeps(&mut self, _: u32) -> bool {
        false
    }
}

impl<N> Deref for Pen<'_, N> {
    type Target = Runs;

    #[inline]
    fn deref(&self) -> &Runs {
        self.runs
    }
}

impl<N> DerefMut for Pen<'_, N> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Runs {
        self.runs
    }
}

/// The runs of a tree and who holds them; all but the table of names.
#[derive(Debug)]
pub(crate) struct Runs {
    view: Arc<View>,
    nodes: Vec<Option<Node>>,
    free: BinaryHeap<Reverse<u32>>,
    /// Runs that are gone, whose names are still to be forgotten.
    graves: Graves,
    odd: Odd,
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
        let runs = Runs::new();
        Self {
            view: Arc::clone(&runs.view),
            runs: Apart(Mutex::new(runs)),
            names: Names::default(),
        }
    }

    /// For a writer that nobody else writes beside.
    #[inline]
    pub(crate) fn alone(&mut self) -> Alone<'_> {
        self.names.gather();
        Pen {
            runs: (self.runs.0.get_mut()).unwrap_or_else(PoisonError::into_inner),
            names: &mut self.names,
        }
    }
}

impl Runs {
    fn new() -> Self {
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
            graves: Graves::default(),
            odd: Odd::default(),
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

    /// Bytes of everything but the table of names, readers' side included; not what readers still keep from
    /// being freed.
    fn bytes_of_runs(&self) -> usize {
        self.run_bytes
            + self.graves.bytes()
            + self.odd.bytes()
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
    fn held(&self, run: u32, h: Holder) -> Held<'_> {
        self.node(run).run.held(h.tier, h.slot)
    }

    #[inline]
    fn holds(&self, place: Place, h: Holder) -> bool {
        self.held(place.run, h).has(place.pos)
    }

    /// Whether a holder holds anything of what may be a run.
    fn holds_any(&self, run: u32, h: Holder) -> bool {
        matches!(self.nodes.get(run as usize), Some(Some(n)) if !n.run.held(h.tier, h.slot).is_nothing())
    }

    fn holding(&mut self, h: Holder) -> &mut Holding {
        let slot = h.slot as usize;
        if self.holdings.len() <= slot {
            self.holdings.resize_with(slot + 1, Default::default);
        }
        &mut self.holdings[slot][h.tier]
    }

    /// Whether the block at `place` has this name.
    #[inline]
    fn is_called(nodes: &[Option<Node>], place: Place, name: u64) -> bool {
        match nodes.get(place.run as usize) {
            Some(Some(node)) => node.names.get(place.pos as usize) == Some(&name),
            _ => false,
        }
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

    /// Takes a free slot for a run.
    fn reserve(&mut self) -> u32 {
        let id = loop {
            match self.free.pop() {
                // Slots that were dropped since they came free are still listed.
                Some(Reverse(id)) if id as usize >= self.nodes.len() => {}
                Some(Reverse(id)) => break id,
                None => {
                    self.nodes.push(None);
                    break self.nodes.len() as u32 - 1;
                }
            }
        };
        if id as usize / CHUNK >= self.chunks.len() {
            let chunk: Chunk = std::array::from_fn(|_| AtomicShared::null());
            self.chunks.push(Arc::new(chunk));
            self.in_use.push(0);
            self.publish_directory();
        }
        self.in_use[id as usize / CHUNK] += 1;
        id
    }

    /// Gives a slot back whose run is gone; chunks of free slots at the end are dropped, all but one. Says
    /// whether no slot is in use: all that is left can go then, by who is alone.
    fn release(&mut self, id: u32) -> bool {
        self.free.push(Reverse(id));
        self.in_use[id as usize / CHUNK] -= 1;
        let idle = self.in_use.iter().rev().take_while(|n| **n == 0).count();
        if idle > 1 {
            self.shrink(self.in_use.len() - idle + 1);
        }
        idle == self.in_use.len()
    }

    #[cold]
    fn shrink(&mut self, chunks: usize) {
        self.in_use.truncate(chunks);
        self.chunks.truncate(chunks);
        self.nodes.truncate((chunks * CHUNK).max(1));
        if chunks == 0 {
            self.free = BinaryHeap::new();
            self.nodes.shrink_to_fit();
            self.in_use.shrink_to_fit();
            self.chunks.shrink_to_fit();
            self.edges = Arc::new(Edges::with_room(0));
            self.edges_used = 0;
        }
        self.publish_directory();
    }

    fn publish_directory(&self) {
        self.view.publish(Directory {
            edges: Arc::clone(&self.edges),
            chunks: self.chunks.clone(),
        });
    }

    /// Shows readers a new version of a run.
    fn publish(&mut self, id: u32, run: Run) {
        let run = Shared::new(run);
        let cell = &self.chunks[id as usize / CHUNK][id as usize % CHUNK];
        drop(cell.swap((Some(run.clone()), Tag::None), Ordering::AcqRel));
        self.node_mut(id).run = run;
        self.account(id);
    }

    /// Brings the count of bytes up to date.
    fn account(&mut self, id: u32) {
        let node = self.node_mut(id);
        let lists = node.names.capacity() * 8 + node.children.capacity() * 4;
        let bytes = node.run.bytes() + lists;
        let before = std::mem::replace(&mut node.bytes, bytes);
        self.run_bytes = self.run_bytes + bytes - before;
    }

    /// To be called before a run is published, as a new table is built from those that are.
    fn make_room_for_edge(&mut self) {
        if self.edges_used + 1 >= self.edges.room() {
            self.renew_edges();
        }
    }

    fn link(&mut self, end: u64, local: u64, id: u32) {
        if self.edges.insert(end, local, id) {
            self.edges_used += 1;
        }
    }

    /// Builds the edge table anew, without the edges that are gone.
    #[cold]
    fn renew_edges(&mut self) {
        let edges = Edges::with_room(self.live + self.live / 2);
        let mut used = 0;
        for (id, node) in self.nodes.iter().enumerate().skip(1) {
            // A run that is being made is not published yet; its edge comes with it.
            if let Some(node) = node.as_ref().filter(|n| n.run.follows != n.run.end) {
                edges.insert(node.run.follows, node.run.first(), id as u32);
                used += 1;
            }
        }
        self.edges = Arc::new(edges);
        self.edges_used = used;
        self.publish_directory();
    }

    /// Adds `id` to the children of `parent`, for the writer alone.
    fn adopt(&mut self, parent: u32, id: u32) {
        let siblings = &mut self.node_mut(parent).children;
        siblings.push(id);
        let place = siblings.len() as u32 - 1;
        let node = self.node_mut(id);
        (node.parent, node.place) = (parent, place);
    }

    fn disown(&mut self, parent: u32, place: u32) {
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

    /// Notes that a holder holds something of a run of which it held nothing.
    fn log(&mut self, h: Holder, run: u32) {
        let holding = self.holding(h);
        holding.runs += 1;
        let before = holding.log.capacity();
        if holding.log.len() > 2 * holding.runs + 16 {
            let mut log = std::mem::take(&mut holding.log);
            log.sort_unstable();
            log.dedup();
            log.retain(|run| self.holds_any(*run, h));
            log.shrink_to_fit();
            self.holding(h).log = log;
        }
        let log = &mut self.holding(h).log;
        log.push(run);
        self.log_bytes = log.capacity() * 4 + self.log_bytes - before * 4;
    }

    /// Makes a holder hold (`on`), or hold no more, the blocks `from..to` of a run.
    ///
    /// Where it has gaps already this writes bits in place; readers are shown a new version only when its
    /// first gap appears and when the last one is filled or nothing is left.
    fn set_held(&mut self, id: u32, h: Holder, from: u32, to: u32, on: bool) {
        let len = self.len(id);
        let run = &self.node(id).run;
        let held = run.held(h.tier, h.slot);
        let (before, after) = match (held, on) {
            (Held::Bits(bits), _) => {
                let changed = bits.write(from, to, on);
                if on && bits.first_clear(0, len) < len {
                    return self.tally(h, i64::from(changed));
                }
                if !on && bits.reach(len) > 0 {
                    return self.tally(h, -i64::from(changed));
                }
                match on {
                    true => (len - changed, len),
                    false => (changed, 0),
                }
            }
            (Held::Head(extent), true) if from <= extent => (extent, extent.max(to)),
            (Held::Head(extent), false) if to >= extent => (extent, extent.min(from)),
            (Held::Head(extent), _) => return self.open_gap(id, h, extent, from..to, on),
        };
        if before == after {
            return;
        }
        let mut draft = run.draft();
        draft.owners_mut(h.tier).set(h.slot, after, len);
        draft.tidy();
        self.publish(id, draft);
        self.count(h, id, before, after);
    }

    /// As [`Tree::set_held`], for a holder of the first `extent` blocks that is left with a gap.
    fn open_gap(&mut self, id: u32, h: Holder, extent: u32, span: Range<u32>, on: bool) {
        let len = self.len(id);
        let mut draft = self.node(id).run.draft();
        let bits = Held::Head(extent).to_bits(len);
        bits.write(span.start, span.end, on);
        let after = bits.count(0, len);
        let owners = draft.owners_mut(h.tier);
        owners.set_bits(h.slot, bits, len);
        self.publish(id, draft);
        self.count(h, id, extent, after);
    }

    /// Keeps the counts when a holder holds `new` and no more `old` blocks of a run.
    fn count(&mut self, h: Holder, id: u32, old: u32, new: u32) {
        match (old, new) {
            (0, 0) => return,
            (0, _) => self.log(h, id),
            (_, 0) => self.holding(h).runs -= 1,
            _ => {}
        }
        self.tally(h, i64::from(new) - i64::from(old));
    }

    /// Keeps the counts of blocks.
    fn tally(&mut self, h: Holder, change: i64) {
        let holding = self.holding(h);
        let was_empty = holding.blocks == 0;
        holding.blocks = holding.blocks.saturating_add_signed(change);
        let is_empty = holding.blocks == 0;
        self.entries = self.entries.saturating_add_signed(change);
        if h.tier > 0 && was_empty != is_empty {
            let lower = &self.view.lower_holders;
            match is_empty {
                true => lower.fetch_sub(1, Ordering::Release),
                false => lower.fetch_add(1, Ordering::Release),
            };
        }
    }
}

impl<N: Book> Pen<'_, N> {
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
        self.adopt(id, tail);
        self.account(id);
        tail
    }

    /// Points names, children and logs to the tail of a run that is being cut.
    fn rename(&mut self, id: u32, at: u32, tail: u32) {
        let (from, to) = (Place { run: id, pos: at }, Place { run: tail, pos: 0 });
        let names = &self.runs.node(tail).names;
        self.names.relocate(names, from, to);
        self.odd.split(id, at, tail);
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

impl Alone<'_> {
    /// Bytes of everything, readers' side included; not what readers still keep from being freed.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes_of_runs() + self.names.bytes()
    }

    /// The named block with this name.
    #[inline]
    fn named(&self, name: u64) -> Option<Place> {
        let nodes = &self.runs.nodes;
        self.names.find(name, |p| Runs::is_called(nodes, p, name))
    }

    /// Gives a slot back.
    fn unreserve(&mut self, id: u32) {
        self.nodes[id as usize] = None;
        self.vacate(id);
    }

    /// As [`Pen::unreserve`], for a slot whose run is gone already.
    fn vacate(&mut self, id: u32) {
        if self.release(id) {
            self.close();
        }
    }

    /// Gives everything back if there is no run.
    pub(crate) fn close(&mut self) {
        if self.in_use.iter().all(|n| *n == 0) {
            self.shrink(0);
            self.names.clear();
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
