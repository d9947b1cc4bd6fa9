//! One rank whose events are numbered: what comes next, what is missing, and what is asked of its worker then.
//!
//! Answers one question: how does what we know of this rank become what its worker holds, whatever was lost on the way? Its
//! whole state is asked for at the start and whenever nothing can be built upon; what is missing within a stream is asked for by
//! number, and the worker answers with the events or with its whole state.
//!
//! What always holds: events are applied in the order of their numbers, each once, or the rank is replaced in one go; live events that
//! cannot be applied yet wait, bounded; questions end, and after the last one live events go on alone, until the next gap.

use std::time::Duration;

use kvasir_types::{KvEvent, Time, WorkerRank};
use kvasir_wire::native::{RecoveryReply, RecoveryRequest, RouterEvent};

use crate::query::{HeldEvents, Query};
use crate::rank::{Effects, RankState};
use crate::recovery::Stage;
use crate::sequencer::STALE_RUN_MAX;
use crate::{Cache, Notice, Output, RecoveryCause, Skip, StreamOptions};

/// The number of a rank's first event.
const FIRST_ID: u64 = 1;
/// Answers in a row that may deny what came live; then the live stream is believed.
const FRUITLESS_MAX: u32 = 3;

/// One rank, how far its events were applied, and what is being asked about it.
#[derive(Clone, Debug)]
pub(crate) struct NumberedRank {
    pub(crate) state: RankState,
    last: Option<u64>,
    stale_run: u32,
    query: Option<Query>,
    held: HeldEvents,
    /// The questions of the start were given up: the next event is taken, whatever its number is.
    accept_any: bool,
    fruitless: u32,
    verify_at: Option<Time>,
}

/// What a rank needs of its stream for one step.
pub(crate) struct Step<'a, C> {
    pub(crate) now: Time,
    pub(crate) options: &'a StreamOptions,
    /// Numbers questions; one sequence for all ranks of a stream.
    pub(crate) attempts: &'a mut u64,
    pub(crate) effects: Effects<'a, C>,
}

impl<C> Step<'_, C> {
    fn notice(&mut self, notice: Notice) {
        self.effects.out.push(Output::Notice(notice));
    }
}

impl NumberedRank {
    pub(crate) fn new(rank: WorkerRank, options: &StreamOptions) -> Self {
        Self {
            state: RankState::new(rank, false, options.copies),
            last: None,
            stale_run: 0,
            query: None,
            held: HeldEvents::default(),
            accept_any: false,
            fruitless: 0,
            verify_at: None,
        }
    }

    /// The source stands already: the first question is due at once.
    pub(crate) fn join_at_once(&mut self) {
        self.query = Some(Query {
            cause: RecoveryCause::Join,
            attempt: 0,
            stage: Stage::Pausing(Time::ZERO),
            tries: 0,
            whole: true,
            start: None,
        });
    }

    pub(crate) fn recovering(&self) -> Option<RecoveryCause> {
        self.query.map(|query| query.cause)
    }

    pub(crate) const fn held_bytes(&self) -> usize {
        self.held.bytes()
    }

    pub(crate) fn next_deadline(&self) -> Option<Time> {
        match self.query {
            Some(query) => Some(query.deadline()),
            None => self.verify_at,
        }
    }

    /// Whether this answer is for this rank.
    pub(crate) fn wants(&self, attempt: u64) -> bool {
        self.query.is_some_and(|query| query.wants(attempt))
    }

    /// The source is connected; `jitter` says when the first question is put.
    pub(crate) fn connected<C: Cache>(&mut self, jitter: Duration, step: &mut Step<'_, C>) {
        if !step.options.replay {
            // The next numbers tell whether anything was missed.
            return;
        }
        // What waited came over the lost connection, maybe from another life of the worker.
        self.held.clear();
        match self.last {
            None => self.begin_at(RecoveryCause::Join, step.now + jitter, step),
            Some(_) => self.begin(RecoveryCause::Reconnect, step),
        }
    }

    pub(crate) fn tick<C: Cache>(&mut self, step: &mut Step<'_, C>) {
        let Some(query) = self.query else {
            if self.verify_at.is_some_and(|at| at <= step.now) {
                self.begin(RecoveryCause::Verify, step);
            }
            return;
        };
        if step.now < query.deadline() {
            return;
        }
        match query.stage {
            Stage::Asking(_) => self.failed(step),
            Stage::Pausing(_) => self.ask(step),
        }
    }

    /// What is known was found wrong, or may be.
    pub(crate) fn verify<C: Cache>(&mut self, step: &mut Step<'_, C>) {
        if self.query.is_none() {
            self.begin(RecoveryCause::Verify, step);
        }
    }

    /// What is known is wrong: it is replaced when the worker has said what it holds.
    pub(crate) fn resync<C: Cache>(&mut self, step: &mut Step<'_, C>) {
        self.begin(RecoveryCause::Resync, step);
    }

    /// A live event.
    pub(crate) fn live<C: Cache>(&mut self, event: &RouterEvent, step: &mut Step<'_, C>) {
        if self.query.is_some_and(|query| query.whole) {
            return self.hold(event, step);
        }
        if self.last.is_none() {
            return self.first(event, step);
        }
        let expected = self.expected();
        if event.id == expected {
            self.fruitless = 0;
            self.apply_next(event, step);
            self.release(step);
        } else if event.id > expected {
            self.gap(event, expected, step);
        } else {
            self.stale(event, step);
        }
    }

    /// The number that comes next.
    fn expected(&self) -> u64 {
        self.last.map_or(FIRST_ID, |last| last.saturating_add(1))
    }

    fn first<C: Cache>(&mut self, event: &RouterEvent, step: &mut Step<'_, C>) {
        if step.options.replay && !self.accept_any {
            self.hold(event, step);
            return self.begin(RecoveryCause::Join, step);
        }
        self.accept_any = false;
        // What came before a later one is not known.
        self.state.exact |= event.id == FIRST_ID;
        self.apply_next(event, step);
    }

    fn gap<C: Cache>(&mut self, event: &RouterEvent, expected: u64, step: &mut Step<'_, C>) {
        let asking = self.query.is_some_and(|q| q.cause != RecoveryCause::Verify);
        if asking {
            return self.hold(event, step);
        }
        let found = event.id;
        step.effects.counts.missed += found - expected;
        if step.options.replay && self.fruitless < FRUITLESS_MAX {
            step.notice(Notice::Gap { expected, found });
            self.hold(event, step);
            return self.begin(RecoveryCause::Gap, step);
        }
        step.notice(Notice::RankGap {
            rank: self.state.rank,
            expected,
            found,
        });
        self.fruitless = 0;
        self.state.forget(step.effects.cache, false);
        self.apply_next(event, step);
    }

    fn stale<C: Cache>(&mut self, event: &RouterEvent, step: &mut Step<'_, C>) {
        if step.options.log {
            return self.repeated(event, step);
        }
        step.effects.counts.stale += 1;
        self.stale_run += 1;
        if self.stale_run < STALE_RUN_MAX {
            return;
        }
        if step.options.replay {
            // Its publisher began again, or a network that was away brings what was asked for meanwhile: the worker knows.
            self.stale_run = 0;
            self.begin(RecoveryCause::Restart, step);
            return self.hold(event, step);
        }
        self.restarted(step);
        self.state.exact = event.id == FIRST_ID;
        self.apply_next(event, step);
    }

    /// An old number in a log: its first one means that the publisher began again, or that all since then follows once more; others are what
    /// was written twice.
    fn repeated<C: Cache>(&mut self, event: &RouterEvent, step: &mut Step<'_, C>) {
        if event.id != FIRST_ID {
            step.effects.counts.stale += 1;
            return;
        }
        self.restarted(step);
        self.state.exact = true;
        self.apply_next(event, step);
    }

    /// The publisher counts from the start again: what it held is gone.
    fn restarted<C: Cache>(&mut self, step: &mut Step<'_, C>) {
        self.tell_restart(step);
        self.state.forget(step.effects.cache, false);
        self.held.clear();
        self.last = None;
        self.accept_any = false;
        self.stale_run = 0;
    }

    fn tell_restart<C>(&self, step: &mut Step<'_, C>) {
        step.effects.counts.restarts += 1;
        step.notice(Notice::Restarted);
    }

    fn hold<C: Cache>(&mut self, event: &RouterEvent, step: &mut Step<'_, C>) {
        let known = self.last.is_some_and(|last| event.id <= last);
        if known && !self.query.is_some_and(|query| query.whole) {
            return;
        }
        let before = self.held.overflowed;
        let dropped = self.held.push(event, step.options.held_bytes_max);
        step.effects.counts.held_dropped += dropped;
        if dropped > 0 && !before {
            step.notice(Notice::HeldDropped);
        }
    }

    fn apply_next<C: Cache>(&mut self, event: &RouterEvent, step: &mut Step<'_, C>) {
        self.last = Some(event.id);
        self.stale_run = 0;
        self.verify_later(step);
        if is_rootless(event) {
            self.state.exact = false;
            return self.state.skip(Skip::Shape, &mut step.effects);
        }
        self.state.apply(&event.event, &mut step.effects);
    }

    /// Applies what waited and can be applied now. A gap behind it is asked for.
    fn release<C: Cache>(&mut self, step: &mut Step<'_, C>) {
        if self.held.is_empty() && !self.held.overflowed {
            return;
        }
        while let Some(event) = self.held.take(self.expected()) {
            self.fruitless = 0;
            self.apply_next(&event, step);
        }
        let whole = self.held.is_empty() && !self.held.overflowed;
        match self.query {
            // What was missing came late.
            Some(query) if whole && query.cause == RecoveryCause::Gap => {
                self.cancel(step);
                self.recovered(RecoveryCause::Gap, 0, step);
            }
            None if !whole => {
                self.held.overflowed = false;
                self.fruitless += 1;
                if self.fruitless < FRUITLESS_MAX {
                    return self.begin(RecoveryCause::Gap, step);
                }
                self.skip_to_held(step);
            }
            _ => {}
        }
    }

    /// Goes on with what waits, whatever is missing before it.
    fn skip_to_held<C: Cache>(&mut self, step: &mut Step<'_, C>) {
        self.held.overflowed = false;
        self.fruitless = 0;
        let Some(first) = self.held.first_id() else {
            return;
        };
        if self.last.is_some_and(|last| first > last.saturating_add(1)) {
            self.state.forget(step.effects.cache, false);
        }
        self.last = Some(first.saturating_sub(1));
        self.release(step);
    }

    fn begin<C: Cache>(&mut self, cause: RecoveryCause, step: &mut Step<'_, C>) {
        let now = step.now;
        self.begin_at(cause, now, step);
    }

    fn begin_at<C: Cache>(&mut self, cause: RecoveryCause, at: Time, step: &mut Step<'_, C>) {
        if !step.options.replay {
            return;
        }
        self.cancel(step);
        step.effects.counts.recoveries += 1;
        let whole = match cause {
            RecoveryCause::Join | RecoveryCause::Restart | RecoveryCause::Resync => true,
            RecoveryCause::Gap | RecoveryCause::Reconnect | RecoveryCause::Verify => {
                self.last.is_none()
            }
        };
        self.query = Some(Query {
            cause,
            attempt: 0,
            stage: Stage::Pausing(at),
            tries: 0,
            whole,
            start: None,
        });
        if at <= step.now {
            self.ask(step);
        }
    }

    fn cancel<C>(&mut self, step: &mut Step<'_, C>) {
        if let Some(query) = self.query.take()
            && matches!(query.stage, Stage::Asking(_))
        {
            let attempt = query.attempt;
            step.effects.out.push(Output::CancelReplay { attempt });
        }
    }

    fn ask<C>(&mut self, step: &mut Step<'_, C>) {
        let (rank, last) = (self.state.rank, self.last);
        let Some(query) = &mut self.query else {
            return;
        };
        *step.attempts += 1;
        query.attempt = *step.attempts;
        query.stage = Stage::Asking(step.now + step.options.replay_timeout);
        let next = last.map(|last| last.saturating_add(1));
        query.start = next.filter(|_| !query.whole);
        step.effects.out.push(Output::Query {
            attempt: query.attempt,
            request: RecoveryRequest::new(rank, query.start),
        });
    }

    /// The worker said what it has.
    pub(crate) fn answered<C: Cache>(&mut self, reply: RecoveryReply, step: &mut Step<'_, C>) {
        let Some(query) = self.query else {
            return;
        };
        if step.options.log {
            // It is followed by everything since.
            self.held.clear();
        }
        match reply {
            RecoveryReply::Events { events, .. } if query.whole => {
                self.replaced(events, None, step)
            }
            RecoveryReply::Events { events, .. } => self.filled(&events, step),
            RecoveryReply::TreeDump { events, last } => self.replaced(events, Some(last), step),
            RecoveryReply::TreeDumpFailed { last, .. } => {
                match step.options.log {
                    true => step.notice(Notice::LogTooShort {
                        rank: self.state.rank,
                    }),
                    false => self.query_failed(query.cause, step),
                }
                self.state.forget(step.effects.cache, false);
                self.last = Some(last);
                self.query = None;
                self.verify_later(step);
                self.release(step);
            }
            RecoveryReply::TooNew { newest, .. } => match query.start {
                Some(start) => self.too_new(start, newest, step),
                None => self.failed(step),
            },
            RecoveryReply::InvalidRange { .. } | RecoveryReply::Error(_) => self.failed(step),
        }
    }

    /// The events that were asked for.
    fn filled<C: Cache>(&mut self, events: &[RouterEvent], step: &mut Step<'_, C>) {
        let (rank, mut applied) = (self.state.rank, 0);
        for event in events.iter().filter(|event| event.rank == rank) {
            let last = self.last.unwrap_or(0);
            if event.id <= last {
                continue;
            }
            // An answer may begin with a clear: nothing before it matters.
            let clears = applied == 0 && matches!(event.event, KvEvent::Cleared { tier: None });
            if event.id - last > 1 && !clears {
                return self.ask_for_all(step);
            }
            self.apply_next(event, step);
            applied += 1;
        }
        self.settled(applied, step);
    }

    /// The whole state, as it was after the event `last`; or events that tell all of it.
    fn replaced<C: Cache>(
        &mut self,
        mut events: Vec<RouterEvent>,
        last: Option<u64>,
        step: &mut Step<'_, C>,
    ) {
        let (rank, before) = (self.state.rank, events.len());
        events.retain(|event| event.rank == rank && !is_rootless(event));
        let left_out = events.len() < before;
        let newest = events.last().map_or(0, |event| event.id);
        let begins = events.first().is_none_or(|event| event.id == FIRST_ID);
        self.state.replace(&events, &mut step.effects);
        self.state.exact &= !left_out && (last.is_some() || begins);
        // Live events that were applied since the question was put are not in its answer: they are asked for.
        let is_behind = !step.options.log && !self.query.is_some_and(|q| q.whole);
        let ahead = self.last.filter(|_| is_behind);
        let last = last.unwrap_or(newest);
        let is_restart = self.query.map(|query| query.cause) == Some(RecoveryCause::Restart);
        if is_restart && self.last.is_some_and(|before| last < before) {
            self.tell_restart(step);
        }
        self.last = Some(last);
        self.stale_run = 0;
        self.settled(events.len() as u64, step);
        if self.state.exact && self.query.is_none() {
            step.notice(Notice::Whole { rank });
        }
        if ahead.is_some_and(|ahead| ahead > last) && self.query.is_none() {
            self.begin(RecoveryCause::Gap, step);
        }
    }

    /// The worker has nothing from `start` on; its newest event is `newest`.
    fn too_new<C: Cache>(&mut self, start: u64, newest: u64, step: &mut Step<'_, C>) {
        if newest < start.saturating_sub(1) {
            self.restarted(step);
            return self.begin(RecoveryCause::Restart, step);
        }
        if self.held.is_empty() {
            return self.settled(0, step);
        }
        // It denies what came live of it.
        self.fruitless += 1;
        if self.fruitless < FRUITLESS_MAX {
            return self.ask_for_all(step);
        }
        self.query = None;
        self.skip_to_held(step);
    }

    /// The answer cannot be built upon: the whole state is asked for.
    fn ask_for_all<C: Cache>(&mut self, step: &mut Step<'_, C>) {
        if let Some(query) = &mut self.query {
            query.whole = true;
            self.ask(step);
        }
    }

    /// A question was answered, by so many events.
    fn settled<C: Cache>(&mut self, events: u64, step: &mut Step<'_, C>) {
        if let Some(query) = self.query.take() {
            self.recovered(query.cause, events, step);
        }
        self.release(step);
    }

    fn recovered<C: Cache>(&mut self, cause: RecoveryCause, events: u64, step: &mut Step<'_, C>) {
        self.accept_any = false;
        self.verify_later(step);
        let missed = matches!(
            cause,
            RecoveryCause::Gap | RecoveryCause::Reconnect | RecoveryCause::Verify
        );
        if missed {
            step.effects.counts.repaired += events;
        }
        if cause != RecoveryCause::Verify || events > 0 {
            let messages = events;
            step.notice(Notice::Recovered { cause, messages });
        }
    }

    /// An attempt failed: the next one after a pause, or none.
    pub(crate) fn failed<C: Cache>(&mut self, step: &mut Step<'_, C>) {
        let Some(query) = &mut self.query else {
            return;
        };
        let attempt = query.attempt;
        query.tries += 1;
        let tries = query.tries;
        let pause = step.options.backoff * 2u32.saturating_pow(tries - 1);
        query.stage = Stage::Pausing(step.now + pause.min(step.options.backoff_max));
        let cause = query.cause;
        step.effects.out.push(Output::CancelReplay { attempt });
        // Nothing is known to be missing: live events do not wait for a comparison, and it is made again anyway.
        if cause == RecoveryCause::Verify || tries >= step.options.attempts_max {
            self.give_up(cause, step);
        }
    }

    fn give_up<C: Cache>(&mut self, cause: RecoveryCause, step: &mut Step<'_, C>) {
        self.query = None;
        self.verify_later(step);
        if cause == RecoveryCause::Verify {
            return;
        }
        self.query_failed(cause, step);
        match cause {
            RecoveryCause::Join => self.accept_any = true,
            // The next numbers tell.
            RecoveryCause::Reconnect | RecoveryCause::Verify => {}
            RecoveryCause::Restart if self.last.is_some() => {
                self.tell_restart(step);
                self.state.forget(step.effects.cache, false);
            }
            RecoveryCause::Gap | RecoveryCause::Restart | RecoveryCause::Resync => {
                self.state.forget(step.effects.cache, false);
            }
        }
        self.skip_to_held(step);
    }

    fn query_failed<C: Cache>(&mut self, cause: RecoveryCause, step: &mut Step<'_, C>) {
        step.effects.counts.recoveries_failed += 1;
        let rank = self.state.rank;
        step.notice(Notice::QueryFailed { rank, cause });
    }

    fn verify_later<C>(&mut self, step: &Step<'_, C>) {
        let every = step.options.verify_every.filter(|_| step.options.replay);
        self.verify_at = every.map(|every| step.now + every);
    }
}

impl Query {
    const fn deadline(&self) -> Time {
        match self.stage {
            Stage::Asking(time) | Stage::Pausing(time) => time,
        }
    }
}

/// Blocks from the middle of a sequence without a parent would be taken for its beginning.
fn is_rootless(event: &RouterEvent) -> bool {
    event.position.is_some_and(|position| position > 0)
        && matches!(event.event, KvEvent::Stored { parent: None, .. })
}
