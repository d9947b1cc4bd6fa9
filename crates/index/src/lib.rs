//! Which worker holds which prefix.
//!
//! Answers one question: for this chain of block hashes, how many leading blocks does each rank hold?
//!
//! Invariants: a match of `k` means that the rank announced blocks `0..k` and has taken back none since;
//! engine hashes are names inside one rank and mean nothing in another; a refused event changes nothing.
//!
//! Elsewhere: hashing (`kvasir-hash`), load and cost (`kvasir-placement`), what silence or a lost event
//! means (the event ingest).

mod error;
mod matches;
mod naive;

pub use error::ApplyError;
pub use matches::{Match, Matches};
pub use naive::NaiveIndex;

use std::sync::{PoisonError, RwLock};

use kvasir_types::{KvEvent, LocalHash, WorkerId, WorkerRank};

/// The index that the router asks. Lookups may run on any thread.
#[derive(Debug, Default)]
pub struct Index {
    inner: RwLock<NaiveIndex>,
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies one event of one rank. Events of a rank must come in the order in which it sent them.
    pub fn apply(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        self.inner
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .apply(rank, event)
    }

    /// Forgets everything that one rank held.
    pub fn remove_rank(&self, rank: WorkerRank) {
        self.inner
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove_rank(rank);
    }

    /// Forgets everything that any rank of a worker held.
    pub fn remove_worker(&self, worker: WorkerId) {
        self.inner
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove_worker(worker);
    }

    /// Fills `out` with how many leading blocks of `prompt` each rank holds.
    pub fn find(&self, prompt: &[LocalHash], out: &mut Matches) {
        self.inner
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .find(prompt, out);
    }
}
