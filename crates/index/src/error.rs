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
    #[error("the index kept changing while it was copied")]
    Changed,
    /// The index contradicts itself there, which is a bug; the file of an earlier moment is as good as it was.
    #[error("the index is damaged at run {0}; please report this")]
    Damaged(u32),
}

/// Why a snapshot was not taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// It does not begin as ours do.
    #[error("these bytes are no index snapshot")]
    NoSnapshot,
    /// Another release wrote it; rebuild the index from the engines instead.
    #[error("a snapshot of version {0} cannot be read by this release")]
    Version(u16),
    /// Its checksum or its content is wrong; rebuild the index from the engines instead.
    #[error("the snapshot is damaged")]
    Corrupt,
    /// The index holds something already; restore into a new one.
    #[error("a snapshot can only be restored into an empty index")]
    NotEmpty,
}
