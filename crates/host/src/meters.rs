//! The series of routers and of the placements that they make.
//!
//! Answers: what is counted of a router and its ranks, and what of a request's way from the router to a worker and back?
//! A series with labels costs a hash and a lock to find, so those that every request writes are found once, here, when
//! the model is made. What is seldom written is looked up where that happens.
//!
//! What always holds: the series of the router are written only where requests are routed by cache; in other modes
//! they stay at zero.
//!
//! Elsewhere: what is counted of clients and of HTTP (`kvasir-frontend`).

mod rank;
mod stage;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvasir_router::{LimitKind, Placement, Role, RouteError, RouterMode, ShadowStats};
use kvasir_telemetry::{Histogram, IntCounter, Metrics};
use kvasir_types::WorkerRank;

use rank::Ranks;
use stage::Stages;
pub use stage::{Stage, StageGuard};

/// What workers are called that answer, and what they do, as labels.
const ANSWER: WorkerLabels = WorkerLabels {
    phase: "aggregated",
    worker_type: "decode",
};
/// The same of workers that compute prompts for others.
const PREFILL: WorkerLabels = WorkerLabels {
    phase: "prefill",
    worker_type: "prefill",
};

/// What the workers of a router are called in series.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerLabels {
    phase: &'static str,
    pub(crate) worker_type: &'static str,
}

/// Namespace, component and endpoint of the workers of a static fleet, as Dynamo's users know them.
pub const ENDPOINT: [&str; 3] = ["dynamo", "backend", "generate"];

/// The policy class of a router without classes.
const DEFAULT_CLASS: &str = "default";

/// Why the router refuses for the time: it waited too long, or it would. Dashboards add both up.
const DUE_TIME_PASSED: &str = "due_time_passed";
const PREDICTED_MISS: &str = "predicted_miss";

/// The series of one router: its ranks, its queue, what it refuses.
#[derive(Debug)]
pub struct RouterMeters {
    metrics: Metrics,
    /// The router, as labels name it.
    name: Arc<str>,
    by_cache: bool,
    pub(crate) labels: WorkerLabels,
    ranks: Ranks,
    counted: Mutex<Counted>,
}

/// What was counted of totals that others keep.
#[derive(Debug, Default)]
struct Counted {
    received: HashMap<String, u64>,
    repeated: u64,
    /// Placements that a shadow would have made alike, and others.
    shadowed: [u64; 2],
}

impl RouterMeters {
    /// Those of the router `name`, which works in `mode` for workers of this role.
    #[must_use]
    pub fn new(metrics: &Metrics, name: &Arc<str>, mode: RouterMode, role: Role) -> Arc<Self> {
        let labels = match role {
            Role::Prefill => PREFILL,
            Role::Aggregated | Role::Decode => ANSWER,
        };
        Arc::new(Self {
            metrics: metrics.clone(),
            name: Arc::clone(name),
            by_cache: mode == RouterMode::Kv,
            labels,
            ranks: Ranks::new(metrics, labels.worker_type),
            counted: Mutex::default(),
        })
    }

    /// Whether requests are routed by cache.
    #[must_use]
    pub fn by_cache(&self) -> bool {
        self.by_cache
    }

    /// The router refused a request; a full queue is counted by what it was full of.
    pub(crate) fn refused(&self, error: &RouteError) {
        let (policy_class, limit_kind) = match error {
            RouteError::QueueLimit {
                policy_class,
                limit_kind,
                ..
            } => (policy_class.as_str(), limit_kind),
            RouteError::QueueTooSlow { .. } => (DEFAULT_CLASS, &LimitKind::WaitMs),
            _ => return,
        };
        let reason = match limit_kind {
            LimitKind::Requests => "request_limit",
            LimitKind::RawIslTokens => "raw_isl_token_limit",
            LimitKind::CachedTokens => "cached_token_limit",
            LimitKind::WaitMs => "wait_limit",
        };
        let labels = [&*self.name, self.labels.worker_type, policy_class, reason];
        let refused = &self.metrics.router_queue_backpressure_total;
        refused.with_label_values(&labels).inc();
        if *limit_kind == LimitKind::WaitMs {
            let predicted = matches!(
                error,
                RouteError::QueueTooSlow {
                    predicted: true,
                    ..
                }
            );
            let reason = match predicted {
                true => PREDICTED_MISS,
                false => DUE_TIME_PASSED,
            };
            self.too_late(policy_class, reason).inc();
        }
    }

    /// Requests of a policy class that are refused for the time.
    fn too_late(&self, class: &str, reason: &str) -> IntCounter {
        let labels = [&*self.name, class, self.labels.worker_type, reason];
        let rejected = &self.metrics.router_admission_rejected_total;
        rejected.with_label_values(&labels)
    }

    /// Brings up to date what is counted elsewhere since the start: requests by policy class, and blocks that
    /// ranks announced again.
    pub(crate) fn catch_up<'c>(
        &self,
        received: impl Iterator<Item = (&'c str, u64)>,
        repeated: u64,
    ) {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let warnings = &self.metrics.kv_cache_event_warnings;
        let warnings = warnings.with_label_values(&["duplicate_store"]);
        warnings.inc_by(repeated.saturating_sub(counted.repeated));
        counted.repeated = repeated;
        for (class, now) in received {
            let before = counted.received.entry(class.to_owned()).or_default();
            let admissions = &self.metrics.router_admission_received_total;
            let admissions =
                admissions.with_label_values(&[&*self.name, class, self.labels.worker_type]);
            admissions.inc_by(now.saturating_sub(*before));
            *before = now;
            for reason in [DUE_TIME_PASSED, PREDICTED_MISS] {
                self.too_late(class, reason);
            }
        }
    }

    /// What a shadow policy has made of placements since the start.
    pub(crate) fn shadow(&self, stats: &ShadowStats) {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let now = [stats.compared - stats.disagreed, stats.disagreed];
        let results = ["agrees", "disagrees"];
        for ((before, now), result) in counted.shadowed.iter_mut().zip(now).zip(results) {
            let placements = &self.metrics.shadow_placements_total;
            let placements = placements.with_label_values(&[&*self.name, result]);
            placements.inc_by(now.saturating_sub(*before));
            *before = now;
        }
        for (better, seconds) in [("shadow", stats.better_s), ("live", stats.worse_s)] {
            let regret = &self.metrics.shadow_regret_seconds;
            regret
                .with_label_values(&[&*self.name, better])
                .set(seconds);
        }
    }

    /// So many workers of this router have ranks whose events nobody listens to.
    pub(crate) fn without_events(&self, workers: usize) {
        if self.by_cache {
            let [namespace, component, endpoint] = ENDPOINT;
            let worker_type = self.labels.worker_type;
            let labels = [&*self.name, namespace, component, endpoint, worker_type];
            let mismatch = &self.metrics.router_kv_event_source_mismatch_workers;
            mismatch.with_label_values(&labels).set(workers as f64);
        }
    }

    /// A rank of a worker is there.
    pub(crate) fn rank_joined(&self, rank: WorkerRank) {
        self.ranks.join(rank, self.by_cache);
    }

    /// It is gone, and its series with it.
    pub(crate) fn rank_left(&self, rank: WorkerRank) {
        self.ranks.leave(rank);
    }

    /// What a rank has to do now.
    pub(crate) fn load(&self, rank: WorkerRank, blocks: f64, tokens: f64) {
        self.ranks.load(rank, blocks, tokens);
    }
}

/// The share of a prompt's blocks that the chosen worker was expected to hold.
#[must_use]
pub fn hit_rate(placement: &Placement, prompt_tokens: usize, block_size: u32) -> f64 {
    let blocks = prompt_tokens.div_ceil(block_size.max(1) as usize);
    (f64::from(placement.overlap_blocks) / blocks.max(1) as f64).min(1.0)
}

/// The series of one model's placements.
#[derive(Debug)]
pub struct PlacementMeters {
    router: Arc<RouterMeters>,
    input_tokens: Histogram,
    selected_tokens: IntCounter,
    best_tokens: IntCounter,
    overlap_lost: Histogram,
    not_the_best: IntCounter,
    reused_tokens: IntCounter,
    stages: Stages,
}

impl PlacementMeters {
    /// Those of `model`, whose requests go through `router`.
    #[must_use]
    pub fn new(router: &Arc<RouterMeters>, model: &str) -> Arc<Self> {
        let WorkerLabels { phase, worker_type } = router.labels;
        let (metrics, phase) = (&router.metrics, [model, phase]);
        Arc::new(Self {
            input_tokens: metrics
                .router_input_sequence_tokens
                .with_label_values(&phase),
            selected_tokens: metrics
                .router_kv_selected_cached_prefix_tokens_total
                .with_label_values(&phase),
            best_tokens: metrics
                .router_kv_best_eligible_cached_prefix_tokens_total
                .with_label_values(&phase),
            overlap_lost: metrics
                .router_overlap_blocks_lost
                .with_label_values(&[worker_type]),
            not_the_best: metrics
                .router_non_max_overlap_selections_total
                .with_label_values(&[worker_type]),
            reused_tokens: metrics
                .router_kv_worker_reused_tokens_total
                .with_label_values(&phase),
            stages: Stages::new(metrics),
            router: Arc::clone(router),
        })
    }

    /// Whether requests are routed by cache.
    #[must_use]
    pub fn by_cache(&self) -> bool {
        self.router.by_cache
    }

    /// A request is in this stage until the value is dropped.
    pub fn enter(&self, stage: Stage) -> StageGuard<'_> {
        self.stages.enter(stage)
    }

    /// A stage took so long.
    pub fn stage_took(&self, stage: Stage, took: Duration) {
        self.stages.took(stage, took);
    }

    /// The router chose.
    pub(crate) fn chosen(&self, placement: &Placement) {
        if !self.by_cache() || !placement.booked {
            return;
        }
        self.best_tokens.inc_by(placement.best_cached_tokens.into());
        self.overlap_lost.observe(placement.overlap_lost);
        if placement.overlap_lost > 0.0 {
            self.not_the_best.inc();
        }
    }

    /// A request is handed to a worker.
    pub fn dispatched(&self) {
        if self.by_cache() {
            self.router.metrics.router_requests_started_total.inc();
        }
    }

    /// The answer came, `waited` after the request was handed over; `first`: with its first tokens, and not as a
    /// whole. Gives the share of the prompt's blocks that the worker was expected to hold.
    pub fn begun(
        &self,
        placement: &Placement,
        prompt_tokens: usize,
        block_size: u32,
        (waited, first): (Duration, bool),
    ) -> f64 {
        let hit_rate = hit_rate(placement, prompt_tokens, block_size);
        self.stages.took(Stage::Dispatch, waited);
        if self.by_cache() {
            let metrics = &self.router.metrics;
            metrics.router_kv_hit_rate.observe(hit_rate);
            if first {
                let first = &metrics.router_time_to_first_token_seconds;
                first.observe(waited.as_secs_f64());
            }
            self.selected_tokens.inc_by(placement.cached_tokens.into());
        }
        hit_rate
    }

    /// Each of some tokens came so many seconds after the one before it.
    pub fn between_tokens(&self, seconds: f64) {
        if self.by_cache() {
            let between = &self.router.metrics.router_inter_token_latency_seconds;
            between.observe(seconds);
        }
    }

    /// What a whole answer amounted to, in tokens.
    pub fn answered(&self, prompt: u32, output: u32, cached: Option<u32>) {
        if self.by_cache() {
            let metrics = &self.router.metrics;
            metrics.router_output_sequence_tokens.observe(output.into());
            self.input_tokens.observe(prompt.into());
            self.reused_tokens.inc_by(cached.unwrap_or(0).into());
        }
    }

    /// An answer of `rank` ended: tokens of its prompt, and the seconds to its first token and between tokens where
    /// they were seen.
    pub fn ended(&self, rank: WorkerRank, prompt: u32, latencies: Option<(f64, f64)>) {
        self.ended_elsewhere();
        self.router.ranks.last(rank, prompt, latencies);
    }

    /// An answer ended that moved from one worker to another.
    pub fn ended_elsewhere(&self) {
        if self.by_cache() {
            self.router.metrics.router_requests_total.inc();
        }
    }
}
