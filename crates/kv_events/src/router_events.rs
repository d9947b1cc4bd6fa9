//! Router events: each names its worker and rank, and is numbered within that rank.
//!
//! Answers one question: which of these events come next in their rank? A source may carry any number of
//! workers, up to [`RANKS_MAX`] ranks; what one rank lost says nothing about another.
//!
//! What always holds: a worker that was not added, or was removed, leaves nothing in the cache. What a rank does with its
//! events is in `numbered_rank`; where nobody can be asked, a rank is emptied after a missing number.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvasir_msgpack::DecodeError;
use kvasir_types::{Rng, Time, WorkerId, WorkerRank};
use kvasir_wire::SourceEvent;
use kvasir_wire::native::{Encoding, RouterEvent, decode_router_events};

use crate::numbered_rank::{NumberedRank, Step};
use crate::rank::{Effects, RankState};
use crate::sequencer::Io;
use crate::{Cache, Counts, Notice, RANKS_MAX, Resync, StreamOptions, StreamStatus};

/// The ranks of one source of router events.
#[derive(Clone, Debug)]
pub(crate) struct RouterEventSequencer {
    encoding: Encoding,
    options: StreamOptions,
    connected: bool,
    workers: BTreeSet<WorkerId>,
    ranks: BTreeMap<WorkerRank, NumberedRank>,
    /// Whether it was reported that events came of a worker that was not added.
    unknown_reported: bool,
    /// The message that is being read.
    events: Vec<RouterEvent>,
    /// Questions put so far.
    attempts: u64,
    rng: Rng,
    counts: Counts,
}

impl RouterEventSequencer {
    pub(crate) fn new(encoding: Encoding, options: StreamOptions) -> Self {
        Self {
            encoding,
            rng: Rng::new(options.seed),
            options,
            connected: false,
            workers: BTreeSet::new(),
            ranks: BTreeMap::new(),
            unknown_reported: false,
            events: Vec::new(),
            attempts: 0,
            counts: Counts::default(),
        }
    }

    pub(crate) fn status(&self) -> StreamStatus {
        let ranks = || self.ranks.values();
        let states = || ranks().map(|rank| &rank.state);
        StreamStatus {
            connected: self.connected,
            recovering: ranks().find_map(NumberedRank::recovering),
            exact: states().all(|state| state.exact),
            cursor: None,
            orphan_blocks: states().map(RankState::orphan_blocks).sum(),
            held_bytes: ranks().map(NumberedRank::held_bytes).sum(),
            lag: Duration::ZERO,
            counts: self.counts,
        }
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = WorkerRank> {
        self.ranks.keys().copied()
    }

    pub(crate) fn next_deadline(&self) -> Option<Time> {
        self.ranks
            .values()
            .filter_map(NumberedRank::next_deadline)
            .min()
    }

    pub(crate) fn add_worker(&mut self, worker: WorkerId) {
        self.workers.insert(worker);
    }

    pub(crate) fn add_rank(&mut self, rank: WorkerRank) {
        self.workers.insert(rank.worker);
        if self.ranks.contains_key(&rank) || self.ranks.len() >= RANKS_MAX {
            return;
        }
        let mut made = NumberedRank::new(rank, &self.options);
        if self.connected && self.options.replay {
            made.join_at_once();
        }
        self.ranks.insert(rank, made);
    }

    pub(crate) fn remove_worker<C: Cache>(&mut self, worker: WorkerId, cache: &C) {
        self.workers.remove(&worker);
        let gone = self.ranks.extract_if(.., |rank, _| rank.worker == worker);
        gone.for_each(|(_, mut rank)| rank.state.forget(cache, false));
    }

    pub(crate) fn leave<C: Cache>(&mut self, cache: &C) {
        for rank in self.ranks.values_mut() {
            rank.state.forget(cache, false);
        }
    }

    pub(crate) fn step<C: Cache>(&mut self, event: SourceEvent, io: &mut Io<'_, C>) {
        match event {
            SourceEvent::Connected => {
                self.connected = true;
                self.each_rank(io, |rank, jitter, step| rank.connected(jitter, step));
            }
            SourceEvent::Disconnected(_) => self.connected = false,
            SourceEvent::Live(frame) => {
                let mut events = std::mem::take(&mut self.events);
                match decode_router_events(self.encoding, &frame.payload, &mut events) {
                    Ok(()) => self.apply_all(events.drain(..), io),
                    Err(error) => self.refuse(error, io),
                }
                self.events = events;
            }
            SourceEvent::Events(events) => self.apply_all(events.into_iter(), io),
            SourceEvent::Refused(error) => self.refuse(error, io),
            SourceEvent::Answered { attempt, reply } => {
                self.asked(attempt, io, |rank, step| rank.answered(reply, step));
            }
            SourceEvent::ReplayFailed { attempt, .. } => {
                self.asked(attempt, io, |rank, step| rank.failed(step));
            }
            // Nobody asked for a replay.
            SourceEvent::Replayed { .. } | SourceEvent::ReplayEnded { .. } => {}
        }
    }

    pub(crate) fn tick<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        self.each_rank(io, |rank, _, step| rank.tick(step));
    }

    /// Where nobody can be asked, a cache view that is wrong is forgotten and one that may be incomplete stays.
    pub(crate) fn resync<C: Cache>(&mut self, resync: Resync, io: &mut Io<'_, C>) {
        let can_ask = self.options.replay;
        match resync {
            Resync::Verify if can_ask => self.each_rank(io, |rank, _, step| rank.verify(step)),
            Resync::Fill | Resync::Replay if can_ask => {
                self.each_rank(io, |rank, _, step| rank.resync(step));
            }
            Resync::Replay | Resync::Forget => self.leave(io.cache),
            Resync::Verify | Resync::Fill => {}
        }
    }

    fn refuse<C>(&mut self, error: DecodeError, io: &mut Io<'_, C>) {
        self.counts.refused += 1;
        io.notice(Notice::Refused(error));
    }

    fn apply_all<C: Cache>(
        &mut self,
        events: impl Iterator<Item = RouterEvent>,
        io: &mut Io<'_, C>,
    ) {
        self.counts.batches += 1;
        for event in events {
            self.apply(&event, io);
        }
    }

    fn apply<C: Cache>(&mut self, event: &RouterEvent, io: &mut Io<'_, C>) {
        match admit(&mut self.ranks, &self.workers, event.rank, &self.options) {
            None => self.ignore(event.rank.worker, io),
            Some(rank) => {
                let mut step = Step {
                    now: io.now,
                    options: &self.options,
                    attempts: &mut self.attempts,
                    effects: effects(&self.options, &mut self.counts, io),
                };
                rank.live(event, &mut step);
            }
        }
    }

    fn ignore<C>(&mut self, worker: WorkerId, io: &mut Io<'_, C>) {
        self.counts.skipped += 1;
        if !self.workers.contains(&worker) && !self.unknown_reported {
            self.unknown_reported = true;
            io.notice(Notice::UnknownWorker(worker));
        }
    }

    /// Does something with every rank; each is given a part of the start's jitter.
    fn each_rank<C: Cache>(
        &mut self,
        io: &mut Io<'_, C>,
        mut act: impl FnMut(&mut NumberedRank, Duration, &mut Step<'_, C>),
    ) {
        for rank in self.ranks.values_mut() {
            let jitter = match self.options.start_jitter.is_zero() {
                true => Duration::ZERO,
                false => self.options.start_jitter.mul_f64(self.rng.unit()),
            };
            let mut step = Step {
                now: io.now,
                options: &self.options,
                attempts: &mut self.attempts,
                effects: effects(&self.options, &mut self.counts, io),
            };
            act(rank, jitter, &mut step);
        }
    }

    /// Does something with the rank that waits for this answer; an answer that nobody waits for is too late.
    fn asked<C: Cache>(
        &mut self,
        attempt: u64,
        io: &mut Io<'_, C>,
        act: impl FnOnce(&mut NumberedRank, &mut Step<'_, C>),
    ) {
        let Some(rank) = self.ranks.values_mut().find(|rank| rank.wants(attempt)) else {
            return;
        };
        let mut step = Step {
            now: io.now,
            options: &self.options,
            attempts: &mut self.attempts,
            effects: effects(&self.options, &mut self.counts, io),
        };
        act(rank, &mut step);
    }
}

fn effects<'a, C>(
    options: &StreamOptions,
    counts: &'a mut Counts,
    io: &'a mut Io<'_, C>,
) -> Effects<'a, C> {
    Effects {
        cache: io.cache,
        counts,
        out: io.out,
        orphan_blocks_max: options.orphan_blocks_max,
        is_news: true,
    }
}

/// The state of `rank`, made if it is new; `None` if its worker was not added or there are too many ranks.
fn admit<'r>(
    ranks: &'r mut BTreeMap<WorkerRank, NumberedRank>,
    workers: &BTreeSet<WorkerId>,
    rank: WorkerRank,
    options: &StreamOptions,
) -> Option<&'r mut NumberedRank> {
    let known = ranks.contains_key(&rank);
    if !known && (!workers.contains(&rank.worker) || ranks.len() >= RANKS_MAX) {
        return None;
    }
    let made = || NumberedRank::new(rank, options);
    Some(ranks.entry(rank).or_insert_with(made))
}
