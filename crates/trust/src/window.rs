//! The last answers of one rank, and what they say together.

use std::collections::VecDeque;
use std::time::Duration;

use kvasir_types::Time;

use crate::evidence::{Cause, Finding, TrustOptions};

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Time,
    finding: Finding,
    weight: u32,
    wrong: u32,
}

/// A bounded, sliding list of samples.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    samples: VecDeque<Sample>,
    max: usize,
}

impl Window {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            samples: VecDeque::new(),
            max: max.max(1),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.samples.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.samples.len()
    }

    pub(crate) fn expire(&mut self, now: Time, age_max: Duration) {
        while self.samples.front().is_some_and(|s| now - s.at > age_max) {
            self.samples.pop_front();
        }
    }

    pub(crate) fn push(&mut self, at: Time, finding: Finding, weight: u32, wrong: u32) {
        if self.samples.len() == self.max {
            self.samples.pop_front();
        }
        self.samples.push_back(Sample {
            at,
            finding,
            weight,
            wrong,
        });
    }

    pub(crate) fn error(&self) -> Option<f64> {
        let sum = |f: fn(&Sample) -> u32| self.samples.iter().map(|s| u64::from(f(s))).sum::<u64>();
        let weight = sum(|s| s.weight);
        (weight > 0).then(|| sum(|s| s.wrong.min(s.weight)) as f64 / weight as f64)
    }

    /// The part of [`Self::error`] that one cause has.
    pub(crate) fn error_by(&self, cause: Cause) -> f64 {
        let weight: u64 = self.samples.iter().map(|s| u64::from(s.weight)).sum();
        let of_cause = self.samples.iter().filter(|s| match s.finding {
            Finding::Right => false,
            Finding::Late => cause == Cause::EventsLate,
            Finding::Wrong(wrong) => wrong == cause,
        });
        let wrong: u64 = of_cause.map(|s| u64::from(s.wrong.min(s.weight))).sum();
        wrong as f64 / weight.max(1) as f64
    }

    /// Forgets what went wrong.
    pub(crate) fn forget_wrong(&mut self) {
        self.samples.retain(|s| s.finding == Finding::Right);
    }

    /// Whether the last `count` samples were right.
    pub(crate) fn all_right_lately(&self, count: usize) -> bool {
        self.samples.len() >= count
            && self
                .samples
                .iter()
                .rev()
                .take(count)
                .all(|s| s.finding == Finding::Right)
    }

    /// The likeliest cause, if enough is wrong.
    pub(crate) fn cause(&self, options: &TrustOptions) -> Option<Cause> {
        let count = |cause: Cause| {
            self.samples
                .iter()
                .filter(|s| s.finding == Finding::Wrong(cause))
                .count()
        };
        let share = |causes: &[Cause]| {
            let wrong = |s: &&Sample| matches!(s.finding, Finding::Wrong(c) if causes.contains(&c));
            let weight = |s: &Sample| u64::from(s.weight);
            let all: u64 = self.samples.iter().map(weight).sum();
            let wrong: u64 = self.samples.iter().filter(wrong).map(weight).sum();
            wrong as f64 / all.max(1) as f64
        };
        let over = [
            Cause::EventsLate,
            Cause::SilentEviction,
            Cause::Hybrid,
            Cause::Tokenization,
            Cause::OtherEngine,
        ];
        let many =
            |causes: &[Cause]| causes.iter().map(|c| count(*c)).sum::<usize>() >= options.wrong_min;
        if many(&over) && share(&over) > options.wrong_share_max {
            return over.into_iter().max_by_key(|c| count(*c));
        }
        let under = [Cause::EventsMissing];
        (many(&under) && share(&under) > options.under_share_max).then_some(Cause::EventsMissing)
    }
}
