//! How long a prompt takes at a rank, learned from streams.
//!
//! Answers one question: when is the prompt of an answer that comes in one piece likely computed? Its engine does not
//! say; the rank's latest streams show how long a token takes that is not cached.
//!
//! What always holds: there is always an estimate. A rank of which no stream was seen is as fast as the others of its
//! model, and without any stream as fast as [`TOKENS_PER_SEC`] says.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvasir_types::WorkerRank;

/// Fewer uncached tokens say more about the engine's fixed costs than about its speed.
const TOKENS_MIN: u32 = 16;
/// How fast prompts are computed where no stream has shown it: slower than any GPU, so that too much stays booked for a
/// moment rather than too little.
const TOKENS_PER_SEC: f64 = 4000.0;
/// How much the latest stream counts.
const WEIGHT: f64 = 0.25;
/// No prompt is expected to take longer.
const ESTIMATE_MAX: Duration = Duration::from_secs(60);
/// Ranks that are kept; those of workers that left go when there are more.
const RANKS_MAX: usize = 16_384;

/// Seconds for each uncached token, by rank.
#[derive(Debug, Default)]
pub struct PrefillTimes {
    by_rank: Mutex<HashMap<WorkerRank, f64>>,
    /// The same over all ranks, from the latest streams of any.
    any: Mutex<Option<f64>>,
}

impl PrefillTimes {
    /// A stream began `waited` after it was handed over, with so many tokens to compute.
    pub fn learn(&self, rank: WorkerRank, uncached: u32, waited: Duration) {
        if uncached < TOKENS_MIN {
            return;
        }
        let seen = waited.as_secs_f64() / f64::from(uncached);
        let mut by_rank = self.by_rank.lock().unwrap_or_else(PoisonError::into_inner);
        if by_rank.len() >= RANKS_MAX && !by_rank.contains_key(&rank) {
            by_rank.clear();
        }
        let known = by_rank.entry(rank).or_insert(seen);
        *known += (seen - *known) * WEIGHT;
        drop(by_rank);
        let mut any = self.any.lock().unwrap_or_else(PoisonError::into_inner);
        let known = any.get_or_insert(seen);
        *known += (seen - *known) * WEIGHT;
    }

    /// How long so many tokens likely take there.
    #[must_use]
    pub fn estimate(&self, rank: WorkerRank, uncached: u32) -> Duration {
        let by_rank = self.by_rank.lock().unwrap_or_else(PoisonError::into_inner);
        let own = by_rank.get(&rank).copied();
        drop(by_rank);
        let any = || *self.any.lock().unwrap_or_else(PoisonError::into_inner);
        let pace = own.or_else(any).unwrap_or(1.0 / TOKENS_PER_SEC);
        Duration::try_from_secs_f64(pace * f64::from(uncached))
            .map_or(ESTIMATE_MAX, |time| time.min(ESTIMATE_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_follows_the_latest_streams() {
        let (times, rank) = (PrefillTimes::default(), WorkerRank::new(1, 0));
        let assumed = Duration::from_secs(1);
        assert_eq!(times.estimate(rank, 4000), assumed);
        times.learn(rank, TOKENS_MIN - 1, Duration::from_secs(9));
        assert_eq!(times.estimate(rank, 4000), assumed, "too short to tell");
        times.learn(rank, 1000, Duration::from_secs(1));
        assert_eq!(times.estimate(rank, 500), Duration::from_millis(500));
        times.learn(rank, 1000, Duration::from_secs(5));
        assert_eq!(times.estimate(rank, 500), Duration::from_secs(1));
        assert_eq!(times.estimate(rank, u32::MAX), ESTIMATE_MAX);
        let other = WorkerRank::new(1, 1);
        assert_eq!(times.estimate(other, 500), Duration::from_secs(1));
        times.learn(other, 1000, Duration::from_secs(1));
        assert_eq!(times.estimate(other, 500), Duration::from_millis(500));
        assert_eq!(times.estimate(rank, 500), Duration::from_secs(1), "its own");
    }
}
