//! A policy that decides beside the real one and acts on nothing.
//!
//! Answers one question: what would another policy have chosen, and what is that worth? A share of the live placements is
//! decided again by the shadow, with its own draws. Where it names another rank, the time model prices both: the *regret*
//! is what the live choice costs beyond the shadow's, in seconds that all requests wait. It is an estimate by a model and
//! no time to first token; where the live policy is `time` itself it is never much above 0.
//!
//! What always holds: placements are the same with and without a shadow; at most [`PER_SECOND_MAX`] placements a second
//! are decided again, and of busier traffic an even share.

use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{Candidate, Policy, SlotSet};
use kvasir_types::{Rng, Time, WorkerRank};

use crate::{RouterConfig, RouterMode};

/// Placements of a second that are decided again.
pub(crate) const PER_SECOND_MAX: u32 = 200;
/// Above so many placements a second only a share is decided again.
const PER_SECOND_AIM: u32 = 100;
const WINDOW: Duration = Duration::from_secs(1);

/// A policy that decides beside the real one: a name, and settings of which only those of the choice matter.
#[derive(Clone, Debug, PartialEq)]
pub struct ShadowPolicy {
    /// What the operator called it.
    pub name: Arc<str>,
    /// Its settings.
    pub config: Box<RouterConfig>,
}

/// What a shadow made of one placement.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ShadowChoice {
    /// Whom it would have chosen.
    pub rank: WorkerRank,
    /// Whether that is another rank; one of equals is no other.
    pub disagrees: bool,
    /// What the live choice costs beyond this one by the time model, in seconds; below 0 where it costs less.
    pub regret_s: f32,
}

/// What a shadow has made of all placements.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct ShadowStats {
    /// Placements in which there was a choice.
    pub placements: u64,
    /// Of those, the ones that it decided, too.
    pub compared: u64,
    /// Of those, the ones that it would have placed elsewhere.
    pub disagreed: u64,
    /// Seconds that the shadow's choices would have cost less, by the time model, where they would have.
    pub better_s: f64,
    /// Seconds that they would have cost more, where they would have.
    pub worse_s: f64,
}

impl ShadowStats {
    /// Share of the compared placements that it would have placed elsewhere.
    #[must_use]
    pub fn disagreement(&self) -> f64 {
        self.disagreed as f64 / self.compared.max(1) as f64
    }

    /// Mean regret of a compared placement, in seconds of the time model.
    #[must_use]
    pub fn mean_regret_s(&self) -> f64 {
        (self.better_s - self.worse_s) / self.compared.max(1) as f64
    }

    fn add(&mut self, choice: &ShadowChoice) {
        self.compared += 1;
        if choice.disagrees {
            self.disagreed += 1;
            let regret = f64::from(choice.regret_s);
            self.better_s += regret.max(0.0);
            self.worse_s += (-regret).max(0.0);
        }
    }
}

/// The shadow of one router.
#[derive(Debug)]
pub(crate) struct Shadow {
    pub(crate) name: Arc<str>,
    pub(crate) config: RouterConfig,
    /// Its choice, where placements do not cost it seconds.
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) rng: Rng,
    /// Buffers.
    pub(crate) kept: Vec<Candidate>,
    pub(crate) pair: SlotSet,
    sampling: Sampling,
    stats: ShadowStats,
}

impl Shadow {
    /// The shadow that `live` names, if it names one.
    pub(crate) fn of(live: &RouterConfig) -> Option<Box<Self>> {
        let shadow = live.shadow_policy.as_ref()?;
        // What it decides about is the live router's.
        let config = RouterConfig {
            kv_cache_block_size: live.kv_cache_block_size,
            router_role: live.router_role,
            router_conditional_disagg: live.router_conditional_disagg,
            shadow_policy: None,
            ..(*shadow.config).clone()
        };
        Some(Box::new(Self {
            name: Arc::clone(&shadow.name),
            policy: crate::router::policy_of(&config),
            rng: Rng::new(live.router_seed ^ 0x5AD0),
            kept: Vec::new(),
            pair: SlotSet::default(),
            sampling: Sampling::default(),
            stats: ShadowStats::default(),
            config,
        }))
    }

    /// Whether load and caches matter to it.
    pub(crate) fn weighs_load(&self) -> bool {
        self.config.router_mode == RouterMode::Kv
    }

    /// A placement was made; whether it is to be decided again.
    pub(crate) fn takes(&mut self, now: Time) -> bool {
        self.stats.placements += 1;
        self.sampling.takes(now)
    }

    pub(crate) fn record(&mut self, choice: &ShadowChoice) {
        self.stats.add(choice);
    }

    pub(crate) fn stats(&self) -> &ShadowStats {
        &self.stats
    }
}

/// Which placements are decided again: all of them while they are few, then every n-th.
#[derive(Clone, Copy, Debug, Default)]
struct Sampling {
    since: Time,
    /// Placements, and those taken, since then.
    seen: u32,
    taken: u32,
    /// One of so many is taken; by how many there were in the second before.
    stride: u32,
}

impl Sampling {
    fn takes(&mut self, now: Time) -> bool {
        if now >= self.since + WINDOW {
            // Of the second before, if that was the one that just ended.
            let fresh = now < self.since + 2 * WINDOW;
            let busy = if fresh { self.seen } else { 0 };
            *self = Self {
                since: now,
                seen: 0,
                taken: 0,
                stride: busy.div_ceil(PER_SECOND_AIM),
            };
        }
        let turn = self.seen.is_multiple_of(self.stride.max(1));
        self.seen = self.seen.saturating_add(1);
        let takes = turn && self.taken < PER_SECOND_MAX;
        self.taken += u32::from(takes);
        takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of so many a second are taken in the seconds from `start`.
    fn taken(sampling: &mut Sampling, per_second: u32, (start, seconds): (u64, u32)) -> u32 {
        let step = 1_000_000_000 / u64::from(per_second);
        let at = |i: u32| Time::from_nanos(start * 1_000_000_000 + u64::from(i) * step);
        let took = (0..per_second * seconds).filter(|i| sampling.takes(at(*i)));
        took.count() as u32
    }

    #[test]
    fn few_placements_are_all_decided_again_and_many_by_an_even_share() {
        assert_eq!(taken(&mut Sampling::default(), 50, (0, 4)), 200);
        let mut busy = Sampling::default();
        let first = taken(&mut busy, 10_000, (0, 1));
        assert_eq!(first, PER_SECOND_MAX);
        let later = taken(&mut busy, 10_000, (1, 5));
        assert_eq!(later, 5 * PER_SECOND_AIM);
        // After a pause nothing is known of the rate.
        assert_eq!(taken(&mut busy, 20, (100, 2)), 40);
    }

    #[test]
    fn regret_counts_both_ways() {
        let mut stats = ShadowStats::default();
        let rank = WorkerRank::new(1, 0);
        for (disagrees, regret_s) in [(false, 0.0), (true, 0.3), (true, -0.1), (true, 0.0)] {
            stats.add(&ShadowChoice {
                rank,
                disagrees,
                regret_s,
            });
        }
        assert_eq!((stats.compared, stats.disagreed), (4, 3));
        assert!((stats.mean_regret_s() - 0.05).abs() < 1e-6);
        assert_eq!(stats.disagreement(), 0.75);
        assert_eq!(ShadowStats::default().mean_regret_s(), 0.0);
    }
}
