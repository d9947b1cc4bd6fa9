//! What a worker should find cached of a prompt, by where that is known from.
//!
//! Answers one question: how many tokens will the engine report as cached? The index says what was cached when it was asked.
//! Requests under way change that before the engine looks: a prefix that one of them is computing there is cached by then, and the
//! blocks that they hold cannot hold anything else.
//!
//! Elsewhere: the cost, which goes by the index and the booked load (`kvasir-placement`).

/// Tokens of a prompt that a worker should find cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct PredictedTokens {
    /// What the index says: events, or routing decisions where events are not trusted.
    pub indexed: u32,
    /// What requests under way on the worker add: they have computed it by then.
    pub in_flight: u32,
    /// What they take from it: their blocks leave no room for it.
    pub evicted: u32,
}

/// What the ledger knows of the chosen rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RankInFlight {
    /// Leading blocks of the prompt that running requests have or are computing.
    pub(crate) depth: u32,
    /// Blocks of all running requests.
    pub(crate) active_blocks: u64,
    /// Blocks of the rank, where that is known.
    pub(crate) total_blocks: Option<u64>,
}

impl PredictedTokens {
    /// All together.
    #[must_use]
    pub fn total(&self) -> u32 {
        let known = self.indexed.saturating_add(self.in_flight);
        known.saturating_sub(self.evicted)
    }

    /// What `indexed` tokens become with what is under way, in blocks of `block_size`.
    pub(crate) fn new(indexed: u32, block_size: u32, rank: RankInFlight) -> Self {
        let tokens = |blocks: u32| blocks.saturating_mul(block_size);
        let depth = tokens(rank.depth);
        let room = rank.total_blocks.map_or(u32::MAX, |total| {
            let free = total.saturating_sub(rank.active_blocks);
            tokens(u32::try_from(free).unwrap_or(u32::MAX))
        });
        Self {
            indexed,
            in_flight: depth.saturating_sub(indexed),
            evicted: indexed.saturating_sub(depth).saturating_sub(room),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_under_way_add_what_they_compute_and_take_what_they_need() {
        let of = |indexed, depth, active_blocks, total_blocks| {
            let rank = RankInFlight {
                depth,
                active_blocks,
                total_blocks,
            };
            let found = PredictedTokens::new(indexed, 16, rank);
            (found.in_flight, found.evicted, found.total())
        };
        assert_eq!(of(160, 0, 0, Some(100)), (0, 0, 160));
        assert_eq!(of(32, 10, 10, Some(100)), (128, 0, 160));
        assert_eq!(of(160, 4, 50, Some(100)), (0, 0, 160));
        assert_eq!(of(160, 0, 95, Some(100)), (0, 80, 80), "room for five");
        assert_eq!(of(160, 4, 99, Some(100)), (0, 80, 80), "four run, one fits");
        assert_eq!(of(160, 0, 200, Some(100)), (0, 160, 0));
        assert_eq!(of(160, 0, 200, None), (0, 0, 160), "nobody knows");
        assert_eq!(of(u32::MAX, u32::MAX, u64::MAX, Some(0)).2, u32::MAX);
    }
}
