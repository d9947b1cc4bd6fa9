//! What is counted and said about one HTTP request, from its arrival to its end.
//!
//! What always holds: every request that was started is ended once; one that is dropped on the way was left
//! by its client.

use std::sync::Arc;

use kvasir_openai::{ApiError, Endpoint};
use kvasir_telemetry::{Clock, Metrics};
use kvasir_types::{RequestId, Time, WorkerRank};

/// The label of a request whose model is not served; a client's text is never a label.
const UNKNOWN_MODEL: &str = "unknown";

/// Watches one HTTP request.
#[derive(Debug)]
pub(crate) struct Watch {
    metrics: Metrics,
    clock: Clock,
    id: RequestId,
    received: Time,
    model: Arc<str>,
    endpoint: &'static str,
    request_type: &'static str,
    first_token: Option<Time>,
    ended: bool,
}

/// What an answer amounted to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Tokens of all prompts.
    pub prompt_tokens: u32,
    /// Those of them that engines found cached, as they said.
    pub cached_tokens: u32,
    /// Tokens of all answers.
    pub output_tokens: u32,
    /// Who served it; the first, where several did.
    pub target: WorkerRank,
}

impl Watch {
    /// A request came for `model`, if that is served.
    pub(crate) fn start(
        metrics: &Metrics,
        clock: Clock,
        id: RequestId,
        model: Option<&Arc<str>>,
        endpoint: Endpoint,
        stream: bool,
    ) -> Self {
        let endpoint = match endpoint {
            Endpoint::Chat => "chat_completions",
            Endpoint::Completions => "completions",
        };
        Self::start_at(metrics, clock, id, model, endpoint, stream)
    }

    /// The same, for any endpoint.
    pub(crate) fn start_at(
        metrics: &Metrics,
        clock: Clock,
        id: RequestId,
        model: Option<&Arc<str>>,
        endpoint: &'static str,
        stream: bool,
    ) -> Self {
        let watch = Self {
            metrics: metrics.clone(),
            clock,
            id,
            received: clock.now(),
            model: model.cloned().unwrap_or_else(|| UNKNOWN_MODEL.into()),
            endpoint,
            request_type: if stream { "stream" } else { "unary" },
            first_token: None,
            ended: false,
        };
        let labels = [&*watch.model, watch.endpoint, watch.request_type];
        watch
            .metrics
            .requests_started_total
            .with_label_values(&labels)
            .inc();
        watch.add_active(1.0);
        watch.add_queued(1.0);
        watch
    }

    /// When the request came.
    pub(crate) fn received(&self) -> Time {
        self.received
    }

    /// The client is about to see its first token.
    pub(crate) fn first_token(&mut self, now: Time) {
        if self.first_token.is_none() {
            self.first_token = Some(now);
            self.add_queued(-1.0);
            let waited = (now - self.received).as_secs_f64();
            self.metrics
                .time_to_first_token_seconds
                .with_label_values(&[&*self.model])
                .observe(waited);
        }
    }

    /// `count` tokens came `seconds` after those before them.
    pub(crate) fn tokens(&self, count: usize, seconds: f64) {
        let model = [&*self.model];
        self.metrics
            .output_tokens_total
            .with_label_values(&model)
            .inc_by(count as u64);
        if count > 0 && seconds > 0.0 {
            let each = seconds / count as f64;
            let latency = self
                .metrics
                .inter_token_latency_seconds
                .with_label_values(&model);
            latency.observe(each);
            self.metrics
                .router_inter_token_latency_seconds
                .with_label_values::<&str>(&[])
                .observe(each);
        }
    }

    /// The whole answer was made.
    pub(crate) fn succeed(mut self, totals: &Totals) {
        let model = [&*self.model];
        let metrics = &self.metrics;
        metrics
            .input_sequence_tokens
            .with_label_values(&model)
            .observe(totals.prompt_tokens.into());
        metrics
            .output_sequence_tokens
            .with_label_values(&model)
            .observe(totals.output_tokens.into());
        metrics
            .cached_tokens
            .with_label_values(&model)
            .observe(totals.cached_tokens.into());
        let router = metrics
            .router_output_sequence_tokens
            .with_label_values::<&str>(&[]);
        router.observe(totals.output_tokens.into());
        let phase = [&*self.model, "aggregated"];
        metrics
            .router_input_sequence_tokens
            .with_label_values(&phase)
            .observe(totals.prompt_tokens.into());
        let reused = metrics
            .router_kv_worker_reused_tokens_total
            .with_label_values(&phase);
        reused.inc_by(totals.cached_tokens.into());
        tracing::info!(
            request = %self.id,
            model = %self.model,
            worker = %totals.target,
            prompt = totals.prompt_tokens,
            cached = totals.cached_tokens,
            output = totals.output_tokens,
            ttft_ms = self.first_token.map(|t| (t - self.received).as_millis() as u64),
            total_ms = (self.clock.now() - self.received).as_millis() as u64,
            "request done"
        );
        self.end("success", "");
    }

    /// It failed; the error is given back for the client.
    pub(crate) fn fail(mut self, error: ApiError) -> ApiError {
        let kind = error_type(&error);
        if kind == "overload" {
            let labels = [&*self.model, self.endpoint];
            self.metrics
                .model_rejection_total
                .with_label_values(&labels)
                .inc();
            self.metrics
                .tasks_rejected_total
                .with_label_values::<&str>(&[])
                .inc();
        }
        tracing::info!(request = %self.id, model = %self.model, %error, "request failed");
        self.end("error", kind);
        error
    }

    fn end(&mut self, status: &str, error_type: &str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let labels = [
            &*self.model,
            self.endpoint,
            self.request_type,
            status,
            error_type,
        ];
        self.metrics.requests_total.with_label_values(&labels).inc();
        self.metrics
            .tasks_issued_total
            .with_label_values::<&str>(&[])
            .inc();
        let took = (self.clock.now() - self.received).as_secs_f64();
        self.metrics
            .request_duration_seconds
            .with_label_values(&[&*self.model])
            .observe(took);
        self.add_active(-1.0);
        if self.first_token.is_none() {
            self.add_queued(-1.0);
        }
    }

    fn add_active(&self, delta: f64) {
        self.metrics
            .active_requests
            .with_label_values(&[&*self.model])
            .add(delta);
        self.metrics
            .inflight_requests
            .with_label_values(&[&*self.model])
            .add(delta);
    }

    fn add_queued(&self, delta: f64) {
        self.metrics
            .queued_requests
            .with_label_values(&[&*self.model])
            .add(delta);
        self.metrics
            .dynamo_queued_requests
            .with_label_values::<&str>(&[])
            .add(delta);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.ended {
            let labels = [&*self.model, self.endpoint, self.request_type];
            self.metrics
                .model_cancellation_total
                .with_label_values(&labels)
                .inc();
            self.metrics
                .disconnected_clients
                .with_label_values::<&str>(&[])
                .inc();
            tracing::info!(request = %self.id, model = %self.model, "client left");
            self.end("error", "cancelled");
        }
    }
}

/// The label that an error is counted under.
fn error_type(error: &ApiError) -> &'static str {
    match error.status {
        404 => "not_found",
        499 => "cancelled",
        501 => "not_implemented",
        504 => "response_timeout",
        400..=498 => "validation",
        _ if error.kind == "service_unavailable" => "overload",
        503 => "unavailable",
        _ => "internal",
    }
}
