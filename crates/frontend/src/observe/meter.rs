//! The series of one model that every request writes.
//!
//! Answers: what is counted when a request comes, begins, and ends, and what of its way from the router to a worker
//! and back. A series with labels costs a hash and a lock to find; a request writes about twenty, so they are
//! found once, here, when the model is made. What is seldom written is looked up where that happens.
//!
//! What always holds: the series of the router are written only where requests are routed by cache; in other modes
//! they stay at zero.

mod rank;
mod stage;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvasir_openai::Endpoint;
use kvasir_router::{LimitKind, RouteError, RouterMode, Sent};
use kvasir_telemetry::{Gauge, Histogram, IntCounter, MetricOptions, Metrics, observe_ms};
use kvasir_types::{Time, WorkerRank};

use crate::observe::request_record::Totals;
use crate::observe::token_source::TokenSource;
use rank::Ranks;
pub(crate) use stage::Stage;
use stage::{Inside, Stages};

/// The label of a request whose model is not served; a client's text is never a label.
const UNKNOWN_MODEL: &str = "unknown";

/// The endpoint whose latency is measured apart.
const EMBEDDINGS: &str = "embeddings";

/// What aggregated workers do, as a label.
const PHASE: &str = "aggregated";

/// Namespace, component and endpoint of the workers of a static fleet, as Dynamo's users know them.
pub(crate) const ENDPOINT: [&str; 3] = ["dynamo", "backend", "generate"];

/// Why the router refuses for the time: it waited too long, or it would. Nothing predicts the latter; dashboards add
/// both up.
const DUE_TIME_PASSED: &str = "due_time_passed";
const PREDICTED_MISS: &str = "predicted_miss";

/// What an aggregated worker is called.
const WORKER_TYPE: &str = "decode";

/// What is asked, as labels say it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking {
    pub(crate) endpoint: &'static str,
    pub(crate) request_type: &'static str,
    /// Which of [`ModelMeters::completions`] counts it; none for what is no completion.
    kind: Option<usize>,
}

impl Asking {
    /// A completion.
    pub(crate) fn completion(endpoint: Endpoint, stream: bool) -> Self {
        let (at, endpoint) = match endpoint {
            Endpoint::Chat => (0, "chat_completions"),
            Endpoint::Completions => (2, "completions"),
        };
        Self {
            kind: Some(at + usize::from(stream)),
            ..Self::other(endpoint, stream)
        }
    }

    /// A route that only engines know; the closed list keeps clients' text out of labels.
    pub(crate) fn route(path: &str, stream: bool) -> Self {
        let endpoint = match path.trim_start_matches("/v1") {
            "/embeddings" => EMBEDDINGS,
            "/responses" => "responses",
            "/messages" => "anthropic_messages",
            "/rerank" => "rerank",
            "/score" => "score",
            "/classify" => "classify",
            "/pooling" => "pooling",
            "/tokenize" => "tokenize",
            "/detokenize" => "detokenize",
            _ => "engine",
        };
        Self::other(endpoint, stream)
    }

    /// Anything else.
    fn other(endpoint: &'static str, stream: bool) -> Self {
        Self {
            endpoint,
            request_type: if stream { "stream" } else { "unary" },
            kind: None,
        }
    }
}

/// Completions of one kind.
#[derive(Debug)]
struct Completions {
    started: IntCounter,
    succeeded: IntCounter,
}

/// The share of a prompt's blocks that the chosen worker was thought to hold.
pub(crate) fn hit_rate(sent: &Sent, prompt_tokens: usize, block_size: u32) -> f64 {
    let blocks = prompt_tokens.div_ceil(block_size.max(1) as usize);
    (f64::from(sent.overlap_blocks) / blocks.max(1) as f64).min(1.0)
}

/// The series of one model.
#[derive(Debug)]
pub struct ModelMeters {
    metrics: Metrics,
    model: Arc<str>,
    by_cache: bool,
    /// Somebody serves the model.
    served: bool,
    /// Made when the first of a kind comes: most models are only ever asked in one way.
    completions: [OnceLock<Completions>; 4],
    active: Gauge,
    inflight: Gauge,
    queued: Gauge,
    duration: Histogram,
    first_token: Histogram,
    between_tokens: Histogram,
    input_tokens: Histogram,
    output_tokens: Histogram,
    cached_tokens: Histogram,
    output_tokens_total: IntCounter,
    tokenizing: Histogram,
    /// By source.
    prompts: [OnceLock<IntCounter>; TokenSource::COUNT],
    router_input_tokens: Histogram,
    selected_tokens: IntCounter,
    best_tokens: IntCounter,
    overlap_lost: Histogram,
    not_the_best: IntCounter,
    reused_tokens: IntCounter,
    stages: Stages,
    /// One for all models that the same workers serve.
    pub(crate) ranks: Arc<Ranks>,
    counted: Arc<Mutex<Counted>>,
}

/// What was counted of totals that others keep.
#[derive(Debug, Default)]
struct Counted {
    received: HashMap<String, u64>,
    repeated: u64,
}

/// Class and reason of a failure, from its kind. Those of 1.6.1 that were observed are spelled as there.
fn failure(kind: &str) -> [&'static str; 2] {
    match kind {
        "validation" => ["InvalidArgument", "request.invalid"],
        "not_found" => ["NotFound", "request.not_found"],
        "overload" => ["CapacityExhausted", "capacity.pool_exhausted"],
        "unavailable" => ["Unavailable", "worker.unavailable"],
        "cancelled" => ["Cancelled", "request.cancelled"],
        "response_timeout" => ["DeadlineExceeded", "worker.response_timeout"],
        "not_implemented" => ["Unimplemented", "request.not_implemented"],
        _ => ["Internal", "internal"],
    }
}

impl ModelMeters {
    /// Those of `model`, whose router works in `mode`.
    #[must_use]
    pub fn new(metrics: &Metrics, model: &Arc<str>, mode: RouterMode) -> Arc<Self> {
        Arc::new(Self::made(metrics, model, mode))
    }

    /// Those of another model of the same workers: what is known of their ranks, and what was counted of their
    /// router, is one.
    #[must_use]
    pub fn beside(&self, model: &Arc<str>) -> Arc<Self> {
        Arc::new(Self {
            by_cache: self.by_cache,
            ranks: Arc::clone(&self.ranks),
            counted: Arc::clone(&self.counted),
            ..Self::made(&self.metrics, model, RouterMode::default())
        })
    }

    fn made(metrics: &Metrics, model: &Arc<str>, mode: RouterMode) -> Self {
        let name = [&**model];
        let phase = [&**model, PHASE];
        Self {
            metrics: metrics.clone(),
            model: Arc::clone(model),
            by_cache: mode == RouterMode::Kv,
            served: true,
            completions: Default::default(),
            active: metrics.active_requests.with_label_values(&name),
            inflight: metrics.inflight_requests.with_label_values(&name),
            queued: metrics.queued_requests.with_label_values(&name),
            duration: metrics.request_duration_seconds.with_label_values(&name),
            first_token: metrics.time_to_first_token_seconds.with_label_values(&name),
            between_tokens: metrics.inter_token_latency_seconds.with_label_values(&name),
            input_tokens: metrics.input_sequence_tokens.with_label_values(&name),
            output_tokens: metrics.output_sequence_tokens.with_label_values(&name),
            cached_tokens: metrics.cached_tokens.with_label_values(&name),
            output_tokens_total: metrics.output_tokens_total.with_label_values(&name),
            tokenizing: metrics
                .tokenizer_latency_ms
                .with_label_values(&["tokenize"]),
            prompts: Default::default(),
            router_input_tokens: metrics
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
                .with_label_values(&[WORKER_TYPE]),
            not_the_best: metrics
                .router_non_max_overlap_selections_total
                .with_label_values(&[WORKER_TYPE]),
            reused_tokens: metrics
                .router_kv_worker_reused_tokens_total
                .with_label_values(&phase),
            stages: Stages::new(metrics),
            ranks: Arc::new(Ranks::new(metrics)),
            counted: Arc::default(),
        }
    }

    /// Those of requests for models that are not served: they are counted, and have no other series, as none of them
    /// has a prompt, an answer or a worker.
    pub(crate) fn unknown(metrics: &Metrics) -> Arc<Self> {
        let aside = Metrics::new(&MetricOptions::default());
        let aside = aside.as_ref().unwrap_or(metrics);
        Arc::new(Self {
            metrics: metrics.clone(),
            served: false,
            ..Self::made(aside, &UNKNOWN_MODEL.into(), RouterMode::RoundRobin)
        })
    }

    /// All series.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The model, as labels name it.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Whether requests are routed by cache.
    pub(crate) fn by_cache(&self) -> bool {
        self.by_cache
    }

    fn completions(&self, asking: &Asking) -> Option<&Completions> {
        // Of a model that nobody serves none ever succeeds.
        let kind = self.completions.get(asking.kind.filter(|_| self.served)?)?;
        Some(kind.get_or_init(|| {
            let [model, endpoint, kind] = self.labels(asking);
            let (started, ended) = (
                &self.metrics.requests_started_total,
                &self.metrics.requests_total,
            );
            Completions {
                started: started.with_label_values(&[model, endpoint, kind]),
                succeeded: ended.with_label_values(&[model, endpoint, kind, "success", ""]),
            }
        }))
    }

    /// The labels of one who asks: model, endpoint, type.
    pub(crate) fn labels(&self, asking: &Asking) -> [&str; 3] {
        [&*self.model, asking.endpoint, asking.request_type]
    }

    /// A request came.
    pub(crate) fn started(&self, asking: &Asking) {
        match self.completions(asking) {
            Some(kind) => kind.started.inc(),
            None => {
                let started = &self.metrics.requests_started_total;
                started.with_label_values(&self.labels(asking)).inc();
            }
        }
        self.metrics.tasks_issued_total.inc();
        self.active.inc();
        self.inflight.inc();
        self.queued.inc();
        self.metrics.dynamo_queued_requests.inc();
    }

    /// It does not wait for its first token any more.
    pub(crate) fn begun_or_given_up(&self) {
        self.queued.dec();
        self.metrics.dynamo_queued_requests.dec();
    }

    /// Its first token comes so long after its arrival.
    pub(crate) fn first_token(&self, waited: Duration) {
        self.begun_or_given_up();
        self.first_token.observe(waited.as_secs_f64());
    }

    /// `count` tokens came `seconds` after those before them.
    pub(crate) fn tokens(&self, count: usize, seconds: f64) {
        self.output_tokens_total.inc_by(count as u64);
        if count > 0 && seconds > 0.0 {
            let each = seconds / count as f64;
            self.between_tokens.observe(each);
            if self.by_cache {
                self.metrics
                    .router_inter_token_latency_seconds
                    .observe(each);
            }
        }
    }

    /// What a whole answer amounted to.
    pub(crate) fn answered(&self, totals: &Totals) {
        let (input, output) = (totals.prompt_tokens.into(), totals.output_tokens.into());
        self.input_tokens.observe(input);
        self.output_tokens.observe(output);
        if let Some(cached) = totals.cached_tokens {
            self.cached_tokens.observe(cached.into());
        }
        if self.by_cache {
            self.metrics.router_output_sequence_tokens.observe(output);
            self.router_input_tokens.observe(input);
            let reused = totals.cached_tokens.unwrap_or(0);
            self.reused_tokens.inc_by(reused.into());
        }
    }

    /// It ended so long after its arrival: well, or by a kind of error.
    pub(crate) fn over(&self, asking: &Asking, error_type: Option<&'static str>, took: Duration) {
        match (error_type, self.completions(asking)) {
            (None, Some(kind)) => kind.succeeded.inc(),
            (error_type, _) => {
                let status = if error_type.is_none() {
                    "success"
                } else {
                    "error"
                };
                let [model, endpoint, kind] = self.labels(asking);
                let labels = [model, endpoint, kind, status, error_type.unwrap_or("")];
                self.metrics.requests_total.with_label_values(&labels).inc();
            }
        }
        if let Some(kind) = error_type {
            let failures = &self.metrics.failures_total;
            failures.with_label_values(&failure(kind)).inc();
        } else if asking.endpoint == EMBEDDINGS {
            let latency = &self.metrics.embedding_latency_seconds;
            let latency = latency.with_label_values(&[&*self.model]);
            latency.observe(took.as_secs_f64());
        }
        let tasks = match error_type {
            None => &self.metrics.tasks_success_total,
            Some("overload") => &self.metrics.tasks_rejected_total,
            Some("cancelled") => &self.metrics.tasks_cancelled_total,
            Some(_) => &self.metrics.tasks_failed_total,
        };
        tasks.inc();
        self.duration.observe(took.as_secs_f64());
        self.active.dec();
        self.inflight.dec();
    }

    /// Its prompt became tokens so.
    pub(crate) fn prompt_read(&self, source: TokenSource) {
        let Some(prompts) = self.prompts.get(source.index()) else {
            return;
        };
        let of_source = || {
            let labels = [&*self.model, source.name()];
            self.metrics.prompts_read_total.with_label_values(&labels)
        };
        prompts.get_or_init(of_source).inc();
    }

    /// A prompt became tokens between these times; a template had printed it at `rendered`, if there was one.
    pub(crate) fn tokenized(&self, start: Time, rendered: Option<Time>, end: Time) {
        observe_ms(&self.tokenizing, end - start);
        if let Some(rendered) = rendered {
            let template = rendered - start;
            self.metrics
                .template_seconds
                .observe(template.as_secs_f64());
        }
        let tokenizer = end - rendered.unwrap_or(start);
        self.metrics
            .tokenize_seconds
            .observe(tokenizer.as_secs_f64());
    }

    /// A request is in this stage until the value is dropped.
    pub(crate) fn enter(&self, stage: Stage) -> Inside<'_> {
        self.stages.enter(stage)
    }

    /// A stage took so long.
    pub(crate) fn stage_took(&self, stage: Stage, took: Duration) {
        self.stages.took(stage, took);
    }

    /// The router chose; `sent` is its choice.
    pub(crate) fn chosen(&self, sent: &Sent) {
        if !self.by_cache || !sent.booked {
            return;
        }
        self.best_tokens.inc_by(sent.best_cached_tokens.into());
        self.overlap_lost.observe(sent.overlap_lost);
        if sent.overlap_lost > 0.0 {
            self.not_the_best.inc();
        }
    }

    /// The router of this name refused; a full queue is counted by what it was full of.
    pub(crate) fn turned_away(&self, router: &str, error: &RouteError) {
        let RouteError::QueueLimit {
            policy_class,
            limit_kind,
            ..
        } = error
        else {
            return;
        };
        let reason = match limit_kind {
            LimitKind::Requests => "request_limit",
            LimitKind::RawIslTokens => "raw_isl_token_limit",
            LimitKind::CachedTokens => "cached_token_limit",
            LimitKind::WaitMs => "wait_limit",
        };
        let labels = [router, WORKER_TYPE, policy_class, reason];
        let refused = &self.metrics.router_queue_backpressure_total;
        refused.with_label_values(&labels).inc();
        if *limit_kind == LimitKind::WaitMs {
            self.too_late(router, policy_class, DUE_TIME_PASSED).inc();
        }
    }

    /// Those of a policy class that are refused for the time.
    fn too_late(&self, router: &str, class: &str, reason: &str) -> IntCounter {
        let labels = [router, class, WORKER_TYPE, reason];
        let rejected = &self.metrics.router_admission_rejected_total;
        rejected.with_label_values(&labels)
    }

    /// Brings up to date what is counted elsewhere since the start: requests by policy class, and blocks that
    /// ranks announced again. `router` is the name of the router.
    pub(crate) fn catch_up<'c>(
        &self,
        router: &str,
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
            let admissions = admissions.with_label_values(&[router, class, WORKER_TYPE]);
            admissions.inc_by(now.saturating_sub(*before));
            *before = now;
            for reason in [DUE_TIME_PASSED, PREDICTED_MISS] {
                self.too_late(router, class, reason);
            }
        }
    }

    /// A request is handed to a worker.
    pub(crate) fn dispatched(&self) {
        if self.by_cache {
            self.metrics.router_requests_started_total.inc();
        }
    }

    /// The answer came, `waited` after the request was handed over; `first`: with its first tokens, and not as a
    /// whole. Gives the share of the prompt's blocks that the worker was thought to hold.
    pub(crate) fn begun(
        &self,
        sent: &Sent,
        prompt_tokens: usize,
        block_size: u32,
        (waited, first): (Duration, bool),
    ) -> f64 {
        let hit_rate = hit_rate(sent, prompt_tokens, block_size);
        self.stages.took(Stage::Dispatch, waited);
        if self.by_cache {
            self.metrics.router_kv_hit_rate.observe(hit_rate);
            if first {
                let first = &self.metrics.router_time_to_first_token_seconds;
                first.observe(waited.as_secs_f64());
            }
            self.selected_tokens.inc_by(sent.cached_tokens.into());
        }
        hit_rate
    }

    /// An answer ended: what its worker was like, with the seconds to its first token and between tokens where
    /// they were seen.
    pub(crate) fn ended(&self, totals: &Totals, latencies: Option<(f64, f64)>) {
        self.ended_elsewhere();
        self.ranks
            .last(totals.target, totals.prompt_tokens, latencies);
    }

    /// An answer ended that moved from one worker to another.
    pub(crate) fn ended_elsewhere(&self) {
        if self.by_cache {
            self.metrics.router_requests_total.inc();
        }
    }

    /// So many workers of this router have ranks whose events nobody listens to.
    pub(crate) fn unheard(&self, router: &str, workers: usize) {
        if self.by_cache {
            let [namespace, component, endpoint] = ENDPOINT;
            let labels = [router, namespace, component, endpoint, WORKER_TYPE];
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
}
