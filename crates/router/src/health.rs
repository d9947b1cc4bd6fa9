//! What is held against a worker, and how long it is ejected for it.
//!
//! Answers one question: which workers are not to be chosen because of how they served, or did not? Two
//! witnesses: requests ([`Outcome::Unreachable`](crate::Outcome::Unreachable) at once,
//! [`Outcome::Broken`](crate::Outcome::Broken) and [`Outcome::Overloaded`](crate::Outcome::Overloaded) several
//! times in a row) and the host's own probes.
//!
//! What always holds: a span that requests caused ends by itself, twice as long each time until a request
//! succeeds there, and never longer than `runtime-inhibited-duration-secs`; one that a probe caused ends with
//! a probe that succeeds; many requests that one death ends count as one failure; a success forgives.

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
/// Answers in a row that say "I failed" or "I am full", while others serve, after which a worker is ejected.
pub const ERRORS_MAX: u32 = 3;
/// A failure this old is forgotten.
pub const FORGIVEN_AFTER: Duration = Duration::from_secs(60);
/// Doubling ends here at the latest, so that it cannot overflow.
const DOUBLINGS_MAX: u32 = 20;

/// How bad a worker that is ejected is; the least is tried when nobody else is left: first those that only
/// requests speak against, the one whose span ends first; then the one that failed longest ago.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EjectionRank {
    sick: bool,
    since_or_until: Time,
}

/// What is held against one worker.
#[derive(Clone, Copy, Debug, Default)]
struct WorkerHealth {
    /// Times that it was ejected, with no success between.
    failures: u32,
    /// When it failed last.
    failed_at: Time,
    /// Answers in a row that say "I failed" or "I am full", and since when.
    errors: u32,
    errors_since: Time,
    /// It is ejected until then.
    until: Option<Time>,
    /// Its last probe failed.
    sick: bool,
}

/// What is held against each worker; those against whom nothing is are not here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health {
    held: BTreeMap<WorkerId, WorkerHealth>,
    /// When the next span ends.
    due: Option<Time>,
    /// The latest success, and the latest of another worker than that.
    served: [Option<(WorkerId, Time)>; 2],
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

    /// A worker answered that it failed or is full. Says whether that is once too often: it has done so several
    /// times in a row, and meanwhile another has served.
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

    /// A worker served a request: nothing that requests said is held against it any more. Says whether it is
    /// back.
    pub(crate) fn served(&mut self, worker: WorkerId, now: Time) -> bool {
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
        if held.sick {
            // Its probes have the last word.
            (held.failures, held.errors, held.until) = (0, 0, None);
            self.reckon();
            return false;
        }
        self.forget(worker)
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
        if !is_down && held.failures == 0 && held.errors == 0 {
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
        let since_or_until = match held.sick {
            true => held.failed_at,
            false => held.until.unwrap_or_default(),
        };
        EjectionRank {
            sick: held.sick,
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
        if self.sick {
            Some(Time::MAX)
        } else {
            self.until
        }
    }

    fn is_down(&self) -> bool {
        self.sick || self.until.is_some()
    }
}

#[cfg(test)]
mod tests;
