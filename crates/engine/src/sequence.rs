//! One request inside the engine: what is known of it, what is computed, what it holds.

use std::sync::Arc;

use kvasir_hash::next_sequence_hash;
use kvasir_types::{EngineHash, FinishReason, LocalHash, RequestId, Rng, SequenceHash, Token};

use crate::pool::BlockId;
use crate::{EngineRequest, OutputTokens, Prompt};

/// Where a request's next token comes from.
#[derive(Clone, Debug)]
enum TokenSource {
    Seeded(Rng, u32),
    Given(Arc<[Token]>),
    Repeated(Arc<[Token]>),
}

/// A request from its admission to its end.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    pub(crate) priority: i32,
    /// Admissions before this one.
    pub(crate) arrival: u64,
    pub(crate) announce_hits: bool,
    prompt: Prompt,
    source: TokenSource,
    max_tokens: u32,
    /// Tokens generated.
    pub(crate) outputs: u32,
    /// Tokens whose keys and values exist.
    pub(crate) computed: u32,
    /// Blocks held, in order; the last one may be partly filled.
    pub(crate) blocks: Vec<BlockId>,
    /// Leading blocks that can be found under their hashes.
    pub(crate) stored: usize,
    /// Prompt tokens found in the cache when the request first entered the batch.
    pub(crate) cached_tokens: Option<u32>,
    /// Hashes of all complete blocks, prompt and output; made when first needed.
    hashes: Vec<EngineHash>,
    /// Local hashes of complete blocks past the prompt's.
    output_locals: Vec<LocalHash>,
    /// Tokens after the last complete block.
    open: Vec<Token>,
    /// All output tokens, where events are to carry them.
    output_tokens: Vec<Token>,
}

impl Sequence {
    pub(crate) fn new(request: EngineRequest, arrival: u64, max_tokens: u32) -> Self {
        let EngineRequest {
            id,
            mut prompt,
            output,
            priority,
            announce_hits,
            ..
        } = request;
        let source = match output {
            OutputTokens::Seeded { seed, vocabulary } => {
                TokenSource::Seeded(Rng::new(seed), vocabulary)
            }
            OutputTokens::Given(tokens) => TokenSource::Given(tokens),
            OutputTokens::Repeated(tokens) => TokenSource::Repeated(tokens),
        };
        let open = std::mem::take(&mut prompt.tail);
        Self {
            id,
            priority,
            arrival,
            announce_hits,
            prompt,
            source,
            max_tokens,
            outputs: 0,
            computed: 0,
            blocks: Vec::new(),
            stored: 0,
            cached_tokens: None,
            hashes: Vec::new(),
            output_locals: Vec::new(),
            open,
            output_tokens: Vec::new(),
        }
    }

    /// Tokens known: the prompt and the output so far.
    pub(crate) fn known(&self) -> u32 {
        self.prompt.len.saturating_add(self.outputs)
    }

    /// Tokens of the prompt.
    pub(crate) fn prompt_len(&self) -> u32 {
        self.prompt.len
    }

    /// Whether its next step computes one new token on top of everything.
    pub(crate) fn decodes(&self) -> bool {
        self.outputs > 0 && self.computed + 1 == self.known()
    }

    /// Hashes of all complete blocks.
    pub(crate) fn hashes(&mut self) -> &[EngineHash] {
        for at in self.hashes.len()..self.prompt.locals.len() {
            let local = self.prompt.locals[at];
            self.push_hash(local);
        }
        &self.hashes
    }

    /// The local hash of block `at`.
    pub(crate) fn local(&self, at: usize) -> Option<LocalHash> {
        let outputs = || {
            self.output_locals
                .get(at.checked_sub(self.prompt.locals.len())?)
        };
        self.prompt.locals.get(at).or_else(outputs).copied()
    }

    fn push_hash(&mut self, local: LocalHash) {
        let parent = self.hashes.last().map(|hash| SequenceHash(hash.0));
        let SequenceHash(hash) = next_sequence_hash(parent, local);
        self.hashes.push(EngineHash(hash));
    }

    /// Draws the next token; with the last one, why it is the last.
    pub(crate) fn next_token(&mut self) -> (Token, Option<FinishReason>) {
        let (token, end) = match &mut self.source {
            TokenSource::Seeded(rng, vocabulary) => {
                (rng.below(u64::from(*vocabulary)) as Token, false)
            }
            TokenSource::Given(tokens) => {
                let at = self.outputs as usize;
                (tokens.get(at).copied().unwrap_or(0), at + 1 >= tokens.len())
            }
            TokenSource::Repeated(tokens) => {
                let at = (self.outputs as usize).checked_rem(tokens.len());
                let token = at.and_then(|at| tokens.get(at)).copied();
                (token.unwrap_or(0), false)
            }
        };
        self.outputs += 1;
        if self.prompt.tokens.is_some() {
            self.output_tokens.push(token);
        }
        self.open.push(token);
        if self.open.len() >= self.prompt.block_size as usize {
            self.close_block();
        }
        let full = self.outputs >= self.max_tokens;
        let finish = full.then_some(FinishReason::Length);
        (token, finish.or(end.then_some(FinishReason::Stop)))
    }

    fn close_block(&mut self) {
        let mut local = Vec::with_capacity(1);
        self.prompt.hasher.extend(&self.open, &mut local);
        self.open.clear();
        if let Some(local) = local.first().copied() {
            self.hashes();
            self.output_locals.push(local);
            self.push_hash(local);
        }
    }

    /// Whether another engine has computed all but the last of its tokens. Once: what is dropped later is not handed over again.
    pub(crate) fn is_transferred(&self) -> bool {
        self.prompt.transferred
    }

    /// It has entered the batch.
    pub(crate) fn take_transfer(&mut self) {
        self.prompt.transferred = false;
    }

    /// Drops what is computed; the tokens stay known.
    pub(crate) fn reset(&mut self) {
        self.computed = 0;
        self.stored = 0;
    }

    /// The tokens of blocks `first..end`, if the prompt kept its tokens.
    pub(crate) fn tokens(&self, first: usize, end: usize) -> Vec<Token> {
        let Some(prompt) = &self.prompt.tokens else {
            return Vec::new();
        };
        let size = self.prompt.block_size as usize;
        let all = prompt.iter().chain(&self.output_tokens);
        all.skip(first * size)
            .take((end - first) * size)
            .copied()
            .collect()
    }
}
