//! How a source's events are taken in, and how a wrong cache view is repaired.

use std::time::Duration;

use kvasir_types::WorkerRank;
use kvasir_wire::native::Encoding;

use crate::TranslateOptions;

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
    /// Whether what is missing can be asked for: the engine has a replay socket that we know of, the worker an index of its own.
    pub replay: bool,
    /// Whether the source is a log that others wrote: it brings everything in order, what it brings twice it brings in one piece, and an answer is
    /// followed by all that came after what it tells.
    pub log: bool,
    /// Silence after which a replay or a question counts as broken. A server under load answers between batches.
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
    /// Whether what was stored twice is to be removed twice, as engines do it; who publishes router events counts copies itself.
    pub copies: bool,
    /// The first question about a rank is put within this time, so that many routers and workers do not ask at once.
    pub start_jitter: Duration,
    /// What the jitter comes from.
    pub seed: u64,
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
            log: false,
            replay_timeout: Duration::from_secs(5),
            attempts_max: 5,
            backoff: Duration::from_millis(200),
            backoff_max: Duration::from_secs(10),
            held_bytes_max: 64 << 20,
            replace_bytes_max: 256 << 20,
            orphan_blocks_max: 1 << 16,
            copies: true,
            start_jitter: Duration::ZERO,
            seed: 0,
            verify_every: Some(Duration::from_secs(60)),
        }
    }

    /// The defaults for router events of a worker that answers questions about its own index.
    #[must_use]
    pub const fn router_events(block_size: u32, seed: u64) -> Self {
        Self {
            replay_timeout: Duration::from_secs(30),
            attempts_max: 8,
            backoff_max: Duration::from_secs(30),
            held_bytes_max: 16 << 20,
            copies: false,
            start_jitter: Duration::from_millis(100),
            seed,
            ..Self::new(block_size)
        }
    }

    /// The defaults for router events that are read from a log.
    #[must_use]
    pub const fn log(block_size: u32) -> Self {
        Self {
            log: true,
            // The whole log may have to be read.
            replay_timeout: Duration::from_secs(300),
            attempts_max: 8,
            copies: false,
            verify_every: None,
            ..Self::new(block_size)
        }
    }

    /// The defaults for router events of a worker that cannot be asked.
    #[must_use]
    pub const fn unanswered(block_size: u32) -> Self {
        Self {
            replay: false,
            ..Self::new(block_size)
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
