//! Who may serve a request at all, before anybody is scored.
//!
//! The order is fixed and each way to end with nobody has its own error: model, transport, allow-list, taints, rank bounds,
//! adapter, earlier failures, then the busy set. A pin is direct dispatch and ignores fault marks. Fault marks
//! never leave a request without anybody, unless its sender can do without: the least bad worker is tried before it is refused.

use kvasir_placement::{Fleet, Member, SlotSet};
use kvasir_types::{WorkerId, WorkerRank};

use crate::health::Health;
use crate::{Arrival, Exclusion, ExclusionReason, Outcome, RouteError};

/// The ranks that a request may go to.
#[derive(Clone, Debug, Default)]
pub(crate) struct EligibleRanks {
    /// Before the busy set is taken away; the queue asks these.
    pub(crate) routable: SlotSet,
    /// After it; the choice is among these.
    pub(crate) candidates: SlotSet,
    pinned: Option<u32>,
    /// Taken from the candidates because they have enough.
    full: SlotSet,
    /// Nobody was left whom nothing speaks against.
    last_resort: bool,
}

impl EligibleRanks {
    /// Works out both sets. On an error of the first stages both are empty.
    pub(crate) fn fill(
        &mut self,
        fleet: &Fleet,
        health: &Health,
        arrival: &Arrival,
        pin: Option<WorkerRank>,
    ) -> Result<(), RouteError> {
        self.pinned = None;
        self.last_resort = false;
        self.full.copy_from(&SlotSet::default());
        match pin {
            Some(rank) => self.fill_pinned(fleet, arrival, rank),
            None => self.fill_free(fleet, health, arrival),
        }
    }

    fn fill_pinned(
        &mut self,
        fleet: &Fleet,
        arrival: &Arrival,
        pin: WorkerRank,
    ) -> Result<(), RouteError> {
        self.routable.copy_from(&SlotSet::default());
        self.candidates.copy_from(&SlotSet::default());
        if !allowed(arrival, pin) {
            return Err(RouteError::PinnedWorkerNotAllowed(pin.worker));
        }
        let unknown = RouteError::PinnedWorkerUnknown(pin.worker);
        let member = fleet.member(pin.worker).filter(|m| !m.is_draining());
        let member = member.ok_or(unknown.clone())?;
        let slot = fleet.slot(pin).ok_or_else(|| {
            let first = member.spec.first_rank.0;
            RouteError::PinnedRankUnknown {
                worker: pin.worker,
                rank: pin.rank,
                first,
                end: first.saturating_add(member.spec.rank_count()),
            }
        })?;
        if !serves(fleet, arrival, slot) || !tainted(fleet, arrival, slot) {
            return Err(unknown);
        }
        if arrival.failed.contains(&pin.worker) {
            return Err(after_failure(arrival));
        }
        self.routable.set(slot, true);
        self.pinned = Some(slot);
        if member.is_busy() {
            return Err(RouteError::PinnedWorkerOverloaded(pin.worker));
        }
        self.candidates.set(slot, true);
        Ok(())
    }

    fn fill_free(
        &mut self,
        fleet: &Fleet,
        health: &Health,
        arrival: &Arrival,
    ) -> Result<(), RouteError> {
        let set = &mut self.routable;
        set.copy_from(fleet.up());
        fit(set, fleet, arrival);
        if !arrival.failed.is_empty() {
            set.retain(|slot| !failed(fleet, arrival, slot));
        }
        if set.is_empty() && !arrival.dispensable {
            self.last_resort = true;
            last_resort(set, fleet, health, arrival);
        }
        let set = &self.routable;
        self.candidates.copy_from(set);
        if set.is_empty() {
            return Err(nobody(fleet, arrival));
        }
        self.candidates.subtract(fleet.busy());
        if self.candidates.is_empty() {
            let workers = workers_of(fleet, set);
            return Err(RouteError::AllEligibleWorkersOverloaded {
                workers,
                retry_after_ms: None,
            });
        }
        Ok(())
    }

    /// Leaves out the candidates that have enough, unless all have.
    pub(crate) fn prefer_open(&mut self, full: &SlotSet) {
        if self.pinned.is_some() || self.candidates.iter().all(|slot| full.has(slot)) {
            return;
        }
        self.full.copy_from(full);
        self.candidates.subtract(full);
    }

    /// Whether the candidates are those whom something speaks against, for want of others.
    pub(crate) fn is_last_resort(&self) -> bool {
        self.last_resort
    }

    /// The one rank that the request is bound to.
    pub(crate) fn pinned(&self) -> Option<u32> {
        self.pinned
    }

    /// Fills the record of who was left out and why.
    pub(crate) fn excluded(&self, fleet: &Fleet, arrival: &Arrival, to: &mut Exclusion) {
        to.named.clear();
        to.count = fleet.live().count() - self.candidates.count();
        if to.count == 0 || self.pinned.is_some() {
            return;
        }
        let out = fleet.live().iter().filter(|s| !self.candidates.has(*s));
        for slot in out.take(Exclusion::NAMED_MAX) {
            if let Some(rank) = fleet.rank(slot) {
                let reason = match self.full.has(slot) && self.routable.has(slot) {
                    true => ExclusionReason::Busy,
                    false => why(fleet, arrival, slot),
                };
                to.named.push((rank, reason));
            }
        }
    }
}

/// Leaves those that satisfy the request's constraints.
fn fit(set: &mut SlotSet, fleet: &Fleet, arrival: &Arrival) {
    if let Some(model) = &arrival.model {
        fleet.keep_serving(set, model);
    }
    let constraints = &arrival.constraints;
    if let Some(transport) = constraints.transport {
        fleet.keep_reached_by(set, transport);
    }
    if constraints.allowed.is_some() {
        set.retain(|slot| fleet.rank(slot).is_some_and(|rank| allowed(arrival, rank)));
    }
    if !constraints.required_taints.is_empty() {
        set.retain(|slot| tainted(fleet, arrival, slot));
    }
    if let Some(asked) = arrival.pin.rank {
        set.retain(|slot| fleet.rank(slot).is_some_and(|rank| rank.rank == asked));
    }
    if let Some(lora) = &constraints.lora {
        let has = |slot| fleet.member_of(slot).is_some_and(|m| m.has_lora(lora));
        if set.iter().any(has) {
            set.retain(has);
        }
    }
}

/// When nobody is left whom nothing speaks against: of those ejected the least bad one that is not busy, then
/// the one that failed this very request longest ago, if it may go there again.
fn last_resort(set: &mut SlotSet, fleet: &Fleet, health: &Health, arrival: &Arrival) {
    set.copy_from(fleet.live());
    set.retain(|slot| !fleet.member_of(slot).is_some_and(|m| m.is_draining()));
    fit(set, fleet, arrival);
    let worker = |slot: u32| Some(fleet.rank(slot)?.worker);
    let fresh = set.iter().filter(|slot| !failed(fleet, arrival, *slot));
    let badness = |slot: &u32| {
        let worker = worker(*slot).unwrap_or_default();
        (fleet.busy().has(*slot), health.badness(worker), worker)
    };
    let least = fresh.min_by_key(badness).and_then(worker);
    let present = |id: &&WorkerId| set.iter().any(|slot| worker(slot) == Some(**id));
    let oldest = || arrival.failed.iter().find(present).copied();
    let chosen = least.or_else(|| oldest().filter(|_| arrival.again));
    set.retain(|slot| chosen.is_some() && worker(slot) == chosen);
}

/// Why nobody is left at all.
fn nobody(fleet: &Fleet, arrival: &Arrival) -> RouteError {
    let mut set = SlotSet::default();
    set.copy_from(fleet.live());
    set.retain(|slot| !fleet.member_of(slot).is_some_and(|m| m.is_draining()));
    fit(&mut set, fleet, arrival);
    match set.is_empty() {
        true => no_endpoints(fleet, arrival),
        false => after_failure(arrival),
    }
}

/// Nobody fits: how many serve the model at all.
pub(crate) fn no_endpoints(fleet: &Fleet, arrival: &Arrival) -> RouteError {
    let of_model = |m: &&Member| {
        m.slots()
            .first()
            .is_some_and(|s| serves(fleet, arrival, *s))
    };
    let (mut known, mut down) = (0, 0);
    for member in fleet.members().filter(of_model) {
        known += 1;
        down += u32::from(member.ejected_until().is_some());
    }
    RouteError::NoEndpoints { known, down }
}

/// Whether the model that the request asks for is served there, and the request can be sent there.
pub(crate) fn serves(fleet: &Fleet, arrival: &Arrival, slot: u32) -> bool {
    has_model(fleet, arrival, slot) && reaches(fleet, arrival, slot)
}

fn has_model(fleet: &Fleet, arrival: &Arrival, slot: u32) -> bool {
    let model = arrival.model.as_deref();
    model.is_none_or(|model| fleet.serves(slot, model))
}

fn reaches(fleet: &Fleet, arrival: &Arrival, slot: u32) -> bool {
    let transport = arrival.constraints.transport;
    transport.is_none_or(|transport| fleet.is_reached_by(slot, transport))
}

fn allowed(arrival: &Arrival, rank: WorkerRank) -> bool {
    let list = arrival.constraints.allowed.as_ref();
    list.is_none_or(|list| list.contains(&rank.worker))
}

fn tainted(fleet: &Fleet, arrival: &Arrival, slot: u32) -> bool {
    let required = &arrival.constraints.required_taints;
    required.iter().all(|taint| fleet.carries(slot, taint))
}

fn failed(fleet: &Fleet, arrival: &Arrival, slot: u32) -> bool {
    let rank = fleet.rank(slot);
    rank.is_some_and(|rank| arrival.failed.contains(&rank.worker))
}

fn after_failure(arrival: &Arrival) -> RouteError {
    match arrival.last_failure {
        Some(Outcome::Overloaded) => RouteError::FailedWorkersOverloaded,
        _ => RouteError::FailedWorkersUnavailable,
    }
}

fn workers_of(fleet: &Fleet, slots: &SlotSet) -> u32 {
    let of = |m: &&Member| m.slots().iter().any(|s| slots.has(*s));
    fleet.members().filter(of).count() as u32
}

/// The first filter that leaves a slot out, in their order.
fn why(fleet: &Fleet, arrival: &Arrival, slot: u32) -> ExclusionReason {
    let rank = fleet.rank(slot).unwrap_or_default();
    let busy = fleet.busy().has(slot);
    if !has_model(fleet, arrival, slot) {
        ExclusionReason::Model
    } else if !reaches(fleet, arrival, slot) {
        ExclusionReason::Transport
    } else if !allowed(arrival, rank) {
        ExclusionReason::NotAllowed
    } else if fleet.member_of(slot).is_some_and(|m| m.is_draining()) {
        ExclusionReason::Draining
    } else if !fleet.up().has(slot) {
        ExclusionReason::Down
    } else if !tainted(fleet, arrival, slot) {
        ExclusionReason::Taint
    } else if arrival.pin.rank.is_some_and(|asked| asked != rank.rank) {
        ExclusionReason::Rank
    } else if failed(fleet, arrival, slot) {
        ExclusionReason::Failed
    } else if busy {
        ExclusionReason::Busy
    } else {
        ExclusionReason::Lora
    }
}
