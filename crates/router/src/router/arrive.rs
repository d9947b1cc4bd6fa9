//! A request wants a worker.

use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{Gate, QueueEntry, QueueLimit, QueuePolicy, WaitingRequest};
use kvasir_types::{RequestId, Time, WorkerId, WorkerRank};

use super::{FreedCapacity, PinnedRank, QueuedRequest, Router, cached_tokens};
use crate::admission::{Admission, TooLate};
use crate::request_settings::RequestSettings;
use crate::{Arrival, LimitKind, Output, RouteError, RouterMode};

impl Router {
    pub(super) fn arrive(&mut self, arrival: Box<Arrival>, out: &mut Vec<Output>) {
        let id = arrival.id;
        let pin = match self
            .check(&arrival, out)
            .and_then(|()| self.resolve_pin(&arrival))
        {
            Ok(pin) => pin,
            Err(error) => return self.refuse(&arrival, error, out),
        };
        self.came_back(&arrival);
        let filled = self.fill(&arrival, pin);
        if arrival.query_only || !self.can_queue() {
            return self.place_filled(&arrival, pin, filled, None, out);
        }
        let (class, cached) = self.classify(&arrival);
        if self.received.len() <= class {
            self.received.resize(class + 1, 0);
        }
        self.received[class] += 1;
        if self.time.is_some() {
            return self.arrive_timed(arrival, pin, filled, (class, cached), out);
        }
        if !self.must_wait(&arrival, class) {
            return self.place_filled(&arrival, pin, filled, None, out);
        }
        let in_time = match pin {
            None => self.last_in_time(&arrival),
            Some(_) => Ok(()),
        };
        if let Err(error) = self.room(class).and(in_time) {
            return self.refuse(&arrival, error, out);
        }
        if let Err((arrival, error)) = self.hold(arrival, pin, class, cached) {
            return self.refuse(&arrival, error, out);
        }
        self.freed = FreedCapacity::Anything;
        self.release(out);
        if self.queue.contains(id) {
            let depth = self.queue.len() as u32;
            out.push(Output::Queued { id, depth });
        }
    }

    /// What can be refused without looking at the fleet.
    fn check(&mut self, arrival: &Arrival, out: &mut Vec<Output>) -> Result<(), RouteError> {
        if arrival.isl_tokens == 0 {
            return Err(RouteError::EmptyPrompt);
        }
        if let Err(bad) = arrival.overrides.check() {
            return Err(RouteError::InvalidOverride {
                name: bad.name,
                value: bad.value,
            });
        }
        if arrival.query_only {
            return Ok(());
        }
        if self.queue.contains(arrival.id) {
            return Err(RouteError::DuplicateRequest);
        }
        if let Some(slot) = self.ledger.slot_of(arrival.id) {
            let rank = self.fleet.rank(slot).unwrap_or_default();
            if !arrival.failed.contains(&rank.worker) {
                return Err(RouteError::DuplicateRequest);
            }
            // The attempt there is known to have failed: its end has only not been told.
            self.free(arrival.id, false, out);
        }
        Ok(())
    }

    /// The rank that the request or its session names.
    fn resolve_pin(&mut self, arrival: &Arrival) -> Result<Option<PinnedRank>, RouteError> {
        let Some(worker) = arrival.pin.worker else {
            if self.config.router_mode == RouterMode::Direct {
                return Err(RouteError::WorkerIdMissing);
            }
            if arrival.pin.rank.is_some() {
                return Ok(None);
            }
            let bound = self.follow_session(arrival);
            return Ok(bound.map(|rank| PinnedRank {
                rank,
                by_session: true,
            }));
        };
        let rank = match arrival.pin.rank {
            Some(rank) => WorkerRank { worker, rank },
            None => self.fill_rank(arrival, worker)?,
        };
        Ok(Some(PinnedRank {
            rank,
            by_session: false,
        }))
    }

    /// The rank of a worker that is named without one: its session's, or its only one. Never guessed.
    fn fill_rank(&self, arrival: &Arrival, worker: WorkerId) -> Result<WorkerRank, RouteError> {
        let session = arrival.session.as_ref();
        let bound = session.and_then(|s| self.sessions.find(&s.id));
        if let Some(bound) = bound.filter(|b| b.worker == worker && self.fleet.slot(*b).is_some()) {
            return Ok(bound);
        }
        let allowed = arrival.constraints.allowed.as_ref();
        if allowed.is_some_and(|list| !list.contains(&worker)) {
            return Err(RouteError::PinnedWorkerNotAllowed(worker));
        }
        let member = self.fleet.member(worker);
        let spec = &member.ok_or(RouteError::PinnedWorkerUnknown(worker))?.spec;
        match spec.rank_count() {
            1 => Ok(WorkerRank {
                worker,
                rank: spec.first_rank,
            }),
            ranks => Err(RouteError::PinnedRankMissing { worker, ranks }),
        }
    }

    /// The class a request waits in, and how many of its tokens some eligible rank (or the one it is bound
    /// to) holds.
    fn classify(&self, arrival: &Arrival) -> (usize, u32) {
        let config = &self.config;
        let needs_cached = config.router_policy_config.is_some()
            || config.router_queue_policy == QueuePolicy::WsptUncached;
        let cached = if needs_cached {
            self.best_cached(arrival)
        } else {
            0
        };
        let class = match &self.config.router_policy_config {
            Some(policy) => {
                let uncached = u64::from(arrival.isl_tokens - cached);
                policy.class_of(arrival.policy_class.as_deref(), uncached)
            }
            None => 0,
        };
        (class, cached)
    }

    fn best_cached(&self, arrival: &Arrival) -> u32 {
        let (host, disk) = (
            self.config.router_host_cache_hit_weight,
            self.config.router_disk_cache_hit_weight,
        );
        let mut best = 0.0f64;
        for found in &arrival.overlap.ranks {
            let slot = self.fleet.slot(found.rank);
            if slot.is_some_and(|slot| self.eligible.routable.has(slot)) {
                best = best.max(found.effective(host, disk));
            }
        }
        cached_tokens(best, arrival.isl_tokens, &self.config)
    }

    /// Whether the request joins a backlog, or finds every rank it may go to closed. Nobody to go to is not
    /// a reason to wait: the choice says what is wrong.
    pub(super) fn must_wait(&mut self, arrival: &Arrival, class: usize) -> bool {
        let gate = self.queue.class(class).map(|c| c.gate).unwrap_or_default();
        let gated = gate.is_set() && self.policy.weighs_load();
        let waits = match self.admission.is_on() {
            true => !was_admitted(arrival),
            false => gated,
        };
        if !waits {
            return false;
        }
        self.queue.has_backlog(class) || !self.is_open(arrival, gate)
    }

    /// Works out who is eligible.
    pub(super) fn fill(
        &mut self,
        arrival: &Arrival,
        pin: Option<PinnedRank>,
    ) -> Result<(), RouteError> {
        let rank = pin.map(|p| p.rank);
        self.eligible
            .fill(&self.fleet, &self.health, arrival, rank)?;
        if self.admission.is_on() {
            self.eligible.prefer_open(self.admission.full());
        }
        Ok(())
    }

    /// Whether a waiting request may go now.
    pub(super) fn may_go(
        &mut self,
        arrival: &Arrival,
        pin: Option<PinnedRank>,
        gate: Gate,
    ) -> bool {
        // An error is the choice's to report: whoever is routable counts.
        let _ = self.fill(arrival, self.still_bound(arrival, pin));
        self.is_open(arrival, gate)
    }

    /// Whether some rank of those worked out is open, or there is none at all. The busy set does not count
    /// here.
    fn is_open(&mut self, arrival: &Arrival, gate: Gate) -> bool {
        if self.eligible.routable.is_empty() {
            return true;
        }
        let settings = RequestSettings::of(&self.config, &arrival.overrides);
        let request = super::place::placement_request(arrival, &[], &settings, gate);
        let view = kvasir_placement::FleetView {
            now: self.now,
            fleet: &self.fleet,
            ledger: &mut self.ledger,
            scorer: &mut self.scorer,
        };
        let (policy, admission) = (&self.policy, &self.admission);
        let guarded = admission.is_on() && !was_admitted(arrival);
        let mut slots = self.eligible.routable.iter();
        slots.any(|slot| {
            policy.is_open(&view, &request, slot) && (!guarded || admission.is_open(slot))
        })
    }

    /// Whether the queue has room: our own bound on its length, then the class's.
    pub(super) fn room(&self, class: usize) -> Result<(), RouteError> {
        let limit = self.config.router_queue_max_requests;
        let (kind, current, limit) = if self.queue.len() >= limit as usize {
            (
                LimitKind::Requests,
                self.queue.len() as u64,
                u64::from(limit),
            )
        } else {
            match self.queue.full(class, self.fleet.workers()) {
                None => return Ok(()),
                Some(full) => (kind_of(full.limit_kind), full.current, full.limit),
            }
        };
        let name = self.queue.class(class).map(|c| c.name.clone());
        Err(RouteError::QueueLimit {
            policy_class: name.unwrap_or_default(),
            limit_kind: kind,
            current,
            limit,
            retry_after_ms: self.retry_after_ms(),
        })
    }

    /// Lets a request wait, unless it is known that it would wait too long.
    pub(super) fn hold(
        &mut self,
        arrival: Box<Arrival>,
        pin: Option<PinnedRank>,
        class: usize,
        cached: u32,
    ) -> Result<(), (Box<Arrival>, RouteError)> {
        let hold = WaitingRequest {
            arrived: self.now,
            priority_jump: arrival.hints.priority_jump(),
            isl_tokens: arrival.isl_tokens,
            uncached_tokens: arrival.isl_tokens - cached,
        };
        let urgency = match (&self.config.router_policy_config, self.queue.class(class)) {
            (Some(_), Some(class)) => hold.urgency(class.queue_policy),
            _ => self.policy.urgency(&hold),
        };
        let alone = self.alone(&arrival);
        let entry = QueueEntry {
            id: arrival.id,
            class,
            model: self.lane_of(&arrival),
            rank: pin.map(|p| p.rank),
            strict_priority: arrival.hints.strict_priority,
            urgency,
            isl_tokens: arrival.isl_tokens,
            cached_tokens: cached,
            payload: QueuedRequest {
                arrival,
                pin,
                alone,
                looked_up: self.now,
                asked: None,
            },
        };
        if let Err(error) = self.in_time(&entry) {
            return Err((entry.payload.arrival, error));
        }
        let model = entry.model.clone();
        let free = entry.rank.is_none();
        let entered = self.queue.push(self.now, entry);
        debug_assert!(entered, "duplicates were refused before");
        if free {
            self.admission.entered(self.now, &model);
        }
        Ok(())
    }

    /// Whether a request that is to wait will likely be placed in time. One that is bound to a rank waits for that
    /// rank, of which the others' waiting says nothing.
    fn in_time(&mut self, entry: &QueueEntry<QueuedRequest>) -> Result<(), RouteError> {
        if !self.admission.is_on() || entry.rank.is_some() || was_admitted(&entry.payload.arrival) {
            return Ok(());
        }
        let ahead = self.queue.ahead(entry);
        self.in_time_behind(&entry.model, ahead)
    }

    /// The same for a request that waits behind everybody of its model, as most do, whatever its prompt is.
    pub(super) fn last_in_time(&mut self, arrival: &Arrival) -> Result<(), RouteError> {
        let hints = &arrival.hints;
        let is_last = hints.priority_jump() == 0.0
            && hints.strict_priority == 0
            && self.config.router_queue_policy == QueuePolicy::Fcfs;
        if !self.admission.is_on() || !is_last || was_admitted(arrival) {
            return Ok(());
        }
        let lane = self.lane_of(arrival);
        let ahead = self.admission.waiting(&lane);
        self.in_time_behind(&lane, ahead)
    }

    /// Who waits behind whom, beside those who are bound to a rank: requests of a model, and under protection those with
    /// the same constraints, so that a few that only full workers may serve do not hold up all others.
    fn lane_of(&self, arrival: &Arrival) -> Option<Arc<str>> {
        let constraints = &arrival.constraints;
        let free = constraints.required_taints.is_empty() && constraints.allowed.is_none();
        if free || !self.admission.is_on() {
            return arrival.model.clone();
        }
        let (model, taints) = (arrival.model.as_deref(), &constraints.required_taints);
        let allowed = constraints.allowed.as_deref();
        Some(format!("{model:?} {taints:?} {allowed:?}").into())
    }

    fn in_time_behind(&mut self, model: &Option<Arc<str>>, ahead: usize) -> Result<(), RouteError> {
        // What is booked and held says it before anybody has waited; of one that goes before others it says less.
        let last = ahead >= self.queue.len();
        let backlog = self.backlog().filter(|_| last && ahead > 0);
        let learned = backlog
            .filter(|wait| *wait > Admission::QUEUE_LIMIT)
            .map(|wait| TooLate {
                expected: wait,
                retry_after: wait,
            });
        let late = learned.or_else(|| self.admission.too_late(self.now, model, ahead));
        late.map_or(Ok(()), |late| {
            Err(RouteError::QueueTooSlow {
                expected_ms: millis(late.expected),
                limit_ms: millis(Admission::QUEUE_LIMIT),
                predicted: true,
                // Nobody waits longer.
                retry_after_ms: millis(late.retry_after.min(self.wait_max)),
            })
        })
    }

    pub(super) fn refuse(&mut self, arrival: &Arrival, error: RouteError, out: &mut Vec<Output>) {
        let error = self.with_retry_after(error);
        self.record_refusal(arrival, &error, None, false);
        out.push(Output::Refuse {
            id: arrival.id,
            error,
        });
    }

    /// A waiting request has waited too long.
    pub(super) fn refuse_waiting(&mut self, id: RequestId, entered: Time, out: &mut Vec<Output>) {
        let Some(entry) = self.queue.remove(id) else {
            return;
        };
        self.no_longer_waits(&entry, false);
        let QueuedRequest { arrival, pin, .. } = &entry.payload;
        let gate = self.queue.class(entry.class).map(|c| c.gate);
        // A session is a wish: rather elsewhere than not at all.
        if self.admission.is_on()
            && pin.is_some_and(|pin| pin.by_session)
            && self.may_go(arrival, None, gate.unwrap_or_default())
        {
            return self.place(arrival, None, Some(entered), out);
        }
        let waited = self.now - entered;
        let learned = self.retry_after_ms();
        let limit = (self.config.router_queue_max_wait_secs * 1e3) as u64;
        let error = match self.admission.is_on() {
            true => RouteError::QueueTooSlow {
                expected_ms: millis(waited),
                limit_ms: limit,
                predicted: false,
                retry_after_ms: learned.unwrap_or_else(|| {
                    millis(self.admission.placed_by(&entry.model).min(self.wait_max))
                }),
            },
            false => {
                let name = self.queue.class(entry.class).map(|c| c.name.clone());
                RouteError::QueueLimit {
                    policy_class: name.unwrap_or_default(),
                    limit_kind: LimitKind::WaitMs,
                    current: millis(waited),
                    limit,
                    retry_after_ms: learned,
                }
            }
        };
        self.record_refusal(&entry.payload.arrival, &error, Some(entered), false);
        out.push(Output::Refuse { id, error });
        self.freed = FreedCapacity::Anything;
    }
}

impl Router {
    /// A request left the queue; `placed` if it has a worker.
    pub(super) fn no_longer_waits(&mut self, entry: &QueueEntry<QueuedRequest>, placed: bool) {
        if entry.rank.is_none() {
            self.admission.went(self.now, &entry.model, placed);
        }
    }
}

/// Whether a request was let in before: another attempt of it is not judged again.
pub(super) fn was_admitted(arrival: &Arrival) -> bool {
    arrival.resumed || !arrival.failed.is_empty()
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn kind_of(limit: QueueLimit) -> LimitKind {
    match limit {
        QueueLimit::Requests => LimitKind::Requests,
        QueueLimit::RawIslTokens => LimitKind::RawIslTokens,
        QueueLimit::CachedTokens => LimitKind::CachedTokens,
    }
}
