//! A request as a token worker receives it, and the answer as it comes back.

use std::sync::Arc;

use crate::{DpRank, RequestId, Token, WorkerId, WorkerRank};

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
    /// What else workers of a fleet are told.
    pub context: RequestContext,
}

/// What a worker is told beside the prompt and how to draw. Most requests leave most of it out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestContext {
    /// The model's end-of-sequence tokens; none where the answer goes on past them.
    pub eos_tokens: Arc<[Token]>,
    /// Checksum of the model card by which the request was made (`mdc_sum`).
    pub card_sum: Option<Arc<str>>,
    /// What the client wants to be told beside the answer.
    pub annotations: Vec<Arc<str>>,
    /// How many tokens the client expects.
    pub expected_output_tokens: Option<u32>,
    /// Seconds by which it jumps the queue.
    pub priority_jump: Option<f64>,
    /// Goes before everything of a lower number.
    pub strict_priority: Option<u32>,
    /// The worker that the client asked for by id.
    pub pinned: Option<WorkerId>,
    /// The session that it belongs to.
    pub session: Option<AgentSession>,
    /// What the engine alone understands: JSON text of an object.
    pub extra_args: Option<Arc<str>>,
    /// What the client's headers say to the worker, by name.
    pub metadata: Vec<(Arc<str>, Arc<str>)>,
    /// Tell how likely the prompt's tokens were, with this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Whether special tokens stay out of text that the engine makes.
    pub skip_special_tokens: Option<bool>,
    /// The rank that computes the prompt, or did, where that is not the one that answers.
    pub prefill: Option<WorkerRank>,
    /// Where the rank of the prompt and that of the answer meet.
    pub bootstrap: Option<BootstrapRoom>,
    /// What the rank of the prompt said.
    pub prefill_result: Option<PrefillResult>,
}

/// Where decode workers meet a prefill worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootstrapAddress {
    /// Host name or address.
    pub host: Arc<str>,
    /// Port.
    pub port: u16,
}

/// A meeting of two workers that share one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootstrapRoom {
    /// Where.
    pub address: BootstrapAddress,
    /// Unlike that of any other request under way there.
    pub room: u64,
    /// A UUID that names the meeting, where the workers want one.
    pub handoff: Option<u128>,
}

/// What a prefill worker said when a prompt was computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefillResult {
    /// Where the prompt is, for the engine of the decode worker: JSON text that nobody else reads.
    pub disaggregated_params: Arc<str>,
    /// Tokens of the prompt that it found in its cache, where it says so.
    pub cached_tokens: Option<u32>,
}

/// The session of an agent, as its worker is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentSession {
    /// Its id.
    pub id: Arc<str>,
    /// What caused this turn, such as `user_message`.
    pub trigger: Option<Arc<str>>,
}

/// When to stop and how to draw the next token. What is `None` is left to the engine and its model's own defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Stop after this many tokens.
    pub max_tokens: u32,
    /// Do not stop before this many.
    pub min_tokens: u32,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<Token>,
    /// Continue past the model's end-of-sequence token.
    pub ignore_eos: bool,
    /// 0 draws the likeliest token.
    pub temperature: Option<f32>,
    /// Nucleus share, 1 for all.
    pub top_p: Option<f32>,
    /// Draw among this many of the likeliest tokens; -1 for all.
    pub top_k: Option<i32>,
    /// Draw only tokens at least this likely, relative to the likeliest; 0 for all.
    pub min_p: Option<f32>,
    /// Against tokens by how often they came; 0 is none.
    pub frequency_penalty: Option<f32>,
    /// Against tokens that came at all; 0 is none.
    pub presence_penalty: Option<f32>,
    /// Divides the odds of tokens that came, the prompt's included; 1 is none.
    pub repetition_penalty: Option<f32>,
    /// Added to the odds of these tokens.
    pub logit_bias: Vec<(Token, f32)>,
    /// The answer must follow a grammar or schema: JSON text of an object with one member, `json`, `regex`, `grammar` or
    /// `choice`.
    pub guided: Option<Arc<str>>,
    /// Tell how likely each token was, with this many alternatives.
    pub logprobs: Option<u32>,
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
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            frequency_penalty: None,
            presence_penalty: None,
            repetition_penalty: None,
            logit_bias: Vec::new(),
            guided: None,
            logprobs: None,
            seed: None,
        }
    }
}

/// Tokens out: one item of a worker's answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenItem {
    /// New tokens; may be empty in the last item.
    pub tokens: Vec<Token>,
    /// How likely each of them was, where the worker tells; else empty.
    pub logprobs: Vec<Likelihood>,
    /// Prompt tokens that the engine found in its cache, where it says so (usually the first item).
    pub cached_tokens: Option<u32>,
    /// Where the prompt is, for the engine that goes on with it: JSON text, from prefill workers alone.
    pub disaggregated_params: Option<Arc<str>>,
    /// Present on the last item only.
    pub finish: Option<FinishReason>,
}

/// How likely a token of an answer was.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Likelihood {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The likeliest tokens in its place, likeliest first, with theirs.
    pub top: Vec<(Token, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model's own end, or a stop token.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
    /// It was cancelled.
    Cancelled,
    /// The engine failed.
    Error,
}
