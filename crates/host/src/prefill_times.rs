//! How long a prompt takes at a rank, learned from streams.
//!
//! Answers one question: when is the prompt of an answer that comes in one piece likely computed? Its engine does not
//! say; the rank's latest streams show how long a token takes that is not cached.
//!
//! What always holds: nothing is estimated for a rank of which no stream was seen.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvasir_types::WorkerRank;

/// Fewer uncached tokens say more about the engine's fixed costs than about its speed.
const TOKENS_MIN: u32 = 16;
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
    }

    /// How long so many tokens likely take there.
    #[must_use]
    pub fn estimate(&self, rank: WorkerRank, uncached: u32) -> Option<Duration> {
        let by_rank = self.by_rank.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = by_rank.get(&rank)? * f64::from(uncached);
        Some(
            Duration::try_from_secs_f64(seconds)
                .map_or(ESTIMATE_MAX, |time| time.min(ESTIMATE_MAX)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_follows_the_latest_streams() {
        let (times, rank) = (PrefillTimes::default(), WorkerRank::new(1, 0));
        assert_eq!(times.estimate(rank, 100), None);
        times.learn(rank, TOKENS_MIN - 1, Duration::from_secs(9));
        assert_eq!(times.estimate(rank, 100), None, "too short to tell");
        times.learn(rank, 1000, Duration::from_secs(1));
        assert_eq!(times.estimate(rank, 500), Some(Duration::from_millis(500)));
        times.learn(rank, 1000, Duration::from_secs(5));
        assert_eq!(times.estimate(rank, 500), Some(Duration::from_secs(1)));
        assert_eq!(times.estimate(rank, u32::MAX), Some(ESTIMATE_MAX));
        assert_eq!(
            times.estimate(WorkerRank::new(1, 1), 1),
            None,
            "each rank its own"
        );
    }
}
