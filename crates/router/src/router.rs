//! The state machine's door.

use kvasir_placement::{Overlap, WorkerSpec};
use kvasir_types::{RequestId, SequenceHash, Time, WorkerId, WorkerRank};

use crate::{Arrival, Decision, Input, Output, RouteError, RouterConfig, Sent, SessionStep};

/// What a rank would have to do if a prompt went there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PotentialLoad {
    /// The rank.
    pub rank: WorkerRank,
    /// Prompt tokens waiting there plus those of this prompt that it does not hold.
    pub potential_prefill_tokens: u64,
    /// Blocks of its running requests with this one added.
    pub potential_decode_blocks: u64,
    /// Requests running there.
    pub active_requests: u32,
}

/// The router as a value. See the [crate] for what it promises.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    workers: Vec<WorkerSpec>,
    turn: u64,
}

impl Router {
    /// A router without workers.
    #[must_use]
    pub fn new(config: RouterConfig) -> Self {
        Self {
            config,
            workers: Vec::new(),
            turn: 0,
        }
    }

    /// Its settings.
    #[must_use]
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Takes one input and appends what is to be done. `now` must not go back; if it does, it counts as
    /// the latest time seen.
    pub fn step(&mut self, now: Time, input: Input, out: &mut Vec<Output>) {
        let _ = now;
        match input {
            Input::Joined(spec) | Input::Updated(spec) => {
                self.leave(spec.id);
                self.workers.push(spec);
            }
            Input::Left(worker) => self.leave(worker),
            Input::Arrived(arrival) => out.push(self.arrive(&arrival)),
            _ => {}
        }
    }

    /// When the next `Tick` is due, if nothing happens before; `None` for never.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        None
    }

    /// The latest decision about a request, while the ring still holds it.
    #[must_use]
    pub fn explain(&self, id: RequestId) -> Option<&Decision> {
        let _ = id;
        None
    }

    /// What each rank would have to do if a prompt went there, one row per rank.
    pub fn potential_loads(
        &mut self,
        now: Time,
        isl_tokens: u32,
        overlap: &Overlap,
        sequence: &[SequenceHash],
        out: &mut Vec<PotentialLoad>,
    ) {
        let _ = (now, isl_tokens, overlap, sequence);
        out.clear();
    }

    fn leave(&mut self, worker: WorkerId) {
        self.workers.retain(|w| w.id != worker);
    }

    fn arrive(&mut self, arrival: &Arrival) -> Output {
        let id = arrival.id;
        let ranks: Vec<WorkerRank> = self
            .workers
            .iter()
            .flat_map(WorkerSpec::rank_iter)
            .collect();
        let turn = usize::try_from(self.turn).unwrap_or(0);
        self.turn += 1;
        match ranks.get(turn.checked_rem(ranks.len()).unwrap_or(0)) {
            Some(&target) => Output::Send(Sent {
                id,
                target,
                booked: !arrival.query_only,
                record: false,
                overlap_blocks: 0,
                cached_tokens: 0,
                queued: std::time::Duration::ZERO,
                session: SessionStep::None,
            }),
            None => Output::Refuse {
                id,
                error: RouteError::NoEndpoints { known: 0, down: 0 },
            },
        }
    }
}
