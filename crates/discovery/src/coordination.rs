//! What processes of one kind agree on through a store: who has a name, and who is there.
//!
//! Answers one question: how does a process take a name that only one may have, and how do others see that it is gone? What always holds: a
//! name goes with its owner, some time after it died.

use crate::store::{StoreError, StoreFuture};

/// A name that this process has. Dropped without [`Self::release`], it is free when the store notices that nobody keeps it.
pub trait Claim: Send + Sync + 'static {
    /// Gives the name back at once.
    fn release(&self) -> StoreFuture<'_, Result<(), StoreError>>;
}

/// What becomes of a name that a store has lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimKind {
    /// It is a lock: another may have it by now.
    Lock,
    /// It says that this process is there: it is taken again.
    Presence,
}

/// A store in which names can be taken.
pub trait Coordination: Send + Sync + 'static {
    /// Takes a name; none if somebody has it.
    fn claim<'a>(
        &'a self,
        name: &'a str,
        kind: ClaimKind,
    ) -> StoreFuture<'a, Result<Option<Box<dyn Claim>>, StoreError>>;

    /// The names that are taken and begin with `prefix`.
    fn names<'a>(&'a self, prefix: &'a str) -> StoreFuture<'a, Result<Vec<String>, StoreError>>;
}
