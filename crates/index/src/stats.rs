//! How much an index holds.

/// Figures of an index at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Different blocks, those of routing decisions counted apart.
    pub blocks: usize,
    /// (rank, tier, block) triples.
    pub entries: u64,
    /// Runs of consecutive blocks that they are kept in.
    pub runs: usize,
    /// Bytes taken; without what is only kept until the lookups that may still see it have ended.
    pub bytes: u64,
    /// Entries dropped because of the byte budget, ever.
    pub evicted: u64,
    /// Entries of routing decisions dropped because there were too many, ever.
    pub pruned: u64,
    /// Blocks that a rank announced again while it held them, ever.
    pub repeated: u64,
}
