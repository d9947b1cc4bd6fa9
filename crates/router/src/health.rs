//! What is held against a worker, and how long it is ejected for it.
//!
//! Answers one question: which workers are not to be chosen because of how they served, or did not? Two
//! witnesses: requests ([`Outcome::Unreachable`](crate::Outcome::Unreachable) at once,
//! [`Outcome::Broken`](crate::Outcome::Broken) at once if it came faster than any answer did, else at the second in
//! a row, [`Outcome::Overloaded`](crate::Outcome::Overloaded) several times in a row) and the host's own probes.
//!
//! What always holds: a span that requests caused ends by itself, twice as long each time until a request
//! succeeds there, and never longer than `runtime-inhibited-duration-secs`; one that a probe caused ends with
//! a probe that succeeds; one that a broken engine caused ends when the engine has generated a token; many
//! requests that one death ends count as one failure; a success forgives.

use std::collections::BTreeMap;
use std::time::Duration;

use kvasir_types::{Rng, Time, WorkerId};

/// How long a worker is ejected for after its first failure; each further one doubles it.
pub const FIRST_SPAN: Duration = Duration::from_millis(250);
/// Up to this share of a span is taken off by chance, so that replicas do not come back to a worker at once.
const JITTER: f64 = 0.1;
/// Failures in a row up to which a probe that succeeds outweighs them. One that keeps failing requests and
/// answering probes comes back only as its spans end.
pub const OUTWEIGHED_MAX: u32 = 2;
/// Answers in a row that say "I am full", while others serve, after which a worker is ejected.
pub const ERRORS_MAX: u32 = 3;
/// Answers in a row that say "I failed" after which a worker is ejected.
pub const BROKEN_MAX: u32 = 2;
/// A failure this old is forgotten.
pub const FORGIVEN_AFTER: Duration = Duration::from_secs(60);
/// Doubling ends here at the latest, so that it cannot overflow.
const DOUBLINGS_MAX: u32 = 20;

/// How bad a worker that is ejected is; the least is tried when nobody else is left: first those that only
/// requests speak against, the one whose span ends first; then those with a broken engine, then those whose
/// probes fail, each the one that failed longest ago.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EjectionRank {
    sick: bool,
    broken: bool,
    since_or_until: Time,
}

/// What is held against one worker.
#[derive(Clone, Copy, Debug, Default)]
struct WorkerHealth {
    /// Times that it was ejected, with no success between.
    failures: u32,
    /// When it failed last.
    failed_at: Time,
    /// Answers in a row that say "I am full", and since when.
    errors: u32,
    errors_since: Time,
    /// Answers in a row that say "I failed", and since when. An answer that begins does not end the row, one that is complete does: an
    /// engine may fail each answer after its first token.
    breaks: u32,
    breaks_since: Time,
    /// It is ejected until then.
    until: Option<Time>,
    /// Its last probe failed.
    sick: bool,
    /// It answers that its engine fails: ejected until it generates a token.
    broken: bool,
}

/// What is held against each worker; those against whom nothing is are not here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health {
    held: BTreeMap<WorkerId, WorkerHealth>,
    /// When the next span ends.
    due: Option<Time>,
    /// The latest success, and the latest of another worker than that.
    served: [Option<(WorkerId, Time)>; 2],
    /// The shortest time in which each worker has begun to answer.
    fastest: BTreeMap<WorkerId, Duration>,
}

impl Health {
    /// A worker could not be reached. `began` is when the attempt was sent, `longest` bounds the span. Returns
    /// until when it is ejected now.
    pub(crate) fn failed(
        &mut self,
        worker: WorkerId,
        now: Time,
        began: Option<Time>,
        longest: Duration,
        rng: &mut Rng,
    ) -> Time {
        let held = self.held.entry(worker).or_default();
        let first = held.failures == 0 || now - held.failed_at > FORGIVEN_AFTER;
        // What was under way when it failed has failed with it: that is no further failure.
        let further = first || began.is_some_and(|began| began >= held.failed_at);
        if further {
            held.failures = if first {
                1
            } else {
                held.failures.saturating_add(1)
            };
            let doublings = (held.failures - 1).min(DOUBLINGS_MAX);
            let span = FIRST_SPAN.saturating_mul(1 << doublings).min(longest);
            let span = span.mul_f64(1.0 - JITTER * rng.unit());
            held.failed_at = now;
            held.until = Some(now + span);
        }
        let until = held.ejected_until();
        self.reckon();
        until.unwrap_or(now)
    }

    /// A worker answered that it is full, or that it failed and nobody can ask it for a token. Says whether that is once too
    /// often: it has done so several times in a row, and meanwhile another has served.
    pub(crate) fn errored(&mut self, worker: WorkerId, now: Time) -> bool {
        let held = self.held.entry(worker).or_default();
        if held.errors == 0 || now - held.errors_since > FORGIVEN_AFTER {
            (held.errors, held.errors_since) = (0, now);
        }
        held.errors = held.errors.saturating_add(1);
        let (errors, since) = (held.errors, held.errors_since);
        let of_another = self.served.iter().flatten().find(|(id, _)| *id != worker);
        errors >= ERRORS_MAX && of_another.is_some_and(|(_, at)| *at >= since)
    }

    /// A worker answered that it failed, to a request that was sent at `began`. Says whether its engine counts as broken: that is the
    /// second such answer in a row, or it came faster than any answer did.
    pub(crate) fn broke(&mut self, worker: WorkerId, now: Time, began: Option<Time>) -> bool {
        let held = self.held.entry(worker).or_default();
        if held.breaks == 0 || now - held.breaks_since > FORGIVEN_AFTER {
            (held.breaks, held.breaks_since) = (0, now);
        }
        held.breaks = held.breaks.saturating_add(1);
        let breaks = held.breaks;
        let fastest = self.fastest.get(&worker);
        let took = began.map(|began| now - began);
        let at_once = took
            .zip(fastest)
            .is_some_and(|(took, fastest)| took < *fastest);
        at_once || breaks >= BROKEN_MAX
    }

    /// The engine of a worker is broken: it is ejected until it generates a token.
    pub(crate) fn eject_broken(&mut self, worker: WorkerId, now: Time) {
        let held = self.held.entry(worker).or_default();
        if !std::mem::replace(&mut held.broken, true) {
            held.failed_at = now;
        }
    }

    /// Whether a worker is ejected until it generates a token.
    pub(crate) fn is_broken(&self, worker: WorkerId) -> bool {
        self.held.get(&worker).is_some_and(|held| held.broken)
    }

    /// A worker that was asked for a token at `asked` gave one: nothing that requests said is held against it any more.
    pub(crate) fn generated(&mut self, worker: WorkerId, asked: Time) {
        let Some(held) = self.held.get_mut(&worker) else {
            return;
        };
        if asked < held.failed_at {
            return;
        }
        if held.sick {
            // Its probes have the last word.
            *held = WorkerHealth {
                sick: true,
                failed_at: held.failed_at,
                ..WorkerHealth::default()
            };
            self.reckon();
        } else {
            self.forget(worker);
        }
    }

    /// A worker cannot be asked for a token: it is ejected for a span, as one that cannot be reached.
    pub(crate) fn cannot_generate(&mut self, worker: WorkerId) -> bool {
        let held = self.held.get_mut(&worker);
        held.is_some_and(|held| std::mem::take(&mut held.broken))
    }

    /// A worker serves a request that was sent at `began`, and has perhaps completed it: nothing that requests said is held against it any
    /// more, unless the request was sent before its engine broke. Says whether it is back.
    pub(crate) fn served(
        &mut self,
        worker: WorkerId,
        now: Time,
        began: Option<Time>,
        completed: bool,
    ) -> bool {
        if let Some(began) = began {
            let took = now - began;
            let fastest = self.fastest.entry(worker).or_insert(took);
            *fastest = took.min(*fastest);
        }
        match &mut self.served {
            [Some((latest, at)), _] if *latest == worker => *at = now,
            [latest, other] => {
                *other = *latest;
                *latest = Some((worker, now));
            }
        }
        if self.held.is_empty() {
            return false;
        }
        let Some(held) = self.held.get_mut(&worker) else {
            return false;
        };
        if held.broken && began.is_none_or(|began| began < held.failed_at) {
            // What it generated before it broke says nothing about now.
            return false;
        }
        let was_down = held.is_down();
        *held = WorkerHealth {
            // Its probes have the last word.
            sick: held.sick,
            failed_at: held.failed_at,
            breaks: if completed { 0 } else { held.breaks },
            breaks_since: held.breaks_since,
            ..WorkerHealth::default()
        };
        let is_down = held.is_down();
        if !held.sick && held.breaks == 0 {
            self.held.remove(&worker);
        }
        self.reckon();
        was_down && !is_down
    }

    /// A probe that was sent at `asked` succeeded. Says whether the worker is back.
    pub(crate) fn healthy(&mut self, worker: WorkerId, asked: Time) -> bool {
        let Some(held) = self.held.get_mut(&worker) else {
            return false;
        };
        let was_down = held.is_down();
        held.sick = false;
        let only_failed = held.errors < ERRORS_MAX;
        if asked >= held.failed_at && held.failures <= OUTWEIGHED_MAX && only_failed {
            held.until = None;
        }
        let is_down = held.is_down();
        if !is_down && held.failures == 0 && held.errors == 0 && held.breaks == 0 {
            self.held.remove(&worker);
        }
        self.reckon();
        was_down && !is_down
    }

    /// Probes fail: the worker is ejected until one succeeds.
    pub(crate) fn sick(&mut self, worker: WorkerId, now: Time) {
        let held = self.held.entry(worker).or_default();
        if !std::mem::replace(&mut held.sick, true) && held.failures == 0 {
            held.failed_at = now;
        }
        self.reckon();
    }

    /// Nothing is held against it any more. Says whether it was ejected.
    pub(crate) fn forget(&mut self, worker: WorkerId) -> bool {
        let held = self.held.remove(&worker);
        self.reckon();
        held.is_some_and(|held| held.is_down())
    }

    /// A worker left.
    pub(crate) fn leave(&mut self, worker: WorkerId) {
        self.forget(worker);
        self.fastest.remove(&worker);
        for served in &mut self.served {
            *served = served.filter(|(id, _)| *id != worker);
        }
    }

    /// Until when it is ejected, if it is; [`Time::MAX`] means until it answers.
    pub(crate) fn ejected_until(&self, worker: WorkerId) -> Option<Time> {
        self.held.get(&worker)?.ejected_until()
    }

    /// How bad a worker is that is ejected.
    pub(crate) fn badness(&self, worker: WorkerId) -> EjectionRank {
        let held = self.held.get(&worker).copied().unwrap_or_default();
        let since_or_until = match held.sick || held.broken {
            true => held.failed_at,
            false => held.until.unwrap_or_default(),
        };
        EjectionRank {
            sick: held.sick,
            broken: held.broken,
            since_or_until,
        }
    }

    /// When the next span ends.
    pub(crate) fn due(&self) -> Option<Time> {
        self.due
    }

    /// One whose span has ended. Its failures stay in mind.
    pub(crate) fn ended(&mut self, now: Time) -> Option<WorkerId> {
        self.due.filter(|due| *due <= now)?;
        let over = |held: &WorkerHealth| held.until.is_some_and(|until| until <= now);
        let (&worker, held) = self.held.iter_mut().find(|(_, held)| over(held))?;
        held.until = None;
        self.reckon();
        Some(worker)
    }

    fn reckon(&mut self) {
        self.due = self.held.values().filter_map(|held| held.until).min();
    }
}

impl WorkerHealth {
    fn ejected_until(&self) -> Option<Time> {
        if self.sick || self.broken {
            Some(Time::MAX)
        } else {
            self.until
        }
    }

    fn is_down(&self) -> bool {
        self.sick || self.broken || self.until.is_some()
    }
}

#[cfg(test)]
mod tests;
