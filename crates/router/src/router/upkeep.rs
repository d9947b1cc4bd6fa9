//! Membership, load reports, and what time alone brings about.

use std::time::Duration;

use kvasir_placement::{Member, RankBusy, ReportedLoad, WorkerSpec};
use kvasir_types::{Time, TransportKind, WorkerId};

use super::{FreedCapacity, Router};
use crate::admission::Admission;
use crate::{
    LoadReport, Observation, Output, PeerChange, Probe, RouterConfig, ThresholdUpdate, TokenProbe,
};

/// A request that no longer waits in its engine has its prompt computed after about this long.
const STEP: Duration = Duration::from_secs(1);
/// Most workers whose slots are put in order when one joins. It takes time for each of them, under the lock that requests
/// wait for: two thousand that join at once would take it two thousand times.
const ORDERED_WORKERS_MAX: u32 = 256;

impl Router {
    pub(super) fn join(&mut self, spec: WorkerSpec, back: bool, out: &mut Vec<Output>) {
        let worker = spec.id;
        let before = self.fleet.member(worker).map(|m| m.slots().to_vec());
        let mut gone = Vec::new();
        self.fleet.put(spec, |slot| gone.push(slot));
        self.forget_slots(&gone);
        self.put_in_order();
        let end = self.fleet.slot_end();
        self.ledger.grow(end);
        if let Some(member) = self.fleet.member(worker) {
            for &slot in member.slots() {
                self.admission.joined(slot, member.spec.max_num_seqs);
            }
        }
        self.time_joined(worker, &before.unwrap_or_default());
        if self.busy.len() < end as usize {
            self.busy.resize(end as usize, RankBusy::default());
        }
        if back {
            self.fleet.set_draining(worker, false);
            self.health.forget(worker);
            self.mark(worker, out);
        }
        self.check_all(out);
        self.freed = FreedCapacity::Anything;
    }

    /// While nothing is booked or waits, slots follow the ids of workers and not the order in which they joined: then the
    /// same seed draws the same workers in every run, however fast each of them answered at the start. Fleets of more than
    /// [`ORDERED_WORKERS_MAX`] keep the order in which they joined.
    fn put_in_order(&mut self) {
        if self.fleet.workers() > ORDERED_WORKERS_MAX || !self.is_idle() {
            return;
        }
        let mut members: Vec<&Member> = self.fleet.members().collect();
        members.sort_by_key(|m| m.spec.id);
        if members.is_sorted_by_key(|m| m.slots().first().copied()) {
            return;
        }
        let members: Vec<Member> = members.into_iter().cloned().collect();
        let old = std::mem::take(&mut self.fleet);
        let mut moves = Vec::new();
        for member in members {
            let id = member.spec.id;
            self.fleet.put(member.spec.clone(), |_| {});
            self.fleet.set_ejected(id, member.ejected_until());
            self.fleet.set_busy(id, member.is_busy());
            self.fleet.set_draining(id, member.is_draining());
            let ranks = member.spec.rank_iter();
            moves.extend(ranks.filter_map(|rank| Some((old.slot(rank)?, self.fleet.slot(rank)?))));
        }
        let busy = std::mem::take(&mut self.busy);
        self.busy
            .resize(self.fleet.slot_end() as usize, RankBusy::default());
        let busy_slots = std::mem::take(&mut self.busy_slots);
        for (from, to) in &moves {
            if let (Some(was), Some(is)) =
                (busy.get(*from as usize), self.busy.get_mut(*to as usize))
            {
                *is = *was;
            }
            self.busy_slots.set(*to, busy_slots.has(*from));
        }
        self.admission.moved(&moves);
        if let Some(times) = self.times_mut() {
            times.moved(&moves);
        }
    }

    /// Sends a worker nothing more; what it has goes on. Those that wait for it alone are refused.
    pub(super) fn drain(&mut self, worker: WorkerId) {
        if self.fleet.set_draining(worker, true) {
            self.freed = FreedCapacity::Anything;
        }
    }

    pub(super) fn leave(&mut self, worker: WorkerId, out: &mut Vec<Output>) {
        let mut gone = Vec::new();
        self.fleet.remove(worker, |slot| gone.push(slot));
        self.forget_slots(&gone);
        self.model.forget(worker);
        self.health.leave(worker);
        self.check_all(out);
        self.freed = FreedCapacity::Anything;
    }

    fn forget_slots(&mut self, slots: &[u32]) {
        for &slot in slots {
            let (now, sessions, peers) = (self.now, &mut self.sessions, &mut self.peers);
            self.ledger.clear_slot(now, slot, |freed| {
                sessions.release(now, freed.id, true);
                peers.note(freed.id, PeerChange::Free);
            });
            if let Some(rank) = self.busy.get_mut(slot as usize) {
                *rank = RankBusy::default();
            }
            self.busy_slots.set(slot, false);
            self.admission.left(slot);
        }
    }

    /// A worker could not be reached by an attempt that was sent at `began`.
    pub(super) fn hide(&mut self, worker: WorkerId, began: Option<Time>, out: &mut Vec<Output>) {
        let seconds = self.config.runtime_inhibited_duration_secs;
        let longest = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO);
        if longest.is_zero() || self.fleet.member(worker).is_none() {
            return;
        }
        self.health
            .failed(worker, self.now, began, longest, &mut self.rng);
        self.mark(worker, out);
    }

    /// A worker answered that it is full. Too many such answers in a row eject it, unless it is the last: a fleet that is full
    /// stays whole.
    pub(super) fn errored(&mut self, worker: WorkerId, began: Option<Time>, out: &mut Vec<Output>) {
        if self.fleet.member(worker).is_none() || !self.health.errored(worker, self.now) {
            return;
        }
        if self.has_another_up(worker) {
            self.hide(worker, began, out);
        }
    }

    /// A worker answered that its engine failed. One that does so twice in a row, or faster than it ever answered, is ejected until
    /// it generates a token, unless it is the last: a request that every engine chokes on must not take the fleet down. Nobody asks
    /// workers on a request plane for a token: they are ejected as those that are full.
    pub(super) fn broke(&mut self, worker: WorkerId, began: Option<Time>, out: &mut Vec<Output>) {
        let Some(member) = self.fleet.member(worker) else {
            return;
        };
        if member.spec.transport != TransportKind::Http {
            return self.errored(worker, began, out);
        }
        let ejects = self.config.runtime_inhibited_duration_secs > 0.0;
        if self.health.broke(worker, self.now, began) && ejects && self.has_another_up(worker) {
            self.health.eject_broken(worker, self.now);
            self.mark(worker, out);
        }
    }

    fn has_another_up(&self, worker: WorkerId) -> bool {
        let is_another = |slot| {
            let rank = self.fleet.rank(slot);
            rank.is_some_and(|rank| rank.worker != worker)
        };
        self.fleet.up().iter().any(is_another)
    }

    /// A worker serves a request that was sent at `began`, and has perhaps completed it.
    pub(super) fn served(
        &mut self,
        worker: WorkerId,
        began: Option<Time>,
        completed: bool,
        out: &mut Vec<Output>,
    ) {
        if self.health.served(worker, self.now, began, completed) {
            self.mark(worker, out);
        }
    }

    /// Whether a worker is ejected until it generates a token ([`Input::Generated`](crate::Input::Generated)).
    #[must_use]
    pub fn awaits_token(&self, worker: WorkerId) -> bool {
        self.health.is_broken(worker)
    }

    /// What came of asking a worker for a token.
    pub(super) fn generated(&mut self, asked: &TokenProbe, out: &mut Vec<Output>) {
        if self.fleet.member(asked.worker).is_none() {
            return;
        }
        match asked.supported {
            true => self.health.generated(asked.worker, asked.asked),
            false => {
                if self.health.cannot_generate(asked.worker) {
                    self.hide(asked.worker, Some(asked.asked), out);
                }
            }
        }
        self.mark(asked.worker, out);
    }

    pub(super) fn probed(&mut self, probe: &Probe, out: &mut Vec<Output>) {
        if self.fleet.member(probe.worker).is_none() {
            return;
        }
        match probe.healthy {
            true => {
                self.health.healthy(probe.worker, probe.asked);
            }
            false => self.health.sick(probe.worker, self.now),
        }
        self.mark(probe.worker, out);
    }

    /// Brings a worker's mark up to date with what is held against it.
    fn mark(&mut self, worker: WorkerId, out: &mut Vec<Output>) {
        let until = self.health.ejected_until(worker);
        if self.fleet.set_ejected(worker, until) {
            let down = until.is_some();
            out.push(Output::Observe(Observation::Down { worker, down }));
        }
        self.freed = FreedCapacity::Anything;
    }

    pub(super) fn load_report(&mut self, report: &LoadReport, out: &mut Vec<Output>) {
        let Some(slot) = self.fleet.slot(report.rank) else {
            return;
        };
        if let Some(rank) = self.busy.get_mut(slot as usize) {
            rank.reported.update(&ReportedLoad {
                active_decode_blocks: report.active_decode_blocks,
                active_prefill_tokens: report.active_prefill_tokens,
                kv_used_blocks: report.kv_used_blocks,
            });
        }
        if let Some(waiting) = report.waiting {
            self.release_silent(slot, report.asked, waiting, out);
            self.admission.reported(self.now, slot, waiting);
        }
        self.load_changed(slot, out);
        self.note_freed(slot);
    }

    /// Frees the prompts of answers in one piece that the engine no longer lets wait.
    fn release_silent(&mut self, slot: u32, asked: Time, waiting: u64, out: &mut Vec<Output>) {
        let nanos = asked.as_nanos().saturating_sub(STEP.as_nanos() as u64);
        let before = Time::from_nanos(nanos);
        while let Some(id) = self.ledger.computed_silently(slot, before, waiting) {
            self.prefilled(id, out);
        }
    }

    /// New thresholds are kept and come into force with the next load.
    pub(super) fn set_thresholds(&mut self, update: &ThresholdUpdate) {
        let thresholds = &mut self.thresholds;
        if let Some(value) = update.active_decode_blocks {
            thresholds.active_decode_blocks = value;
        }
        if let Some(value) = update.active_prefill_tokens {
            thresholds.active_prefill_tokens = value;
        }
        if let Some(value) = update.active_prefill_tokens_frac {
            thresholds.active_prefill_tokens_frac = value;
        }
        self.thresholds_new = true;
    }

    /// A rank's load changed: brings its worker's place in the busy set up to date.
    pub(super) fn load_changed(&mut self, slot: u32, out: &mut Vec<Output>) {
        if self.thresholds_new {
            self.apply_new_thresholds(out);
        } else if self.thresholds.is_set() {
            self.check_slot(slot);
            self.check_worker_of(slot, out);
        }
    }

    pub(super) fn apply_new_thresholds(&mut self, out: &mut Vec<Output>) {
        if self.thresholds_new {
            self.check_all(out);
        }
    }

    fn check_all(&mut self, out: &mut Vec<Output>) {
        let was_set = std::mem::take(&mut self.thresholds_new);
        if !was_set && !self.thresholds.is_set() {
            return;
        }
        for slot in 0..self.fleet.slot_end() {
            self.check_slot(slot);
        }
        for slot in 0..self.fleet.slot_end() {
            self.check_worker_of(slot, out);
        }
    }

    fn check_slot(&mut self, slot: u32) {
        let (Some(member), Some(rank)) =
            (self.fleet.member_of(slot), self.busy.get_mut(slot as usize))
        else {
            return;
        };
        let mut booked = self.ledger.load(slot, self.now);
        // Blocks without names are counted once for each request that shares them: the engine knows better.
        if !self.policy.weighs_load() && rank.reported.kv_used_blocks.is_some() {
            booked.active_blocks = 0;
        }
        let total = member.spec.kv_total_blocks;
        let batch = self.fleet.max_batched(slot);
        let busy = rank.check(&self.thresholds, &booked, total, batch);
        self.busy_slots.set(slot, busy);
    }

    /// A worker is busy only if all its ranks are.
    fn check_worker_of(&mut self, slot: u32, out: &mut Vec<Output>) {
        let Some(member) = self.fleet.member_of(slot) else {
            return;
        };
        let worker = member.spec.id;
        let busy = member.slots().iter().all(|s| self.busy_slots.has(*s));
        if busy != member.is_busy() && self.fleet.set_busy(worker, busy) {
            out.push(Output::Observe(Observation::Busy { worker, busy }));
            self.freed = FreedCapacity::Anything;
        }
    }

    /// When something is due, as things stand.
    pub(super) fn deadline(&self) -> Option<Time> {
        let expiry = self.ledger.stalest().map(|(_, seen)| seen + self.expiry);
        let hidden = self.health.due();
        let session = self.sessions.next_due();
        let too_long = self
            .queue
            .oldest()
            .map(|(_, entered)| entered + self.wait_max);
        let opens = self.opens.filter(|_| !self.queue.is_empty());
        let recheck = (!self.queue.is_empty()).then(|| self.queue_checked + self.recheck());
        let asked = self.asks.front().map(|at| *at + Self::REFRESH_WAIT);
        [expiry, hidden, session, too_long, opens, recheck, asked]
            .into_iter()
            .flatten()
            .min()
    }

    fn recheck(&self) -> Duration {
        if self.model.decays() {
            Self::RECHECK_DECAYING
        } else if self.admission.is_on() {
            Admission::RECHECK
        } else {
            Self::RECHECK
        }
    }

    /// Everything that is due by now.
    pub(super) fn run_due(&mut self, out: &mut Vec<Output>) {
        if self.due.is_none_or(|due| due > self.now) {
            return;
        }
        while let Some(freed) = self.ledger.expire(self.now, self.expiry) {
            self.sessions.release(self.now, freed.id, false);
            self.tell(freed.id, PeerChange::Free, out);
            self.admission
                .ended(self.now, freed.slot, freed.sign, false);
            self.load_changed(freed.slot, out);
            self.freed = FreedCapacity::Anything;
            let target = self.fleet.rank(freed.slot).unwrap_or_default();
            let id = freed.id;
            out.push(Output::Observe(Observation::Expired { id, target }));
        }
        let now = self.now;
        while let Some(worker) = self.health.ended(now) {
            self.mark(worker, out);
        }
        while let Some(ended) = self.sessions.expire(now) {
            if ended.in_engine {
                let (id, target) = (ended.id, ended.target);
                out.push(Output::CloseSession { id, target });
            }
        }
        while let Some((id, entered)) = self.queue.oldest() {
            if entered + self.wait_max > now {
                break;
            }
            self.refuse_waiting(id, entered, out);
        }
        while self
            .asks
            .front()
            .is_some_and(|at| *at + Self::REFRESH_WAIT <= now)
        {
            self.asks.pop_front();
            self.freed = FreedCapacity::Anything;
        }
        if self.opens.is_some_and(|opens| opens <= now) {
            self.freed = FreedCapacity::Anything;
        }
        if self.queue_checked + self.recheck() <= now {
            self.admission.tick(now);
            self.freed = FreedCapacity::Anything;
        }
    }
}

/// How long a booking of which nothing is heard stays: the setting, or five minutes where it says nothing sensible.
pub(super) fn expiry_of(config: &RouterConfig) -> Duration {
    let default = Duration::from_secs(300);
    match Duration::try_from_secs_f64(config.router_active_request_expiry_secs) {
        Ok(span) if !span.is_zero() => span,
        _ => default,
    }
}

/// How long a request may wait.
pub(super) fn wait_max_of(config: &RouterConfig) -> Duration {
    let seconds = config.router_queue_max_wait_secs;
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
