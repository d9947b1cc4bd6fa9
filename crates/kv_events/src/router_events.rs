//! Router events: each names its worker and rank, and is numbered within that rank.
//!
//! Answers one question: which of these events come next in their rank? A source may carry any number of
//! workers, up to [`RANKS_MAX`] ranks; what one rank lost says nothing about another.
//!
//! What always holds: events of a rank are applied in the order of their numbers, each once; after a missing
//! number the rank is emptied before the next event is applied; a worker that was not added, or was removed,
//! leaves nothing in the cache.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvasir_types::{KvEvent, WorkerId, WorkerRank};
use kvasir_wire::native::{Encoding, RouterEvent, decode_router_events};
use kvasir_wire::{DecodeError, Skip, SourceEvent};

use crate::rank::{Effects, RankState};
use crate::sequencer::{Io, STALE_RUN_MAX};
use crate::{Cache, Counts, Notice, Output, RANKS_MAX, Resync, StreamStatus};

/// The number of a rank's first event.
const FIRST_ID: u64 = 1;

/// The ranks of one source of router events.
#[derive(Clone, Debug)]
pub(crate) struct RouterEventSequencer {
    encoding: Encoding,
    orphan_blocks_max: usize,
    connected: bool,
    workers: BTreeSet<WorkerId>,
    ranks: BTreeMap<WorkerRank, NumberedRank>,
    /// Whether it was reported that events came of a worker that was not added.
    unknown_reported: bool,
    /// The message that is being read.
    events: Vec<RouterEvent>,
    counts: Counts,
}

/// One rank, and how far its events were applied.
#[derive(Clone, Debug)]
struct NumberedRank {
    state: RankState,
    last: Option<u64>,
    stale_run: u32,
}

impl RouterEventSequencer {
    pub(crate) fn new(encoding: Encoding, orphan_blocks_max: usize) -> Self {
        Self {
            encoding,
            orphan_blocks_max,
            connected: false,
            workers: BTreeSet::new(),
            ranks: BTreeMap::new(),
            unknown_reported: false,
            events: Vec::new(),
            counts: Counts::default(),
        }
    }

    pub(crate) fn status(&self) -> StreamStatus {
        let states = || self.ranks.values().map(|rank| &rank.state);
        StreamStatus {
            connected: self.connected,
            recovering: None,
            exact: states().all(|state| state.exact),
            cursor: None,
            orphan_blocks: states().map(RankState::orphan_blocks).sum(),
            held_bytes: 0,
            lag: Duration::ZERO,
            counts: self.counts,
        }
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = WorkerRank> {
        self.ranks.keys().copied()
    }

    pub(crate) fn add_worker(&mut self, worker: WorkerId) {
        self.workers.insert(worker);
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
            // The next numbers tell whether anything was missed.
            SourceEvent::Connected => self.connected = true,
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
            // Nothing was asked for.
            SourceEvent::Replayed { .. }
            | SourceEvent::ReplayEnded { .. }
            | SourceEvent::ReplayFailed { .. } => {}
        }
    }

    /// There is no replay: a cache view that is wrong is forgotten, one that may be incomplete stays.
    pub(crate) fn resync<C: Cache>(&mut self, resync: Resync, io: &mut Io<'_, C>) {
        if matches!(resync, Resync::Replay | Resync::Forget) {
            self.leave(io.cache);
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
        let Some(rank) = admit(&mut self.ranks, &self.workers, event.rank) else {
            return self.ignore(event.rank.worker, io);
        };
        let mut effects = Effects {
            cache: io.cache,
            counts: &mut self.counts,
            out: io.out,
            orphan_blocks_max: self.orphan_blocks_max,
            is_news: true,
        };
        if rank.is_next(event.id, &mut effects) {
            rank.apply(event, &mut effects);
        }
    }

    fn ignore<C>(&mut self, worker: WorkerId, io: &mut Io<'_, C>) {
        self.counts.skipped += 1;
        if !self.workers.contains(&worker) && !self.unknown_reported {
            self.unknown_reported = true;
            io.notice(Notice::UnknownWorker(worker));
        }
    }
}

/// The state of `rank`, made if it is new; `None` if its worker was not added or there are too many ranks.
fn admit<'r>(
    ranks: &'r mut BTreeMap<WorkerRank, NumberedRank>,
    workers: &BTreeSet<WorkerId>,
    rank: WorkerRank,
) -> Option<&'r mut NumberedRank> {
    let known = ranks.contains_key(&rank);
    if !known && (!workers.contains(&rank.worker) || ranks.len() >= RANKS_MAX) {
        return None;
    }
    Some(ranks.entry(rank).or_insert_with(|| NumberedRank {
        state: RankState::new(rank, false),
        last: None,
        stale_run: 0,
    }))
}

impl NumberedRank {
    /// Whether the event with this number is to be applied; the rank is emptied first if events before it are
    /// missing or if its publisher began again.
    fn is_next<C: Cache>(&mut self, id: u64, effects: &mut Effects<'_, C>) -> bool {
        let expected = self.last.map_or(FIRST_ID, |last| last.saturating_add(1));
        if id == expected {
            self.state.exact |= self.last.is_none();
        } else if self.last.is_none() {
            // What came before this one is not known.
        } else if id > expected {
            effects.counts.missed += id - expected;
            effects.out.push(Output::Notice(Notice::RankGap {
                rank: self.state.rank,
                expected,
                found: id,
            }));
            self.state.forget(effects.cache, false);
        } else {
            effects.counts.stale += 1;
            self.stale_run += 1;
            if self.stale_run < STALE_RUN_MAX {
                return false;
            }
            effects.counts.restarts += 1;
            effects.out.push(Output::Notice(Notice::Restarted));
            self.state.forget(effects.cache, id == FIRST_ID);
        }
        self.last = Some(id);
        self.stale_run = 0;
        true
    }

    fn apply<C: Cache>(&mut self, event: &RouterEvent, effects: &mut Effects<'_, C>) {
        // Blocks from the middle of a sequence without a parent would be taken for its beginning.
        let rootless = event.position.is_some_and(|position| position > 0)
            && matches!(event.event, KvEvent::Stored { parent: None, .. });
        if rootless {
            self.state.exact = false;
            return self.state.skip(Skip::Shape, effects);
        }
        self.state.apply(&event.event, effects);
    }
}
