//! Events of different ranks at once.
//!
//! A writer among others changes runs in *turns*, behind the one lock of the runs, and does with names what
//! it can between its turns, behind the locks of their table:
//!
//! - **Stored**: guess where the parent is; a turn to see what of the event is in the tree already and where
//!   the rest will be; claim the names of the rest; a turn to see that nothing it stands on has changed, and
//!   to commit. One turn is enough where nothing is new.
//! - **Removed**: guess where the names are; a turn to give those blocks up; forget the names of what went;
//!   and so on with the next names.
//!
//! Why that is exact:
//! - Who cannot go on (a claim that agrees with some entry, a tree that has changed, anything but plain
//!   blocks) has changed nothing, and does the whole event alone.
//! - Nobody is alone meanwhile: the odd list, which blocks are named, ranks and their slots stay as they are,
//!   and nobody is cleared. Other writers add, cut and drop runs in their turns.
//! - A guess is believed only where the block there has the name (`Runs::is_called`). A named block keeps its
//!   entry; one that a rank holds goes only by that rank's own events. So a name of which nothing was found,
//!   or nothing that fits and nothing under the lock either, is none of the rank's.
//! - (slot, `end`, length) of a run stand for one path for ever (see `run`): a run that shows the same ones
//!   in the second turn as in the first has the same blocks with the same names, whatever happened between.
//! - A slot of which names are claimed or not forgotten yet is nobody else's: it is reserved before the
//!   claim and given back after the names are forgotten. Names that were cut off a run that is still there
//!   are claimed by nobody before they are forgotten (see `names::together`).
//!
//! Order of locks: the index's, then the runs', then one of the names'. Nobody waits for the runs with a lock
//! of the names in hand.
//!
//! Two events of one rank at once are against the contract: they may count or drop blocks of that rank
//! wrongly, in turns that each leave the tree sound.

use std::sync::Arc;

use kvasir_types::{EngineHash, StoredBlock};

use super::remove::AHEAD;
use super::store::{Point, Stretch, locals};
use super::{Again, Book, Holder, NAMES_AT_ONCE, Node, Pen, ROOT, Runs, Tree};
use crate::ApplyError;
use crate::names::{Guess, Names, Place, RUN_MAX};
use crate::run::Run;
use crate::sync::{MutexGuard, lock_soon};

/// What became of an event that was applied among others.
#[derive(Debug)]
pub(crate) struct Applied {
    pub(crate) outcome: Result<(), ApplyError>,
    /// Bytes of the tree after something was stored.
    pub(crate) bytes: usize,
    /// Whether no run is left: then somebody should settle the tree, alone.
    pub(crate) empty: bool,
}

/// What becomes of names in a turn: those of blocks that are gone are forgotten after it.
#[derive(Debug)]
struct Later<'a> {
    table: &'a Names,
    gone: Vec<u64>,
    /// Where they were: the first place of so many of them.
    places: Vec<(Place, usize)>,
    /// Slots to give back after that.
    slots: Vec<u32>,
}

impl Book for Later<'_> {
    fn forget(&mut self, names: &[u64], first: Place) {
        self.gone.extend_from_slice(names);
        self.places.push((first, names.len()));
    }

    fn relocate(&mut self, names: &[u64], from: Place, to: Place) {
        self.table.relocate_together(names, from, to);
    }

    fn keeps(&mut self, run: u32) -> bool {
        self.slots.push(run);
        true
    }
}

impl<'a> Later<'a> {
    fn new(table: &'a Names) -> Self {
        Self {
            table,
            gone: Vec::new(),
            places: Vec::new(),
            slots: Vec::new(),
        }
    }

    /// Forgets what went in the turn that has ended.
    fn forget_now(&mut self) {
        let mut rest = self.gone.as_slice();
        for (first, count) in self.places.drain(..) {
            let (names, later) = rest.split_at(count);
            self.table.forget_together(names, first);
            rest = later;
        }
        self.gone.clear();
    }

    fn release(&mut self, runs: &mut Runs) {
        for slot in self.slots.drain(..) {
            runs.release(slot);
        }
    }
}

/// What of an event was in the tree in the first turn, and where the rest shall be.
struct Sight {
    /// Blocks that are there, with the identity of their run's end.
    known: Vec<(Stretch, u64)>,
    /// After what the rest comes.
    end: Point,
    end_run: Seen,
    /// Where the rest will be: in a slot that is reserved, unless it `grows` the run of `end`.
    first: Place,
    grows: bool,
}

/// A run by what stands for its path.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Seen {
    end: u64,
    len: u32,
}

impl Tree {
    /// Whether [`Tree::store_together`] and the like may be called: [`Tree::share`] was since anybody was alone.
    pub(crate) fn is_shared(&self) -> bool {
        self.names.is_spread()
    }

    /// Lets several write.
    pub(crate) fn share(&mut self) {
        self.names.spread();
    }

    fn turn(&self) -> MutexGuard<'_, Runs> {
        lock_soon(&self.runs.0)
    }

    /// As [`Pen::store`], of an event that counts; `None` if it must be done alone.
    pub(crate) fn store_together(
        &self,
        h: Holder,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
    ) -> Option<Applied> {
        if blocks.is_empty() || blocks.len() > RUN_MAX {
            return None;
        }
        let guess = parent.map(|name| (name.0, self.names.guess_one_together(name.0)));
        let mut turn = self.turn();
        let at = turn.parent_at(h, guess)?;
        let (mut sight, rest) = turn.look(h, at, blocks)?;
        let grave = turn.take_grave();
        if rest.is_empty() {
            turn.clock += 1;
            turn.extend_known(h, &sight);
        } else {
            if !sight.grows {
                sight.first = Place {
                    run: turn.reserve(),
                    pos: 0,
                };
            }
            drop(turn);
            match self.commit(h, &sight, rest) {
                Some(done) => turn = done,
                None => {
                    self.forget_grave(grave);
                    return None;
                }
            }
        }
        let applied = Applied {
            outcome: Ok(()),
            bytes: turn.bytes_of_runs() + self.names.bytes_together(),
            empty: false,
        };
        drop(turn);
        self.forget_grave(grave);
        Some(applied)
    }

    /// Claims the names of the blocks that are not there yet, and makes them.
    fn commit(
        &self,
        h: Holder,
        sight: &Sight,
        rest: &[StoredBlock],
    ) -> Option<MutexGuard<'_, Runs>> {
        let names: Vec<u64> = rest.iter().map(|b| b.engine.0).collect();
        let contents = (!sight.grows).then(|| locals(rest));
        let claimed = self.names.claim_together(&names, sight.first);
        let mut turn = self.turn();
        if claimed && turn.is_still(h, sight, rest) {
            turn.clock += 1;
            turn.extend_known(h, sight);
            match contents {
                None => turn.grow_claimed(h, sight.first, names, rest),
                Some(contents) => self.attach_claimed(&mut turn, h, sight, names, contents),
            }
            return Some(turn);
        }
        if claimed {
            drop(turn);
            self.names.forget_together(&names, sight.first);
            turn = self.turn();
        }
        if !sight.grows {
            turn.release(sight.first.run);
        }
        None
    }

    fn attach_claimed(
        &self,
        runs: &mut Runs,
        h: Holder,
        sight: &Sight,
        names: Vec<u64>,
        contents: Arc<[u64]>,
    ) {
        let id = sight.first.run;
        let mut node = Node::new(Run::new(0, 0, 0, Arc::new([])), ROOT);
        node.names = names;
        runs.nodes[id as usize] = Some(node);
        // A cut moves names; it makes none that are to be forgotten.
        let mut names = Later::new(&self.names);
        let names = &mut names;
        Pen { runs, names }.attach(h, sight.end, id, contents);
    }

    /// Forgets some names of a run that is gone, which the writer took on itself in its first turn.
    fn forget_grave(&self, grave: Option<(u32, Vec<u64>)>) {
        let Some((run, mut names)) = grave else {
            return;
        };
        let keep = names.len().saturating_sub(NAMES_AT_ONCE);
        let pos = keep as u32;
        self.names
            .forget_together(&names[keep..], Place { run, pos });
        names.truncate(keep);
        self.turn().put_back_grave(run, names);
    }

    /// As [`Pen::remove`]; `None` if it must be done alone.
    pub(crate) fn remove_together(&self, h: Holder, names: &[EngineHash]) -> Option<Applied> {
        let mut unknown = None;
        let mut rest = names;
        let mut later = Later::new(&self.names);
        let (mut grave, mut empty) = (None, false);
        // Most events take one stretch off the end of a run: the first name leads to all of them.
        let mut ahead = 1;
        while !rest.is_empty() {
            let mut guesses = [Guess::Nothing; AHEAD];
            let batch = &rest[..rest.len().min(ahead)];
            self.names
                .guess_together(batch.iter().map(|n| n.0), &mut guesses);
            let mut turn = self.turn();
            if !turn.holds_plainly(h) {
                return None;
            }
            turn.clock += 1;
            later.release(&mut turn);
            grave = grave.or_else(|| turn.take_grave());
            let (runs, names) = (&mut *turn, &mut later);
            Pen { runs, names }.remove_guessed(h, &guesses[..batch.len()], &mut rest, &mut unknown);
            empty = turn.live == 0;
            drop(turn);
            later.forget_now();
            ahead = AHEAD;
        }
        if !later.slots.is_empty() {
            later.release(&mut self.turn());
        }
        self.forget_grave(grave);
        Some(Applied {
            outcome: unknown.map_or(Ok(()), |name| Err(ApplyError::BlockNotFound(name))),
            bytes: 0,
            empty,
        })
    }
}

impl Runs {
    /// Where the blocks of an event begin: after a parent that its rank holds. `None` if that is not plain.
    fn parent_at(&self, h: Holder, parent: Option<(u64, Guess)>) -> Option<Point> {
        let tiers = self.holdings.get(h.slot as usize)?;
        if tiers.iter().any(|t| t.odd > 0) {
            return None;
        }
        let Some((name, guess)) = parent else {
            return Some(Point { run: ROOT, pos: 0 });
        };
        let Guess::Perhaps(place) = guess else {
            return None;
        };
        let held = Self::is_called(&self.nodes, place, name)
            && self.node(place.run).clean
            && (0..tiers.len()).any(|tier| self.holds(place, Holder { tier, ..h }));
        held.then(|| Point::after(place))
    }

    /// What of an event's blocks is there, and which are not. `None` if they are not plain.
    fn look<'b>(
        &self,
        h: Holder,
        at: Point,
        blocks: &'b [StoredBlock],
    ) -> Option<(Sight, &'b [StoredBlock])> {
        let mut known: Vec<(Stretch, u64)> = Vec::new();
        let (mut end, mut rest) = (at, blocks);
        while let Some(stretch) = self.stretch(end, rest) {
            let (names, later) = rest.split_at(stretch.len as usize);
            if !self.is_plain(h, stretch, names, Again::Counts) {
                return None;
            }
            known.push((stretch, self.node(stretch.at.run).run.end));
            end = Point {
                run: stretch.at.run,
                pos: stretch.at.pos + stretch.len,
            };
            rest = later;
        }
        let sight = Sight {
            known,
            end,
            end_run: self.seen(end.run)?,
            first: Place {
                run: end.run,
                pos: end.pos,
            },
            grows: self.can_grow(h, end, rest.len()),
        };
        Some((sight, rest))
    }

    fn seen(&self, run: u32) -> Option<Seen> {
        let node = self.nodes.get(run as usize)?.as_ref()?;
        let (end, len) = (node.run.end, node.names.len() as u32);
        Some(Seen { end, len })
    }

    /// Whether all that an event builds on is as it was seen, and its first new block is still new.
    fn is_still(&self, h: Holder, sight: &Sight, rest: &[StoredBlock]) -> bool {
        let known = |(s, end): &(Stretch, u64)| {
            let now = self.seen(s.at.run);
            now.is_some_and(|now| now.end == *end && now.len >= s.at.pos + s.len)
        };
        self.seen(sight.end.run) == Some(sight.end_run)
            && sight.known.iter().all(known)
            && self.stretch(sight.end, rest).is_none()
            && (!sight.grows || self.can_grow(h, sight.end, rest.len()))
    }

    fn extend_known(&mut self, h: Holder, sight: &Sight) {
        for (stretch, _) in &sight.known {
            self.extend_plain(h, *stretch);
        }
    }

    fn grow_claimed(&mut self, h: Holder, first: Place, names: Vec<u64>, blocks: &[StoredBlock]) {
        self.node_mut(first.run).add_names(names.into_iter(), true);
        self.grow(h, first.run, blocks);
    }
}

impl Pen<'_, Later<'_>> {
    /// Gives up blocks by their guessed places, and with each those that follow in its run.
    fn remove_guessed(
        &mut self,
        h: Holder,
        guesses: &[Guess],
        rest: &mut &[EngineHash],
        unknown: &mut Option<EngineHash>,
    ) {
        if guesses.len() > 1 {
            let mut places = [None; AHEAD];
            for (place, guess) in places.iter_mut().zip(guesses) {
                *place = match *guess {
                    Guess::Perhaps(place) => Some(place),
                    _ => None,
                };
            }
            self.fetch(h, &places);
        }
        let mut at = 0;
        while let (Some(guess), Some((first, others))) = (guesses.get(at), rest.split_first()) {
            let before = rest.len();
            *rest = others;
            let place = self.called(first.0, *guess);
            if !place.is_some_and(|place| self.remove_stretch(h, place, rest)) {
                *unknown = unknown.or(Some(*first));
            }
            at += before - rest.len();
        }
    }

    /// The block with this name.
    fn called(&self, name: u64, guess: Guess) -> Option<Place> {
        let is_called = |place| Runs::is_called(&self.nodes, place, name);
        match guess {
            Guess::Nothing => None,
            Guess::Perhaps(place) if is_called(place) => Some(place),
            // A cut has moved it, or the entry is of another name.
            _ => self.names.table.find_together(name, is_called),
        }
    }
}
