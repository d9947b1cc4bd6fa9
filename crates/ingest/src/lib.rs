//! Order, loss and recovery of an engine's KV events.
//!
//! Answers one question: given what came from one publisher (messages, answers of its replay socket,
//! connections made and lost, time passing), what does its cache hold, and what must be asked again?
//!
//! [`Ingest`] is a state machine without I/O, one per event socket. The host hands in [`Input`]s with the
//! time, applies nothing itself (the machine writes to a [`Cache`]), and does what the [`Output`]s ask.
//!
//! Invariants: the cache holds a state that the engine went through, in order, or says that it does not
//! ([`Status::exact`]); a batch is applied once; whatever is kept (live messages during a recovery, blocks
//! without parents, a replay that is to replace a rank) is bounded; a recovery always ends.
//!
//! Elsewhere: bytes (`kvasir-wire`), sockets (`kvasir-transport`), whether the picture can be believed
//! (`kvasir-trust`).

mod counts;
mod cursor;
mod ingest;
mod input;
mod orphans;
mod rank;
mod recovery;

pub use counts::Counts;
pub use cursor::Cursor;
pub use ingest::{Ingest, Kept, Status};
pub use input::{Cause, IngestOptions, Input, Notice, Output, Resync};
pub use kvasir_wire::Learned;

use kvasir_index::{ApplyError, Index};
use kvasir_types::{KvEvent, WorkerRank};

/// Where events are applied.
pub trait Cache {
    /// Applies one event of one rank.
    fn apply(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError>;
    /// Forgets everything that one rank held.
    fn remove_rank(&self, rank: WorkerRank);
}

impl Cache for Index {
    fn apply(&self, rank: WorkerRank, event: &KvEvent) -> Result<(), ApplyError> {
        Index::apply(self, rank, event)
    }

    fn remove_rank(&self, rank: WorkerRank) {
        Index::remove_rank(self, rank);
    }
}
