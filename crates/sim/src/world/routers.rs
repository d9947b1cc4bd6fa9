//! Router replicas, each with its own index: what reaches them, and what they want done.

use std::sync::Arc;

use kvasir_engine::{AdmitError, CacheEvent, EngineRequest, OutputTokens, Prompt};
use kvasir_index::{Index, Matches};
use kvasir_router::{
    Arrival, Input, LoadReport, Lookup, Outcome, Output, Overlap, PeerChange, PeerEvent, Pin,
    Placement, Role, Router, SessionAction, SessionRequest, WorkerSpec,
};
use kvasir_trust::TrustLevels;
use kvasir_types::{RequestId, Time, WorkerId, WorkerRank};

use super::engines::SimulatedEngine;
use super::queue::Event;
use super::{Leg, State, World};
use crate::Piece;
use crate::prompt::{PromptHashes, VOCABULARY};

/// A router with its own index.
#[derive(Debug)]
pub(super) struct Replica {
    pub(super) router: Router,
    index: Index,
    found: Matches,
    /// Empty: a simulated engine's events are as true as they are complete.
    trust: TrustLevels,
    /// When its next tick is planned.
    tick_at: Option<Time>,
}

pub(super) fn id(request: u32) -> RequestId {
    RequestId(u128::from(request))
}

pub(super) fn request_of(id: RequestId) -> u32 {
    id.0 as u32
}

/// A conversation as its client names it in a header.
fn session(conversation: &u32) -> SessionRequest {
    SessionRequest {
        id: conversation.to_string().into(),
        action: SessionAction::Header,
    }
}

impl World<'_> {
    pub(super) fn add_routers(&mut self) {
        let pools = 1 + u32::from(self.fleet.prefill.is_some());
        for replica in 0..self.fleet.replicas * pools {
            let mut config = self.policy.router.clone();
            config.kv_cache_block_size = self.fleet.engine.block_size;
            config.router_seed ^= self.fleet.seed.rotate_left(8) ^ u64::from(replica);
            if replica >= self.fleet.replicas {
                config.router_role = Role::Prefill;
                config.router_track_active_blocks = false;
            }
            self.replicas.push(Replica {
                router: Router::new(config),
                index: Index::with_options(&self.policy.index),
                found: Matches::new(),
                trust: TrustLevels::default(),
                tick_at: None,
            });
        }
    }

    /// Tells every router that places requests on this worker.
    fn tell_pool(&mut self, worker: WorkerId, input: &Input) {
        for replica in self.replicas_of(worker) {
            self.inputs.push_back((replica, input.clone()));
        }
    }

    /// A request is at the door.
    pub(super) fn arrive(&mut self, request: u32) {
        let slot = &mut self.requests[request as usize];
        if slot.attempts == 0 {
            slot.arrived = self.now;
        }
        let leg = self.first_leg();
        self.ask(request, leg, None);
    }

    /// Hash it, look it up, ask the router of the workers that compute this part of it.
    pub(super) fn ask(&mut self, request: u32, leg: Leg, pin: Option<WorkerRank>) {
        let trace = &self.trace.requests[request as usize];
        let carried = self.requests[request as usize].generated;
        let more = (carried > 0).then_some(Piece {
            seed: trace.answer_seed,
            len: carried,
        });
        let hashed = self.prompt_hasher.hash(&trace.prompt, more);
        let replica = self.replica_of(request, leg);
        let lookup = self.lookup_of(&hashed);
        let overlap = self.find(replica, &lookup);
        let overrides = self.overrides_of(leg);
        let slot = &mut self.requests[request as usize];
        (slot.state, slot.replica, slot.carried) = (State::Routing, replica, carried);
        slot.leg = leg;
        let mut arrival = Arrival {
            failed: slot.failed.clone(),
            last_failure: slot.failed.last().map(|_| Outcome::Unreachable),
            session: self.conversations.get(request as usize).map(session),
            overrides,
            pin: Pin {
                worker: pin.map(|rank| rank.worker),
                rank: pin.map(|rank| rank.rank),
            },
            query_only: leg == Leg::Question,
            ..Arrival::new(id(request), hashed.len)
        };
        lookup.arrive(&mut arrival, overlap);
        slot.prompt = Some(Box::new(hashed));
        self.inputs
            .push_back((replica, Input::Arrived(Box::new(arrival))));
    }

    /// How a prompt is looked up: where the index is of no use, it is not asked.
    fn lookup_of(&self, hashed: &PromptHashes) -> Lookup {
        let locals = match self.policy.uses_index() {
            true => Arc::clone(&hashed.locals),
            false => Arc::default(),
        };
        Lookup {
            locals,
            sequence: Arc::clone(&hashed.sequence),
            predict_all: true,
            shared: Arc::default(),
        }
    }

    fn find(&mut self, replica: usize, lookup: &Lookup) -> Overlap {
        let Replica {
            index,
            found,
            trust,
            ..
        } = &mut self.replicas[replica];
        index.expire(self.now);
        lookup.find(index, trust, found)
    }

    pub(super) fn obey(&mut self, replica: usize, output: Output) {
        match output {
            Output::Send(sent) if !sent.booked => self.answered(&sent),
            Output::Send(sent) => self.send(replica, &sent),
            Output::Refuse { id, .. } => self.refused(request_of(id)),
            Output::Refresh { id } => {
                let prompt = self.requests[request_of(id) as usize].prompt.as_ref();
                let lookup = prompt.map(|prompt| self.lookup_of(prompt));
                let overlap = lookup.map(|lookup| self.find(replica, &lookup));
                self.inputs
                    .push_back((replica, Input::Refreshed { id, overlap }));
            }
            Output::Queued { .. } => self.tally.queued += 1,
            Output::CloseSession { .. } | Output::Tell(_) | Output::Observe(_) => {}
        }
    }

    fn send(&mut self, replica: usize, sent: &Placement) {
        let request = request_of(sent.id);
        let trace = &self.trace.requests[request as usize];
        let slot = &mut self.requests[request as usize];
        let Some(hashed) = slot.prompt.take() else {
            return; // ended while it waited
        };
        let lookup = self.lookup_of(&hashed);
        let Replica { index, trust, .. } = &self.replicas[replica];
        lookup.record(self.now, sent, index, trust);
        self.tell_peers(replica, sent, &hashed.sequence, hashed.len);
        let slot = &self.requests[request as usize];
        let (carried, leg) = (slot.carried, slot.leg);
        let prompt = Prompt::from_parts(
            self.prompt_hasher.hasher,
            self.prompt_hasher.block_size,
            hashed.len,
            hashed.locals,
            hashed.tail,
        );
        let admission = EngineRequest {
            id: sent.id,
            prompt: match leg {
                Leg::Decode => prompt.transferred(),
                _ => prompt,
            },
            output: OutputTokens::Seeded {
                seed: trace.answer_seed.wrapping_add(u64::from(carried)),
                vocabulary: VOCABULARY,
            },
            max_tokens: match leg {
                Leg::Prefill => 1,
                _ => trace.output_tokens.saturating_sub(carried).max(1),
            },
            priority: trace.priority,
            announce_hits: false,
        };
        match leg {
            Leg::Decode => self.transfer(sent, admission),
            _ => self.give(sent.target, admission),
        }
    }

    /// Gives a request to the worker that was chosen for it.
    pub(super) fn give(&mut self, target: WorkerRank, admission: EngineRequest) {
        let request = request_of(admission.id);
        match self.admit(target, admission) {
            Ok(host) => self.requests[request as usize].state = State::Running { host },
            Err(error) => self.not_admitted(request, target, &error),
        }
    }

    fn not_admitted(&mut self, request: u32, target: WorkerRank, error: &AdmitError) {
        let full = matches!(error, AdmitError::QueueFull(_));
        let outcome = if full {
            Outcome::Overloaded
        } else {
            Outcome::Failed
        };
        self.release(request, target, outcome);
        if full {
            self.retry(request, target.worker);
        } else {
            self.end(request, State::Rejected);
        }
    }

    /// Tells the router, and its peers, that an attempt is over.
    pub(super) fn release(&mut self, request: u32, on: WorkerRank, outcome: Outcome) {
        let replica = self.requests[request as usize].replica;
        let id = id(request);
        self.inputs.push_back((
            replica,
            Input::Finished {
                id,
                on: Some(on),
                outcome,
            },
        ));
        self.peer(
            replica,
            &PeerEvent {
                id,
                target: on,
                change: PeerChange::Free,
            },
        );
    }

    /// Comes again, unless it has come too often.
    pub(super) fn retry(&mut self, request: u32, worker: WorkerId) {
        let slot = &mut self.requests[request as usize];
        slot.attempts += 1;
        slot.failed.push(worker);
        if slot.attempts > self.fleet.retries {
            return self.end(request, State::Refused);
        }
        slot.state = State::Routing;
        self.tally.retries += 1;
        self.queue.push(self.now, Event::Arrive(request));
    }

    fn tell_peers(
        &mut self,
        replica: usize,
        sent: &Placement,
        sequence: &Arc<[kvasir_types::SequenceHash]>,
        len: u32,
    ) {
        let change = PeerChange::Add {
            sequence: Arc::clone(sequence),
            prefill_tokens: len.saturating_sub(sent.cached_tokens),
            prefill_duration: None,
            osl: None,
        };
        self.peer(
            replica,
            &PeerEvent {
                id: sent.id,
                target: sent.target,
                change,
            },
        );
    }

    pub(super) fn peer(&mut self, from: usize, event: &PeerEvent) {
        if !self.fleet.replica_sync || self.fleet.replicas < 2 {
            return;
        }
        let at = self.now + self.fleet.event_latency;
        for replica in (0..self.replicas.len()).filter(|r| *r != from) {
            let event = Box::new(event.clone());
            self.queue.push(at, Event::Peer { replica, event });
        }
    }

    /// Cache events are on their way to every router.
    pub(super) fn publish(&mut self, host: usize, events: Vec<CacheEvent>) {
        let wanted = self.policy.uses_index() && self.policy.router.router_kv_events;
        if events.is_empty() || !wanted {
            return;
        }
        let events = Arc::new(events);
        let SimulatedEngine { life, rank, .. } = self.hosts[host];
        for replica in self.replicas_of(rank.worker) {
            let events = Arc::clone(&events);
            if self.fleet.event_latency.is_zero() {
                self.deliver(replica, host, life, &events);
            } else {
                let at = self.now + self.fleet.event_latency;
                self.queue.push(
                    at,
                    Event::Deliver {
                        replica,
                        host,
                        life,
                        events,
                    },
                );
            }
        }
    }

    pub(super) fn deliver(
        &mut self,
        replica: usize,
        host: usize,
        life: u32,
        events: &[CacheEvent],
    ) {
        let Some(rank) = self
            .hosts
            .get(host)
            .filter(|h| h.life == life && h.is_alive())
            .map(|h| h.rank)
        else {
            return; // its worker is gone, and with it everything it held
        };
        let index = &self.replicas[replica].index;
        for CacheEvent { event, .. } in events {
            if self.fleet.event_loss > 0.0 && self.losses.unit() < self.fleet.event_loss {
                self.tally.events_lost += 1;
            } else if index.apply(rank, event).is_err() {
                self.tally.events_refused += 1;
            }
        }
    }

    pub(super) fn forget_worker(&mut self, worker: WorkerId) {
        for replica in &self.replicas {
            replica.index.remove_worker(worker);
        }
        self.tell_pool(worker, &Input::Left(worker));
    }

    pub(super) fn announce_worker(&mut self, worker: WorkerId) {
        let spec = WorkerSpec {
            ranks: self.fleet.ranks,
            kv_total_blocks: Some(u64::from(self.fleet.engine.usable_blocks())),
            max_num_batched_tokens: Some(u64::from(self.fleet.engine.max_num_batched_tokens)),
            ..WorkerSpec::new(worker)
        };
        self.tell_pool(worker, &Input::Joined(spec));
    }

    /// A rank's load, for routers that look at it.
    pub(super) fn report_load(&mut self, host: usize) {
        let router = &self.policy.router;
        let wanted = router.active_decode_blocks_threshold.is_some()
            || router.active_prefill_tokens_threshold.is_some()
            || router.active_prefill_tokens_threshold_frac.is_some();
        if !wanted {
            return;
        }
        let Some((rank, load)) = self.hosts[host].load() else {
            return;
        };
        self.tell_pool(
            rank.worker,
            &Input::Load(LoadReport {
                rank,
                active_decode_blocks: Some(u64::from(load.used_blocks)),
                active_prefill_tokens: Some(load.pending_prefill_tokens),
                kv_used_blocks: Some(u64::from(load.used_blocks)),
                ..LoadReport::default()
            }),
        );
    }

    pub(super) fn tick(&mut self, replica: usize) {
        if self.replicas[replica].tick_at == Some(self.now) {
            self.replicas[replica].tick_at = None;
            self.inputs.push_back((replica, Input::Tick));
        }
    }

    /// Plans a tick if the router wants one before the one that is planned.
    pub(super) fn plan_tick(&mut self, replica: usize) {
        let slot = &mut self.replicas[replica];
        let Some(wanted) = slot.router.next_deadline() else {
            return;
        };
        let at = wanted.max(self.now);
        if slot.tick_at.is_none_or(|planned| at < planned) {
            slot.tick_at = Some(at);
            self.queue.push(at, Event::Tick(replica));
        }
    }
}
