//! What a cache that all workers share holds of a prompt.
//!
//! Answers one question: which blocks of this prompt could any worker fetch instead of computing them? A [`CachePool`] knows: an
//! external pool that is asked ([`CachePool::find`] over a socket), or one whose events are followed ([`HicachePool`]).
//!
//! What always holds: asking takes `--shared-cache-timeout-ms` at most and fails no request: an error, a late answer and a pool that is
//! away are no credit, each counted; at most [`ASKING_MAX`] questions are under way; a prompt is asked for once, however many workers
//! it is tried on; of a long prompt the first [`POOL_TOKENS_MAX`] tokens are asked for.

mod hicache;
mod pages;

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_index::SharedRanges;
use kvasir_telemetry::observe_ms;
use kvasir_types::Token;

use crate::context::HostContext;
use crate::lookaside::{Lookaside, LookasideWords, NoAnswer};
pub use hicache::HicachePool;
pub use pages::HicacheLayout;

/// Questions that are under way at once; the next prompt is placed without an answer.
pub const ASKING_MAX: usize = 256;
/// Tokens of a prompt that are asked for.
pub const POOL_TOKENS_MAX: usize = 1 << 17;

/// A prompt as a pool is asked for it.
#[derive(Clone, Debug)]
pub struct PoolPrompt {
    /// The model that is to read it.
    pub model: Arc<str>,
    /// Its tokens.
    pub tokens: Arc<[Token]>,
    /// Tokens in a block.
    pub block_size: u32,
    /// The namespace that the client chose for its blocks; empty: the common one.
    pub salt: Arc<str>,
    /// The adapter under which its blocks are cached; empty: none.
    pub lora: Arc<str>,
}

impl PoolPrompt {
    /// Its whole blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        let blocks = self.tokens.len() / self.block_size.max(1) as usize;
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }
}

/// What [`CachePool::find`] returns; an error says what happened.
pub type PoolFuture<'a> = Pin<Box<dyn Future<Output = Result<SharedRanges, String>> + Send + 'a>>;

/// A cache that all workers share.
pub trait CachePool: fmt::Debug + Send + Sync + 'static {
    /// Which blocks of a prompt it holds.
    fn find<'a>(&'a self, prompt: &'a PoolPrompt) -> PoolFuture<'a>;
}

/// A pool with the limits of asking it.
#[derive(Debug)]
pub struct SharedCache {
    pool: Arc<dyn CachePool>,
    lookaside: Lookaside,
}

/// What the log says of a pool.
const WORDS: LookasideWords = LookasideWords {
    failed: "the shared cache failed several times in a row: prompts are placed without it and it is asked again from time to time; see \
             --shared-cache-url and --shared-cache-timeout-ms",
    again: "the shared cache answers again",
};

impl SharedCache {
    /// A pool that has so long to answer.
    #[must_use]
    pub fn new(pool: Arc<dyn CachePool>, timeout: Duration) -> Arc<Self> {
        Arc::new(Self {
            pool,
            lookaside: Lookaside::new(WORDS, timeout, ASKING_MAX),
        })
    }

    /// The blocks of a prompt that the pool holds; `None` if it did not say.
    async fn ask(&self, prompt: &PoolPrompt, context: &HostContext) -> Option<SharedRanges> {
        let start = context.clock.now();
        // Asked only if it may be.
        let question = async { self.pool.find(prompt).await };
        let asked = self.lookaside.ask(context.clock, question).await;
        let metrics = &context.metrics;
        let outcome = asked
            .as_ref()
            .map_or_else(|none| none.name(), |_| "answered");
        let queries = &metrics.shared_cache_queries_total;
        queries.with_label_values(&[outcome]).inc();
        if matches!(asked, Err(NoAnswer::Error | NoAnswer::Late)) {
            metrics.shared_cache_errors_total.inc();
        }
        if !matches!(asked, Err(NoAnswer::Busy | NoAnswer::Away)) {
            let took = context.clock.now() - start;
            observe_ms(&metrics.overhead_shared_cache_query_ms, took);
        }
        let blocks = prompt.blocks();
        let found = within(&asked.ok()?, blocks);
        let share = f64::from(found.total()) / f64::from(blocks.max(1));
        metrics.router_shared_cache_hit_rate.observe(share);
        Some(found)
    }
}

/// Positions beyond the prompt are nothing.
fn within(found: &SharedRanges, blocks: u32) -> SharedRanges {
    let cut = |range: &Range<u32>| range.start.min(blocks)..range.end.min(blocks);
    SharedRanges::from_ranges(found.ranges().iter().map(cut))
}

/// A prompt that a pool is asked for, once.
#[derive(Debug)]
pub(crate) struct PooledPrompt {
    prompt: PoolPrompt,
    answer: OnceLock<PoolAnswer>,
}

/// What a pool said of a prompt.
#[derive(Clone, Debug)]
pub(crate) enum PoolAnswer {
    /// It holds these blocks.
    Holds(Arc<[Range<u32>]>),
    /// It did not say.
    Unknown,
}

impl PooledPrompt {
    pub(crate) fn new(prompt: PoolPrompt) -> Arc<Self> {
        Arc::new(Self {
            prompt,
            answer: OnceLock::new(),
        })
    }

    /// What the pool says; it is asked the first time.
    pub(crate) async fn answer(&self, cache: &SharedCache, context: &HostContext) -> PoolAnswer {
        if let Some(answer) = self.answer.get() {
            return answer.clone();
        }
        let found = cache.ask(&self.prompt, context).await;
        let answer = match found {
            Some(found) => PoolAnswer::Holds(found.ranges().into()),
            None => PoolAnswer::Unknown,
        };
        self.answer.get_or_init(|| answer).clone()
    }
}

impl PoolAnswer {
    /// Its blocks; none if it did not say.
    pub(crate) fn ranges(&self) -> Arc<[Range<u32>]> {
        match self {
            Self::Holds(ranges) => Arc::clone(ranges),
            Self::Unknown => Arc::default(),
        }
    }

    /// How many leading blocks a worker with `own` of them can find in all: its own, then the pool's without a hole.
    pub(crate) fn reach(&self, own: u32) -> u32 {
        match self {
            Self::Holds(ranges) => ranges
                .iter()
                .fold(own, |end, range| match range.start <= end {
                    true => end.max(range.end),
                    false => end,
                }),
            Self::Unknown => u32::MAX,
        }
    }
}

#[cfg(test)]
mod tests;
