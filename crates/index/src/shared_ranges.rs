//! Which positions of a prompt lie in a cache that all workers share.

use std::ops::Range;

/// Positions of a prompt that an external pool holds, as sorted ranges that do not touch. Unlike a rank's
/// own blocks these need not be contiguous from the start.
///
/// ```
/// # use kvasir_index::SharedRanges;
/// let shared = SharedRanges::from_positions([7, 3, 4, 4, 5]);
/// assert_eq!(shared.ranges(), [3..6, 7..8]);
/// assert_eq!(shared.beyond(4), 3);
/// assert_eq!(shared.total(), 4);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedRanges {
    ranges: Vec<Range<u32>>,
}

impl SharedRanges {
    /// The positions given, in any order, repeated or not.
    #[must_use]
    pub fn from_positions(positions: impl IntoIterator<Item = u32>) -> Self {
        Self::from_ranges(positions.into_iter().map(|p| p..p.saturating_add(1)))
    }

    /// The union of the ranges given, in any order, overlapping or not; empty ones count nothing.
    #[must_use]
    pub fn from_ranges(ranges: impl IntoIterator<Item = Range<u32>>) -> Self {
        let mut all: Vec<Range<u32>> = ranges.into_iter().filter(|r| r.start < r.end).collect();
        all.sort_unstable_by_key(|r| r.start);
        let mut ranges: Vec<Range<u32>> = Vec::with_capacity(all.len());
        for next in all {
            match ranges.last_mut() {
                Some(last) if next.start <= last.end => last.end = last.end.max(next.end),
                _ => ranges.push(next),
            }
        }
        Self { ranges }
    }

    /// The ranges, sorted, with gaps between them.
    #[must_use]
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.ranges
    }

    /// Shared positions at `depth` and after it: what a rank that holds `depth` blocks would save more.
    #[must_use]
    pub fn beyond(&self, depth: u32) -> u32 {
        let first = self.ranges.partition_point(|r| r.end <= depth);
        self.ranges
            .iter()
            .skip(first)
            .map(|r| r.end - r.start.max(depth))
            .sum()
    }

    /// All shared positions.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.beyond(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a plain set of positions, for every depth.
        #[test]
        fn counts_as_a_set_does(
            list in prop::collection::vec((0u32..40, 0u32..6), 0..12),
        ) {
            let set: std::collections::BTreeSet<u32> =
                list.iter().flat_map(|&(s, n)| s..s + n).collect();
            let shared = SharedRanges::from_ranges(list.iter().map(|&(s, n)| s..s + n));
            for depth in 0..50 {
                prop_assert_eq!(shared.beyond(depth) as usize, set.range(depth..).count());
            }
            for pair in shared.ranges().windows(2) {
                prop_assert!(pair[0].end < pair[1].start, "ranges touch: {:?}", pair);
            }
        }
    }
}
