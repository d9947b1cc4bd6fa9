//! How long a prompt takes at a rank, learned from streams.
//!
//! Answers one question: when is the prompt of an answer that comes in one piece likely computed? Its engine does not
//! say; the rank's streams of late show how long it takes for a token that is not cached.
//!
//! What always holds: a rank of which no stream was seen has no pace, and nothing is assumed of it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvasir_types::WorkerRank;

/// Fewer uncached tokens say more about the engine's fixed costs than about its pace.
const TOKENS_MIN: u32 = 16;
/// How much the latest stream counts.
const WEIGHT: f64 = 0.25;
/// No prompt is thought to take longer.
const SPAN_MAX: Duration = Duration::from_secs(60);
/// Ranks that are kept; those of workers that left go when there are more.
const RANKS_MAX: usize = 16_384;

/// Seconds for each uncached token, by rank.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    by_rank: Mutex<HashMap<WorkerRank, f64>>,
}

impl Paces {
    /// A stream began `waited` after it was handed over, with so many tokens to compute.
    pub(crate) fn learn(&self, rank: WorkerRank, uncached: u32, waited: Duration) {
        if uncached < TOKENS_MIN {
            return;
        }
        let seen = waited.as_secs_f64() / f64::from(uncached);
        let mut by_rank = self.by_rank.lock().unwrap_or_else(PoisonError::into_inner);
        if by_rank.len() >= RANKS_MAX && !by_rank.contains_key(&rank) {
            by_rank.clear();
        }
        let pace = by_rank.entry(rank).or_insert(seen);
        *pace += (seen - *pace) * WEIGHT;
    }

    /// How long so many tokens likely take there.
    pub(crate) fn span(&self, rank: WorkerRank, uncached: u32) -> Option<Duration> {
        let by_rank = self.by_rank.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = by_rank.get(&rank)? * f64::from(uncached);
        Some(Duration::try_from_secs_f64(seconds).map_or(SPAN_MAX, |span| span.min(SPAN_MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_learned_and_follows_the_latest_streams() {
        let (paces, rank) = (Paces::default(), WorkerRank::new(1, 0));
        assert_eq!(paces.span(rank, 100), None);
        paces.learn(rank, TOKENS_MIN - 1, Duration::from_secs(9));
        assert_eq!(paces.span(rank, 100), None, "too short to tell");
        paces.learn(rank, 1000, Duration::from_secs(1));
        assert_eq!(paces.span(rank, 500), Some(Duration::from_millis(500)));
        paces.learn(rank, 1000, Duration::from_secs(5));
        assert_eq!(paces.span(rank, 500), Some(Duration::from_secs(1)));
        assert_eq!(paces.span(rank, u32::MAX), Some(SPAN_MAX));
        assert_eq!(
            paces.span(WorkerRank::new(1, 1), 1),
            None,
            "each rank its own"
        );
    }
}
