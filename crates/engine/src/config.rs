//! What an engine is made of: capacity, limits, habits.

use kvasir_profile::{GridError, Polynomial, Preset, StepTimes};

/// Whose caching habits the engine has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flavor {
    /// vLLM: a block can be shared from the moment it is scheduled, so that equal prompts of one step
    /// share; a block computed twice is kept twice under one name; output blocks appear one by one; one
    /// block of the pool is never used.
    #[default]
    Vllm,
    /// SGLang: prompt blocks can be shared after the pass that computed them, output blocks when the
    /// request ends; a block is kept once.
    Sglang,
    /// TensorRT-LLM: prompt blocks can be shared when the whole prompt is computed, output blocks as
    /// they fill; a block is kept once.
    TensorRtLlm,
}

impl Flavor {
    /// Blocks of the pool that no request can have.
    pub(crate) const fn reserved_blocks(self) -> u32 {
        match self {
            Self::Vllm => 1,
            Self::Sglang | Self::TensorRtLlm => 0,
        }
    }
}

/// Who makes room when the pool is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preemption {
    /// The request that came last into the batch.
    #[default]
    Lifo,
    /// The request that came first. So that two do not throw each other out for ever, a request then
    /// enters only if all that is known of it fits.
    Fifo,
}

/// In which order waiting requests enter the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// As they came.
    #[default]
    Arrival,
    /// The more urgent first, then as they came; the least urgent makes room.
    Priority,
}

/// One rank of an engine. [`EngineConfig::default`] is an engine of 16,384 blocks of 64 tokens whose
/// steps take what Dynamo's polynomial says; presets are better: [`EngineConfig::preset`].
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Whose caching habits.
    pub flavor: Flavor,
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks of the pool; vLLM never uses one of them.
    pub num_blocks: u32,
    /// Requests in the batch.
    pub max_num_seqs: u32,
    /// Tokens computed in one step.
    pub max_num_batched_tokens: u32,
    /// Longest request, prompt and answer together.
    pub max_model_len: u32,
    /// Prompts longer than what is left of a step are computed in pieces.
    pub chunked_prefill: bool,
    /// Most prompt tokens of one request in one step; `None` for no such limit.
    pub long_prefill_tokens: Option<u32>,
    /// Blocks are shared between requests.
    pub prefix_caching: bool,
    /// Who makes room.
    pub preemption: Preemption,
    /// Who enters first.
    pub order: Order,
    /// Waiting requests; one more is refused. Those thrown out of the batch wait beside them.
    pub max_waiting: u32,
    /// How long a step takes.
    pub times: StepTimes,
    /// Steps take this many times less.
    pub speedup: f64,
    /// Stored events carry the tokens of their blocks; the event sockets of real engines send them.
    pub event_tokens: bool,
}

/// What makes no engine.
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
    /// No number to divide by.
    #[error("speedup is {0}; it must be a positive number")]
    Speedup(f64),
    /// The measured step times cannot be read.
    #[error("step times: {0}")]
    Times(#[from] GridError),
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            flavor: Flavor::Vllm,
            block_size: 64,
            num_blocks: 16_384,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            max_model_len: 131_072,
            chunked_prefill: true,
            long_prefill_tokens: None,
            prefix_caching: true,
            preemption: Preemption::Lifo,
            order: Order::Arrival,
            max_waiting: 65_536,
            times: StepTimes::Polynomial(Polynomial),
            speedup: 1.0,
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
        self.num_blocks
            .saturating_sub(self.flavor.reserved_blocks())
    }

    /// Tokens that a sequence which lacks `lacking` gets of a step that has `budget` left.
    pub(crate) fn most_new(&self, lacking: u32, budget: u32) -> u32 {
        lacking
            .min(self.long_prefill_tokens.unwrap_or(u32::MAX))
            .min(budget)
    }

    /// Says what is wrong with it, if anything.
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
