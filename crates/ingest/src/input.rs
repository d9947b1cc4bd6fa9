//! What goes into the machine and what comes out.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use kvasir_types::DpRank;
use kvasir_wire::frame::Frame;
use kvasir_wire::{DecodeError, Skip, TranslateOptions};

/// How one publisher's events are taken in.
#[derive(Clone, Debug, PartialEq)]
pub struct IngestOptions {
    /// Block size and image placeholder of the model.
    pub translate: TranslateOptions,
    /// Whether the engine has a replay socket that we know of.
    pub replay: bool,
    /// Silence after which a replay counts as broken. A server under load answers between batches.
    pub replay_silence_max: Duration,
    /// Attempts without progress before a recovery is given up.
    pub attempts_max: u32,
    /// Pause before the second attempt; doubles.
    pub backoff: Duration,
    /// Longest pause between attempts.
    pub backoff_max: Duration,
    /// Live messages kept during a recovery, in bytes.
    pub held_bytes_max: usize,
    /// A replay that is to replace a rank at once, in bytes; past it, it replaces step by step.
    pub replace_bytes_max: usize,
    /// Blocks per rank that wait for their parent.
    pub orphan_blocks_max: usize,
    /// How often a quiet stream is compared with the engine's buffer: finds a lost last message.
    pub verify_every: Option<Duration>,
}

impl IngestOptions {
    /// The defaults, for blocks of `block_size` tokens.
    #[must_use]
    pub const fn new(block_size: u32) -> Self {
        Self {
            translate: TranslateOptions {
                block_size,
                image_token: None,
            },
            replay: true,
            replay_silence_max: Duration::from_secs(5),
            attempts_max: 5,
            backoff: Duration::from_millis(200),
            backoff_max: Duration::from_secs(10),
            held_bytes_max: 64 << 20,
            replace_bytes_max: 256 << 20,
            orphan_blocks_max: 1 << 16,
            verify_every: Some(Duration::from_secs(60)),
        }
    }
}

/// What the host tells the machine.
#[derive(Clone, Debug)]
pub enum Input {
    /// The subscription stands (again).
    Connected,
    /// The subscription is gone.
    Disconnected,
    /// A live message.
    Live(Frame<Bytes>),
    /// A live message that is no event message at all.
    Refused(DecodeError),
    /// A message of the replay with this number.
    Replayed {
        /// As the request was numbered.
        attempt: u64,
        /// The message.
        frame: Frame<Bytes>,
    },
    /// The replay is complete.
    ReplayEnded {
        /// As the request was numbered.
        attempt: u64,
    },
    /// The replay broke off.
    ReplayFailed {
        /// As the request was numbered.
        attempt: u64,
    },
    /// Somebody found the picture wrong.
    Resync(Resync),
    /// A deadline may have passed.
    Tick,
}

/// How thoroughly to mend a wrong picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resync {
    /// Ask whether anything came after the last message that we know.
    Verify,
    /// Replace it if the engine's buffer still tells the whole story; else it is better than the buffer.
    Fill,
    /// Replace it by what the engine's buffer tells, from its start.
    Replay,
    /// Forget it and learn from now on: the engine's own events were wrong.
    Forget,
}

/// What the machine asks of the host.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Ask the replay socket for all messages from `from` on. Ends an earlier replay.
    Replay {
        /// Goes with every answer.
        attempt: u64,
        /// First sequence number wanted.
        from: u64,
    },
    /// The replay with this number is no longer wanted.
    CancelReplay {
        /// As the request was numbered.
        attempt: u64,
    },
    /// Something that an operator may want to read once.
    Notice(Notice),
}

/// Why a recovery runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
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
    /// Somebody found the picture wrong.
    Resync,
}

/// What was noticed. Each is said when it begins, not with every message that shows it.
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
        cause: Cause,
        /// Messages that it brought.
        messages: u64,
    },
    /// A recovery was given up: the replay socket does not answer.
    RecoveryFailed {
        /// Why it ran.
        cause: Cause,
    },
    /// Messages are missing and there is no replay socket; the rank was emptied.
    GapWithoutReplay,
    /// The engine cleared its cache.
    Cleared {
        /// Whose.
        rank: DpRank,
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
        rank: DpRank,
    },
    /// A recovery took so long that live messages had to be dropped.
    HeldDropped,
}

impl fmt::Display for Notice {
    /// What happened and what was done about it, for a log line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gap { expected, found } => {
                let missing = found - expected;
                write!(f, "{missing} event messages are missing before number {found}")
            }
            Self::Restarted => f.write_str("the engine was restarted: its cache picture starts anew"),
            Self::ReplayTooShort { asked, first } => write!(
                f,
                "the engine's replay buffer begins at {first}, {asked} was asked for: older blocks are \
                 not known (a larger buffer_steps in its kv-events-config would help)"
            ),
            Self::Recovered { cause, messages } => {
                write!(f, "caught up by {messages} replayed messages (cause: {cause:?})")
            }
            Self::RecoveryFailed { cause } => write!(
                f,
                "the replay socket does not answer (cause: {cause:?}): going on without the past; \
                 check the replay address"
            ),
            Self::GapWithoutReplay => f.write_str(
                "event messages are missing and no replay socket is known: the cache picture starts \
                 anew (set replay_endpoint in the engine's kv-events-config)",
            ),
            Self::Cleared { .. } => f.write_str("the engine cleared its cache"),
            Self::Refused(error) => write!(f, "an event message cannot be read: {error}"),
            Self::Skipped(Skip::BlockSize { engine }) => write!(
                f,
                "the blocks of its events have {engine} tokens, those of its model's index have not: they \
                 cannot be used (set --kv-cache-block-size and block-size= to {engine} or leave them out, and start \
                 all engines of the model with the same --block-size)"
            ),
            Self::Skipped(skip) => write!(f, "some events do not count: {skip:?}"),
            Self::BlockSizeFits => f.write_str("the engine's blocks have the expected size again"),
            Self::Pairs => f.write_str("tokens come as pairs, as with Eagle-style speculation"),
            Self::Orphans { .. } => {
                f.write_str("a block follows one that was never announced: something was missed")
            }
            Self::HeldDropped => {
                f.write_str("live messages were dropped during a long replay; they are asked for again")
            }
        }
    }
}
