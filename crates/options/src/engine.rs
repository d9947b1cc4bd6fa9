//! Rows of the engine model. Where vLLM has the option, its name and default are vLLM's.

use crate::row::{Row, row};
use crate::{EngineFamily, PreemptionMode};

const TOKENS_MAX: u64 = 1 << 24;

/// Longest request where the option is unset and the cache is large enough.
pub const MAX_MODEL_LEN_DEFAULT: u32 = 131_072;

/// Whose caching behaviour the engine has.
pub const ENGINE_TYPE: Row<EngineFamily> = row!(EngineFamily::Vllm);
/// Requests in one batch.
pub const MAX_NUM_SEQS: Row<u32> = row!(256).whole(1, 1 << 20);
/// Tokens computed in one step.
pub const MAX_NUM_BATCHED_TOKENS: Row<u32> = row!(8192).whole(1, TOKENS_MAX);
/// Longest request, prompt and output together, in tokens.
pub const MAX_MODEL_LEN: Row<Option<u32>> = row!(None).whole(2, TOKENS_MAX);
/// Share cached blocks between requests.
pub const ENABLE_PREFIX_CACHING: Row<bool> = row!(true);
/// Compute long prompts in chunks.
pub const ENABLE_CHUNKED_PREFILL: Row<bool> = row!(true);
/// Most prompt tokens of one request in one step.
pub const LONG_PREFILL_TOKEN_THRESHOLD: Row<Option<u32>> = row!(None).whole(1, TOKENS_MAX);
/// Which request is preempted when the cache is full.
pub const PREEMPTION_MODE: Row<PreemptionMode> = row!(PreemptionMode::Lifo);
/// Factor by which steps are shorter than measured.
pub const SPEEDUP: Row<f64> = row!(1.0).positive();
