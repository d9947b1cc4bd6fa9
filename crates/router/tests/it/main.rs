//! The router as its hosts see it: inputs in, outputs out.

#![expect(
    clippy::unwrap_used,
    reason = "a test says by failing what it expected"
)]

mod busy;
mod ejection;
mod filters;
mod history;
mod kv;
mod learned;
mod model;
mod models;
mod modes;
mod overload;
mod queue;
mod replicas;
mod sessions;
mod shadow;
mod time;
mod tracking;
mod what_if;

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_router::{
    Arrival, Input, Outcome, Output, Overlap, Placement, RankOverlap, RouteError, Router,
    RouterConfig, RouterMode, WorkerSpec,
};
use kvasir_types::{RequestId, SequenceHash, Time, WorkerId, WorkerRank};

/// A router with a clock in milliseconds and its outputs since the last look.
struct Host {
    router: Router,
    now: Time,
    out: Vec<Output>,
}

impl Host {
    /// A router in kv mode with what `change` changes.
    fn kv(change: impl FnOnce(&mut RouterConfig)) -> Self {
        let mut config = RouterConfig {
            router_mode: RouterMode::Kv,
            ..RouterConfig::default()
        };
        change(&mut config);
        Self::new(config)
    }

    fn new(config: RouterConfig) -> Self {
        Self {
            router: Router::new(config),
            now: Time::ZERO,
            out: Vec::new(),
        }
    }

    /// With workers 1 to `count`, one rank each.
    fn workers(mut self, count: u64) -> Self {
        for id in 1..=count {
            self.input(Input::Joined(WorkerSpec::new(WorkerId(id))));
        }
        self
    }

    fn join(&mut self, id: u64, change: impl FnOnce(&mut WorkerSpec)) {
        let mut spec = WorkerSpec::new(WorkerId(id));
        change(&mut spec);
        self.input(Input::Joined(spec));
    }

    fn at(&mut self, millis: u64) -> &mut Self {
        self.now = Time::from_millis(millis);
        self
    }

    fn input(&mut self, input: Input) -> &[Output] {
        self.out.clear();
        self.router.step(self.now, input, &mut self.out);
        &self.out
    }

    fn arrive(&mut self, arrival: Arrival) -> &[Output] {
        self.input(Input::Arrived(Box::new(arrival)))
    }

    /// Where a request is sent at once.
    fn sent(&mut self, arrival: Arrival) -> Placement {
        let id = arrival.id;
        let out = self.arrive(arrival);
        out.iter()
            .find_map(|o| match o {
                Output::Send(sent) if sent.id == id => Some(sent.clone()),
                _ => None,
            })
            .unwrap_or_else(|| panic!("{id} was not sent: {out:?}"))
    }

    fn worker(&mut self, arrival: Arrival) -> u64 {
        self.sent(arrival).target.worker.0
    }

    fn refused(&mut self, arrival: Arrival) -> RouteError {
        let id = arrival.id;
        let out = self.arrive(arrival);
        out.iter()
            .find_map(|o| match o {
                Output::Refuse { id: of, error } if *of == id => Some(error.clone()),
                _ => None,
            })
            .unwrap_or_else(|| panic!("{id} was not refused: {out:?}"))
    }

    fn first_token(&mut self, id: u128) -> &[Output] {
        self.input(Input::FirstToken { id: RequestId(id) })
    }

    fn finish(&mut self, id: u128) -> &[Output] {
        self.input(Input::Finished {
            id: RequestId(id),
            on: None,
            outcome: Outcome::Completed { output_tokens: 1 },
        })
    }

    /// Who was sent by the last input, in order.
    fn released(&self) -> Vec<u128> {
        let sent = self.out.iter().filter_map(|o| match o {
            Output::Send(sent) => Some(sent.id.0),
            _ => None,
        });
        sent.collect()
    }

    /// Prompt tokens and blocks booked on a worker's rank 0.
    fn load(&self, worker: u64) -> (u64, u64) {
        let load = self.router.load(WorkerRank::new(worker, 0)).unwrap();
        (load.prefill_tokens, load.active_blocks)
    }
}

/// A prompt of whole blocks of 16 tokens, its hashes those of `words`.
fn prompt(id: u128, words: &[u64]) -> Arrival {
    Arrival {
        sequence: chain(words),
        ..Arrival::new(RequestId(id), words.len() as u32 * 16)
    }
}

/// Chained hashes: equal at a place only if all words before it are.
pub(crate) fn chain(words: &[u64]) -> Arc<[SequenceHash]> {
    let mut hash = 7u64;
    words
        .iter()
        .map(|word| {
            hash = (hash ^ word)
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .rotate_left(29);
            SequenceHash(hash)
        })
        .collect()
}

/// `count` words that no other prompt has.
fn words(id: u64, count: u64) -> Vec<u64> {
    (0..count).map(|i| id * 1_000_000 + i).collect()
}

/// Worker `.0` holds `.1` blocks in device memory.
pub(crate) fn held(blocks: &[(u64, u32)]) -> Overlap {
    Overlap {
        ranks: blocks
            .iter()
            .map(|&(worker, device)| RankOverlap {
                rank: WorkerRank::new(worker, 0),
                device: f64::from(device),
                ..RankOverlap::default()
            })
            .collect(),
        shared: Vec::new(),
    }
}
