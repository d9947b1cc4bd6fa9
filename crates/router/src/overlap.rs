//! The one place where the router knows the shape of an index lookup's answer.

use kvasir_index::Matches;
use kvasir_placement::{Overlap, RankOverlap};

/// An index lookup's answer as an [`Arrival`](crate::Arrival) carries it.
#[must_use]
pub fn overlap_of(matches: &Matches) -> Overlap {
    Overlap {
        ranks: matches
            .iter()
            .map(|m| RankOverlap {
                rank: m.rank,
                device: f64::from(m.device),
                host: m.host,
                disk: m.disk,
            })
            .collect(),
        shared: Vec::new(),
    }
}
