//! What an engine reports: each step, its load, its totals.

use std::time::Duration;

use kvasir_types::{FinishReason, KvEvent, RequestId, Token};

/// A change of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheEvent {
    /// The change. Consecutive removals of one allocation are one event; vLLM sends one event for each.
    pub event: KvEvent,
    /// The tokens of stored blocks, if [`crate::EngineConfig::event_tokens`] and the prompt kept them.
    pub tokens: Vec<Token>,
    /// The request that stored them.
    pub request: Option<RequestId>,
}

/// A request's first entry into the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestStart {
    /// The request.
    pub id: RequestId,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u32,
}

/// One token of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// The request.
    pub id: RequestId,
    /// The token.
    pub token: Token,
    /// With the first token: prompt tokens that were found in the cache.
    pub cached_tokens: Option<u32>,
    /// With the last token.
    pub finish: Option<FinishReason>,
}

/// What one step did; a buffer to be used again. Outputs and events are seen from outside when the step
/// ends, `duration` after it began.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// How long it takes.
    pub duration: Duration,
    /// Requests that entered the batch for the first time, in order.
    pub started: Vec<RequestStart>,
    /// Tokens, in batch order.
    pub outputs: Vec<Output>,
    /// Changes of the cache, in order.
    pub events: Vec<CacheEvent>,
    /// Prompt tokens computed.
    pub prefill_tokens: u32,
    /// Sequences that computed one token.
    pub decodes: u32,
    /// Requests preempted to make room; they are computed again.
    pub preempted: u32,
}

impl Step {
    pub(crate) fn clear(&mut self) {
        self.duration = Duration::ZERO;
        self.started.clear();
        self.outputs.clear();
        self.events.clear();
        (self.prefill_tokens, self.decodes, self.preempted) = (0, 0, 0);
    }
}

/// Load of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests in the batch.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Blocks that running requests hold.
    pub used_blocks: u32,
    /// Free blocks whose contents can still be found.
    pub cached_blocks: u32,
    /// Blocks that requests can have.
    pub total_blocks: u32,
    /// Prompt tokens still to be computed, running and waiting; without a cache lookup.
    pub pending_prefill_tokens: u64,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps.
    pub steps: u64,
    /// Requests admitted.
    pub admitted: u64,
    /// Requests that finished.
    pub finished: u64,
    /// Requests cancelled.
    pub cancelled: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Prompt tokens of requests that entered the batch.
    pub prompt_tokens: u64,
    /// Of these, found in the cache.
    pub cached_tokens: u64,
    /// Tokens looked up in the cache, recomputation included.
    pub queried_tokens: u64,
    /// Of these, found.
    pub hit_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
}
