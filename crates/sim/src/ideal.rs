//! The best hit share that any policy could have: one cache, without limit, that has seen everything.

use std::collections::HashSet;

use crate::prompt::PromptHasher;
use crate::{Piece, Trace};

/// The share of prompt tokens of `trace` that one engine with an endless cache would find, requests
/// coming one after the other in the trace's order. Answers count, as they do in an engine; the last
/// token of a prompt is always computed.
#[must_use]
pub fn ideal_hit_share(trace: &Trace, block_size: u32) -> f64 {
    let mut hasher = PromptHasher::new(block_size);
    let mut seen = HashSet::new();
    let (mut found, mut asked) = (0u64, 0u64);
    for request in &trace.requests {
        let (len, answer) = (
            request.prompt.len(),
            request.output_tokens.saturating_sub(1),
        );
        let more = Piece {
            seed: request.answer_seed,
            len: answer,
        };
        let hashed = hasher.hash(&request.prompt, Some(more));
        let most = (len.saturating_sub(1) / block_size.max(1)) as usize;
        let known = hashed
            .sequence
            .iter()
            .take(most)
            .take_while(|h| seen.contains(*h))
            .count();
        found += known as u64 * u64::from(block_size);
        asked += u64::from(len);
        seen.extend(hashed.sequence.iter().copied());
    }
    found as f64 / asked.max(1) as f64
}
