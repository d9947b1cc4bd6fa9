//! Traffic as it was: who asked what, when.

mod mooncake;
mod plain;
mod read;

use std::time::Duration;

use kvasir_types::{Rng, Time};

use crate::PromptSource;

pub use read::{TraceError, TraceFormat, TraceOptions};

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    /// When it arrives, unless it follows another one.
    pub at: Time,
    /// What it asks.
    pub prompt: PromptSource,
    /// Tokens it is answered with.
    pub output_tokens: u32,
    /// What the answer's tokens follow from.
    pub answer_seed: u64,
    /// The request whose end it waits for, and how long after that it comes.
    pub follows: Option<(u32, Duration)>,
    /// Larger is more urgent.
    pub priority: i32,
}

/// Requests, those that follow nothing in order of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Where it is from.
    pub name: String,
    /// Its requests. A request comes after the one it follows.
    pub requests: Vec<TraceRequest>,
}

impl Trace {
    /// From its first to its last arrival.
    #[must_use]
    pub fn span(&self) -> Duration {
        let first = self.requests.iter().map(|r| r.at).min();
        let last = self.requests.iter().map(|r| r.at).max();
        last.unwrap_or_default() - first.unwrap_or_default()
    }

    /// Tokens of all prompts.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.requests
            .iter()
            .map(|r| u64::from(r.prompt.len()))
            .sum()
    }

    /// Requests of one moment are spread over the time until the next moment, by chance that follows
    /// from `seed`, in their order. Published traces round their clocks, some to seconds; played as
    /// they are, they would be a series of bursts that nobody sent.
    pub fn spread(&mut self, seed: u64) {
        let mut rng = Rng::new(seed);
        let mut start = 0;
        while let Some(at) = self.requests.get(start).map(|r| r.at) {
            let same = self.requests[start..]
                .iter()
                .take_while(|r| r.at == at)
                .count();
            let next = self.requests.get(start + same).map_or(at, |r| r.at);
            let gap = (next - at).as_nanos() as u64;
            let mut offsets: Vec<u64> = (0..same).map(|_| rng.below(gap)).collect();
            offsets.sort_unstable();
            for (request, offset) in self.requests[start..].iter_mut().zip(offsets) {
                request.at = at + Duration::from_nanos(offset);
            }
            start += same;
        }
    }

    /// For each request the first one of its conversation: the one that follows nothing.
    #[must_use]
    pub fn conversations(&self) -> Vec<u32> {
        let mut first: Vec<u32> = Vec::with_capacity(self.requests.len());
        for (at, request) in (0u32..).zip(&self.requests) {
            let before = request.follows.map(|(before, _)| before as usize);
            first.push(before.and_then(|b| first.get(b).copied()).unwrap_or(at));
        }
        first
    }

    /// Keeps the first `count` requests.
    pub fn truncate(&mut self, count: usize) {
        self.requests.truncate(count);
    }
}
