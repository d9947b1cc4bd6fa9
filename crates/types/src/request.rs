//! A request as a token worker receives it, and the answer as it comes back.

use std::sync::Arc;

use crate::{DpRank, RequestId, Token};

/// Tokens in: what the frontend hands to a worker once a prompt is templated and tokenized.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenRequest {
    /// The same for all attempts at one request.
    pub id: RequestId,
    /// The served model's name.
    pub model: Arc<str>,
    /// The prompt; never empty.
    pub tokens: Arc<[Token]>,
    /// When to stop and how to draw.
    pub sampling: Sampling,
    /// The rank that the router chose.
    pub rank: DpRank,
    /// Larger is more urgent; engines without priorities ignore it.
    pub priority: i32,
    /// LoRA adapter, if not the base model.
    pub lora: Option<Arc<str>>,
    /// Cache namespace: blocks are shared only under the same salt.
    pub salt: Option<Arc<str>>,
}

/// When to stop and how to draw the next token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Stop after this many tokens.
    pub max_tokens: u32,
    /// Do not stop before this many.
    pub min_tokens: u32,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<Token>,
    /// Go on past the model's end-of-sequence token.
    pub ignore_eos: bool,
    /// 0 draws the likeliest token.
    pub temperature: f32,
    /// Nucleus share, 1 for all.
    pub top_p: f32,
    /// Fixes the draw where the engine can.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_tokens: 16,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            temperature: 1.0,
            top_p: 1.0,
            seed: None,
        }
    }
}

/// Tokens out: one item of a worker's answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenItem {
    /// New tokens; may be empty in the last item.
    pub tokens: Vec<Token>,
    /// Prompt tokens that the engine found in its cache, where it says so (usually the first item).
    pub cached_tokens: Option<u32>,
    /// Present on the last item only.
    pub finish: Option<FinishReason>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model's own end, or a stop token.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
    /// Somebody cancelled it.
    Cancelled,
    /// The engine failed.
    Error,
}
