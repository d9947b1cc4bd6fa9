//! Prompts that are cheap to keep and quick to make: tokens follow from seeds.
//!
//! A trace of an hour has more prompt tokens than memory should hold. A prompt is kept as pieces, each a
//! seed and a length, and becomes tokens when its request arrives. Equal pieces are equal tokens, and an
//! engine's seeded answer is the piece of the same seed, so that a next turn can quote it.

use std::sync::Arc;

use kvasir_hash::{BlockHasher, sequence_hashes};
use kvasir_types::{LocalHash, Rng, SequenceHash, Token};

/// Tokens are drawn below this.
pub(crate) const VOCABULARY: u32 = 128_000;

/// `len` tokens that follow from `seed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What they follow from.
    pub seed: u64,
    /// How many.
    pub len: u32,
}

impl Piece {
    /// Appends its tokens.
    pub fn extend(&self, tokens: &mut Vec<Token>) {
        let mut rng = Rng::new(self.seed);
        let draw = |_| rng.below(u64::from(VOCABULARY)) as Token;
        tokens.extend((0..self.len).map(draw));
    }
}

/// Where a prompt's tokens come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptSource {
    /// Pieces, one after the other.
    Pieces(Box<[Piece]>),
    /// The tokens themselves.
    Tokens(Box<[Token]>),
    /// Only hashes are known: those of the complete blocks of `block_size` tokens.
    Hashes {
        /// Tokens of a block.
        block_size: u32,
        /// Tokens of the prompt.
        len: u32,
        /// One for each complete block.
        locals: Arc<[LocalHash]>,
    },
}

impl PromptSource {
    /// Tokens of the prompt.
    #[must_use]
    pub fn len(&self) -> u32 {
        match self {
            Self::Pieces(pieces) => pieces.iter().fold(0, |sum, p| p.len.saturating_add(sum)),
            Self::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            Self::Hashes { len, .. } => *len,
        }
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block size for which its hashes were made, if it has only hashes.
    #[must_use]
    pub fn fixed_block_size(&self) -> Option<u32> {
        match self {
            Self::Hashes { block_size, .. } => Some(*block_size),
            Self::Pieces(_) | Self::Tokens(_) => None,
        }
    }
}

/// A prompt that arrived: hashed once, for router and engine.
#[derive(Clone, Debug)]
pub(crate) struct PromptHashes {
    pub(crate) len: u32,
    pub(crate) locals: Arc<[LocalHash]>,
    pub(crate) sequence: Arc<[SequenceHash]>,
    pub(crate) tail: Vec<Token>,
}

/// Turns prompts into hashes; keeps its buffers.
#[derive(Debug)]
pub(crate) struct PromptHasher {
    pub(crate) hasher: BlockHasher,
    pub(crate) block_size: u32,
    tokens: Vec<Token>,
    locals: Vec<LocalHash>,
}

impl PromptHasher {
    pub(crate) fn new(block_size: u32) -> Self {
        Self {
            hasher: BlockHasher::new(block_size as usize, &kvasir_hash::Scope::default()),
            block_size,
            tokens: Vec::new(),
            locals: Vec::new(),
        }
    }

    /// Hashes `source` followed by `more`.
    pub(crate) fn hash(&mut self, source: &PromptSource, more: Option<Piece>) -> PromptHashes {
        self.tokens.clear();
        match source {
            PromptSource::Pieces(pieces) => pieces.iter().for_each(|p| p.extend(&mut self.tokens)),
            PromptSource::Tokens(tokens) => self.tokens.extend_from_slice(tokens),
            PromptSource::Hashes { len, locals, .. } => return self.known(*len, locals),
        }
        if let Some(piece) = more {
            piece.extend(&mut self.tokens);
        }
        self.locals.clear();
        self.hasher.extend(&self.tokens, &mut self.locals);
        let complete = self.locals.len() * self.block_size as usize;
        PromptHashes {
            len: u32::try_from(self.tokens.len()).unwrap_or(u32::MAX),
            locals: Arc::from(self.locals.as_slice()),
            sequence: sequence_hashes(&self.locals).into(),
            tail: self.tokens.get(complete..).unwrap_or_default().to_vec(),
        }
    }

    /// A prompt of which only hashes are known: its tail is made up.
    fn known(&self, len: u32, locals: &Arc<[LocalHash]>) -> PromptHashes {
        let complete = locals.len() as u32 * self.block_size;
        let mut tail = Vec::new();
        let seed = locals.last().map_or(u64::from(len), |hash| hash.0);
        Piece {
            seed,
            len: len.saturating_sub(complete),
        }
        .extend(&mut tail);
        PromptHashes {
            len,
            locals: Arc::clone(locals),
            sequence: sequence_hashes(locals).into(),
            tail,
        }
    }
}
