//! What a stream reports: why it recovers, and what an operator may want to read once.

use std::fmt;

use kvasir_msgpack::DecodeError;
use kvasir_types::{WorkerId, WorkerRank};

use crate::Skip;

/// Why a recovery runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecoveryCause {
    /// We came late or for the first time.
    Join,
    /// Messages are missing.
    Gap,
    /// The engine began again.
    Restart,
    /// The connection was lost for a while.
    Reconnect,
    /// A routine comparison.
    Verify,
    /// The cache view was found wrong.
    Resync,
}

/// Something that an operator may want to read. Each is reported when it begins, not with every message that shows it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Notice {
    /// Messages are missing between these two.
    Gap {
        /// What should have come.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// Router events of one rank are missing between these two; the rank was emptied.
    RankGap {
        /// Whose.
        rank: WorkerRank,
        /// What should have come.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// The engine behind this address began again: its cache is empty or was refilled since.
    Restarted,
    /// The engine's buffer no longer reaches back to what is missing; the rank was emptied.
    ReplayTooShort {
        /// What was asked for.
        asked: u64,
        /// What the buffer begins with.
        first: u64,
    },
    /// A recovery ended well.
    Recovered {
        /// Why it ran.
        cause: RecoveryCause,
        /// Messages that it brought.
        messages: u64,
    },
    /// A worker's own index said all that a rank holds, and what follows is numbered from there.
    Whole {
        /// Whose.
        rank: WorkerRank,
    },
    /// A recovery was given up: the replay socket does not answer.
    RecoveryFailed {
        /// Why it ran.
        cause: RecoveryCause,
    },
    /// The questions to a worker's own index were given up, or it cannot say what its cache holds.
    QueryFailed {
        /// Whose.
        rank: WorkerRank,
        /// Why they were put.
        cause: RecoveryCause,
    },
    /// A log no longer holds all events of a rank; it was emptied and goes on with those that there are.
    LogTooShort {
        /// Whose.
        rank: WorkerRank,
    },
    /// Messages are missing and there is no replay socket; the rank was emptied.
    GapWithoutReplay,
    /// The engine cleared its cache.
    Cleared {
        /// Whose.
        rank: WorkerRank,
    },
    /// A message was refused.
    Refused(DecodeError),
    /// Events of this kind do not count, from the first one on.
    Skipped(Skip),
    /// Blocks have the expected size again.
    BlockSizeFits,
    /// Tokens come as pairs: requests must be hashed with the Eagle window.
    Pairs,
    /// A block came whose parent is not known, though nothing was missing so far.
    Orphans {
        /// Whose.
        rank: WorkerRank,
    },
    /// A recovery took so long that live messages had to be dropped.
    HeldDropped,
    /// Events came of a worker that this stream was not told of; they do not count.
    UnknownWorker(WorkerId),
}

impl fmt::Display for RecoveryCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Join => "join",
            Self::Gap => "gap",
            Self::Restart => "restart",
            Self::Reconnect => "reconnect",
            Self::Verify => "verify",
            Self::Resync => "resync",
        })
    }
}

impl fmt::Display for Notice {
    /// What happened and what was done about it, for a log line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gap { expected, found } => {
                let missing = found - expected;
                write!(f, "{missing} event messages missing before number {found}")
            }
            Self::RankGap {
                rank,
                expected,
                found,
            } => {
                let missing = found - expected;
                write!(
                    f,
                    "{missing} events of rank {rank} missing before number {found}; its blocks are forgotten"
                )
            }
            Self::Restarted => f.write_str("engine restarted; its blocks are forgotten"),
            Self::ReplayTooShort { asked, first } => write!(
                f,
                "replay buffer begins at {first}, {asked} was requested; older blocks are not known \
                 (increase buffer_steps in the engine's kv-events-config)"
            ),
            Self::Recovered { cause, messages } => {
                write!(f, "recovered with {messages} replayed messages (cause: {cause})")
            }
            Self::Whole { .. } => f.write_str("all that the worker's cache holds is known"),
            Self::RecoveryFailed { cause } => write!(
                f,
                "replay socket does not answer (cause: {cause}); continuing without past events; \
                 check the replay address"
            ),
            Self::QueryFailed { cause, .. } => write!(
                f,
                "worker does not answer what its cache holds (cause: {cause}); continuing with live events; \
                 check its KV query endpoint"
            ),
            Self::LogTooShort { .. } => f.write_str(
                "the JetStream stream no longer holds all events of the rank, and no snapshot has them; \
                 older blocks are not known",
            ),
            Self::GapWithoutReplay => f.write_str(
                "event messages missing and no replay socket known; the rank's blocks are forgotten \
                 (set replay_endpoint in the engine's kv-events-config)",
            ),
            Self::Cleared { .. } => f.write_str("engine cleared its cache"),
            Self::Refused(error) => write!(f, "unreadable event message: {error}"),
            Self::Skipped(Skip::BlockSize { engine }) => write!(
                f,
                "events have blocks of {engine} tokens, the index of the model has others; they are ignored \
                 (set --kv-cache-block-size and block-size= to {engine} or leave them out, and start \
                 all engines of the model with the same --block-size)"
            ),
            Self::Skipped(skip) => write!(f, "some events are ignored: {skip:?}"),
            Self::BlockSizeFits => f.write_str("blocks have the expected size again"),
            Self::Pairs => f.write_str("tokens come as pairs, as with Eagle speculation"),
            Self::Orphans { .. } => {
                f.write_str("a block follows one that was never announced; an event was missed")
            }
            Self::HeldDropped => {
                f.write_str("live messages dropped during a long replay; they are requested again")
            }
            Self::UnknownWorker(worker) => {
                write!(f, "events of worker {worker} are ignored; it is not a member")
            }
        }
    }
}
