//! How a worker is chosen, as a value.
//!
//! A policy scores the candidates, decides whether a rank is open now or the request should wait,
//! orders the waiting ones, and takes feedback. Dynamo's linear cost is one; the simple modes are others.
//! What it sees of the fleet carries what a cost in seconds needs, too: requests pending and decoding, their
//! context, when the oldest prompt became the oldest ([`Ledger::load`]), KV capacity ([`Fleet`]).

mod simple;

pub use simple::{DeviceAware, LeastLoaded, PowerOfTwo, Random, RoundRobin};

use std::fmt;
use std::time::Duration;

use kvasir_options::QueuePolicy;
use kvasir_types::{Rng, Time};

use crate::{
    Candidate, Fleet, Ledger, PrefillSample, Prompt, Scorer, ScoringContext, SlotSet, Weights,
    WinReason,
};

/// The fleet at one moment, with the buffers to work in.
#[derive(Debug)]
pub struct FleetView<'a> {
    /// The moment.
    pub now: Time,
    /// Who is there.
    pub fleet: &'a Fleet,
    /// What they have to do.
    pub ledger: &'a mut Ledger,
    /// Buffers.
    pub scorer: &'a mut Scorer,
}

/// A request as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest<'a> {
    /// Its prompt.
    pub prompt: Prompt<'a>,
    /// The settings of the cost, with what the request overrides.
    pub weights: Weights,
    /// 0 takes the best.
    pub temperature: f64,
    /// When ranks are closed to it.
    pub gate: Gate,
}

/// When a rank is closed to a request: above either figure of waiting prompt tokens. Both `None` never
/// closes, and then nothing is ever held.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gate {
    /// Prompt tokens.
    pub tokens: Option<u64>,
    /// Batches of prompt tokens.
    pub batches: Option<f64>,
}

impl Gate {
    /// Whether it can close at all.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.tokens.is_some() || self.batches.is_some()
    }

    /// Whether `waiting` prompt tokens on a rank with batches of `max_batched` are too many. Strict: as
    /// many as the limit are not.
    #[must_use]
    pub fn closes(&self, waiting: u64, max_batched: u64) -> bool {
        self.tokens.is_some_and(|limit| waiting > limit)
            || self
                .batches
                .is_some_and(|limit| waiting as f64 > limit * max_batched as f64)
    }
}

/// A request that has to wait, as its order sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WaitingRequest {
    /// When it arrived.
    pub arrived: Time,
    /// Seconds by which it moves ahead in the queue.
    pub priority_jump: f64,
    /// Prompt tokens.
    pub isl_tokens: u32,
    /// Of those, the ones cached on no eligible rank.
    pub uncached_tokens: u32,
}

impl WaitingRequest {
    /// Where the request stands in a queue of this order: higher goes first.
    #[must_use]
    pub fn urgency(&self, order: QueuePolicy) -> f64 {
        let offset = self.arrived.as_secs_f64();
        match order {
            QueuePolicy::Fcfs => self.priority_jump - offset,
            QueuePolicy::Lcfs => self.priority_jump + offset,
            QueuePolicy::Wspt => (1.0 + self.priority_jump) / f64::from(self.isl_tokens.max(1)),
            QueuePolicy::WsptUncached => {
                (1.0 + self.priority_jump) / f64::from(self.uncached_tokens.max(1))
            }
        }
    }
}

/// Outcome of earlier choices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Feedback {
    /// A prompt was computed.
    FirstToken(PrefillSample),
    /// A request ended.
    Ended {
        /// Where.
        slot: u32,
        /// Tokens it generated.
        output_tokens: u32,
        /// From booking to end.
        took: Duration,
    },
}

/// How a worker is chosen.
pub trait Policy: fmt::Debug + Send {
    /// Chooses among `eligible` (not empty). `kept` receives the cheapest with their terms, the winner
    /// among them, where the policy has a cost.
    fn choose(
        &mut self,
        view: &mut FleetView<'_>,
        request: &PlacementRequest<'_>,
        eligible: &SlotSet,
        rng: &mut Rng,
        kept: &mut Vec<Candidate>,
    ) -> Option<(u32, WinReason)>;

    /// Whether a rank takes this request now. A request for which no eligible rank does is held.
    fn is_open(&self, view: &FleetView<'_>, request: &PlacementRequest<'_>, slot: u32) -> bool {
        let _ = (view, request, slot);
        true
    }

    /// Where a held request stands: higher goes first.
    fn urgency(&self, waiting: &WaitingRequest) -> f64 {
        waiting.urgency(QueuePolicy::Fcfs)
    }

    /// Whether load and caches matter to it, so that blocks and prompt tokens are worth booking.
    fn weighs_load(&self) -> bool {
        false
    }

    /// Outcome of earlier choices.
    fn observe(&mut self, feedback: &Feedback) {
        let _ = feedback;
    }
}

/// Dynamo's cost: uncached prompt work plus decode load, in blocks; lowest wins.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinearCost {
    /// Order of waiting requests.
    pub order: QueuePolicy,
}

impl Policy for LinearCost {
    fn choose(
        &mut self,
        view: &mut FleetView<'_>,
        request: &PlacementRequest<'_>,
        eligible: &SlotSet,
        rng: &mut Rng,
        kept: &mut Vec<Candidate>,
    ) -> Option<(u32, WinReason)> {
        let context = ScoringContext {
            now: view.now,
            weights: &request.weights,
            prompt: &request.prompt,
            fleet: view.fleet,
        };
        view.scorer.choose(
            &context,
            request.temperature,
            eligible,
            view.ledger,
            rng,
            kept,
        )
    }

    fn is_open(&self, view: &FleetView<'_>, request: &PlacementRequest<'_>, slot: u32) -> bool {
        let waiting = view.ledger.prefill_tokens(slot, view.now);
        !request.gate.closes(waiting, view.fleet.max_batched(slot))
    }

    fn urgency(&self, waiting: &WaitingRequest) -> f64 {
        waiting.urgency(self.order)
    }

    fn weighs_load(&self) -> bool {
        true
    }
}
