//! Why an event was refused.

use kvasir_types::EngineHash;

/// Why an event changed nothing, or less than it said. Counted by the caller, never shown to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The whole event was dropped: it hangs on a block that this rank does not hold.
    #[error("parent block {0} is not held by this rank")]
    ParentBlockNotFound(EngineHash),
    /// The whole event was dropped: a block is its own ancestor.
    #[error("block {0} appears twice in one chain")]
    InvalidBlockSequence(EngineHash),
    /// The rest of the removal was applied: this is the first name that was not known.
    #[error("block {0} is not held by this rank")]
    BlockNotFound(EngineHash),
}
