//! Step times interpolated from measurements.
//!
//! Measured are prompts alone and decodes alone; a real step mixes them. The model of a mixed step: the
//! matrix work of all its tokens adds up (it is linear from a few hundred tokens on), each sequence's
//! attention adds what it added when measured alone, and a pass with any prompt in it never takes less
//! than the shortest prompt pass, nor than its decodes alone.

use crate::grid::Grid;
use crate::{Chunk, GridError, Point, StepWork};

/// New tokens from which a prompt pass is bound by arithmetic and no longer by launching kernels; below
/// it the arithmetic of a chunk is its share of this many tokens.
const COMPUTE_BOUND_TOKENS: f64 = 512.0;

/// Measured step times of one model on one device.
#[derive(Clone, Debug)]
pub struct Profile {
    prefill: Grid,
    decode: Grid,
    /// Shortest prompt pass, milliseconds.
    prefill_floor_ms: f64,
    /// Arithmetic of one token among many, milliseconds.
    token_ms: f64,
}

impl Profile {
    /// A profile from measurements: `prefill` has rows of new tokens, `decode` rows of sequences; the
    /// columns of both are tokens cached before, for each sequence.
    pub fn new(prefill: &[Point], decode: &[Point]) -> Result<Self, GridError> {
        let (prefill, decode) = (Grid::new(prefill)?, Grid::new(decode)?);
        Ok(Self {
            prefill_floor_ms: prefill.min_ms(),
            token_ms: prefill.at(COMPUTE_BOUND_TOKENS, 0.0) / COMPUTE_BOUND_TOKENS,
            prefill,
            decode,
        })
    }

    /// Milliseconds of a decode step of `sequences`, each attending to `context` tokens.
    #[must_use]
    pub fn decode_ms(&self, sequences: u32, context: f64) -> f64 {
        self.decode.at(f64::from(sequences), context)
    }

    /// Milliseconds of a step that mixes prompts and decodes.
    #[must_use]
    pub fn step_ms(&self, work: &StepWork<'_>) -> f64 {
        let context = work.mean_context();
        let decode_alone = match work.decodes {
            0 => 0.0,
            sequences => self.decode_ms(sequences, context),
        };
        if work.chunks.is_empty() {
            return decode_alone;
        }
        let prompts: f64 = work.chunks.iter().map(|c| self.chunk_ms(*c)).sum();
        let decodes = match work.decodes {
            0 => 0.0,
            n => f64::from(n) * self.token_ms + decode_alone - self.decode_ms(n, 0.0),
        };
        (prompts + decodes)
            .max(self.prefill_floor_ms)
            .max(decode_alone)
    }

    /// What a chunk adds to a busy step.
    fn chunk_ms(&self, chunk: Chunk) -> f64 {
        let new = f64::from(chunk.new);
        let arithmetic = if new < COMPUTE_BOUND_TOKENS {
            new * self.token_ms
        } else {
            self.prefill.at(new, 0.0)
        };
        arithmetic + self.attention_ms(new, f64::from(chunk.cached))
    }

    /// What attending to `cached` tokens adds to computing `new` ones. Between one token (a decode) and
    /// the smallest prompt measured, a line.
    fn attention_ms(&self, new: f64, cached: f64) -> f64 {
        if cached <= 0.0 {
            return 0.0;
        }
        let first = self.prefill.first_row();
        let prompt = self.prefill.at(new, cached) - self.prefill.at(new, 0.0);
        if new >= first || first <= 1.0 {
            return prompt.max(0.0);
        }
        let single = self.decode.at(1.0, cached) - self.decode.at(1.0, 0.0);
        let share = ((new - 1.0) / (first - 1.0)).clamp(0.0, 1.0);
        (single + (prompt - single) * share).max(0.0)
    }
}
