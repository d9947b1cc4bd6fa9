//! What happened so far, as numbers.

/// Totals since the machine was made. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches applied.
    pub batches: u64,
    /// Events applied.
    pub events: u64,
    /// Blocks stored.
    pub blocks_stored: u64,
    /// Blocks removed.
    pub blocks_removed: u64,
    /// Clears.
    pub cleared: u64,
    /// Batches that came a second time.
    pub duplicates: u64,
    /// Batches older than what is known, and not known to be duplicates.
    pub stale: u64,
    /// Batches missing in the live stream.
    pub missed: u64,
    /// Messages that did not come live and were had from the replay: losses that were repaired.
    pub repaired: u64,
    /// Messages refused because they could not be read.
    pub refused: u64,
    /// Events of kinds that this release does not know.
    pub unknown_kinds: u64,
    /// Events left out by rule (place, group, shape, salts).
    pub skipped: u64,
    /// Those of them that spoke of groups of layers which keep no whole prefixes: the model is a hybrid.
    pub group_skipped: u64,
    /// Events left out because the block size differs.
    pub block_size_differs: u64,
    /// Removals of blocks that were not known.
    pub unknown_removed: u64,
    /// Events refused by the index for a block that is its own ancestor.
    pub invalid: u64,
    /// Blocks kept until their parent comes.
    pub orphans_parked: u64,
    /// Parked blocks whose parent came.
    pub orphans_placed: u64,
    /// Parked blocks given up for want of room.
    pub orphans_dropped: u64,
    /// Recoveries begun.
    pub recoveries: u64,
    /// Recoveries given up.
    pub recoveries_failed: u64,
    /// Replays that no longer reached back to what was missing.
    pub replays_too_short: u64,
    /// Restarts of the engine that were noticed.
    pub restarts: u64,
    /// Live messages dropped because a recovery took too long.
    pub held_dropped: u64,
}
