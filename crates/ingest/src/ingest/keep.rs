//! What is kept of a stream while the router is restarted.

use kvasir_types::{DpRank, WorkerId};
use kvasir_wire::Learned;

use super::Ingest;
use crate::rank::RankState;
use crate::{Cursor, IngestOptions};

/// What is kept of a stream while the router is restarted, beside the cache itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// The last batch applied.
    pub cursor: Cursor,
    /// What was learned of each rank.
    pub ranks: Vec<(DpRank, Learned)>,
}

impl Ingest {
    /// As [`Self::resume`], from what [`Self::keep`] gave.
    #[must_use]
    pub fn resume_kept(
        worker: WorkerId,
        rank: DpRank,
        options: IngestOptions,
        kept: &Kept,
    ) -> Self {
        let mut ingest = Self::resume(worker, rank, options, Some(kept.cursor));
        for (rank, learned) in &kept.ranks {
            let at = ingest.rank_state(*rank, true);
            if let Some(state) = at.and_then(|at| ingest.ranks.get_mut(at)) {
                state.relearn(learned);
            }
        }
        ingest
    }

    /// What a later stream needs to go on from here with the same cache; `None` if the cache is not what
    /// the engine announced up to the cursor.
    #[must_use]
    pub fn keep(&self) -> Option<Kept> {
        let whole = |rank: &RankState| rank.exact && rank.orphan_blocks() == 0;
        let cursor = self.trail.last()?;
        let ranks = self.ranks.iter().map(|r| (r.rank.rank, r.learned()));
        self.ranks.iter().all(whole).then(|| Kept {
            cursor,
            ranks: ranks.collect(),
        })
    }
}
