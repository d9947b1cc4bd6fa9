//! An engine's batches: one publisher's stream, in order, with what is missing asked for again.
//!
//! What a message with the right number does, and one without; the recovery is in `replay`.

mod checkpoint;
mod replay;

pub use checkpoint::StreamCheckpoint;

use bytes::Bytes;
use kvasir_msgpack::DecodeError;
use kvasir_types::{DpRank, Time, WorkerRank};
use kvasir_wire::SourceEvent;
use kvasir_wire::engine::{Batch, peek_time};
use kvasir_wire::frame::Frame;

use crate::cursor::{History, Repeat};
use crate::lag::EventLag;
use crate::rank::{BatchRank, Effects};
use crate::recovery::{HeldMessages, Recovery};
use crate::sequencer::{Io, STALE_RUN_MAX};
use crate::{Cache, Counts, Cursor, Notice, RANKS_MAX, RecoveryCause, StreamOptions, StreamStatus};

/// Recoveries in a row that may deny what came live; then the live stream is believed, not the replay.
const FRUITLESS_MAX: u32 = 2;

/// One publisher's stream of batches.
#[derive(Clone, Debug)]
pub(crate) struct BatchSequencer {
    /// Whose events batches are that name no rank.
    rank: WorkerRank,
    options: StreamOptions,
    connected: bool,
    history: History,
    ranks: Vec<BatchRank>,
    recovery: Option<Recovery>,
    held: HeldMessages,
    batch: Batch,
    attempts: u64,
    stale_run: u32,
    /// The history before the cursor is not known, and the engine may still have it.
    history_wanted: bool,
    /// A replay was given up: go on with the next message, whatever its number is.
    accept_any: bool,
    /// Recoveries in a row that ended well and knew nothing of live messages.
    fruitless: u32,
    /// The engine itself sends what we cannot read; do not ask for it again.
    unreadable: bool,
    verify_at: Option<Time>,
    lag: EventLag,
    /// The engine's buffer no longer has its first message: nothing can replace what is known.
    start_lost: bool,
    counts: Counts,
}

impl BatchSequencer {
    pub(crate) fn new(rank: WorkerRank, options: StreamOptions, cursor: Option<Cursor>) -> Self {
        let mut batches = Self {
            rank,
            options,
            connected: false,
            history: History::new(cursor),
            ranks: Vec::new(),
            recovery: None,
            held: HeldMessages::default(),
            batch: Batch::new(),
            attempts: 0,
            stale_run: 0,
            history_wanted: false,
            accept_any: false,
            fruitless: 0,
            unreadable: false,
            verify_at: None,
            lag: EventLag::default(),
            start_lost: false,
            counts: Counts::default(),
        };
        batches.rank_at(rank.rank, cursor.is_some());
        batches
    }

    pub(crate) fn status(&self) -> StreamStatus {
        let states = || self.ranks.iter().map(|rank| &rank.state);
        StreamStatus {
            connected: self.connected,
            recovering: self.recovery.as_ref().map(|r| r.cause),
            exact: states().all(|state| state.exact),
            cursor: self.history.last(),
            orphan_blocks: states().map(|state| state.orphan_blocks()).sum(),
            held_bytes: self.held.bytes(),
            lag: self.lag.slowest(),
            counts: self.counts,
        }
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = WorkerRank> {
        self.ranks.iter().map(|rank| rank.state.rank)
    }

    pub(crate) fn next_deadline(&self) -> Option<Time> {
        match &self.recovery {
            Some(recovery) => Some(recovery.deadline()),
            None => self.verify_at,
        }
    }

    pub(crate) fn step<C: Cache>(&mut self, event: SourceEvent, io: &mut Io<'_, C>) {
        match event {
            SourceEvent::Connected => self.on_connected(io),
            SourceEvent::Disconnected(_) => self.connected = false,
            SourceEvent::Live(frame) => self.on_live(frame, io),
            // Not an engine's: nothing says where they belong in its order.
            SourceEvent::Events(events) => self.counts.skipped += events.len() as u64,
            SourceEvent::Refused(error) => {
                self.counts.refused += 1;
                io.notice(Notice::Refused(error));
            }
            SourceEvent::Replayed { attempt, frame } => self.on_replayed(attempt, frame, io),
            SourceEvent::ReplayEnded { attempt } => self.on_replay_ended(attempt, io),
            SourceEvent::ReplayFailed { attempt, .. } => self.on_replay_failed(attempt, io),
            // Engines have no such index; nobody asked.
            SourceEvent::Answered { .. } => {}
        }
    }

    pub(crate) fn leave<C: Cache>(&mut self, cache: &C) {
        for rank in &mut self.ranks {
            rank.forget(cache, false);
        }
    }

    fn on_connected<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        self.connected = true;
        // What waited came over the lost connection, maybe from another life of the engine.
        self.held.clear();
        if !self.options.replay {
            // Nobody can say what happened meanwhile.
            return self.set_exact(false);
        }
        let cause = match self.history.last() {
            None => RecoveryCause::Join,
            Some(_) => RecoveryCause::Reconnect,
        };
        self.begin(cause, io);
    }

    fn on_live<C: Cache>(&mut self, frame: Frame<Bytes>, io: &mut Io<'_, C>) {
        if let Some(made) = peek_time(&frame.payload) {
            self.lag.observe(io.now, made);
        }
        if self.recovery.is_some() {
            return self.hold(frame, io);
        }
        self.live(frame, io);
    }

    fn hold<C: Cache>(&mut self, frame: Frame<Bytes>, io: &mut Io<'_, C>) {
        let dropped = self.held.push(frame, self.options.held_bytes_max);
        if dropped > 0 {
            self.counts.held_dropped += dropped as u64;
            io.notice(Notice::HeldDropped);
        }
    }

    fn live<C: Cache>(&mut self, frame: Frame<Bytes>, io: &mut Io<'_, C>) {
        let found = Cursor::of(frame.sequence, &frame.payload);
        let Some(last) = self.history.last() else {
            return self.first(frame, found, io);
        };
        if found.sequence == last.sequence.wrapping_add(1) {
            self.stale_run = 0;
            self.fruitless = 0;
            return self.apply_live(&frame.payload, found, io);
        }
        if found.sequence > last.sequence {
            return self.gap(frame, &found, last, io);
        }
        match self.history.judge(&found) {
            Repeat::Duplicate => self.counts.duplicates += 1,
            Repeat::Restart => self.restarted(Some((frame, found)), io),
            Repeat::Stale => {
                self.counts.stale += 1;
                self.stale_run += 1;
                if self.stale_run >= STALE_RUN_MAX {
                    self.restarted(Some((frame, found)), io);
                }
            }
        }
    }

    /// Applies the next message, or asks for it again if it was damaged on its way.
    fn apply_live<C: Cache>(&mut self, payload: &[u8], found: Cursor, io: &mut Io<'_, C>) {
        let decoded = self.batch.decode(payload);
        match decoded {
            Err(error) if self.options.replay && !self.unreadable => {
                self.counts.refused += 1;
                io.notice(Notice::Refused(error));
                self.begin(RecoveryCause::Gap, io);
            }
            _ => self.apply_decoded(decoded, found, io),
        }
    }

    /// The first message of a stream: its very start, or somewhere in the middle of a history that only
    /// the replay socket still has.
    fn first<C: Cache>(&mut self, frame: Frame<Bytes>, found: Cursor, io: &mut Io<'_, C>) {
        if found.sequence == 0 {
            self.set_exact(true);
        } else if self.options.replay && !self.accept_any && self.fruitless < FRUITLESS_MAX {
            self.held.push_front(frame);
            return self.begin(RecoveryCause::Join, io);
        } else {
            self.set_exact(false);
        }
        self.accept_any = false;
        self.apply(&frame.payload, found, io);
    }

    fn gap<C: Cache>(
        &mut self,
        frame: Frame<Bytes>,
        found: &Cursor,
        last: Cursor,
        io: &mut Io<'_, C>,
    ) {
        if found.at < last.at {
            // Made before what we know, and numbered after it: from an earlier life of the engine.
            self.counts.stale += 1;
            self.stale_run += 1;
            if self.stale_run < STALE_RUN_MAX {
                return;
            }
        }
        let expected = last.sequence + 1;
        self.counts.missed += found.sequence - expected;
        io.notice(Notice::Gap {
            expected,
            found: found.sequence,
        });
        if self.options.replay && self.fruitless < FRUITLESS_MAX {
            self.held.push_front(frame);
            return self.begin(RecoveryCause::Gap, io);
        }
        match self.options.replay {
            true => self.too_short(expected, found.sequence, io),
            false => io.notice(Notice::GapWithoutReplay),
        }
        self.forget(false, io);
        self.apply(&frame.payload, *found, io);
    }

    /// The engine began again: what it held is gone. `frame` is the message that showed it, if one did.
    fn restarted<C: Cache>(&mut self, frame: Option<(Frame<Bytes>, Cursor)>, io: &mut Io<'_, C>) {
        self.counts.restarts += 1;
        self.stale_run = 0;
        self.lag = EventLag::default();
        self.start_lost = false;
        io.notice(Notice::Restarted);
        self.forget(true, io);
        self.history.clear();
        match frame {
            Some((frame, found)) if found.sequence == 0 || !self.options.replay => {
                self.first(frame, found, io);
            }
            Some((frame, _)) => {
                self.held.push_front(frame);
                self.begin(RecoveryCause::Restart, io);
            }
            None => self.begin(RecoveryCause::Restart, io),
        }
    }

    fn apply<C: Cache>(&mut self, payload: &[u8], found: Cursor, io: &mut Io<'_, C>) {
        let decoded = self.batch.decode(payload);
        self.apply_decoded(decoded, found, io);
    }

    fn apply_decoded<C: Cache>(
        &mut self,
        decoded: Result<(), DecodeError>,
        found: Cursor,
        io: &mut Io<'_, C>,
    ) {
        self.history.advance(found);
        self.unreadable = decoded.is_err();
        if let Err(error) = decoded {
            self.counts.refused += 1;
            self.set_exact(false);
            return io.notice(Notice::Refused(error));
        }
        self.counts.batches += 1;
        let rank = self.batch.rank().map_or(self.rank.rank, DpRank);
        let exact = self.history.last().is_some_and(|c| c.sequence == 0);
        let Some(at) = self.rank_at(rank, exact) else {
            self.counts.skipped += self.batch.len() as u64;
            return;
        };
        let mut effects = Effects {
            cache: io.cache,
            counts: &mut self.counts,
            out: io.out,
            orphan_blocks_max: self.options.orphan_blocks_max,
            // What a replay repeats is no news.
            is_news: self.recovery.is_none(),
        };
        if let Some(rank) = self.ranks.get_mut(at) {
            rank.apply(&self.batch, &mut effects);
        }
    }

    /// Where the state of `rank` is, made if it is new; `None` past [`RANKS_MAX`].
    fn rank_at(&mut self, rank: DpRank, exact: bool) -> Option<usize> {
        let found = self.ranks.iter().position(|r| r.state.rank.rank == rank);
        if found.is_some() || self.ranks.len() >= RANKS_MAX {
            return found;
        }
        let all_exact = self.ranks.iter().all(|r| r.state.exact) && !self.ranks.is_empty();
        let rank = WorkerRank { rank, ..self.rank };
        let made = BatchRank::new(rank, self.options.translate, exact || all_exact);
        self.ranks.push(made);
        Some(self.ranks.len() - 1)
    }

    fn set_exact(&mut self, exact: bool) {
        for rank in &mut self.ranks {
            rank.state.exact = exact;
        }
    }

    fn forget<C: Cache>(&mut self, exact: bool, io: &mut Io<'_, C>) {
        for rank in &mut self.ranks {
            rank.forget(io.cache, exact);
        }
    }
}
