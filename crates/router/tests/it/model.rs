//! The router as one would write it without caring for speed: lists of everything, each figure recomputed
//! from scratch whenever it is asked for. The truth for the history test.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

mod held;

use super::*;
use held::Held;
use kvasir_router::{LimitKind, LoadReport, QueuePolicy, Thresholds};

pub(crate) const BLOCK: u32 = 16;
const MILLION: u64 = 1_000_000;

/// What a step must have said about requests, in order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Said {
    Sent(RequestId),
    Queued(RequestId),
    Refused(RequestId, RouteError),
}

#[derive(Clone, Debug, Default)]
struct Rank {
    used: Option<u64>,
    latched: bool,
}

#[derive(Clone, Debug)]
struct Worker {
    spec: WorkerSpec,
    ranks: BTreeMap<WorkerRank, Rank>,
    held: Held,
    busy: bool,
}

#[derive(Clone, Debug)]
struct Booked {
    id: RequestId,
    rank: WorkerRank,
    arrival: Arrival,
    /// Prefixes of the prompt, as booked.
    blocks: Vec<SequenceHash>,
    prefill: u32,
    began: Time,
    generated: u32,
    total_blocks: u32,
    output_blocks: u64,
    weight: u64,
    seen: Time,
}

#[derive(Clone, Debug)]
struct Waiting {
    arrival: Arrival,
    pin: Option<WorkerRank>,
    urgency: f64,
    entered: Time,
}

/// The naive router.
#[derive(Debug)]
pub(crate) struct Model {
    config: RouterConfig,
    now: Time,
    workers: BTreeMap<WorkerId, Worker>,
    booked: Vec<Booked>,
    waiting: Vec<Waiting>,
    wanted: Thresholds,
    in_force: Thresholds,
    /// Who served a request when, last.
    served: BTreeMap<WorkerId, Time>,
    /// How fast each has begun to answer at best.
    fastest: BTreeMap<WorkerId, Duration>,
    /// Until when the router ejects workers, after its step.
    marks: BTreeMap<WorkerId, Time>,
    /// What the router has said, still to be accounted for.
    heard: std::collections::VecDeque<Output>,
}

impl Model {
    pub(crate) fn new(config: RouterConfig) -> Self {
        let thresholds = Thresholds {
            active_decode_blocks: config.active_decode_blocks_threshold,
            active_prefill_tokens: config.active_prefill_tokens_threshold,
            active_prefill_tokens_frac: config.active_prefill_tokens_threshold_frac,
        };
        Self {
            config,
            now: Time::ZERO,
            workers: BTreeMap::new(),
            booked: Vec::new(),
            waiting: Vec::new(),
            wanted: thresholds,
            in_force: thresholds,
            served: BTreeMap::new(),
            fastest: BTreeMap::new(),
            marks: BTreeMap::new(),
            heard: Default::default(),
        }
    }

    /// Takes the same input and checks that what the router said is what had to be said.
    pub(crate) fn step(
        &mut self,
        now: Time,
        input: &Input,
        out: &[Output],
        marks: BTreeMap<WorkerId, Time>,
    ) {
        self.now = self.now.max(now);
        self.marks = marks;
        let about_requests = |o: &&Output| !matches!(o, Output::Observe(_));
        self.heard = out.iter().filter(about_requests).cloned().collect();
        self.due();
        match input {
            Input::Joined(spec) => self.put(spec, true),
            Input::Updated(spec) => self.put(spec, false),
            Input::Left(worker) => {
                self.workers.remove(worker);
                self.served.remove(worker);
                self.fastest.remove(worker);
                self.booked.retain(|b| b.rank.worker != *worker);
                self.load_seen();
            }
            Input::Arrived(arrival) => self.arrive(arrival),
            Input::FirstToken { id } => self.first_token(*id),
            Input::Tokens { id, generated } => self.tokens(*id, *generated),
            Input::Finished { id, on, outcome } => self.finish(*id, *on, *outcome),
            Input::Load(report) => self.load(report),
            Input::Probed(probe) => self.probed(probe),
            Input::Generated(probe) => self.generated(probe),
            Input::Thresholds(update) => {
                let keep = &mut self.wanted;
                keep.active_decode_blocks = update
                    .active_decode_blocks
                    .unwrap_or(keep.active_decode_blocks);
                keep.active_prefill_tokens = update
                    .active_prefill_tokens
                    .unwrap_or(keep.active_prefill_tokens);
            }
            Input::Tick => {
                if self.wanted != self.in_force {
                    self.load_seen();
                }
            }
            other => panic!("histories do not contain {other:?}"),
        }
        self.release();
        assert!(self.heard.is_empty(), "said too much: {:?}", self.heard);
        for id in self.workers.keys().copied().collect::<Vec<_>>() {
            self.compare_mark(id);
        }
    }

    fn expect(&mut self, said: &Said) -> Option<WorkerRank> {
        let heard = self.heard.pop_front();
        let (got, target) = match &heard {
            Some(Output::Send(sent)) => (Some(Said::Sent(sent.id)), Some(sent.target)),
            Some(Output::Queued { id, .. }) => (Some(Said::Queued(*id)), None),
            Some(Output::Refuse { id, error }) => (Some(Said::Refused(*id, error.clone())), None),
            _ => (None, None),
        };
        assert_eq!(got.as_ref(), Some(said), "said {heard:?}");
        target
    }

    fn due(&mut self) {
        let expiry = Duration::from_secs_f64(self.config.router_active_request_expiry_secs);
        let now = self.now;
        let before = self.booked.len();
        self.booked.retain(|b| b.seen + expiry > now);
        if self.booked.len() != before {
            self.load_seen();
        }
        for worker in self.workers.values_mut() {
            let until = &mut worker.held.until;
            *until = until.filter(|(.., latest, drawn)| drawn.unwrap_or(*latest) > now);
        }
        let wait = Duration::from_secs_f64(self.config.router_queue_max_wait_secs);
        while let Some(at) = self.waiting.iter().position(|w| w.entered + wait <= now) {
            let gone = self.waiting.remove(at);
            let error = RouteError::QueueLimit {
                policy_class: "default".to_owned(),
                limit_kind: LimitKind::WaitMs,
                current: (now - gone.entered).as_millis() as u64,
                limit: wait.as_millis() as u64,
                retry_after_ms: None,
            };
            self.expect(&Said::Refused(gone.arrival.id, error));
        }
    }

    fn put(&mut self, spec: &WorkerSpec, back: bool) {
        let old = self.workers.remove(&spec.id);
        let ranks = spec.rank_iter().map(|rank| {
            let kept = old.as_ref().and_then(|o| o.ranks.get(&rank)).cloned();
            (rank, kept.unwrap_or_default())
        });
        let ranks: BTreeMap<_, _> = ranks.collect();
        self.booked
            .retain(|b| b.rank.worker != spec.id || ranks.contains_key(&b.rank));
        let held = old.as_ref().map(|o| o.held.clone()).filter(|_| !back);
        let worker = Worker {
            spec: spec.clone(),
            ranks,
            held: held.unwrap_or_default(),
            busy: old.is_some_and(|o| o.busy),
        };
        self.workers.insert(spec.id, worker);
        self.load_seen();
    }

    // Figures.

    fn here(&self, rank: WorkerRank) -> impl Iterator<Item = &Booked> {
        self.booked.iter().filter(move |b| b.rank == rank)
    }

    fn shares(&self, arrival: &Arrival) -> bool {
        let own = arrival.overrides.assume_kv_reuse;
        own.unwrap_or(self.config.router_assume_kv_reuse)
    }

    pub(crate) fn prefill(&self, rank: WorkerRank) -> u64 {
        self.here(rank).map(|b| u64::from(b.prefill)).sum()
    }

    pub(crate) fn requests(&self, rank: WorkerRank) -> u32 {
        self.here(rank).count() as u32
    }

    /// Each distinct shared block once, at its only owner's weight or whole; own blocks and output apart.
    pub(crate) fn active_blocks(&self, rank: WorkerRank) -> u64 {
        let mut owners: BTreeMap<SequenceHash, Vec<u64>> = BTreeMap::new();
        let mut sum = 0;
        for b in self.here(rank) {
            sum += b.output_blocks * b.weight;
            for hash in &b.blocks {
                if self.shares(&b.arrival) {
                    owners.entry(*hash).or_default().push(b.weight);
                } else {
                    sum += b.weight;
                }
            }
        }
        for weights in owners.values() {
            sum += match weights.as_slice() {
                [only] => *only,
                _ => MILLION,
            };
        }
        (sum + MILLION / 2) / MILLION
    }

    fn tracked<'a>(&self, arrival: &'a Arrival) -> &'a [SequenceHash] {
        match self.config.router_track_active_blocks {
            true => &arrival.sequence,
            false => &[],
        }
    }

    /// Effective blocks of the prompt that a rank holds.
    fn cached_blocks(&self, arrival: &Arrival, rank: WorkerRank) -> f64 {
        let found = arrival.overlap.ranks.iter().find(|r| r.rank == rank);
        found.map_or(0.0, |r| {
            let blocks = f64::from(arrival.isl_tokens.div_ceil(BLOCK));
            r.device.min(blocks) + 0.75 * f64::from(r.host) + 0.25 * f64::from(r.disk)
        })
    }

    fn cost(&self, arrival: &Arrival, rank: WorkerRank) -> f64 {
        let waiting =
            (self.prefill(rank) + u64::from(arrival.isl_tokens)) as f64 / f64::from(BLOCK);
        let raw = match self.config.router_track_prefill_tokens {
            true => waiting,
            false => 0.0,
        };
        let adjusted = (raw - self.cached_blocks(arrival, rank)).max(0.0);
        let sequence = self.tracked(arrival);
        let active: BTreeSet<_> = match self.shares(arrival) {
            true => {
                let sharing = self.here(rank).filter(|b| self.shares(&b.arrival));
                sharing.flat_map(|b| &b.blocks).collect()
            }
            false => BTreeSet::new(),
        };
        let known = sequence.iter().take_while(|h| active.contains(h)).count();
        let decode = self.active_blocks(rank) + (sequence.len() - known) as u64;
        self.config.router_prefill_load_scale * adjusted + decode as f64
    }

    // Who may.

    fn routable(
        &self,
        arrival: &Arrival,
        pin: Option<WorkerRank>,
    ) -> Result<Vec<WorkerRank>, RouteError> {
        let allowed = |id: &WorkerId| {
            let list = arrival.constraints.allowed.as_ref();
            list.is_none_or(|list| list.contains(id))
        };
        let tainted = |w: &Worker| {
            let required = &arrival.constraints.required_taints;
            required.iter().all(|t| w.spec.taints.contains(t))
        };
        if let Some(pin) = pin {
            let unknown = Err(RouteError::PinnedWorkerUnknown(pin.worker));
            if !allowed(&pin.worker) {
                return Err(RouteError::PinnedWorkerNotAllowed(pin.worker));
            }
            let Some(worker) = self.workers.get(&pin.worker) else {
                return unknown;
            };
            if !worker.ranks.contains_key(&pin) {
                let first = worker.spec.first_rank.0;
                return Err(RouteError::PinnedRankUnknown {
                    worker: pin.worker,
                    rank: pin.rank,
                    first,
                    end: first + worker.spec.ranks,
                });
            }
            if !tainted(worker) {
                return unknown;
            }
            if arrival.failed.contains(&pin.worker) {
                return Err(RouteError::FailedWorkersUnavailable);
            }
            return Ok(vec![pin]);
        }
        let ranks = |w: &Worker| w.ranks.keys().copied().collect();
        let all = self.workers.values();
        let fit: Vec<&Worker> = all.filter(|w| allowed(&w.spec.id) && tainted(w)).collect();
        let is_fresh = |w: &Worker| !arrival.failed.contains(&w.spec.id);
        let up: Vec<WorkerRank> = fit
            .iter()
            .filter(|w| is_fresh(w) && !w.held.is_down())
            .flat_map(|w| w.ranks.keys().copied())
            .collect();
        if !up.is_empty() {
            return Ok(up);
        }
        let mut ejected: Vec<&&Worker> = fit.iter().filter(|w| is_fresh(w)).collect();
        ejected.sort_by_key(|w| (w.busy, w.held.badness(), w.spec.id));
        if let Some(least) = ejected.first() {
            return Ok(ranks(least));
        }
        let again = arrival.failed.iter().filter(|_| arrival.again);
        let mut again = again.filter_map(|id| fit.iter().find(|w| w.spec.id == *id));
        match (again.next(), fit.is_empty()) {
            (Some(oldest), _) => Ok(ranks(oldest)),
            (None, false) => Err(RouteError::FailedWorkersUnavailable),
            (None, true) => Err(RouteError::NoEndpoints {
                known: self.workers.len() as u32,
                down: self.workers.values().filter(|w| w.held.is_down()).count() as u32,
            }),
        }
    }

    fn may_go(&self, arrival: &Arrival, pin: Option<WorkerRank>) -> bool {
        let Some(threshold) = self.config.router_queue_threshold else {
            return true;
        };
        let ranks = self.routable(arrival, pin).unwrap_or_default();
        let open = |rank: &WorkerRank| {
            let batch = self.workers[&rank.worker].spec.max_num_batched_tokens;
            self.prefill(*rank) as f64 <= threshold * batch.unwrap_or(10_000_000) as f64
        };
        ranks.is_empty() || ranks.iter().any(open)
    }

    // What happens.

    fn arrive(&mut self, arrival: &Arrival) {
        let id = arrival.id;
        let refuse = |model: &mut Self, error| {
            model.expect(&Said::Refused(id, error));
        };
        if arrival.isl_tokens == 0 {
            return refuse(self, RouteError::EmptyPrompt);
        }
        if self.waiting.iter().any(|w| w.arrival.id == id) {
            return refuse(self, RouteError::DuplicateRequest);
        }
        if let Some(at) = self.booked.iter().position(|b| b.id == id) {
            if !arrival.failed.contains(&self.booked[at].rank.worker) {
                return refuse(self, RouteError::DuplicateRequest);
            }
            self.booked.remove(at);
            self.load_seen();
        }
        let pin = match self.pin(arrival) {
            Ok(pin) => pin,
            Err(error) => return refuse(self, error),
        };
        let queues = self.config.router_queue_threshold.is_some();
        if !queues || self.waiting.is_empty() && self.may_go(arrival, pin) {
            return self.place(arrival.clone(), pin);
        }
        let limit = self.config.router_queue_max_requests;
        if self.waiting.len() >= limit as usize {
            let error = RouteError::QueueLimit {
                policy_class: "default".to_owned(),
                limit_kind: LimitKind::Requests,
                current: self.waiting.len() as u64,
                limit: u64::from(limit),
                retry_after_ms: None,
            };
            return refuse(self, error);
        }
        self.waiting.push(Waiting {
            urgency: self.urgency(arrival),
            arrival: arrival.clone(),
            pin,
            entered: self.now,
        });
        self.release();
        if self.waiting.iter().any(|w| w.arrival.id == id) {
            self.expect(&Said::Queued(id));
        }
    }

    fn urgency(&self, arrival: &Arrival) -> f64 {
        let jump = arrival.hints.priority_jump();
        let offset = self.now.as_secs_f64();
        match self.config.router_queue_policy {
            QueuePolicy::Fcfs => jump - offset,
            QueuePolicy::Lcfs => jump + offset,
            QueuePolicy::Wspt => (1.0 + jump) / f64::from(arrival.isl_tokens),
            QueuePolicy::WsptUncached => panic!("not in histories"),
        }
    }

    fn pin(&self, arrival: &Arrival) -> Result<Option<WorkerRank>, RouteError> {
        let Some(worker) = arrival.pin.worker else {
            return Ok(None);
        };
        if let Some(rank) = arrival.pin.rank {
            return Ok(Some(WorkerRank { worker, rank }));
        }
        let list = arrival.constraints.allowed.as_ref();
        if list.is_some_and(|list| !list.contains(&worker)) {
            return Err(RouteError::PinnedWorkerNotAllowed(worker));
        }
        let known = self.workers.get(&worker);
        let ranks = &known.ok_or(RouteError::PinnedWorkerUnknown(worker))?.ranks;
        match ranks.len() {
            1 => Ok(ranks.keys().next().copied()),
            n => Err(RouteError::PinnedRankMissing {
                worker,
                ranks: n as u32,
            }),
        }
    }

    fn place(&mut self, arrival: Arrival, pin: Option<WorkerRank>) {
        let id = arrival.id;
        let free = self.routable(&arrival, pin).and_then(|ranks| {
            let busy = |rank: &WorkerRank| self.workers[&rank.worker].busy;
            let free: Vec<_> = ranks.iter().copied().filter(|r| !busy(r)).collect();
            let workers: BTreeSet<_> = ranks.iter().map(|r| r.worker).collect();
            match (free.is_empty(), pin) {
                (false, _) => Ok(free),
                (true, Some(pin)) => Err(RouteError::PinnedWorkerOverloaded(pin.worker)),
                (true, None) => Err(RouteError::AllEligibleWorkersOverloaded {
                    workers: workers.len() as u32,
                    retry_after_ms: None,
                }),
            }
        });
        let free = match free {
            Ok(free) => free,
            Err(error) => {
                self.expect(&Said::Refused(id, error));
                return;
            }
        };
        let costs: Vec<_> = free.iter().map(|r| (self.cost(&arrival, *r), *r)).collect();
        let target = self.expect(&Said::Sent(id)).unwrap();
        let lowest = costs.iter().map(|c| c.0).fold(f64::INFINITY, f64::min);
        let chosen = costs.iter().find(|c| c.1 == target);
        let chosen = chosen.unwrap_or_else(|| panic!("{target} is not free: {costs:?}"));
        if self.config.router_temperature == 0.0 {
            assert_eq!(chosen.0, lowest, "{target} is not the cheapest: {costs:?}");
        }
        self.book(arrival, target);
    }

    fn book(&mut self, arrival: Arrival, rank: WorkerRank) {
        let cached = (self.cached_blocks(&arrival, rank) * f64::from(BLOCK)).round() as u32;
        let prefill = match self.config.router_track_prefill_tokens {
            true => arrival.isl_tokens - cached.min(arrival.isl_tokens),
            false => 0,
        };
        let blocks = self.tracked(&arrival).to_vec();
        self.booked.push(Booked {
            id: arrival.id,
            rank,
            blocks,
            prefill,
            began: self.now,
            generated: 0,
            total_blocks: arrival.isl_tokens.div_ceil(BLOCK),
            output_blocks: 0,
            weight: MILLION,
            seen: self.now,
            arrival,
        });
        self.load_seen();
    }

    fn release(&mut self) {
        loop {
            let mut best: Option<usize> = None;
            for (at, w) in self.waiting.iter().enumerate() {
                let ahead = |other: &Waiting| {
                    let (a, b) = (&other.arrival.hints, &w.arrival.hints);
                    let key = (a.strict_priority, other.urgency);
                    key > (b.strict_priority, w.urgency)
                };
                let is_head = |at: usize| {
                    let lane = self
                        .waiting
                        .iter()
                        .enumerate()
                        .filter(|(_, o)| o.pin == w.pin);
                    !lane.clone().any(|(_, o)| ahead(o))
                        && !lane.clone().any(|(i, o)| {
                            i < at
                                && o.urgency == w.urgency
                                && o.arrival.hints.strict_priority
                                    == w.arrival.hints.strict_priority
                        })
                };
                if !is_head(at) || !self.may_go(&w.arrival, w.pin) {
                    continue;
                }
                if best.is_none_or(|b| !(ahead(&self.waiting[b]) || self.equal(b, at))) {
                    best = Some(at);
                }
            }
            let Some(at) = best else {
                return;
            };
            let next = self.waiting.remove(at);
            self.place(next.arrival, next.pin);
        }
    }

    fn equal(&self, a: usize, b: usize) -> bool {
        let key = |w: &Waiting| (w.arrival.hints.strict_priority, w.urgency);
        key(&self.waiting[a]) == key(&self.waiting[b])
    }

    fn first_token(&mut self, id: RequestId) {
        if let Some(at) = self.booked.iter().position(|b| b.id == id) {
            let Booked { rank, began, .. } = self.booked[at];
            self.has_served(rank.worker, began, false);
            let b = &mut self.booked[at];
            b.seen = self.now;
            if std::mem::take(&mut b.prefill) > 0 {
                self.load_seen();
            }
        }
    }

    fn tokens(&mut self, id: RequestId, generated: u32) {
        let track =
            self.config.router_track_output_blocks && self.config.router_track_active_blocks;
        let now = self.now;
        let Some(b) = self.booked.iter_mut().find(|b| b.id == id) else {
            return;
        };
        b.seen = now;
        b.generated = b.generated.max(generated);
        let total = (b.arrival.isl_tokens + b.generated).div_ceil(BLOCK);
        if track && total > b.total_blocks {
            b.total_blocks = total;
            b.output_blocks += 1;
            if let Some(osl) = b.arrival.hints.osl {
                let osl = u64::from(osl.max(1));
                b.weight = osl.saturating_sub(u64::from(b.generated)) * MILLION / osl;
            }
        }
        if track {
            self.load_seen();
        }
    }

    fn finish(&mut self, id: RequestId, on: Option<WorkerRank>, outcome: Outcome) {
        if on.is_none()
            && let Some(at) = self.waiting.iter().position(|w| w.arrival.id == id)
        {
            self.waiting.remove(at);
            return;
        }
        let at = self.booked.iter().position(|b| b.id == id);
        let here = at.map(|at| self.booked[at].rank);
        if let Some(rank) = on.or(here) {
            let began = at.map(|at| self.booked[at].began);
            let began = began.filter(|_| here == Some(rank));
            match outcome {
                Outcome::Unreachable => self.has_failed(rank.worker, began),
                Outcome::Broken => self.has_broken(rank.worker, began),
                Outcome::Overloaded => self.has_erred(rank.worker, began),
                Outcome::Completed { .. } => {
                    if let Some(began) = began {
                        self.has_served(rank.worker, began, true);
                    }
                }
                _ => {}
            }
        }
        if let Some(at) = at
            && (on.is_none() || on == here)
        {
            self.booked.remove(at);
            self.load_seen();
        }
    }

    fn load(&mut self, report: &LoadReport) {
        let worker = self.workers.get_mut(&report.rank.worker);
        if let Some(rank) = worker.and_then(|w| w.ranks.get_mut(&report.rank)) {
            rank.used = report.kv_used_blocks.or(rank.used);
            self.load_seen();
        }
    }

    /// Thresholds come into force with any load; then every rank is looked at again.
    fn load_seen(&mut self) {
        self.in_force = self.wanted;
        let ids: Vec<_> = self.workers.keys().copied().collect();
        for id in ids {
            let ranks: Vec<_> = self.workers[&id].ranks.keys().copied().collect();
            let mut all = true;
            for rank in ranks {
                let (held, prefill) = (self.active_blocks(rank), self.prefill(rank));
                let (share, tokens) = (
                    self.in_force.active_decode_blocks,
                    self.in_force.active_prefill_tokens,
                );
                let worker = self.workers.get_mut(&id).unwrap();
                let total = worker.spec.kv_total_blocks;
                let state = worker.ranks.get_mut(&rank).unwrap();
                let decode = match (share, total) {
                    (Some(share), Some(total)) => {
                        let limit = share * total as f64;
                        let used = state.used.unwrap_or(0) as f64;
                        let over = held as f64 > limit || used > limit;
                        let under = |blocks: f64| blocks == 0.0 || blocks < limit;
                        let below = under(held as f64) && under(used);
                        over || state.latched && !below
                    }
                    _ => false,
                };
                state.latched = decode;
                all &= decode || tokens.is_some_and(|t| prefill > t);
            }
            self.workers.get_mut(&id).unwrap().busy = all;
        }
    }

    // What can be compared.

    pub(crate) fn ranks(&self) -> impl Iterator<Item = WorkerRank> {
        self.workers.values().flat_map(|w| w.ranks.keys().copied())
    }

    pub(crate) fn is_busy(&self, worker: WorkerId) -> bool {
        self.workers[&worker].busy
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn booked(&self) -> Vec<RequestId> {
        self.booked.iter().map(|b| b.id).collect()
    }
}
