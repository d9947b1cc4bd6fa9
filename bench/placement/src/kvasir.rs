//! Our router behind the benchmark's interface.

use std::sync::Arc;

use kvasir_router::{
    Arrival, Input, Outcome, Output, Overlap, RankOverlap, Router, RouterConfig, RouterMode,
    WorkerSpec,
};
use kvasir_types::{RequestId, SequenceHash, Time, WorkerId, WorkerRank};

use crate::{Ask, BLOCK, RING, Scheduler};

pub(crate) struct Kvasir {
    router: Router,
    out: Vec<Output>,
}

fn hashes(sequence: &[u64]) -> Arc<[SequenceHash]> {
    sequence.iter().map(|h| SequenceHash(*h)).collect()
}

impl Kvasir {
    fn step(&mut self, input: Input) -> Option<u64> {
        self.out.clear();
        self.router.step(Time::ZERO, input, &mut self.out);
        self.out.iter().find_map(|o| match o {
            Output::Send(sent) => Some(sent.target.worker.0),
            _ => None,
        })
    }
}

impl Scheduler for Kvasir {
    type Prepared = Box<Arrival>;

    fn new(workers: u64) -> Self {
        let config = RouterConfig {
            router_mode: RouterMode::Kv,
            kv_cache_block_size: BLOCK,
            router_decision_log: RING,
            ..RouterConfig::default()
        };
        let mut kvasir = Self {
            router: Router::new(config),
            out: Vec::new(),
        };
        for id in 0..workers {
            kvasir.step(Input::Joined(WorkerSpec::new(WorkerId(id))));
        }
        kvasir
    }

    fn seed(&mut self, id: u64, worker: u64, sequence: &[u64], started: bool) {
        let id = RequestId(u128::from(id));
        let mut arrival = Arrival::new(id, sequence.len() as u32 * BLOCK);
        arrival.sequence = hashes(sequence);
        arrival.pin.worker = Some(WorkerId(worker));
        self.step(Input::Arrived(Box::new(arrival)));
        if started {
            self.step(Input::FirstToken { id });
        }
    }

    fn prepare(&mut self, ask: &Ask) -> Box<Arrival> {
        let id = RequestId(u128::from(ask.id));
        let mut arrival = Arrival::new(id, ask.sequence.len() as u32 * BLOCK);
        arrival.sequence = hashes(&ask.sequence);
        arrival.overlap = overlap(ask);
        Box::new(arrival)
    }

    fn decide(&mut self, prepared: Box<Arrival>) -> u64 {
        self.step(Input::Arrived(prepared)).expect("sent")
    }

    fn end(&mut self, id: u64) {
        let id = RequestId(u128::from(id));
        self.step(Input::FirstToken { id });
        self.step(Input::Finished {
            id,
            on: None,
            outcome: Outcome::Completed { output_tokens: 1 },
        });
    }

    fn loads(&mut self, ask: &Ask) -> Vec<(u64, u64, u64)> {
        let mut rows = Vec::new();
        let sequence = hashes(&ask.sequence);
        self.router
            .potential_loads(Time::ZERO, 1, &Overlap::none(), &sequence, &mut rows);
        let mut loads: Vec<_> = rows
            .iter()
            .map(|r| {
                (
                    r.rank.worker.0,
                    r.potential_prefill_tokens - 1,
                    r.potential_decode_blocks,
                )
            })
            .collect();
        loads.sort_unstable();
        loads
    }
}

fn overlap(ask: &Ask) -> Overlap {
    Overlap {
        ranks: ask
            .held
            .iter()
            .map(|&(worker, blocks)| RankOverlap {
                rank: WorkerRank::new(worker, 0),
                device: f64::from(blocks),
                ..RankOverlap::default()
            })
            .collect(),
        shared: Vec::new(),
    }
}
