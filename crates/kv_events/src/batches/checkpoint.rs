//! What is saved of a stream while the router is restarted.

use kvasir_types::{DpRank, WorkerRank};

use super::BatchSequencer;
use crate::rank::BatchRank;
use crate::{Cursor, StreamOptions, TranslatorState};

/// What is saved of a stream while the router is restarted, beside the cache itself.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamCheckpoint {
    /// The last batch applied.
    pub cursor: Cursor,
    /// What the translator of each rank knew.
    pub ranks: Vec<(DpRank, TranslatorState)>,
}

impl BatchSequencer {
    pub(crate) fn restore(
        rank: WorkerRank,
        options: StreamOptions,
        checkpoint: &StreamCheckpoint,
    ) -> Self {
        let mut batches = Self::new(rank, options, Some(checkpoint.cursor));
        for (rank, state) in &checkpoint.ranks {
            let at = batches.rank_at(*rank, true);
            if let Some(rank) = at.and_then(|at| batches.ranks.get_mut(at)) {
                rank.restore(state);
            }
        }
        batches
    }

    pub(crate) fn checkpoint(&self) -> Option<StreamCheckpoint> {
        let whole = |rank: &BatchRank| rank.state.exact && rank.state.orphan_blocks() == 0;
        let cursor = self.history.last()?;
        let ranks = self.ranks.iter();
        let ranks = ranks.map(|r| (r.state.rank.rank, r.translator_state()));
        self.ranks.iter().all(whole).then(|| StreamCheckpoint {
            cursor,
            ranks: ranks.collect(),
        })
    }
}
