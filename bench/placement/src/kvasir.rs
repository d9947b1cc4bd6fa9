//! Our router behind the benchmark's interface.

use std::sync::Arc;
use std::time::Duration;

use kvasir_router::{
    Arrival, Input, Outcome, Output, Overlap, RankOverlap, Router, RouterConfig, RouterMode,
    RouterPolicy, WorkerSpec,
};
use kvasir_types::{RequestId, SequenceHash, Time, WorkerId, WorkerRank};

use crate::{Ask, BLOCK, RING, Scheduler};

/// Between two things that happen.
const STEP: Duration = Duration::from_millis(20);

/// Our router, by policy and by what the fleet is doing: one of [`LOADED`], [`LINEAR`] and [`SECONDS`].
pub(crate) struct Kvasir<const KIND: u8> {
    router: Router,
    out: Vec<Output>,
    now: Time,
}

/// The linear cost on the fleet that the peer has, too: a tenth of its requests wait for their first token.
pub(crate) const LOADED: u8 = 0;
/// The linear cost where no prompt waits.
pub(crate) const LINEAR: u8 = 1;
/// Placement by seconds on the same fleet: with prompts waiting it would hold requests back.
pub(crate) const SECONDS: u8 = 2;

fn hashes(sequence: &[u64]) -> Arc<[SequenceHash]> {
    sequence.iter().map(|h| SequenceHash(*h)).collect()
}

impl<const KIND: u8> Kvasir<KIND> {
    fn step(&mut self, input: Input) -> Option<u64> {
        self.out.clear();
        if KIND != LOADED {
            self.now += STEP;
        }
        self.router.step(self.now, input, &mut self.out);
        self.out.iter().find_map(|o| match o {
            Output::Send(sent) => Some(sent.target.worker.0),
            _ => None,
        })
    }
}

impl<const KIND: u8> Scheduler for Kvasir<KIND> {
    type Prepared = Box<Arrival>;

    fn new(workers: u64) -> Self {
        let config = RouterConfig {
            router_mode: RouterMode::Kv,
            router_policy: match KIND {
                SECONDS => RouterPolicy::Time,
                _ => RouterPolicy::Kv,
            },
            kv_cache_block_size: BLOCK,
            router_decision_log: RING,
            ..RouterConfig::default()
        };
        let mut kvasir = Self {
            router: Router::new(config),
            out: Vec::new(),
            now: Time::ZERO,
        };
        for id in 0..workers {
            let mut spec = WorkerSpec::new(WorkerId(id));
            if KIND != LOADED {
                // Only where the size of a cache is known have evictions a price.
                spec.kv_total_blocks = Some(16_384);
            }
            kvasir.step(Input::Joined(spec));
        }
        kvasir
    }

    fn seed(&mut self, id: u64, worker: u64, sequence: &[u64], started: bool) {
        let id = RequestId(u128::from(id));
        let mut arrival = Arrival::new(id, sequence.len() as u32 * BLOCK);
        arrival.sequence = hashes(sequence);
        arrival.pin.worker = Some(WorkerId(worker));
        self.step(Input::Arrived(Box::new(arrival)));
        if started || KIND != LOADED {
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
            .potential_loads(self.now, 1, &Overlap::none(), &sequence, &mut rows);
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
