//! How a source's events are taken in, and how a wrong cache view is repaired.

use std::time::Duration;

use kvasir_types::WorkerRank;
use kvasir_wire::TranslateOptions;
use kvasir_wire::native::Encoding;

/// How a source's messages are read, and by which numbers they are put in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventFormat {
    /// Batches of vLLM and SGLang, all of one worker, numbered by their publisher.
    EngineBatches {
        /// Whose they are; a batch may name another rank of the same worker.
        rank: WorkerRank,
    },
    /// Dynamo's router events: each names its worker and its rank and is numbered within that rank. A source
    /// may carry several workers; those count that [`Sequencer::add_worker`](crate::Sequencer::add_worker)
    /// named.
    RouterEvents(Encoding),
}

/// How one source's events are taken in.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamOptions {
    /// Block size and image placeholder of the model.
    pub translate: TranslateOptions,
    /// Whether the engine has a replay socket that we know of.
    pub replay: bool,
    /// Silence after which a replay counts as broken. A server under load answers between batches.
    pub replay_timeout: Duration,
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

impl StreamOptions {
    /// The defaults, for blocks of `block_size` tokens.
    #[must_use]
    pub const fn new(block_size: u32) -> Self {
        Self {
            translate: TranslateOptions {
                block_size,
                image_token: None,
            },
            replay: true,
            replay_timeout: Duration::from_secs(5),
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

/// How thoroughly to repair a wrong cache view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resync {
    /// Ask whether anything came after the last message that we know.
    Verify,
    /// Replace it if the engine's buffer still has everything since its start; else it is better than the buffer.
    Fill,
    /// Replace it by what the engine's buffer has, from its start.
    Replay,
    /// Forget it and learn from now on: the engine's own events were wrong.
    Forget,
}
