//! Two pools of workers: some compute prompts, the others answer.
//!
//! A request is placed twice, each time by the router of its pool, as a frontend does it: its prompt first; when that is
//! computed, its answer, on a worker that takes the prompt over and then generates every token, the first included. Where a
//! rule allows it, the router of those that answer is asked first, and a prompt of which little is left to compute there is
//! computed there.
//!
//! Workers that answer come first in the order of ids; so do their routers.

use std::ops::Range;

use kvasir_engine::EngineRequest;
use kvasir_router::{Input, Outcome, Overrides, Placement};
use kvasir_types::{WorkerId, WorkerRank};

use super::queue::Event;
use super::routers::{id, request_of};
use super::{Leg, SimError, State, World};
use crate::{Fleet, FleetChange};

pub(super) fn prefill_workers(fleet: &Fleet) -> u32 {
    fleet.prefill.map_or(0, |pool| pool.workers)
}

pub(super) fn check(fleet: &Fleet) -> Result<(), SimError> {
    let Some(pool) = &fleet.prefill else {
        return Ok(());
    };
    let comes_or_goes = |change: &FleetChange| !matches!(change, FleetChange::Slows { .. });
    if pool.workers == 0 {
        return Err(SimError::Zero("prefill workers"));
    }
    if fleet.replicas > 1 {
        return Err(SimError::Pools("more than one router"));
    }
    if fleet.changes.iter().any(comes_or_goes) {
        return Err(SimError::Pools("a worker that leaves or joins"));
    }
    Ok(())
}

impl World<'_> {
    /// What is done first of a request.
    pub(super) fn first_leg(&self) -> Leg {
        match &self.fleet.prefill {
            None => Leg::Whole,
            Some(pool) if pool.bypass.is_some() => Leg::Question,
            Some(_) => Leg::Prefill,
        }
    }

    /// The router that places this part of a request.
    pub(super) fn replica_of(&self, request: u32, leg: Leg) -> usize {
        let routers = self.fleet.replicas.max(1);
        let one = (request % routers) as usize;
        match leg {
            Leg::Prefill => one + routers as usize,
            Leg::Whole | Leg::Question | Leg::Decode => one,
        }
    }

    /// The routers that place requests on a worker.
    pub(super) fn replicas_of(&self, worker: WorkerId) -> Range<usize> {
        let routers = self.fleet.replicas as usize;
        let prefills = self.fleet.prefill.is_some() && worker.0 >= u64::from(self.fleet.workers);
        match prefills {
            true => routers..2 * routers,
            false => 0..routers,
        }
    }

    /// What an answer to a prompt that comes from elsewhere changes: nothing is left to compute, and blocks that are handed
    /// over are not shared. Caches are worth nothing then, unless some prompts are computed here.
    pub(super) fn overrides_of(&self, leg: Leg) -> Overrides {
        let bypass = self.fleet.prefill.is_some_and(|pool| pool.bypass.is_some());
        match leg {
            Leg::Decode => Overrides {
                overlap_score_credit: (!bypass).then_some(0.0),
                assume_kv_reuse: Some(false),
                track_prefill_tokens: Some(false),
                ..Overrides::default()
            },
            Leg::Whole | Leg::Question | Leg::Prefill => Overrides::default(),
        }
    }

    /// It is known where a request would be answered.
    pub(super) fn answered(&mut self, sent: &Placement) {
        let request = request_of(sent.id);
        let prompt = self.trace.requests[request as usize].prompt.len();
        let rule = self.fleet.prefill.and_then(|pool| pool.bypass);
        match rule.is_some_and(|rule| rule.holds(prompt, sent.cached_tokens)) {
            true => self.ask(request, Leg::Whole, Some(sent.target)),
            false => self.ask(request, Leg::Prefill, None),
        }
    }

    /// A router has no worker for a request. A question that has no answer changes nothing.
    pub(super) fn refused(&mut self, request: u32) {
        match self.requests[request as usize].leg {
            Leg::Question => self.ask(request, Leg::Prefill, None),
            Leg::Whole | Leg::Prefill | Leg::Decode => self.end(request, State::Refused),
        }
    }

    /// A prompt is computed: now its answer is placed.
    pub(super) fn prefilled(&mut self, at: usize, request: u32) {
        let host = &mut self.hosts[at];
        host.settle(self.now);
        host.in_flight -= 1;
        let target = host.rank;
        let slot = &mut self.requests[request as usize];
        slot.prefilled_on = at;
        let first = Input::FirstToken { id: id(request) };
        self.inputs.push_back((slot.replica, first));
        self.release(request, target, Outcome::Completed { output_tokens: 1 });
        self.ask(request, Leg::Decode, None);
    }

    /// A prompt is on its way to the worker that answers it: what that does not hold, after what its worker sends, and the
    /// other receives, already.
    pub(super) fn transfer(&mut self, sent: &Placement, admission: EngineRequest) {
        let Some(pool) = self.fleet.prefill else {
            return self.give(sent.target, admission);
        };
        let from = self.requests[request_of(sent.id) as usize].prefilled_on;
        let to = self.host_of(sent.target);
        let tokens = admission.prompt.len().saturating_sub(sent.cached_tokens);
        let busy = [from, to].map(|at| self.hosts.get(at).map_or(self.now, |h| h.link_until));
        let begin = busy.into_iter().fold(self.now, std::cmp::max);
        let until = begin + pool.link.duration(tokens);
        for at in [from, to] {
            if let Some(host) = self.hosts.get_mut(at) {
                host.link_until = until;
            }
        }
        let admission = Box::new(admission);
        let target: WorkerRank = sent.target;
        self.queue
            .push(until, Event::Transferred { target, admission });
    }

    pub(super) fn transferred(&mut self, target: WorkerRank, admission: EngineRequest) {
        self.give(target, admission);
    }
}
