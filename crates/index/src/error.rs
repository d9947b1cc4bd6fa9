//! Why an event or a snapshot was refused.

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

/// Why there is no snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// Events came while it was copied in parts, each time; try again later.
    #[error("the index changed during every attempt to copy it")]
    Changed,
    /// The index contradicts itself there, which is a bug; the file of an earlier moment is as good as it was.
    #[error("the index is damaged at run {0}; please report this")]
    Damaged(u32),
}

/// Why a snapshot was not taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The bytes do not begin with the mark of a snapshot.
    #[error("the file is not an index snapshot")]
    NotASnapshot,
    /// Another release wrote it; rebuild the index from the engines instead.
    #[error("snapshot version {0} is not supported by this release")]
    Version(u16),
    /// Its checksum or its content is wrong; rebuild the index from the engines instead.
    #[error("the snapshot is damaged")]
    Corrupt,
    /// The index holds something already; restore into a new one.
    #[error("the index is not empty; restore into a new one")]
    NotEmpty,
}
