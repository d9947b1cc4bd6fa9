//! The recovery of a stream of batches: what is asked of the replay socket, and what its answer does.

use bytes::Bytes;
use kvasir_types::Time;
use kvasir_wire::frame::Frame;

use super::BatchSequencer;
use crate::cursor::Repeat;
use crate::recovery::{FirstReplayed, Recovery, Replacement, Stage, judge_first};
use crate::sequencer::Io;
use crate::{Cache, Counts, Cursor, Notice, Output, RecoveryCause, Resync};

impl BatchSequencer {
    pub(crate) fn resync<C: Cache>(&mut self, resync: Resync, io: &mut Io<'_, C>) {
        match resync {
            Resync::Verify if !self.options.replay || self.recovery.is_some() => {}
            Resync::Verify => self.begin(RecoveryCause::Verify, io),
            Resync::Replay if self.options.replay => self.begin(RecoveryCause::Resync, io),
            // A buffer that has lost its start cannot replace anything: only what came last can be missing.
            Resync::Fill if self.start_lost => self.resync(Resync::Verify, io),
            Resync::Fill if self.options.replay => {
                self.begin(RecoveryCause::Resync, io);
                let replacement = self.recovery.as_mut().and_then(|r| r.replacement.as_mut());
                if let Some(replacement) = replacement {
                    replacement.whole = true;
                }
            }
            Resync::Fill => {}
            Resync::Replay | Resync::Forget => self.forget(false, io),
        }
    }

    pub(crate) fn tick<C: Cache>(&mut self, io: &mut Io<'_, C>) {
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
            true => RecoveryCause::Resync,
            false => RecoveryCause::Verify,
        };
        self.begin(cause, io);
    }

    fn schedule_verify(&mut self, now: Time) {
        let every = self.options.verify_every.filter(|_| self.options.replay);
        self.verify_at = every.map(|every| now + every);
    }

    pub(super) fn begin<C: Cache>(&mut self, cause: RecoveryCause, io: &mut Io<'_, C>) {
        if let Some(running) = self.recovery.take() {
            let attempt = running.attempt;
            io.out.push(Output::CancelReplay { attempt });
        }
        self.counts.recoveries += 1;
        let full = cause == RecoveryCause::Resync;
        self.recovery = Some(Recovery {
            cause,
            attempt: 0,
            stage: Stage::Pausing(io.now),
            anchor: self.history.last().filter(|_| !full),
            begun: false,
            tries: 0,
            messages: 0,
            replacement: full.then(Replacement::default),
        });
        self.ask(io);
    }

    fn ask<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        let timeout = self.options.replay_timeout;
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        self.attempts += 1;
        self.held.asked();
        recovery.attempt = self.attempts;
        recovery.stage = Stage::Asking(io.now + timeout);
        recovery.begun = false;
        io.out.push(Output::Replay {
            attempt: recovery.attempt,
            from: recovery.from(),
        });
    }

    pub(super) fn on_replayed<C: Cache>(
        &mut self,
        attempt: u64,
        frame: Frame<Bytes>,
        io: &mut Io<'_, C>,
    ) {
        let timeout = self.options.replay_timeout;
        let Some(recovery) = self.recovery.as_mut().filter(|r| r.wants(attempt)) else {
            return;
        };
        recovery.stage = Stage::Asking(io.now + timeout);
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
            FirstReplayed::Early => return,
            FirstReplayed::Anchor => {
                recovery.begun = true;
                return;
            }
            FirstReplayed::Follows => {}
            FirstReplayed::Start => self.set_exact(true),
            FirstReplayed::TooShort => {
                self.too_short(asked, found.sequence, io);
                self.forget(false, io);
                self.history_wanted = false;
            }
            FirstReplayed::Restart => return self.restarted(None, io),
        }
        if let Some(recovery) = &mut self.recovery {
            recovery.begun = true;
        }
        self.applied_replay(&frame.payload, found, io);
    }

    fn replayed_next<C: Cache>(&mut self, payload: &[u8], found: Cursor, io: &mut Io<'_, C>) {
        let next = self.history.last().map_or(0, |last| last.sequence + 1);
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
        self.history.clear();
        self.history_wanted = false;
        let before = self.counts;
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
        // What was told before and is told again did not happen again.
        self.counts = Counts {
            blocks_stored: before.blocks_stored,
            blocks_removed: before.blocks_removed,
            cleared: before.cleared,
            ..self.counts
        };
        if let Some(recovery) = &mut self.recovery {
            recovery.messages += messages;
        }
    }

    pub(super) fn too_short<C: Cache>(&mut self, asked: u64, first: u64, io: &mut Io<'_, C>) {
        self.counts.replays_too_short += 1;
        self.start_lost = true;
        io.notice(Notice::ReplayTooShort { asked, first });
    }

    pub(super) fn on_replay_ended<C: Cache>(&mut self, attempt: u64, io: &mut Io<'_, C>) {
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
                .drop_unknown(self.history.last().map(|c| c.sequence));
            self.counts.stale += denied;
            self.fruitless = match (denied, messages) {
                (0, _) | (_, 1..) => 0,
                _ => self.fruitless + 1,
            };
            // What waited came live, too: nothing of that was missed.
            let last = self.history.last().map(|c| c.sequence);
            let missed = messages.saturating_sub(self.held.count_until(last));
            if !matches!(
                cause,
                RecoveryCause::Join | RecoveryCause::Resync | RecoveryCause::Restart
            ) {
                self.counts.repaired += missed;
            }
            if cause != RecoveryCause::Verify || missed > 0 {
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
            if self.history.last().is_some_and(known)
                && self.history.judge(&found) == Repeat::Duplicate
            {
                // The recovery brought it, too.
                continue;
            }
            self.live(frame, io);
        }
    }

    pub(super) fn on_replay_failed<C: Cache>(&mut self, attempt: u64, io: &mut Io<'_, C>) {
        if self.recovery.as_ref().is_some_and(|r| r.wants(attempt)) {
            self.retry(io);
        }
    }

    fn retry<C: Cache>(&mut self, io: &mut Io<'_, C>) {
        let last = self.history.last();
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
            RecoveryCause::Verify => {}
            RecoveryCause::Reconnect => self.set_exact(false),
            RecoveryCause::Resync => self.history_wanted = true,
            RecoveryCause::Join | RecoveryCause::Gap | RecoveryCause::Restart => {
                self.history_wanted = true;
                self.forget(false, io);
                self.history.clear();
                self.accept_any = true;
            }
        }
        self.schedule_verify(io.now);
        self.release(io);
    }
}
