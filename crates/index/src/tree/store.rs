//! Blocks that appeared.
//!
//! The usual store meets blocks that its rank does not hold yet, under their own names, and then blocks
//! that nobody holds: runs are extended and made as a whole. Everything else, a block announced again, a
//! second name, a name that moves, goes block by block.

use std::collections::HashSet;
use std::sync::Arc;

use kvasir_types::{EngineHash, StoredBlock};

use super::{Holder, Node, ROOT, Tree};
use crate::ApplyError;
use crate::names::{Place, RUN_MAX};
use crate::owners::Coverage;
use crate::run::{Run, TAIL_MAX};

/// Whether a block that is announced again counts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repeats {
    /// An engine stored another copy.
    Count,
    /// It only confirms what is known: a routing decision, a publisher that counts copies itself.
    Ignore,
}

/// A point between two blocks: after `pos` blocks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) run: u32,
    pub(super) pos: u32,
}

impl Point {
    pub(super) fn after(place: Place) -> Self {
        Self {
            run: place.run,
            pos: place.pos + 1,
        }
    }
}

/// Blocks of an event that are in the tree: `len` of them from `at` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    pub(super) at: Point,
    pub(super) len: u32,
}

impl Tree {
    /// Adds consecutive blocks after `parent` to what a holder holds.
    pub(crate) fn store(
        &mut self,
        h: Holder,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        repeats: Repeats,
    ) -> Result<(), ApplyError> {
        self.clock += 1;
        let found = match parent {
            None => Some(Point { run: ROOT, pos: 0 }),
            Some(name) => {
                let named = self.named(name.0);
                self.held_in_any_tier(h, name.0, named).map(Point::after)
            }
        };
        // A parent under an alias is the one name that `names` does not know.
        let alias_parent = found.is_some_and(|at| {
            let (node, name) = (self.node(at.run), parent.map_or(0, |p| p.0));
            at.run != ROOT && !(node.clean && node.names[at.pos as usize - 1] == name)
        });
        let (Some(mut at), true) = (found, blocks.len() <= RUN_MAX && !alias_parent) else {
            check_distinct(parent, blocks)?;
            let at =
                found.ok_or_else(|| ApplyError::ParentBlockNotFound(parent.unwrap_or_default()))?;
            return self.store_long(h, at, blocks, repeats);
        };
        let mut checked = false;
        self.store_at(h, &mut at, blocks, repeats, &mut || {
            if !std::mem::replace(&mut checked, true) {
                check_distinct(parent, blocks)?;
            }
            Ok(())
        })
    }

    fn store_long(
        &mut self,
        h: Holder,
        mut at: Point,
        blocks: &[StoredBlock],
        repeats: Repeats,
    ) -> Result<(), ApplyError> {
        for piece in blocks.chunks(RUN_MAX) {
            self.store_at(h, &mut at, piece, repeats, &mut || Ok(()))?;
        }
        Ok(())
    }

    /// Stores at most [`RUN_MAX`] blocks from `at` on and moves `at` behind them. Calls `check` before it
    /// changes anything, unless it knows that all names differ.
    fn store_at(
        &mut self,
        h: Holder,
        at: &mut Point,
        blocks: &[StoredBlock],
        repeats: Repeats,
        check: &mut dyn FnMut() -> Result<(), ApplyError>,
    ) -> Result<(), ApplyError> {
        let mut known: Vec<Stretch> = Vec::new();
        let mut plain = self
            .holdings
            .get(h.slot as usize)
            .is_none_or(|t| t[h.tier].alias_count == 0);
        let mut end = *at;
        let mut rest = blocks;
        while let Some(stretch) = self.stretch(end, rest) {
            let (names, later) = rest.split_at(stretch.len as usize);
            plain &= self.is_plain(h, stretch, names, repeats);
            known.push(stretch);
            end = Point {
                run: stretch.at.run,
                pos: stretch.at.pos + stretch.len,
            };
            rest = later;
        }
        let made = if plain { self.make(h, end, rest) } else { None };
        let Some(made) = made else {
            check()?;
            return self.store_singly(h, at, blocks, repeats);
        };
        for stretch in known {
            end = self.extend_plain(h, stretch);
        }
        *at = match made {
            NewBlocks::Nothing => end,
            NewBlocks::Grown(len) => self.grow(h, end.run, &rest[..len]),
            NewBlocks::Run(id) => self.attach(h, end, id, locals(rest)),
        };
        Ok(())
    }

    /// Claims the names of blocks that are not in the tree yet. Nothing a reader sees changes. `None` if a
    /// name is taken: then nothing changed at all.
    fn make(&mut self, h: Holder, end: Point, blocks: &[StoredBlock]) -> Option<NewBlocks> {
        if blocks.is_empty() {
            return Some(NewBlocks::Nothing);
        }
        let grows = self.can_grow(h, end, blocks.len());
        let id = if grows {
            end.run
        } else {
            let id = self.reserve();
            self.nodes[id as usize] = Some(Node::new(Run::new(0, 0, 0, Arc::new([])), ROOT));
            id
        };
        let from = self.node(id).names.len();
        self.node_mut(id)
            .add_names(blocks.iter().map(|b| b.engine.0), grows);
        let nodes = &self.nodes;
        let first = Place {
            run: id,
            pos: from as u32,
        };
        let has_name = |p, name| Self::has_name(nodes, p, name);
        if self.names.claim(blocks, |b| b.engine.0, first, has_name) {
            return Some(if grows {
                NewBlocks::Grown(blocks.len())
            } else {
                NewBlocks::Run(id)
            });
        }
        self.node_mut(id).names.truncate(from);
        if !grows {
            self.unreserve(id);
        }
        None
    }

    /// Stores block by block: any name for any block. The caller knows that the names differ.
    fn store_singly(
        &mut self,
        h: Holder,
        at: &mut Point,
        blocks: &[StoredBlock],
        repeats: Repeats,
    ) -> Result<(), ApplyError> {
        for block in blocks {
            let place = match self.stretch(*at, std::slice::from_ref(block)) {
                Some(s) => Place {
                    run: s.at.run,
                    pos: s.at.pos,
                },
                None => self.make_single(h, *at, block),
            };
            self.hold(h, place, block.engine.0, repeats);
            self.trim(place.run);
            *at = Point {
                run: place.run,
                pos: place.pos + 1,
            };
        }
        Ok(())
    }

    /// Makes a block that nobody holds yet; it is named unless its name is taken.
    fn make_single(&mut self, h: Holder, at: Point, block: &StoredBlock) -> Place {
        let id = self.reserve();
        let name = block.engine.0;
        let mut node = Node::new(Run::new(0, 0, 0, Arc::new([])), ROOT);
        node.names = vec![name];
        self.nodes[id as usize] = Some(node);
        let (place, nodes) = (Place { run: id, pos: 0 }, &self.nodes);
        let taken = self.names.insert(name, place, |p| {
            p != place && Self::has_name(nodes, p, name)
        });
        self.node_mut(id).clean = taken.is_ok();
        self.attach(h, at, id, Arc::new([block.local.0]));
        // Coverage only once `hold` says so; until then nothing may trim it away.
        self.pinned = id;
        self.set_held(id, h, 0, 1, false);
        place
    }

    /// The blocks from `at` on that are in the tree and have the first of the given contents.
    pub(super) fn stretch(&self, at: Point, blocks: &[StoredBlock]) -> Option<Stretch> {
        let local = blocks.first()?.local.0;
        let at = if at.pos < self.len(at.run) {
            at
        } else {
            let run = self.child(at.run, local)?;
            Point { run, pos: 0 }
        };
        let node = self.node(at.run);
        let pos = at.pos as usize;
        let same = (pos..node.names.len())
            .zip(blocks)
            .take_while(|(pos, b)| node.run.local(*pos) == b.local.0)
            .count();
        (same > 0).then_some(Stretch {
            at,
            len: same as u32,
        })
    }

    /// Whether a holder without aliases can simply be made to hold these blocks under these names.
    pub(super) fn is_plain(
        &self,
        h: Holder,
        s: Stretch,
        blocks: &[StoredBlock],
        repeats: Repeats,
    ) -> bool {
        let node = self.node(s.at.run);
        let own = &node.names[s.at.pos as usize..];
        node.clean
            && own.iter().zip(blocks).all(|(name, b)| *name == b.engine.0)
            && (repeats == Repeats::Ignore
                || self.held(s.at.run, h).count(s.at.pos, s.at.pos + s.len) == 0)
    }

    /// Makes a holder hold a stretch; returns the point after it.
    pub(super) fn extend_plain(&mut self, h: Holder, s: Stretch) -> Point {
        let Point { run, pos } = s.at;
        let end = pos + s.len;
        self.set_held(run, h, pos, end, true);
        self.node_mut(run).touched = self.clock;
        Point { run, pos: end }
    }

    /// Whether `added` blocks after `end` can be added to its run: a leaf that only this holder holds.
    pub(super) fn can_grow(&self, h: Holder, end: Point, added: usize) -> bool {
        let node = self.node(end.run);
        end.run != ROOT
            && added <= RUN_MAX - node.names.len()
            && end.pos as usize == node.names.len()
            && node.children.is_empty()
            && node.run.is_sole(h.tier, h.slot)
    }

    /// Adds blocks, whose names are claimed, to the end of a leaf that only this holder holds.
    #[inline(always)]
    pub(super) fn grow(&mut self, h: Holder, id: u32, blocks: &[StoredBlock]) -> Point {
        let clock = self.clock;
        let node = self.node_mut(id);
        let (len, added) = (node.run.len(), blocks.len() as u32);
        node.touched = clock;
        let fresh = len == node.written;
        let room = match node.run.held(h.tier, h.slot) {
            Coverage::Bits(bits) if fresh && bits.room() >= len + added => {
                bits.write(len, len + added, true);
                true
            }
            Coverage::Bits(_) => false,
            Coverage::Head(_) => fresh,
        };
        if !(room && node.run.push(blocks.iter().map(|b| b.local.0))) {
            self.grow_copy(h, id, blocks, fresh);
        }
        self.node_mut(id).written = len + added;
        self.blocks += blocks.len();
        self.tally(h, i64::from(added));
        self.account(id);
        Point {
            run: id,
            pos: len + added,
        }
    }

    /// As [`Tree::grow`], by publishing a run with more room.
    fn grow_copy(&mut self, h: Holder, id: u32, blocks: &[StoredBlock], fresh: bool) {
        let old = self.node(id).run.clone();
        let locals = blocks.iter().map(|b| b.local.0);
        let (len, grown) = (old.len(), old.len() + blocks.len() as u32);
        let mut draft = old.draft();
        draft.own_bits(grown + TAIL_MAX as u32);
        if let Coverage::Bits(bits) = draft.held(h.tier, h.slot) {
            bits.write(len, grown, true);
        }
        let opened = fresh && blocks.len() <= TAIL_MAX / 4 && draft.open_tail();
        if !(opened && draft.push(locals.clone())) {
            let mut all = Vec::with_capacity(grown as usize);
            old.copy(0, len as usize, &mut all);
            all.extend(locals);
            draft = draft.draft_with(all.into());
        }
        if !fresh {
            draft.end = self.new_end();
            // The end has a new identity; what stood at the old one is gone, so no edge refers to it.
            debug_assert!(self.node(id).children.is_empty());
        }
        self.publish(id, draft);
    }

    /// Hangs a new run, whose names are claimed, after `at`.
    pub(super) fn attach(&mut self, h: Holder, at: Point, id: u32, locals: Arc<[u64]>) -> Point {
        if at.pos < self.len(at.run) {
            self.split(at.run, at.pos);
        }
        self.make_room_for_edge();
        let end = self.new_end();
        let parent = &self.node(at.run).run;
        let (follows, start) = (parent.end, parent.start + self.len(at.run));
        let (first, len) = (locals[0], locals.len() as u32);
        let mut run = Run::new(end, follows, start, locals);
        run.owners_mut(h.tier).full.insert(h.slot);
        let clock = self.clock;
        let node = self.node_mut(id);
        (node.written, node.touched) = (len, clock);
        self.live += 1;
        self.blocks += len as usize;
        self.publish(id, run);
        self.link(follows, first, id);
        self.add_child(at.run, id);
        if at.run != ROOT {
            self.account(at.run);
        }
        self.count(h, id, 0, len);
        Point { run: id, pos: len }
    }
}

impl Node {
    /// Adds names at the end, with room for more if it is one that grows.
    pub(super) fn add_names(&mut self, names: impl ExactSizeIterator<Item = u64>, grows: bool) {
        if self.names.capacity() - self.names.len() < names.len() {
            let spare = if grows && names.len() < TAIL_MAX {
                TAIL_MAX
            } else {
                0
            };
            self.names.reserve_exact(names.len() + spare);
        }
        self.names.extend(names);
    }
}

/// The contents of blocks.
pub(super) fn locals(blocks: &[StoredBlock]) -> Arc<[u64]> {
    blocks.iter().map(|b| b.local.0).collect()
}

/// Refuses an event of a rank that holds nothing.
pub(crate) fn refuse(parent: EngineHash, blocks: &[StoredBlock]) -> Result<(), ApplyError> {
    check_distinct(Some(parent), blocks)?;
    Err(ApplyError::ParentBlockNotFound(parent))
}

/// What [`Tree::make`] prepared.
enum NewBlocks {
    Nothing,
    /// So many blocks at the end of an existing run.
    Grown(usize),
    /// A run of its own.
    Run(u32),
}

/// No name twice among a parent and its blocks.
fn check_distinct(parent: Option<EngineHash>, blocks: &[StoredBlock]) -> Result<(), ApplyError> {
    let mut seen: HashSet<EngineHash> = parent.into_iter().collect();
    match blocks.iter().find(|b| !seen.insert(b.engine)) {
        Some(twice) => Err(ApplyError::InvalidBlockSequence(twice.engine)),
        None => Ok(()),
    }
}
