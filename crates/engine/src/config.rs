//! Settings of an engine: capacity, limits, scheduling, caching behaviour.

use kvasir_options::{EngineFamily, PreemptionMode, engine};
use kvasir_profile::{GridError, Polynomial, Preset, StepTimes};

/// Blocks of the pool that no request can have.
const fn reserved_blocks(family: EngineFamily) -> u32 {
    match family {
        EngineFamily::Vllm => 1,
        EngineFamily::Sglang | EngineFamily::Trtllm => 0,
    }
}

/// In which order waiting requests enter the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Higher priority first, then first come; the least urgent is preempted.
    Priority,
}

/// One rank of an engine. [`EngineConfig::default`] is an engine of 16,384 blocks of 64 tokens with the
/// step times of Dynamo's polynomial; presets are better: [`EngineConfig::preset`].
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Whose caching behaviour it has.
    ///
    /// vLLM: a block can be shared from the moment it is scheduled, so that equal prompts of one step share; a block
    /// computed twice is kept twice under one hash; output blocks appear one by one; one block of the pool is never
    /// used. SGLang: prompt blocks can be shared after the pass that computed them, output blocks when the request
    /// ends; a block is kept once. TensorRT-LLM: prompt blocks can be shared when the whole prompt is computed, output
    /// blocks as they fill; a block is kept once.
    pub family: EngineFamily,
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks of the pool; vLLM never uses one of them.
    pub num_blocks: u32,
    /// Requests in the batch.
    pub max_num_seqs: u32,
    /// Tokens computed in one step.
    pub max_num_batched_tokens: u32,
    /// Longest request, prompt and output together.
    pub max_model_len: u32,
    /// Prompts longer than what is left of a step are computed in chunks.
    pub chunked_prefill: bool,
    /// Most prompt tokens of one request in one step; `None` for no such limit.
    pub long_prefill_tokens: Option<u32>,
    /// Blocks are shared between requests.
    pub prefix_caching: bool,
    /// Which request is preempted when the pool is full. With [`PreemptionMode::Fifo`] a request enters only if all
    /// that is known of it fits, so that two requests do not preempt each other without end.
    pub preemption: PreemptionMode,
    /// Which request enters first.
    pub scheduling: SchedulingPolicy,
    /// Waiting requests; one more is refused. Preempted requests wait beside them.
    pub max_waiting: u32,
    /// How long a step takes.
    pub times: StepTimes,
    /// Steps take this many times less.
    pub speedup: f64,
    /// Stored events carry the tokens of their blocks; the event sockets of real engines send them.
    pub event_tokens: bool,
}

/// Why a configuration is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A count that must be at least 1.
    #[error("{0} is 0; it must be at least 1")]
    Zero(&'static str),
    /// The pool is smaller than the longest request.
    #[error(
        "the pool holds {tokens} tokens and a request may have {max_model_len}; raise num_blocks or \
         lower max_model_len"
    )]
    PoolTooSmall {
        /// Tokens of the pool.
        tokens: u64,
        /// The longest request.
        max_model_len: u32,
    },
    /// The speedup is not a positive number.
    #[error("speedup is {0}; it must be a positive number")]
    Speedup(f64),
    /// The measured step times cannot be read.
    #[error("step times: {0}")]
    Times(#[from] GridError),
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            family: engine::ENGINE_TYPE.default,
            block_size: 64,
            num_blocks: 16_384,
            max_num_seqs: engine::MAX_NUM_SEQS.default,
            max_num_batched_tokens: engine::MAX_NUM_BATCHED_TOKENS.default,
            max_model_len: engine::MAX_MODEL_LEN_DEFAULT,
            chunked_prefill: engine::ENABLE_CHUNKED_PREFILL.default,
            long_prefill_tokens: engine::LONG_PREFILL_TOKEN_THRESHOLD.default,
            prefix_caching: engine::ENABLE_PREFIX_CACHING.default,
            preemption: engine::PREEMPTION_MODE.default,
            scheduling: SchedulingPolicy::Fcfs,
            max_waiting: 65_536,
            times: StepTimes::Polynomial(Polynomial),
            speedup: engine::SPEEDUP.default,
            event_tokens: false,
        }
    }
}

impl EngineConfig {
    /// The engine of a preset, in blocks of `block_size` tokens: as many as fit beside its weights.
    pub fn preset(preset: Preset, block_size: u32) -> Result<Self, ConfigError> {
        if block_size == 0 {
            return Err(ConfigError::Zero("block_size"));
        }
        let blocks = preset.kv_tokens() / u64::from(block_size);
        Ok(Self {
            block_size,
            num_blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            times: StepTimes::Measured(preset.profile()?),
            ..Self::default()
        })
    }

    /// Blocks that requests can have.
    #[must_use]
    pub fn usable_blocks(&self) -> u32 {
        self.num_blocks.saturating_sub(reserved_blocks(self.family))
    }

    /// Tokens that a sequence which lacks `lacking` gets of a step that has `budget` left.
    pub(crate) fn most_new(&self, lacking: u32, budget: u32) -> u32 {
        lacking
            .min(self.long_prefill_tokens.unwrap_or(u32::MAX))
            .min(budget)
    }

    /// Checks the configuration.
    pub fn check(&self) -> Result<(), ConfigError> {
        let counts = [
            ("block_size", self.block_size),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_model_len", self.max_model_len),
            ("max_waiting", self.max_waiting),
            ("long_prefill_tokens", self.long_prefill_tokens.unwrap_or(1)),
        ];
        if let Some((name, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(ConfigError::Zero(name));
        }
        if !self.speedup.is_finite() || self.speedup <= 0.0 {
            return Err(ConfigError::Speedup(self.speedup));
        }
        let tokens = u64::from(self.usable_blocks()) * u64::from(self.block_size);
        if tokens < u64::from(self.max_model_len) {
            return Err(ConfigError::PoolTooSmall {
                tokens,
                max_model_len: self.max_model_len,
            });
        }
        Ok(())
    }
}
