//! The machine: one publisher's stream, in order, with what is missing asked for again.

mod keep;

pub use keep::Kept;

use bytes::Bytes;
use kvasir_types::{DpRank, Time, WorkerId, WorkerRank};
use kvasir_wire::DecodeError;
use kvasir_wire::engine::Batch;
use kvasir_wire::frame::Frame;

use crate::cursor::{Repeat, Trail};
use crate::rank::{Effects, RankState};
use crate::recovery::{First, Held, Recovery, Replacement, Stage, judge_first};
use crate::{Cache, Cause, Counts, Cursor, IngestOptions, Input, Notice, Output, Resync};

/// Old messages in a row after which a clock that went back is assumed instead: the engine began again.
const STALE_RUN_MAX: u32 = 8;
/// Recoveries in a row that may deny what came live; then the live stream is believed, not the replay.
const FRUITLESS_MAX: u32 = 2;
/// Ranks that one publisher may speak of. Engines have one socket per rank; a relay may merge some.
const RANKS_MAX: usize = 1024;

/// How a publisher's stream stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// Whether the subscription stands.
    pub connected: bool,
    /// Why a recovery runs, if one does.
    pub recovering: Option<Cause>,
    /// Whether the cache holds exactly what the engine announced since its cache was last empty.
    pub exact: bool,
    /// The last batch applied.
    pub cursor: Option<Cursor>,
    /// Blocks that wait for their parents.
    pub orphan_blocks: usize,
    /// Bytes of live messages that wait for a recovery.
    pub held_bytes: usize,
    /// Totals.
    pub counts: Counts,
}

/// One publisher's stream.
#[derive(Clone, Debug)]
pub struct Ingest {
    worker: WorkerId,
    rank: DpRank,
    options: IngestOptions,
    connected: bool,
    trail: Trail,
    ranks: Vec<RankState>,
    recovery: Option<Recovery>,
    held: Held,
    batch: Batch,
    attempts: u64,
    stale_run: u32,
    /// The history before the cursor is not known, and the engine may still have it.
    history_wanted: bool,
    /// A replay was given up: take the stream up wherever it stands.
    take_up: bool,
    /// Recoveries in a row that ended well and knew nothing of live messages.
    fruitless: u32,
    /// The engine itself sends what we cannot read; do not ask for it again.
    unreadable: bool,
    verify_at: Option<Time>,
    counts: Counts,
}

impl Ingest {
    /// A stream of which nothing came yet. Events of batches that name no rank count for `rank`.
    #[must_use]
    pub fn new(worker: WorkerId, rank: DpRank, options: IngestOptions) -> Self {
        Self::resume(worker, rank, options, None)
    }

    /// A stream whose cache was kept as it was at `cursor`: it is compared with the engine's on connecting.
    #[must_use]
    pub fn resume(
        worker: WorkerId,
        rank: DpRank,
        options: IngestOptions,
        cursor: Option<Cursor>,
    ) -> Self {
        let mut ingest = Self {
            worker,
            rank,
            options,
            connected: false,
            trail: Trail::new(cursor),
            ranks: Vec::new(),
            recovery: None,
            held: Held::default(),
            batch: Batch::new(),
            attempts: 0,
            stale_run: 0,
            history_wanted: false,
            take_up: false,
            fruitless: 0,
            unreadable: false,
            verify_at: None,
            counts: Counts::default(),
        };
        ingest.rank_state(rank, cursor.is_some());
        ingest
    }

    /// How the stream stands.
    #[must_use]
    pub fn status(&self) -> Status {
        Status {
            connected: self.connected,
            recovering: self.recovery.as_ref().map(|r| r.cause),
            exact: self.ranks.iter().all(|r| r.exact),
            cursor: self.trail.last(),
            orphan_blocks: self.ranks.iter().map(RankState::orphan_blocks).sum(),
            held_bytes: self.held.bytes(),
            counts: self.counts,
        }
    }

    /// The ranks that this publisher spoke of.
    pub fn ranks(&self) -> impl Iterator<Item = WorkerRank> {
        self.ranks.iter().map(|r| r.rank)
    }

    /// When [`Input::Tick`] is due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        match &self.recovery {
            Some(recovery) => Some(recovery.deadline()),
            None => self.verify_at,
        }
    }

    /// Takes one input. Effects on blocks go to `cache` at once, the rest to `out`.
    pub fn step<C: Cache>(&mut self, now: Time, input: Input, cache: &C, out: &mut Vec<Output>) {
        let mut io = Io { now, cache, out };
        match input {
            Input::Connected => self.on_connected(&mut io),
            Input::Disconnected => self.connected = false,
            Input::Live(frame) => self.on_live(frame, &mut io),
            Input::Refused(error) => {
                self.counts.refused += 1;
                io.notice(Notice::Refused(error));
            }
            Input::Replayed { attempt, frame } => self.on_replayed(attempt, frame, &mut io),
            Input::ReplayEnded { attempt } => self.on_replay_ended(attempt, &mut io),
            Input::ReplayFailed { attempt } => self.on_replay_failed(attempt, &mut io),
            Input::Resync(resync) => self.on_resync(resync, &mut io),
            Input::Tick => self.on_tick(&mut io),
        }
    }

    /// Forgets every rank of this publisher; for a worker that left.
    pub fn leave<C: Cache>(&mut self, cache: &C) {
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
        let cause = match self.trail.last() {
            None => Cause::Join,
            Some(_) => Cause::Reconnect,
        };
        self.begin(cause, io);
    }

    fn on_resync<C: Cache>(&mut self, resync: Resync, io: &mut Io<'_, C>) {
        match resync {
            Resync::Verify if !self.options.replay || self.recovery.is_some() => {}
            Resync::Verify => self.begin(Cause::Verify, io),
            Resync::Replay if self.options.replay => self.begin(Cause::Resync, io),
            Resync::Fill if self.options.replay => {
                self.begin(Cause::Resync, io);
                let replacement = self.recovery.as_mut().and_then(|r| r.replacement.as_mut());
                if let Some(replacement) = replacement {
                    replacement.whole = true;
                }
            }
            Resync::Fill => {}
            Resync::Replay | Resync::Forget => self.forget(false, io),
        }
    }

    fn on_tick<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        let Some(recovery) = &self.recovery else {
            if self.verify_at.is_some_and(|at| at <= io.now) {
                self.verify(io);
            }
            return;
        };
        if io.now < recovery.deadline() {
            return;
        }
        match recovery.stage {
            Stage::Asking(_) => self.retry(io),
            Stage::Pausing(_) => self.ask(io),
        }
    }

    fn verify<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        self.schedule_verify(io.now);
        if !self.connected {
            return;
        }
        let cause = match self.history_wanted {
            true => Cause::Resync,
            false => Cause::Verify,
        };
        self.begin(cause, io);
    }

    fn schedule_verify(&mut self, now: Time) {
        let every = self.options.verify_every.filter(|_| self.options.replay);
        self.verify_at = every.map(|every| now + every);
    }

    // ---- live messages ----

    fn on_live<C: Cache>(&mut self, frame: Frame<Bytes>, io: &mut Io<'_, C>) {
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
        let Some(last) = self.trail.last() else {
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
        match self.trail.judge(&found) {
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
                self.begin(Cause::Gap, io);
            }
            _ => self.apply_decoded(decoded, found, io),
        }
    }

    /// The first message of a stream: its very start, or somewhere in the middle of a history that only
    /// the replay socket still has.
    fn first<C: Cache>(&mut self, frame: Frame<Bytes>, found: Cursor, io: &mut Io<'_, C>) {
        if found.sequence == 0 {
            self.set_exact(true);
        } else if self.options.replay && !self.take_up && self.fruitless < FRUITLESS_MAX {
            self.held.push_front(frame);
            return self.begin(Cause::Join, io);
        } else {
            self.set_exact(false);
        }
        self.take_up = false;
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
            return self.begin(Cause::Gap, io);
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
        io.notice(Notice::Restarted);
        self.forget(true, io);
        self.trail.clear();
        match frame {
            Some((frame, found)) if found.sequence == 0 || !self.options.replay => {
                self.first(frame, found, io);
            }
            Some((frame, _)) => {
                self.held.push_front(frame);
                self.begin(Cause::Restart, io);
            }
            None => self.begin(Cause::Restart, io),
        }
    }

    // ---- recovery ----

    fn begin<C: Cache>(&mut self, cause: Cause, io: &mut Io<'_, C>) {
        if let Some(running) = self.recovery.take() {
            let attempt = running.attempt;
            io.out.push(Output::CancelReplay { attempt });
        }
        self.counts.recoveries += 1;
        let full = cause == Cause::Resync;
        self.recovery = Some(Recovery {
            cause,
            attempt: 0,
            stage: Stage::Pausing(io.now),
            anchor: self.trail.last().filter(|_| !full),
            begun: false,
            tries: 0,
            messages: 0,
            replacement: full.then(Replacement::default),
        });
        self.ask(io);
    }

    fn ask<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        let silence = self.options.replay_silence_max;
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        self.attempts += 1;
        self.held.asked();
        recovery.attempt = self.attempts;
        recovery.stage = Stage::Asking(io.now + silence);
        recovery.begun = false;
        io.out.push(Output::Replay {
            attempt: recovery.attempt,
            from: recovery.from(),
        });
    }

    fn on_replayed<C: Cache>(&mut self, attempt: u64, frame: Frame<Bytes>, io: &mut Io<'_, C>) {
        let silence = self.options.replay_silence_max;
        let Some(recovery) = self.recovery.as_mut().filter(|r| r.wants(attempt)) else {
            return;
        };
        recovery.stage = Stage::Asking(io.now + silence);
        if let Some(replacement) = &mut recovery.replacement {
            replacement.bytes += frame.payload.len();
            replacement.frames.push(frame);
            if replacement.bytes > self.options.replace_bytes_max {
                self.replace(io);
            }
            return;
        }
        let found = Cursor::of(frame.sequence, &frame.payload);
        if recovery.begun {
            return self.replayed_next(&frame.payload, found, io);
        }
        let asked = recovery.from();
        match judge_first(recovery.anchor, &found) {
            First::Early => return,
            First::Anchor => {
                recovery.begun = true;
                return;
            }
            First::Follows => {}
            First::Start => self.set_exact(true),
            First::TooShort => {
                self.too_short(asked, found.sequence, io);
                self.forget(false, io);
                self.history_wanted = false;
            }
            First::Restart => return self.restarted(None, io),
        }
        if let Some(recovery) = &mut self.recovery {
            recovery.begun = true;
        }
        self.applied_replay(&frame.payload, found, io);
    }

    fn replayed_next<C: Cache>(&mut self, payload: &[u8], found: Cursor, io: &mut Io<'_, C>) {
        let next = self.trail.last().map_or(0, |last| last.sequence + 1);
        if found.sequence == next {
            self.applied_replay(payload, found, io);
        } else if found.sequence > next {
            // The replay itself lost messages on its way: what was applied is sound, ask again behind it.
            self.retry(io);
        }
    }

    fn applied_replay<C: Cache>(&mut self, payload: &[u8], found: Cursor, io: &mut Io<'_, C>) {
        self.apply(payload, found, io);
        if let Some(recovery) = &mut self.recovery {
            recovery.messages += 1;
            recovery.tries = 0;
        }
    }

    /// Replaces every rank by the collected replay; what follows is applied message by message.
    fn replace<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        let Some(replacement) = recovery.replacement.take() else {
            return;
        };
        recovery.begun = true;
        recovery.anchor = None;
        let from_start = replacement.frames.first().is_none_or(|f| f.sequence == 0);
        if let Some(first) = replacement.frames.first().filter(|f| f.sequence > 0) {
            let (asked, first) = (0, first.sequence);
            self.too_short(asked, first, io);
            if replacement.whole {
                return;
            }
        }
        self.forget(from_start, io);
        self.trail.clear();
        self.history_wanted = false;
        let mut messages = 0;
        let mut next = None;
        for frame in replacement.frames {
            if next.is_some_and(|next| frame.sequence != next) {
                break;
            }
            next = Some(frame.sequence + 1);
            let found = Cursor::of(frame.sequence, &frame.payload);
            self.apply(&frame.payload, found, io);
            messages += 1;
        }
        if let Some(recovery) = &mut self.recovery {
            recovery.messages += messages;
        }
    }

    fn too_short<C: Cache>(&mut self, asked: u64, first: u64, io: &mut Io<'_, C>) {
        self.counts.replays_too_short += 1;
        io.notice(Notice::ReplayTooShort { asked, first });
    }

    fn on_replay_ended<C: Cache>(&mut self, attempt: u64, io: &mut Io<'_, C>) {
        let Some(recovery) = self.recovery.as_ref().filter(|r| r.wants(attempt)) else {
            return;
        };
        if recovery.replacement.is_some() {
            self.replace(io);
        } else if !recovery.begun && recovery.anchor.is_some() {
            // The engine does not have the last message that we know: it counts from the start again.
            return self.restarted(None, io);
        } else if !recovery.begun {
            self.set_exact(true);
            self.history_wanted = false;
        }
        self.finish(io);
    }

    fn finish<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        if let Some(recovery) = self.recovery.take() {
            let (cause, messages) = (recovery.cause, recovery.messages);
            let denied = self
                .held
                .drop_unknown(self.trail.last().map(|c| c.sequence));
            self.counts.stale += denied;
            self.fruitless = match (denied, messages) {
                (0, _) | (_, 1..) => 0,
                _ => self.fruitless + 1,
            };
            // What waited came live, too: nothing of that was missed.
            let last = self.trail.last().map(|c| c.sequence);
            let missed = messages.saturating_sub(self.held.count_until(last));
            if cause != Cause::Verify || missed > 0 {
                io.notice(Notice::Recovered { cause, messages });
            }
        }
        self.schedule_verify(io.now);
        self.release(io);
    }

    /// Applies what waited, until it is gone or shows another gap.
    fn release<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        while self.recovery.is_none()
            && let Some(frame) = self.held.pop()
        {
            let found = Cursor::of(frame.sequence, &frame.payload);
            let known = |last: Cursor| found.sequence <= last.sequence;
            if self.trail.last().is_some_and(known) && self.trail.judge(&found) == Repeat::Duplicate
            {
                // The recovery brought it, too.
                continue;
            }
            self.live(frame, io);
        }
    }

    fn on_replay_failed<C: Cache>(&mut self, attempt: u64, io: &mut Io<'_, C>) {
        if self.recovery.as_ref().is_some_and(|r| r.wants(attempt)) {
            self.retry(io);
        }
    }

    fn retry<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        let last = self.trail.last();
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        let attempt = recovery.attempt;
        io.out.push(Output::CancelReplay { attempt });
        recovery.tries += 1;
        if recovery.tries >= self.options.attempts_max {
            return self.give_up(io);
        }
        match &mut recovery.replacement {
            Some(replacement) => {
                *replacement = Replacement {
                    whole: replacement.whole,
                    ..Replacement::default()
                };
            }
            None => recovery.anchor = last,
        }
        let doubled = self.options.backoff * 2u32.saturating_pow(recovery.tries - 1);
        let pause = doubled.min(self.options.backoff_max);
        recovery.stage = Stage::Pausing(io.now + pause);
    }

    fn give_up<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        let Some(recovery) = self.recovery.take() else {
            return;
        };
        self.counts.recoveries_failed += 1;
        let cause = recovery.cause;
        io.notice(Notice::RecoveryFailed { cause });
        match cause {
            // Nothing is known to be missing; the next messages will tell.
            Cause::Verify => {}
            Cause::Reconnect => self.set_exact(false),
            Cause::Resync => self.history_wanted = true,
            Cause::Join | Cause::Gap | Cause::Restart => {
                self.history_wanted = true;
                self.forget(false, io);
                self.trail.clear();
                self.take_up = true;
            }
        }
        self.schedule_verify(io.now);
        self.release(io);
    }

    // ---- effects ----

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
        self.trail.advance(found);
        self.unreadable = decoded.is_err();
        if let Err(error) = decoded {
            self.counts.refused += 1;
            self.set_exact(false);
            return io.notice(Notice::Refused(error));
        }
        self.counts.batches += 1;
        let rank = self.batch.rank().map_or(self.rank, DpRank);
        let exact = self.trail.last().is_some_and(|c| c.sequence == 0);
        let Some(at) = self.rank_state(rank, exact) else {
            self.counts.skipped += self.batch.len() as u64;
            return;
        };
        let mut effects = Effects {
            cache: io.cache,
            counts: &mut self.counts,
            out: io.out,
            orphan_blocks_max: self.options.orphan_blocks_max,
        };
        if let Some(state) = self.ranks.get_mut(at) {
            state.apply(&self.batch, &mut effects);
        }
    }

    /// Where the state of `rank` is, made if it is new; `None` past [`RANKS_MAX`].
    fn rank_state(&mut self, rank: DpRank, exact: bool) -> Option<usize> {
        let found = self.ranks.iter().position(|r| r.rank.rank == rank);
        if found.is_some() || self.ranks.len() >= RANKS_MAX {
            return found;
        }
        let exact = exact || self.ranks.iter().all(|r| r.exact) && !self.ranks.is_empty();
        let worker = self.worker;
        let rank = WorkerRank { worker, rank };
        let state = RankState::new(rank, self.options.translate, exact);
        self.ranks.push(state);
        Some(self.ranks.len() - 1)
    }

    fn set_exact(&mut self, exact: bool) {
        for rank in &mut self.ranks {
            rank.exact = exact;
        }
    }

    fn forget<C: Cache>(&mut self, exact: bool, io: &mut Io<'_, C>) {
        for rank in &mut self.ranks {
            rank.forget(io.cache, exact);
        }
    }
}

/// The world as one step sees it.
struct Io<'a, C> {
    now: Time,
    cache: &'a C,
    out: &'a mut Vec<Output>,
}

impl<C> Io<'_, C> {
    fn notice(&mut self, notice: Notice) {
        self.out.push(Output::Notice(notice));
    }
}
