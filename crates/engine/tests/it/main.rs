//! The engine model against a real vLLM's recordings, and its invariants under random drive.

mod behaviour;
mod captures;
mod random;

use kvasir_engine::{Engine, EngineRequest, OutputTokens, Prompt, Step};
use kvasir_hash::Scope;
use kvasir_types::{RequestId, Token};

/// A request with a seeded answer of `max_tokens` tokens.
fn request(id: u128, tokens: &[Token], block_size: u32, max_tokens: u32) -> EngineRequest {
    EngineRequest {
        id: RequestId(id),
        prompt: Prompt::new(tokens, block_size, &Scope::default()),
        output: OutputTokens::Seeded {
            seed: id as u64,
            vocabulary: 50_000,
        },
        max_tokens,
        priority: 0,
        announce_hits: false,
    }
}

/// Steps until nothing is left to do, and returns the steps.
fn run(engine: &mut Engine) -> Vec<Step> {
    let mut steps = Vec::new();
    while !engine.is_idle() {
        let mut step = Step::default();
        engine.step(&mut step);
        steps.push(step);
        assert!(steps.len() < 100_000, "the engine does not come to an end");
    }
    steps
}
