//! How much of one prompt each rank already holds, as the cost needs it.

use std::ops::Range;

use kvasir_types::WorkerRank;

/// What one rank holds of a prompt, in blocks. Host and disk count only what *follows* the blocks before:
/// they are extensions, not totals.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankOverlap {
    /// The rank.
    pub rank: WorkerRank,
    /// Blocks from the start of the prompt in device memory. A caller that knows only an effective
    /// overlap puts it here, fraction and all.
    pub device: f64,
    /// Blocks that follow those in host memory.
    pub host: u32,
    /// Blocks that follow those on disk or further away.
    pub disk: u32,
}

impl RankOverlap {
    /// Blocks saved, with a weight per tier. The device tier weighs 1 whatever the overlap credit is.
    #[must_use]
    pub fn effective(&self, host_weight: f64, disk_weight: f64) -> f64 {
        self.device + host_weight * f64::from(self.host) + disk_weight * f64::from(self.disk)
    }
}

/// The answer of an index lookup in the shape the cost reads. Ranks that hold nothing are absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overlap {
    /// Ranks that hold something, each at most once, in any order. Unknown ranks are ignored.
    pub ranks: Vec<RankOverlap>,
    /// Block positions present in a cache that all workers share: sorted, disjoint, half open.
    pub shared: Vec<Range<u32>>,
}

impl Overlap {
    /// No rank holds anything.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// How many shared positions lie at or after `depth`.
    ///
    /// ```
    /// # use kvasir_placement::Overlap;
    /// let overlap = Overlap { shared: vec![0..4, 8..10], ..Overlap::none() };
    /// assert_eq!(overlap.shared_beyond(2), 4);
    /// assert_eq!(overlap.shared_beyond(9), 1);
    /// ```
    #[must_use]
    pub fn shared_beyond(&self, depth: u32) -> u32 {
        self.shared
            .iter()
            .map(|r| r.end.saturating_sub(r.start.max(depth)))
            .sum()
    }
}
