//! What becomes of a request once it is sent: first token, tokens, end; and of its session.

use std::time::Duration;

use kvasir_placement::{Feedback, Sign};
use kvasir_types::{RequestId, WorkerRank};

use super::{FreedCapacity, Router};
use crate::session::BindingKind;
use crate::{
    Arrival, Observation, Outcome, Output, PeerChange, SessionAction, SessionCommand, SessionEvent,
};

impl Router {
    pub(super) fn first_token(&mut self, id: RequestId, out: &mut Vec<Output>) {
        self.session_dispatched(id, out);
        let slot = self.ledger.slot_of(id);
        if let Some(rank) = slot.and_then(|slot| self.fleet.rank(slot)) {
            let began = self.ledger.booked_at(id);
            self.served(rank.worker, began, false, out);
        }
        if self.sign(id, Sign::Seen).is_some() {
            self.tell(id, PeerChange::PrefillCompleted, out);
        }
        if let Some(slot) = slot.filter(|_| self.admission.is_on()) {
            self.note_freed(slot);
        }
        if let Some(done) = self.ledger.first_token(self.now, id) {
            if let (Some(took), Some(rank)) = (done.took, self.fleet.rank(done.slot)) {
                self.model
                    .learn(rank.worker, done.tokens, done.cached, took);
            }
            self.policy.observe(&Feedback::FirstToken(done));
            self.load_changed(done.slot, out);
            self.note_freed(done.slot);
        }
    }

    /// The prompt is likely computed: its load goes, and nothing is learnt of the worker.
    pub(super) fn prefilled(&mut self, id: RequestId, out: &mut Vec<Output>) {
        if let Some(slot) = self.sign(id, Sign::Presumed) {
            self.tell(id, PeerChange::PrefillCompleted, out);
            if self.admission.is_on() {
                self.note_freed(slot);
            }
        }
        if let Some(done) = self.ledger.prefilled(self.now, id) {
            self.load_changed(done.slot, out);
            self.note_freed(done.slot);
        }
    }

    /// Notes a sign that a prompt is computed; where, if it is news.
    fn sign(&mut self, id: RequestId, sign: Sign) -> Option<u32> {
        let change = self.ledger.sign(id, sign)?;
        self.admission.signed(self.now, &change);
        Some(change.slot)
    }

    pub(super) fn tokens(&mut self, id: RequestId, generated: u32, out: &mut Vec<Output>) {
        let track = self.config.router_track_output_blocks && self.tracks_blocks();
        self.ledger.output(self.now, id, generated, track);
        if let Some(slot) = self.ledger.slot_of(id).filter(|_| track) {
            self.load_changed(slot, out);
        }
    }

    pub(super) fn finish(
        &mut self,
        id: RequestId,
        on: Option<WorkerRank>,
        outcome: Outcome,
        out: &mut Vec<Output>,
    ) {
        if let Some(left) = on.is_none().then(|| self.queue.remove(id)).flatten() {
            self.no_longer_waits(&left, false);
            self.freed = FreedCapacity::Anything;
            return;
        }
        let booked = self.ledger.slot_of(id);
        let here = booked.and_then(|slot| self.fleet.rank(slot));
        if let Some(rank) = on.or(here) {
            let began = self.ledger.booked_at(id).filter(|_| here == Some(rank));
            match outcome {
                Outcome::Unreachable => self.hide(rank.worker, began, out),
                Outcome::Broken => self.broke(rank.worker, began, out),
                Outcome::Overloaded => self.errored(rank.worker, began, out),
                Outcome::Completed { .. } if began.is_some() => {
                    self.served(rank.worker, began, true, out);
                }
                _ => {}
            }
        }
        let Some(slot) = booked else {
            return;
        };
        if on.is_some() && on != here {
            return;
        }
        if let Outcome::Completed { output_tokens } = outcome {
            self.session_dispatched(id, out);
            if let Some(times) = self.times_mut() {
                times.estimator_mut().answered(output_tokens);
            }
            let took = self
                .ledger
                .booked_at(id)
                .map_or(Duration::ZERO, |at| self.now - at);
            self.policy.observe(&Feedback::Ended {
                slot,
                output_tokens,
                took,
            });
        }
        let failed = matches!(
            outcome,
            Outcome::Unreachable
                | Outcome::Overloaded
                | Outcome::Failed
                | Outcome::Broken
                | Outcome::NotSent
        );
        self.sessions.release(self.now, id, failed);
        let served = matches!(outcome, Outcome::Completed { .. });
        self.free(id, served, out);
    }

    /// Frees a booking, whoever asks; `served` if its answer is whole.
    pub(super) fn free(&mut self, id: RequestId, served: bool, out: &mut Vec<Output>) {
        if let Some(freed) = self.ledger.free(self.now, id) {
            self.tell(id, PeerChange::Free, out);
            self.admission
                .ended(self.now, freed.slot, freed.sign, served);
            self.load_changed(freed.slot, out);
            self.note_freed(freed.slot);
        }
    }

    /// The rank that a request's session is bound to, if it may be followed.
    pub(super) fn follow_session(&mut self, arrival: &Arrival) -> Option<WorkerRank> {
        let session = arrival.session.as_ref().filter(|s| self.serves(s.action))?;
        let target = self.sessions.find(&session.id)?;
        if !self.takes_new(target) || arrival.failed.contains(&target.worker) {
            self.sessions.unbind(&session.id);
            return None;
        }
        let allowed = arrival.constraints.allowed.as_ref();
        let barred = allowed.is_some_and(|list| !list.contains(&target.worker));
        // Another model of the session may live where this one is not served.
        if barred || !self.serves_model(arrival, target) {
            return None;
        }
        if !arrival.query_only {
            self.sessions.touch(self.now, &session.id);
        }
        Some(target)
    }

    /// Sessions are a matter of kv mode; the header form only with a time to live.
    fn serves(&self, action: SessionAction) -> bool {
        let header = action == SessionAction::Header;
        self.policy.weighs_load()
            && (!header || self.config.router_session_affinity_ttl_secs.is_some())
    }

    /// What a request that was just sent means for its session.
    pub(super) fn bind_session(
        &mut self,
        arrival: &Arrival,
        target: WorkerRank,
        out: &mut Vec<Output>,
    ) -> SessionCommand {
        let Some(session) = arrival.session.as_ref().filter(|s| self.serves(s.action)) else {
            return SessionCommand::None;
        };
        let id = &session.id;
        match session.action {
            SessionAction::Use => {}
            SessionAction::Bind { timeout } => {
                self.bind(id, target, BindingKind::Router, timeout, out);
            }
            SessionAction::Open { timeout } => {
                if !(self.sessions.is_in_engine(id) && self.sessions.find(id) == Some(target)) {
                    return SessionCommand::Open {
                        id: id.clone(),
                        timeout,
                    };
                }
            }
            SessionAction::Close => {
                self.sessions.unbind(id);
                return SessionCommand::Close { id: id.clone() };
            }
            SessionAction::Header => self.sessions.lease(arrival.id, id, target),
        }
        SessionCommand::None
    }

    fn bind(
        &mut self,
        id: &std::sync::Arc<str>,
        target: WorkerRank,
        kind: BindingKind,
        idle: Duration,
        out: &mut Vec<Output>,
    ) {
        let evicted = self.sessions.bind(self.now, id, target, kind, idle);
        self.say_evicted(evicted, out);
        out.push(Output::Observe(Observation::SessionBound {
            id: id.clone(),
            target,
            since: self.now,
        }));
    }

    fn say_evicted(&self, evicted: Option<crate::session::ClosedSession>, out: &mut Vec<Output>) {
        let Some(ended) = evicted else {
            return;
        };
        if ended.in_engine {
            out.push(Output::CloseSession {
                id: ended.id.clone(),
                target: ended.target,
            });
        }
        out.push(Output::Observe(Observation::SessionEvicted {
            id: ended.id,
        }));
    }

    /// A request's dispatch succeeded: its header session is bound where it went.
    fn session_dispatched(&mut self, id: RequestId, out: &mut Vec<Output>) {
        let Some(ttl) = self.config.router_session_affinity_ttl_secs else {
            return;
        };
        let idle = Duration::from_secs(ttl);
        let (bound, evicted) = self.sessions.dispatched(self.now, id, idle);
        self.say_evicted(evicted, out);
        let told = match bound {
            None if self.config.router_replica_sync => self.sessions.held_by(id),
            bound => bound,
        };
        if let Some(id) = told
            && let Some((target, since)) = self.sessions.bound(&id)
        {
            let bound = Observation::SessionBound { id, target, since };
            out.push(Output::Observe(bound));
        }
    }

    pub(super) fn session_event(&mut self, event: SessionEvent, out: &mut Vec<Output>) {
        match event {
            SessionEvent::Opened {
                id,
                target,
                timeout,
            } => {
                if self.fleet.slot(target).is_some() {
                    self.bind(&id, target, BindingKind::Engine, timeout, out);
                }
            }
            SessionEvent::Inherited {
                id,
                target,
                in_engine,
                by_header,
                timeout,
            } => {
                let kind = match (in_engine, by_header) {
                    (true, _) => BindingKind::Engine,
                    (false, true) => BindingKind::Header,
                    (false, false) => BindingKind::Router,
                };
                if self.sessions.find(&id).is_none() && self.fleet.slot(target).is_some() {
                    let evicted = self.sessions.bind(self.now, &id, target, kind, timeout);
                    self.say_evicted(evicted, out);
                }
            }
            SessionEvent::PeerBound { id, target, since } => {
                let Some(ttl) = self.config.router_session_affinity_ttl_secs else {
                    return;
                };
                if self.fleet.slot(target).is_none() {
                    return;
                }
                let idle = Duration::from_secs(ttl);
                let bound = self.sessions.bound(&id);
                let live = bound.filter(|(at, _)| self.fleet.slot(*at).is_some());
                match live {
                    Some((at, _)) if at == target => self.sessions.touch(self.now, &id),
                    Some((at, ours)) if (ours, at) <= (since, target) => {}
                    Some(_) if self.sessions.is_in_engine(&id) => {}
                    _ => {
                        let kind = BindingKind::Header;
                        let evicted = self.sessions.bind(self.now, &id, target, kind, idle);
                        self.sessions.set_since(&id, since);
                        self.say_evicted(evicted, out);
                    }
                }
            }
        }
    }
}
