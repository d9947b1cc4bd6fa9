//! A request as the engine takes it: a prompt by its block hashes, and the output it will get.

use std::sync::Arc;

use kvasir_hash::{BlockHasher, Scope};
use kvasir_types::{LocalHash, RequestId, Token};

/// A prompt, reduced to what caching needs.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub(crate) hasher: BlockHasher,
    pub(crate) block_size: u32,
    pub(crate) len: u32,
    pub(crate) locals: Arc<[LocalHash]>,
    /// Tokens after the last complete block.
    pub(crate) tail: Vec<Token>,
    /// All tokens, where stored events are to carry them.
    pub(crate) tokens: Option<Arc<[Token]>>,
    /// Another engine has computed it.
    pub(crate) transferred: bool,
}

impl Prompt {
    /// Hashes `tokens` in blocks of `block_size`.
    #[must_use]
    pub fn new(tokens: &[Token], block_size: u32, scope: &Scope<'_>) -> Self {
        let hasher = BlockHasher::new(block_size as usize, scope);
        let mut locals = Vec::new();
        hasher.extend(tokens, &mut locals);
        let complete = locals.len().saturating_mul(block_size as usize);
        let tail = tokens.get(complete..).unwrap_or_default().to_vec();
        let len = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        Self::from_parts(hasher, block_size, len, locals.into(), tail)
    }

    /// For a host that hashed the prompt already: `len` tokens, hashed with `hasher` in blocks of
    /// `block_size` into `locals`, and the tokens after the last complete block.
    #[must_use]
    pub fn from_parts(
        hasher: BlockHasher,
        block_size: u32,
        len: u32,
        locals: Arc<[LocalHash]>,
        tail: Vec<Token>,
    ) -> Self {
        Self {
            hasher,
            block_size,
            len,
            locals,
            tail,
            tokens: None,
            transferred: false,
        }
    }

    /// Another engine has computed it and hands it over: all but its last token is there when the request enters the batch.
    #[must_use]
    pub fn transferred(mut self) -> Self {
        self.transferred = true;
        self
    }

    /// Keeps the tokens too, so that stored events can carry them.
    #[must_use]
    pub fn keep_tokens(mut self, tokens: Arc<[Token]>) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The local hashes of its complete blocks.
    #[must_use]
    pub fn locals(&self) -> &Arc<[LocalHash]> {
        &self.locals
    }
}

/// Which tokens a request generates.
#[derive(Clone, Debug)]
pub enum OutputTokens {
    /// Drawn from a seed, below `vocabulary`, until `max_tokens`.
    Seeded {
        /// Determines the whole output.
        seed: u64,
        /// One more than the largest token.
        vocabulary: u32,
    },
    /// These, and then the end.
    Given(Arc<[Token]>),
    /// These over and over, until `max_tokens`, as with `ignore_eos`.
    Repeated(Arc<[Token]>),
}

/// One request.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    /// Its id; unique among those in the engine.
    pub id: RequestId,
    /// The prompt.
    pub prompt: Prompt,
    /// Which tokens come out.
    pub output: OutputTokens,
    /// Stop after this many tokens; clipped to what the model's length leaves.
    pub max_tokens: u32,
    /// Larger is more urgent; only [`crate::SchedulingPolicy::Priority`] looks at it.
    pub priority: i32,
    /// Announce blocks that are found as if stored (vLLM's `kv_cache_report_mode=full`).
    pub announce_hits: bool,
}

/// Why a request was refused. Nothing of it stays in the engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmitError {
    /// There is nothing to compute.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// There is nothing to generate.
    #[error("max_tokens is 0; it must be at least 1")]
    NoTokens,
    /// It does not fit the model.
    #[error("the prompt has {prompt} tokens; this model takes at most {max}")]
    TooLong {
        /// Tokens of the prompt.
        prompt: u32,
        /// The longest prompt possible.
        max: u32,
    },
    /// It was hashed for another engine.
    #[error("the prompt was hashed in blocks of {prompt} tokens; the engine's have {engine}")]
    BlockSize {
        /// The prompt's.
        prompt: u32,
        /// The engine's.
        engine: u32,
    },
    /// A request of this id is in the engine.
    #[error("request {0} is in the engine already")]
    Duplicate(RequestId),
    /// Too many requests wait.
    #[error("{0} requests are waiting, which is the limit; try again later or elsewhere")]
    QueueFull(u32),
}
