//! Order, loss and recovery of KV events.
//!
//! Answers one question: given what a source of events says (messages, answers of its replay socket,
//! connections made and lost) and the time, what do its workers' caches hold, and what must be asked again?
//!
//! [`Sequencer`] is a state machine without I/O, one per source. Its [`EventFormat`] says how messages are read
//! and what orders them: batches of an engine by the publisher's sequence number, router events by the number
//! that each has within its rank. The host hands in [`SourceEvent`]s with the time and does what the
//! [`Output`]s ask; blocks go to a [`Cache`] at once.
//!
//! Invariants: the cache holds a state that the engine went through, in order, or says that it does not
//! ([`StreamStatus::exact`]); an event is applied once; whatever is kept (live messages during a recovery,
//! blocks without parents, a replay that is to replace a rank) is bounded; a recovery always ends.
//!
//! From an engine's batch to index events it is [`Translator`]. The other side, what a worker publishes and answers, is [`publisher`].
//!
//! Elsewhere: bytes (`kvasir-wire`), sockets (`kvasir-transport`), whether the cache's content can be believed
//! (`kvasir-trust`).

mod batches;
mod counts;
mod cursor;
mod lag;
mod notice;
mod numbered_rank;
mod options;
mod orphans;
pub mod publisher;
mod query;
mod rank;
mod recovery;
mod router_events;
mod sequencer;
mod translate;
pub mod trtllm;

pub use batches::StreamCheckpoint;
pub use counts::Counts;
pub use cursor::Cursor;
pub use kvasir_wire::native::Encoding;
pub use kvasir_wire::{SourceEvent, SourceFault};
pub use notice::{Notice, RecoveryCause};
pub use options::{EventFormat, Resync, StreamOptions};
pub use sequencer::{Output, Sequencer, StreamStatus};
pub use translate::{
    GROUPS_MAX, SALTED_BLOCKS_MAX, Skip, TranslateOptions, Translation, Translator, TranslatorState,
};

use kvasir_index::{ApplyError, Index};
use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::native::RouterEvent;

/// Ranks that one source may speak of. Engines have one socket per rank; a relay or a broker merges some.
pub const RANKS_MAX: usize = 1024;

/// Where events are applied.
pub trait Cache {
    /// Applies one event of one rank. What was stored twice is to be removed twice, unless `copies` is false.
    fn apply(&self, rank: WorkerRank, event: &KvEvent, copies: bool) -> Result<(), ApplyError>;
    /// Forgets everything that one rank held.
    fn remove_rank(&self, rank: WorkerRank);
    /// Replaces everything that one rank held by what `events` make of an empty cache, at once as far as readers see.
    /// Returns which were refused, by their place.
    fn replace_rank(&self, rank: WorkerRank, events: &[RouterEvent]) -> Vec<(usize, ApplyError)>;
}

impl Cache for Index {
    fn apply(&self, rank: WorkerRank, event: &KvEvent, copies: bool) -> Result<(), ApplyError> {
        match copies {
            true => Index::apply(self, rank, event),
            false => self.apply_once(rank, event),
        }
    }

    fn remove_rank(&self, rank: WorkerRank) {
        Index::remove_rank(self, rank);
    }

    fn replace_rank(&self, rank: WorkerRank, events: &[RouterEvent]) -> Vec<(usize, ApplyError)> {
        Index::replace_rank(self, rank, events.iter().map(|event| &event.event))
    }
}
