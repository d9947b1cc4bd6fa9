//! How far each rank is trusted: what every lookup reads.

use std::collections::HashMap;

use kvasir_types::WorkerRank;

use crate::evidence::{CacheState, TrustLevel};

/// The trust in each rank. One that is not listed is not judged: its events count in full.
#[derive(Clone, Debug, Default)]
pub struct TrustLevels {
    by_rank: HashMap<WorkerRank, TrustLevel>,
}

impl TrustLevels {
    /// How far a rank is trusted, if it is judged.
    #[must_use]
    pub fn get(&self, rank: WorkerRank) -> Option<TrustLevel> {
        self.by_rank.get(&rank).copied()
    }

    /// A rank is judged so from now on; `None` if nobody judges it any more.
    pub fn set(&mut self, rank: WorkerRank, trust: Option<TrustLevel>) {
        match trust {
            Some(trust) => self.by_rank.insert(rank, trust),
            None => self.by_rank.remove(&rank),
        };
    }

    /// Whether the events of a rank are not fully trusted: what is sent there is then worth remembering.
    #[must_use]
    pub fn is_doubted(&self, rank: WorkerRank) -> bool {
        self.get(rank)
            .is_some_and(|trust| trust.state != CacheState::Exact)
    }
}
