//! The series of one model that every request of a client writes.
//!
//! Answers: what is counted when a request comes, begins, and ends? A series with labels costs a hash and a lock to
//! find; a request writes about twenty, so they are found once, here, when the model is made. What is seldom written is
//! looked up where that happens.
//!
//! Elsewhere: what is counted of the router and of a request's way to a worker and back (`kvasir-host`).

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_host::{PlacementMeters, RouterMeters};
use kvasir_openai::Endpoint;
use kvasir_router::{Role, RouterMode};
use kvasir_telemetry::{Gauge, Histogram, IntCounter, MetricOptions, Metrics, observe_ms};
use kvasir_types::Time;

use crate::observe::request_record::Totals;
use crate::observe::token_source::TokenSource;

/// The label of a request whose model is not served; a client's text is never a label.
const UNKNOWN_MODEL: &str = "unknown";

/// The endpoint whose latency is measured apart.
const EMBEDDINGS: &str = "embeddings";

/// What is asked, as labels say it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestKind {
    pub(crate) endpoint: &'static str,
    pub(crate) request_type: &'static str,
    /// Which of [`ModelMeters::completions`] counts it; none for what is no completion.
    kind: Option<usize>,
}

impl RequestKind {
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

/// The series of one model.
#[derive(Debug)]
pub struct ModelMeters {
    metrics: Metrics,
    model: Arc<str>,
    /// What is counted of its placements.
    placements: Arc<PlacementMeters>,
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
    /// Those of `model`, whose placements are counted in `placements`.
    #[must_use]
    pub fn new(
        metrics: &Metrics,
        model: &Arc<str>,
        placements: &Arc<PlacementMeters>,
    ) -> Arc<Self> {
        Arc::new(Self::made(metrics, model, Arc::clone(placements)))
    }

    fn made(metrics: &Metrics, model: &Arc<str>, placements: Arc<PlacementMeters>) -> Self {
        let name = [&**model];
        Self {
            metrics: metrics.clone(),
            model: Arc::clone(model),
            placements,
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
        }
    }

    /// Those of requests for models that are not served: they are counted, and have no other series, as none of them
    /// has a prompt, an answer or a worker.
    pub(crate) fn unknown(metrics: &Metrics) -> Arc<Self> {
        let aside = Metrics::new(&MetricOptions::default());
        let aside = aside.as_ref().unwrap_or(metrics);
        let name = UNKNOWN_MODEL.into();
        let router = RouterMeters::new(aside, &name, RouterMode::RoundRobin, Role::Aggregated);
        let placements = PlacementMeters::new(&router, &name);
        Arc::new(Self {
            metrics: metrics.clone(),
            served: false,
            ..Self::made(aside, &name, placements)
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
        self.placements.by_cache()
    }

    /// What is counted of placements.
    pub(crate) fn placements(&self) -> &PlacementMeters {
        &self.placements
    }

    fn completions(&self, asking: &RequestKind) -> Option<&Completions> {
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
    pub(crate) fn labels(&self, asking: &RequestKind) -> [&str; 3] {
        [&*self.model, asking.endpoint, asking.request_type]
    }

    /// A request came.
    pub(crate) fn started(&self, asking: &RequestKind) {
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
            self.placements.between_tokens(each);
        }
    }

    /// What a whole answer amounted to.
    pub(crate) fn answered(&self, totals: &Totals) {
        let (input, output) = (totals.prompt_tokens, totals.output_tokens);
        self.input_tokens.observe(input.into());
        self.output_tokens.observe(output.into());
        if let Some(cached) = totals.cached_tokens {
            self.cached_tokens.observe(cached.into());
        }
        self.placements
            .answered(input, output, totals.cached_tokens);
    }

    /// It ended so long after its arrival: well, or by a kind of error.
    pub(crate) fn over(
        &self,
        asking: &RequestKind,
        error_type: Option<&'static str>,
        took: Duration,
    ) {
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

    /// An answer ended, with the seconds to its first token and between tokens where they were seen.
    pub(crate) fn ended(&self, totals: &Totals, latencies: Option<(f64, f64)>) {
        self.placements
            .ended(totals.target, totals.prompt_tokens, latencies);
    }
}
