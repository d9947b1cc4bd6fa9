//! The state machine: one input in, what is to be done out.
//!
//! This file holds the state and the order of things inside a step: first what time has brought about,
//! then the input, then whoever may leave the queue because of them. The steps themselves are in the
//! modules below, by what they are about.

mod arrive;
mod life;
mod peer;
mod place;
mod refuse;
mod release;
mod shadow;
mod time;
mod upkeep;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{
    Candidate, DeviceAware, Fleet, Gate, LeastLoaded, Ledger, LinearCost, Load, Overlap, Policy,
    PolicyClass, PowerOfTwo, PrefillModel, Prompt, Queue, QueueStats, Random, RankBusy, RoundRobin,
    RunningRequest, Scorer, ScoringContext, SlotSet, Thresholds, TimePolicy,
};
use kvasir_profile::StepTimes;
use kvasir_types::{RequestId, Rng, SequenceHash, Time, WorkerRank};

use crate::admission::Admission;
use crate::filter::EligibleRanks;
use crate::health::Health;
use crate::peers::Peers;
use crate::request_settings::RequestSettings;
use crate::ring::Ring;
use crate::session::{SessionRow, Sessions};
use crate::shadow::Shadow;
use crate::{Arrival, Decision, Input, Output, PrefillLoadModel, RouterConfig, RouterMode};

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

/// A worker that a request must go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PinnedRank {
    rank: WorkerRank,
    by_session: bool,
}

/// A request in the queue.
#[derive(Clone, Debug)]
struct QueuedRequest {
    arrival: Box<Arrival>,
    pin: Option<PinnedRank>,
    /// How long its prompt takes alone, at best, in seconds; 0 where placements do not cost seconds.
    alone: f64,
    /// When its overlap was looked up.
    looked_up: Time,
    /// When a new lookup was asked for and has not been answered.
    asked: Option<Time>,
}

/// The router as a value. See the [crate] for what it promises.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    now: Time,
    rng: Rng,
    policy: Box<dyn Policy>,
    /// Placement by seconds, where that is the policy.
    time: Option<Box<TimePolicy>>,
    /// The same where it only prices what a shadow would have done.
    judge: Option<Box<TimePolicy>>,
    /// What was known of ranks that have not come yet.
    known_ranks: BTreeMap<WorkerRank, Vec<f64>>,
    /// A policy that decides beside the real one.
    shadow: Option<Box<Shadow>>,
    fleet: Fleet,
    ledger: Ledger,
    model: PrefillModel,
    queue: Queue<QueuedRequest>,
    sessions: Sessions,
    /// What other replicas have booked, and what they are told of ours.
    peers: Peers,
    ring: Ring,
    thresholds: Thresholds,
    /// Thresholds changed and no load has been seen since.
    thresholds_new: bool,
    /// By slot.
    busy: Vec<RankBusy>,
    busy_slots: SlotSet,
    /// Who is ejected, and for what.
    health: Health,
    /// Overload protection.
    admission: Admission,
    eligible: EligibleRanks,
    scorer: Scorer,
    /// Requests that asked for a worker, by class.
    received: Vec<u64>,
    kept: Vec<Candidate>,
    /// When lookups were asked for, oldest first; at most one per waiting request.
    asks: VecDeque<Time>,
    /// What is booked where blocks are not tracked.
    nothing: Arc<[SequenceHash]>,
    /// Capacity that may let a held request go.
    freed: FreedCapacity,
    queue_checked: Time,
    /// When a rank opens by time alone, for those that are held.
    opens: Option<Time>,
    /// When the next tick is due, as of the last step.
    due: Option<Time>,
    /// How long a booking of which nothing is heard stays.
    expiry: Duration,
    /// How long a request may wait.
    wait_max: Duration,
}

/// Where capacity was freed since the queue was last looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FreedCapacity {
    Nothing,
    Slot(u32),
    Anything,
}

impl Router {
    /// How often the queue is looked at while nothing happens.
    pub const RECHECK: Duration = Duration::from_secs(60);
    /// The same while charges shrink with time.
    pub const RECHECK_DECAYING: Duration = Duration::from_millis(100);
    /// How long a lookup asked for with [`Output::Refresh`] is waited for before the old one is used.
    pub const REFRESH_WAIT: Duration = Duration::from_secs(1);

    /// A router without workers.
    #[must_use]
    pub fn new(config: RouterConfig) -> Self {
        let policy = policy_of(&config);
        Self::with_policy(config, policy)
    }

    /// A router without workers that chooses by a policy of the caller's.
    #[must_use]
    pub fn with_policy(config: RouterConfig, policy: Box<dyn Policy>) -> Self {
        let thresholds = Thresholds {
            active_decode_blocks: config.active_decode_blocks_threshold,
            active_prefill_tokens: config.active_prefill_tokens_threshold,
            active_prefill_tokens_frac: config.active_prefill_tokens_threshold_frac,
        };
        Self {
            now: Time::ZERO,
            rng: Rng::new(config.router_seed),
            policy,
            time: time::policy_of(&config),
            judge: time::judge_of(&config),
            known_ranks: BTreeMap::new(),
            shadow: Shadow::of(&config),
            fleet: Fleet::default(),
            ledger: time::ledger_of(&config),
            model: model_of(&config),
            queue: Queue::new(classes_of(&config)),
            sessions: Sessions::new(config.router_max_sessions),
            peers: Peers::new(config.router_replica_sync),
            ring: Ring::new(config.router_decision_log),
            thresholds,
            thresholds_new: false,
            busy: Vec::new(),
            busy_slots: SlotSet::default(),
            health: Health::default(),
            admission: Admission::new(config.overload_protection),
            eligible: EligibleRanks::default(),
            scorer: Scorer::default(),
            received: Vec::new(),
            asks: VecDeque::new(),
            nothing: Arc::from([]),
            kept: Vec::new(),
            freed: FreedCapacity::Nothing,
            queue_checked: Time::ZERO,
            opens: None,
            due: None,
            expiry: upkeep::expiry_of(&config),
            wait_max: upkeep::wait_max_of(&config),
            config,
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
        self.now = self.now.max(now);
        self.run_due(out);
        match input {
            Input::Joined(spec) => self.join(spec, true, out),
            Input::Updated(spec) => self.join(spec, false, out),
            Input::Draining(worker) => self.drain(worker),
            Input::Left(worker) => self.leave(worker, out),
            Input::Arrived(arrival) => self.arrive(arrival, out),
            Input::Refreshed { id, overlap } => self.refreshed(id, overlap),
            Input::FirstToken { id } => self.first_token(id, out),
            Input::Prefilled { id } => {
                self.prefilled(id, out);
                for key in self.peers.keys_of(id) {
                    self.prefilled(key, out);
                }
            }
            Input::Tokens { id, generated } => self.tokens(id, generated, out),
            Input::Finished { id, on, outcome } => self.finish(id, on, outcome, out),
            Input::Load(report) => self.load_report(&report, out),
            Input::Probed(probe) => self.probed(&probe, out),
            Input::Generated(probe) => self.generated(&probe, out),
            Input::Thresholds(update) => self.set_thresholds(&update),
            Input::Session(event) => self.session_event(event, out),
            Input::Peer {
                from,
                event,
                recalled,
            } => self.peer(from, &event, recalled, out),
            Input::PeerRecalled(recall) => self.peer_recalled(&recall, out),
            Input::PeerGone(replica) => self.peer_gone(replica, out),
            Input::Tick => self.apply_new_thresholds(out),
        }
        self.release(out);
        self.follow_times();
        self.due = self.deadline();
    }

    /// When the next `Tick` is due, if nothing happens before; `None` for never.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.due
    }

    /// The latest decision about a request, while the ring still holds it.
    #[must_use]
    pub fn explain(&self, id: RequestId) -> Option<&Decision> {
        self.ring.find(id)
    }

    /// The decisions kept, newest first.
    pub fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.ring.iter()
    }

    /// A rank's booked load.
    #[must_use]
    pub fn load(&self, rank: WorkerRank) -> Option<Load> {
        let slot = self.fleet.slot(rank)?;
        Some(self.ledger.load(slot, self.now))
    }

    /// Who is a member, busy, hidden.
    #[must_use]
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Requests waiting, in all and of the first class (the only one without policy classes).
    #[must_use]
    pub fn queued(&self) -> (usize, QueueStats) {
        (self.queue.len(), self.queue.stats(0))
    }

    /// What waits in each policy class, by name.
    pub fn queue_stats(&self) -> impl Iterator<Item = (&str, QueueStats)> {
        let named = |at| self.queue.class(at).map(|c: &PolicyClass| c.name.as_str());
        (0..)
            .map_while(move |at| Some((named(at)?, at)))
            .map(|(name, at)| (name, self.queue.stats(at)))
    }

    /// Requests that asked for a worker since the start, retries too, by the name of their policy class.
    pub fn received(&self) -> impl Iterator<Item = (&str, u64)> {
        let named = |(at, received)| {
            let class: &PolicyClass = self.queue.class(at)?;
            Some((class.name.as_str(), received))
        };
        let received = self.received.iter().copied();
        received.enumerate().filter_map(named)
    }

    /// Sessions bound.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Up to `most` of the sessions bound: first those that requests hold, then the ones that last longest.
    #[must_use]
    pub fn session_rows(&self, most: usize) -> Vec<SessionRow> {
        self.sessions.rows(most)
    }

    /// Requests booked.
    #[must_use]
    pub fn booked(&self) -> usize {
        self.ledger.len()
    }

    /// Where a request is booked, if it is.
    #[must_use]
    pub fn rank_of(&self, id: RequestId) -> Option<WorkerRank> {
        self.fleet.rank(self.ledger.slot_of(id)?)
    }

    /// Every request that is booked here, in no order, and where; those of other replicas are theirs to tell. With the names of its blocks
    /// where `names` says so.
    pub fn running(
        &self,
        names: impl FnMut(RequestId) -> bool,
    ) -> impl Iterator<Item = (WorkerRank, RunningRequest)> {
        let running = self.ledger.running(names);
        let own = running.filter(|row| !self.peers.is_peers(row.id));
        own.filter_map(|row| Some((self.fleet.rank(row.slot)?, row)))
    }

    /// Whether nothing is booked, nothing waits and nothing is left of what was.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ledger.is_empty() && self.queue.is_empty()
    }

    /// The busy thresholds in force.
    #[must_use]
    pub fn thresholds(&self) -> Thresholds {
        self.thresholds
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
        self.now = self.now.max(now);
        out.clear();
        let settings = RequestSettings::of(&self.config, &Default::default());
        let prompt = Prompt {
            isl_tokens,
            overlap,
            sequence: if self.tracks_blocks() { sequence } else { &[] },
            shares: settings.shares,
            preferred_taints: &[],
        };
        let (fleet, ledger, now) = (&self.fleet, &mut self.ledger, self.now);
        let mut rows = Vec::new();
        let context = ScoringContext {
            now,
            weights: &settings.weights,
            prompt: &prompt,
            fleet,
        };
        self.scorer
            .all(&context, fleet.live(), ledger, |slot, terms| {
                rows.push((slot, terms))
            });
        for (slot, terms) in rows {
            let cached = cached_tokens(terms.cached_blocks, isl_tokens, &self.config);
            let load = ledger.load(slot, now);
            out.extend(fleet.rank(slot).map(|rank| PotentialLoad {
                rank,
                potential_prefill_tokens: load.prefill_tokens + u64::from(isl_tokens - cached),
                potential_decode_blocks: terms.decode_blocks as u64,
                active_requests: load.requests,
            }));
        }
    }

    fn tracks_blocks(&self) -> bool {
        self.config.router_track_active_blocks && self.config.router_role != crate::Role::Prefill
    }

    /// Whether requests can wait at all: in the modes that do not weigh load only by the overload protection.
    fn can_queue(&self) -> bool {
        self.policy.weighs_load() || self.admission.is_on()
    }

    fn note_freed(&mut self, slot: u32) {
        self.freed = match self.freed {
            FreedCapacity::Nothing => FreedCapacity::Slot(slot),
            FreedCapacity::Slot(same) if same == slot => FreedCapacity::Slot(slot),
            _ => FreedCapacity::Anything,
        };
    }
}

/// The policy of these settings, where placements do not cost seconds.
pub(crate) fn policy_of(config: &RouterConfig) -> Box<dyn Policy> {
    match config.router_mode {
        // Direct mode never chooses: a request without a worker is refused before.
        RouterMode::RoundRobin | RouterMode::Direct => Box::new(RoundRobin::default()),
        RouterMode::Random => Box::new(Random),
        RouterMode::Kv => Box::new(LinearCost {
            order: config.router_queue_policy,
        }),
        RouterMode::PowerOfTwo => Box::new(PowerOfTwo),
        RouterMode::LeastLoaded => Box::new(LeastLoaded),
        RouterMode::DeviceAwareWeighted => Box::new(DeviceAware {
            ratio: config.encoder_cuda_to_cpu_ratio,
        }),
    }
}

/// Prompt tokens that a rank holding so many effective blocks need not compute.
fn cached_tokens(cached_blocks: f64, isl_tokens: u32, config: &RouterConfig) -> u32 {
    let tokens = (cached_blocks * f64::from(config.kv_cache_block_size)).round();
    (tokens as u32).min(isl_tokens)
}

fn model_of(config: &RouterConfig) -> PrefillModel {
    match config.router_prefill_load_model {
        PrefillLoadModel::None => PrefillModel::None,
        PrefillLoadModel::Learned => PrefillModel::Learned(Box::default()),
        PrefillLoadModel::Aic => {
            let measured = config.aic_profile.and_then(|preset| preset.profile().ok());
            measured.map_or(PrefillModel::None, |profile| {
                PrefillModel::Measured(StepTimes::Measured(profile))
            })
        }
    }
}

fn classes_of(config: &RouterConfig) -> Vec<PolicyClass> {
    match &config.router_policy_config {
        Some(policy) if !policy.classes.is_empty() => policy.classes.clone(),
        _ => {
            let gate = Gate {
                tokens: None,
                batches: config.router_queue_threshold,
            };
            vec![PolicyClass::only(config.router_queue_policy, gate)]
        }
    }
}
