//! What an engine says about its cache.

use crate::{EngineHash, LocalHash};

/// Where in a worker's memory hierarchy a block lies, nearest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Tier {
    /// The accelerator's own memory.
    #[default]
    Device,
    /// The host's pinned memory.
    HostPinned,
    /// A local disk.
    Disk,
    /// Anything reached over a network.
    External,
}

/// A block as an engine announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct StoredBlock {
    /// The engine's name for it; later removals use this name.
    pub engine: EngineHash,
    /// What it holds; queries use this.
    pub local: LocalHash,
}

/// One change of one rank's cache. Per (worker, rank) the order of events is the order of changes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum KvEvent {
    /// Consecutive blocks appeared: the first one follows `parent`, each other one its predecessor.
    Stored {
        /// Where they lie.
        tier: Tier,
        /// The block before the first one; `None` at the start of a sequence.
        parent: Option<EngineHash>,
        /// The blocks, in order.
        blocks: Vec<StoredBlock>,
    },
    /// Blocks went away; the list may be empty.
    Removed {
        /// Where they lay.
        tier: Tier,
        /// The engine's names of them.
        blocks: Vec<EngineHash>,
    },
    /// Everything went away, in one tier or (`None`) in all.
    Cleared {
        /// The tier that is now empty.
        tier: Option<Tier>,
    },
}
