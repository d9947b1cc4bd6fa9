//! Placement by seconds: requests are held while the best rank for them is behind, and bound to a rank late.
//!
//! A pass takes those that are held in the order of their slowdown, the longest wait for its size first. Each chooses the
//! rank where it costs least, as if all before it had gone where they chose. If that rank is open and nothing is planned
//! there, it goes; else it stays, and its choice is a plan that the others see for the rest of the pass. An engine computes
//! all that waits in one step, and whoever waits has its first token at the end of it: so one prompt waits at an engine, and
//! the others here, unless sharing a step is worth it.
//!
//! What keeps its meaning: limits of the queue and of policy classes refuse as ever. A class's gate closes ranks to it in
//! addition, its own order holds inside it, and classes take turns by their quanta. A strict priority goes before any
//! slowdown; a priority counts as seconds already waited. Pins and sessions leave one rank to choose, which is waited
//! for. Busy and ejected ranks are no choice; preferred taints multiply the cost. In a prefill role only the prompt
//! costs, in a decode role only the answer.

use std::time::Duration;

use kvasir_placement::{
    Gate, LearnedRecord, LearnedTimes, Ledger, PlacedWork, TimePolicy, TimedRequest,
};
use kvasir_types::{RequestId, SequenceHash, Time, WorkerId, WorkerRank};

use super::arrive::was_admitted;
use super::place::placement_request;
use super::{PinnedRank, QueuedRequest, Router};
use crate::request_settings::RequestSettings;
use crate::{Arrival, Output, Reason, Role, RouteError, RouterConfig};

/// Held requests that a pass looks at.
const PASS_MAX: usize = 64;

/// Samples of prompts before a wait is foretold by them.
const BACKLOG_SAMPLES: u64 = 32;

/// Whom a pass sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sends {
    All,
    Only(RequestId),
    Nobody,
}

/// What closes ranks to a request beside their being behind.
#[derive(Clone, Copy, Debug)]
struct Gates {
    /// Its class's.
    gate: Gate,
    /// Overload protection judges it; another attempt of a request that was let in is not judged again.
    guarded: bool,
}

impl Gates {
    fn of(arrival: &Arrival, gate: Gate) -> Self {
        Self {
            gate,
            guarded: !was_admitted(arrival),
        }
    }
}

/// What becomes of a held request.
#[derive(Debug)]
enum Look {
    Goes(u32, Reason),
    Refused(RouteError),
}

/// The policy of these settings, if it counts seconds.
pub(super) fn policy_of(config: &RouterConfig) -> Option<Box<TimePolicy>> {
    config.counts_seconds().then(|| times_of(config))
}

/// What prices a shadow's choices, where the live policy does not count seconds.
pub(super) fn judge_of(config: &RouterConfig) -> Option<Box<TimePolicy>> {
    let judges = config.learns_seconds() && !config.counts_seconds();
    judges.then(|| times_of(config))
}

fn times_of(config: &RouterConfig) -> Box<TimePolicy> {
    let work = PlacedWork {
        prompt: config.router_role != Role::Decode,
        answer: config.router_role != Role::Prefill,
    };
    let prior = config.engine_law.unwrap_or_default();
    Box::new(TimePolicy::new(&prior, config.kv_cache_block_size, work))
}

/// An empty ledger, with a journal if somebody reads it.
pub(super) fn ledger_of(config: &RouterConfig) -> Ledger {
    let mut ledger = Ledger::new(config.kv_cache_block_size);
    if config.learns_seconds() {
        ledger.keep_journal();
    }
    ledger
}

impl Router {
    /// What was learned of a rank, where placements cost seconds.
    #[must_use]
    pub fn learned(&self, rank: WorkerRank) -> Option<LearnedTimes> {
        let slot = self.fleet.slot(rank)?;
        self.times().map(|times| times.learned(slot))
    }

    /// Tokens of a usual answer, as learned.
    #[must_use]
    pub fn learned_output(&self) -> Option<f64> {
        self.times().map(|times| times.estimator().output())
    }

    /// What learns seconds: the policy, or what judges a shadow.
    fn times(&self) -> Option<&TimePolicy> {
        self.time.as_deref().or(self.judge.as_deref())
    }

    pub(super) fn times_mut(&mut self) -> Option<&mut TimePolicy> {
        self.time.as_deref_mut().or(self.judge.as_deref_mut())
    }

    /// The worker has these slots now; it had those `before`.
    pub(super) fn time_joined(&mut self, worker: WorkerId, before: &[u32]) {
        let times = self.time.as_deref_mut().or(self.judge.as_deref_mut());
        let (Some(time), Some(member)) = (times, self.fleet.member(worker)) else {
            return;
        };
        for &slot in member.slots() {
            let (batch, new) = (self.fleet.max_batched(slot), !before.contains(&slot));
            time.joined(slot, batch, new);
            let known = self.fleet.rank(slot).filter(|_| new);
            if let Some(numbers) = known.and_then(|rank| self.known_ranks.remove(&rank)) {
                time.estimator_mut().resume_rank(slot, &numbers);
            }
        }
    }

    /// What was learned, to be kept; `None` where nothing is learned.
    #[must_use]
    pub fn learned_record(&self) -> Option<LearnedRecord> {
        let estimator = self.times()?.estimator();
        let mut ranks: Vec<(WorkerRank, Vec<f64>)> = self
            .known_ranks
            .iter()
            .map(|(rank, numbers)| (*rank, numbers.clone()))
            .collect();
        for slot in self.fleet.live().iter() {
            let rank = self.fleet.rank(slot);
            ranks.extend(rank.map(|rank| (rank, estimator.rank_record(slot))));
        }
        ranks.truncate(LearnedRecord::RANKS_MAX);
        Some(LearnedRecord {
            fleet: estimator.fleet_record(),
            ranks,
        })
    }

    /// Goes on from what another router had learned. Says whether that is of use.
    pub fn resume_learned(&mut self, record: &LearnedRecord) -> bool {
        let resumed = self
            .times_mut()
            .is_some_and(|times| times.estimator_mut().resume_fleet(&record.fleet));
        if !resumed {
            return false;
        }
        for (rank, numbers) in record.ranks.iter().take(LearnedRecord::RANKS_MAX) {
            match self.fleet.slot(*rank) {
                Some(slot) => {
                    if let Some(times) = self.times_mut() {
                        times.estimator_mut().resume_rank(slot, numbers);
                    }
                }
                None => drop(self.known_ranks.insert(*rank, numbers.clone())),
            }
        }
        true
    }

    /// How long it takes until what waits now has been computed: what is booked and what is held, shared by all ranks. `None`
    /// until it was seen how long prompts take.
    pub(super) fn backlog(&self) -> Option<Duration> {
        let time = self.time.as_deref()?;
        if time.estimator().samples().0 < BACKLOG_SAMPLES {
            return None;
        }
        let up = self.fleet.up();
        let booked = up.iter().map(|slot| time.expected_wait(slot, self.now));
        let held = self.queue.iter().map(|(entry, _)| entry.payload.alone);
        let seconds = booked.sum::<Duration>().as_secs_f64() + held.sum::<f64>();
        Duration::try_from_secs_f64(seconds / f64::from(up.count().max(1))).ok()
    }

    /// When a client that is refused should come back, where that is known.
    pub(super) fn retry_after_ms(&self) -> Option<u64> {
        let wait = self.backlog()?.min(self.wait_max);
        u64::try_from(wait.as_millis()).ok()
    }

    /// A refusal by busy thresholds says when to come back, where that is known.
    pub(super) fn with_retry_after(&self, mut error: RouteError) -> RouteError {
        if let RouteError::AllEligibleWorkersOverloaded { retry_after_ms, .. } = &mut error {
            *retry_after_ms = self.retry_after_ms();
        }
        error
    }

    /// Learns from what happened in this step, and plans the next look at those that are held.
    pub(super) fn follow_times(&mut self) {
        if let Some(judge) = &mut self.judge {
            judge.sync(&self.fleet, &mut self.ledger);
        }
        let Some(time) = &mut self.time else {
            return;
        };
        time.sync(&self.fleet, &mut self.ledger);
        self.opens = None;
        if !self.queue.is_empty() {
            let now = self.now;
            let opens = self.fleet.up().iter().filter_map(|s| time.opens_at(s, now));
            self.opens = opens.min();
        }
    }

    /// A request that goes on from an earlier one: that one is no longer expected. One that failed elsewhere never ended.
    pub(super) fn came_back(&mut self, arrival: &Arrival) {
        if arrival.query_only || !arrival.failed.is_empty() {
            return;
        }
        let found = arrival.overlap.ranks.iter();
        let cached = found.map(|found| found.effective(1.0, 1.0) as u32).max();
        self.goes_on(&arrival.sequence, cached.unwrap_or(0));
    }

    /// The same of any request, of whose prompt so many blocks are cached.
    pub(super) fn goes_on(&mut self, sequence: &[SequenceHash], blocks: u32) {
        let times = self.time.as_deref_mut().or(self.judge.as_deref_mut());
        let Some(times) = times.filter(|_| blocks > 0) else {
            return;
        };
        if times.arrived(self.now, &mut self.ledger, sequence, blocks) {
            times.sync(&self.fleet, &mut self.ledger);
        }
    }

    /// A request under this policy: it goes at once if its best rank is open, else it is held.
    pub(super) fn arrive_timed(
        &mut self,
        arrival: Box<Arrival>,
        pin: Option<PinnedRank>,
        filled: Result<(), RouteError>,
        (class, cached): (usize, u32),
        out: &mut Vec<Output>,
    ) {
        let id = arrival.id;
        let settings = RequestSettings::of(&self.config, &arrival.overrides);
        let gate = self.queue.class(class).map(|c| c.gate).unwrap_or_default();
        let gates = Gates::of(&arrival, gate);
        if filled.is_err() && !self.all_closed(gates) {
            return self.place_filled(&arrival, pin, filled, None, out);
        }
        if filled.is_ok() && self.queue.is_empty() {
            match self.choose(&arrival, pin, &settings) {
                Ok((slot, reason))
                    if self.is_open_to(slot, gates)
                        && !self.is_crowded(&arrival, slot, &settings, 0) =>
                {
                    return self.send(&arrival, slot, reason, &settings, None, out);
                }
                Ok(_) => {}
                Err(error) => {
                    return self.place_filled(&arrival, pin, Err(error), None, out);
                }
            }
        }
        if let Err(error) = self.room(class) {
            return self.refuse(&arrival, error, out);
        }
        if let Err((arrival, error)) = self.hold(arrival, pin, class, cached) {
            return self.refuse(&arrival, error, out);
        }
        self.bind_held(true, out);
        if self.queue.contains(id) {
            let depth = self.queue.len() as u32;
            out.push(Output::Queued { id, depth });
        }
    }

    /// Whether there are ranks for this request and each is closed.
    fn all_closed(&self, gates: Gates) -> bool {
        let routable = &self.eligible.routable;
        !routable.is_empty() && !routable.iter().any(|slot| self.is_open_to(slot, gates))
    }

    /// Whether a rank takes a request with these gates now.
    fn is_open_to(&self, slot: u32, gates: Gates) -> bool {
        let Gates { gate, guarded } = gates;
        if guarded && self.admission.is_on() && !self.admission.is_open(slot) {
            return false;
        }
        let time = self.time.as_ref();
        let open = time.is_none_or(|time| time.is_open(slot, self.now));
        let waiting = || self.ledger.prefill_tokens(slot, self.now);
        open && !(gate.is_set() && gate.closes(waiting(), self.fleet.max_batched(slot)))
    }

    /// Seconds of a prompt alone where most of it is cached.
    pub(super) fn alone(&mut self, arrival: &Arrival) -> f64 {
        let Some(time) = &self.time else {
            return 0.0;
        };
        let (host, disk) = (
            self.config.router_host_cache_hit_weight,
            self.config.router_disk_cache_hit_weight,
        );
        let mut best = (0.0f64, None);
        for found in &arrival.overlap.ranks {
            let slot = self.fleet.slot(found.rank);
            let eligible = slot.filter(|slot| self.eligible.routable.has(*slot));
            if eligible.is_some() && found.effective(host, disk) > best.0 {
                best = (found.effective(host, disk), eligible);
            }
        }
        let slot = best.1.or_else(|| self.eligible.routable.iter().next());
        let batch = slot.map_or(0, |slot| self.fleet.max_batched(slot));
        let settings = RequestSettings::of(&self.config, &arrival.overrides);
        let request = placement_request(arrival, &[], &settings, Gate::default());
        let timed = TimedRequest {
            request: &request,
            osl: arrival.hints.osl,
        };
        time.alone(self.now, &timed, best.0, batch)
    }

    /// How long a prompt will take on a rank, for its booking.
    pub(super) fn own_time(
        &self,
        arrival: &Arrival,
        slot: u32,
        cached: u32,
        settings: &RequestSettings,
    ) -> Option<Duration> {
        let request = placement_request(arrival, &[], settings, Gate::default());
        let timed = TimedRequest {
            request: &request,
            osl: arrival.hints.osl,
        };
        self.times()?.own(slot, self.now, &timed, cached)
    }

    /// A request goes where it costs least, and so many blocks of it are there: who comes next for the same prefix may find it
    /// worth a copy.
    pub(super) fn placed_timed(
        &mut self,
        arrival: &Arrival,
        (slot, blocks): (u32, f64),
        reason: Reason,
    ) {
        let chose = matches!(reason, Reason::LowestCost | Reason::Tie { .. });
        let tracks = self.tracks_blocks();
        if let Some(time) = self.time.as_mut().filter(|_| chose && tracks) {
            let prompt = (&arrival.overlap, &arrival.sequence[..]);
            time.placed(self.now, &self.fleet, prompt, (slot, blocks));
        }
    }

    /// Lets those go whose time has come. `changed`: something happened since the last time.
    pub(super) fn bind_held(&mut self, changed: bool, out: &mut Vec<Output>) {
        if self.queue.is_empty() || !changed {
            return;
        }
        self.queue_checked = self.now;
        let Some(time) = &mut self.time else {
            return;
        };
        time.sync(&self.fleet, &mut self.ledger);
        let now = self.now;
        let live = self.fleet.live();
        if !live.is_empty() && !live.iter().any(|slot| time.is_open(slot, now)) {
            return;
        }
        if self.queue.classes_waiting() > 1 {
            self.bind_by_turns(out);
        } else {
            let order = self.held_order(None);
            self.pass(&order, Sends::All, out);
        }
    }

    /// Several classes wait: each has a pass of its own, and of those that could go the one whose class has its turn
    /// goes; and again.
    fn bind_by_turns(&mut self, out: &mut Vec<Output>) {
        for _ in 0..PASS_MAX {
            let classes = (0..)
                .take_while(|at| self.queue.class(*at).is_some())
                .count();
            let mut ready = Vec::new();
            for class in 0..classes {
                if !self.queue.has_backlog(class) {
                    continue;
                }
                let order = self.held_order(Some(class));
                ready.extend(self.pass(&order, Sends::Nobody, out).first().copied());
            }
            let Some(id) = self.queue.next_among(&ready) else {
                return;
            };
            let class = self.queue.get(id).map(|(entry, _)| entry.class);
            let order = self.held_order(class);
            self.pass(&order, Sends::Only(id), out);
            if self.queue.contains(id) {
                return;
            }
        }
    }

    /// Who is looked at, of one class or of all, and in which order.
    fn held_order(&self, class: Option<usize>) -> Vec<RequestId> {
        struct Held {
            id: RequestId,
            rank: (u32, f64),
            entered: Time,
        }
        let by_class = self.config.router_policy_config.is_some();
        let slowdown = |payload: &QueuedRequest, entered: Time| {
            let waited = (self.now - entered).as_secs_f64();
            let ahead = payload.arrival.hints.priority_jump();
            1.0 + (waited + ahead) / payload.alone.max(1e-6)
        };
        let mut held: Vec<Held> = self
            .queue
            .iter()
            .filter(|(entry, _)| class.is_none_or(|class| entry.class == class))
            .map(|(entry, entered)| {
                let urgency = match by_class {
                    true => entry.urgency,
                    false => slowdown(&entry.payload, entered),
                };
                Held {
                    id: entry.id,
                    rank: (entry.strict_priority, urgency),
                    entered,
                }
            })
            .collect();
        let before = |a: &Held, b: &Held| {
            let tier = b.rank.0.cmp(&a.rank.0);
            let urgency = b.rank.1.total_cmp(&a.rank.1);
            tier.then(urgency).then(a.entered.cmp(&b.entered))
        };
        if held.len() > PASS_MAX {
            held.select_nth_unstable_by(PASS_MAX, before);
            held.truncate(PASS_MAX);
        }
        held.sort_by(before);
        held.into_iter().map(|held| held.id).collect()
    }

    /// One pass. Names those that could have gone and were not sent.
    fn pass(&mut self, order: &[RequestId], sends: Sends, out: &mut Vec<Output>) -> Vec<RequestId> {
        let mut ready = Vec::new();
        for &id in order {
            let asked = self.queue.get(id).map(|(entry, _)| entry.payload.asked);
            match asked {
                Some(asked) if !self.awaits_lookup(asked) && !self.ask_refresh(id, out) => {}
                _ => continue,
            }
            let sent = match sends {
                Sends::All => true,
                Sends::Only(only) => only == id,
                Sends::Nobody => false,
            };
            match self.look_at(id, sent) {
                None => {}
                Some(Look::Goes(..) | Look::Refused(_)) if !sent => ready.push(id),
                Some(Look::Goes(slot, reason)) => {
                    if let Some((entry, entered)) = self.queue.take(id) {
                        self.no_longer_waits(&entry, true);
                        let arrival = &entry.payload.arrival;
                        let settings = RequestSettings::of(&self.config, &arrival.overrides);
                        self.send(arrival, slot, reason, &settings, Some(entered), out);
                    }
                }
                Some(Look::Refused(error)) => {
                    if let Some((entry, entered)) = self.queue.take(id) {
                        self.no_longer_waits(&entry, false);
                        let QueuedRequest { arrival, pin, .. } = &entry.payload;
                        self.place_filled(arrival, *pin, Err(error), Some(entered), out);
                    }
                }
            }
            if matches!(sends, Sends::Only(_)) && sent {
                break;
            }
        }
        if let Some(time) = &mut self.time {
            time.drop_plans();
        }
        ready
    }

    /// What would become of a held request now. One that stays, or may yet be sent by another pass, is planned.
    fn look_at(&mut self, id: RequestId, sent: bool) -> Option<Look> {
        // The queue lends the request to the choice, which needs the rest of the router.
        let nobody = kvasir_placement::Queue::new(Vec::new());
        let queue = std::mem::replace(&mut self.queue, nobody);
        let look = match queue.get(id) {
            Some((entry, _)) => {
                let gate = queue.class(entry.class).map(|c| c.gate);
                let others = queue.len().saturating_sub(1);
                let gate = gate.unwrap_or_default();
                self.look_at_waiting(&entry.payload, gate, sent, others)
            }
            None => None,
        };
        self.queue = queue;
        look
    }

    /// `others` are held, too.
    fn look_at_waiting(
        &mut self,
        waiting: &QueuedRequest,
        gate: Gate,
        sent: bool,
        others: usize,
    ) -> Option<Look> {
        let arrival = &waiting.arrival;
        let pin = self.still_bound(arrival, waiting.pin);
        let settings = RequestSettings::of(&self.config, &arrival.overrides);
        let filled = self.fill(arrival, pin);
        let gates = Gates::of(arrival, gate);
        if filled.is_err() && self.all_closed(gates) {
            return None;
        }
        let chosen = filled.and_then(|()| self.choose(arrival, pin, &settings));
        let (slot, reason) = match chosen {
            Ok(chosen) => chosen,
            Err(error) => return Some(Look::Refused(error)),
        };
        let planned = self.time.as_ref().is_some_and(|time| time.has_plan(slot));
        let goes = !planned
            && self.is_open_to(slot, gates)
            && !self.is_crowded(arrival, slot, &settings, others);
        if !goes || !sent {
            self.plan(arrival, slot, &settings);
        }
        goes.then_some(Look::Goes(slot, reason))
    }

    /// Whether the rank just chosen has a prompt waiting that would be delayed more than a step of its own delays this one.
    fn is_crowded(
        &self,
        arrival: &Arrival,
        slot: u32,
        settings: &RequestSettings,
        others: usize,
    ) -> bool {
        let time = self.time.as_ref();
        let Some(time) = time.filter(|time| time.has_prompt_behind(slot)) else {
            return false;
        };
        let cached = super::cached_tokens(self.kept_of(slot), arrival.isl_tokens, &self.config);
        let request = placement_request(arrival, &[], settings, Gate::default());
        let timed = TimedRequest {
            request: &request,
            osl: arrival.hints.osl,
        };
        let ranks = f64::from(self.fleet.up().count().max(1));
        time.is_crowded(slot, self.now, &timed, cached, others as f64 / ranks)
    }

    fn plan(&mut self, arrival: &Arrival, slot: u32, settings: &RequestSettings) {
        let chosen = self.kept_of(slot);
        let cached = super::cached_tokens(chosen, arrival.isl_tokens, &self.config);
        let own = self.own_time(arrival, slot, cached, settings);
        if let Some(time) = &mut self.time {
            time.plan(slot, arrival.isl_tokens, own);
        }
    }

    /// Blocks that the rank just chosen holds.
    fn kept_of(&self, slot: u32) -> f64 {
        let rank = self.fleet.rank(slot);
        let found = self.kept.iter().find(|kept| Some(kept.rank) == rank);
        found.map_or(0.0, |kept| kept.terms.cached_blocks)
    }
}
