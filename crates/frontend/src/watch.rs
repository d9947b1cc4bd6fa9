//! What is counted and said about one HTTP request, from its arrival to its end.
//!
//! What always holds: every request that was started is ended once; one that is dropped on the way was left
//! by its client.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue};
use kvasir_openai::{ApiError, Endpoint};
use kvasir_telemetry::{Clock, Metrics};
use kvasir_types::{RequestId, Time, WorkerRank};

use crate::App;
use crate::host::Booking;
use crate::outcomes::{self, Ended, Outcomes};
use crate::spans::{Times, Traced};

/// The label of a request whose model is not served; a client's text is never a label.
const UNKNOWN_MODEL: &str = "unknown";

/// The status under which a request is remembered whose client left.
const CLIENT_LEFT: u16 = 499;

/// Watches one HTTP request.
#[derive(Debug)]
pub(crate) struct Watch {
    metrics: Metrics,
    clock: Clock,
    outcomes: Outcomes,
    id: RequestId,
    /// The client's own name of it.
    given: Option<HeaderValue>,
    received: Time,
    /// Where it was sent, and how much of the prompt was expected to be cached there.
    placed: Option<(WorkerRank, u32)>,
    model: Arc<str>,
    endpoint: &'static str,
    request_type: &'static str,
    first_token: Option<Time>,
    /// It was first sent to a worker then.
    sent: Option<Time>,
    traced: Option<Box<Traced>>,
    ended: bool,
}

/// What an answer amounted to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// The status of the answer.
    pub status: u16,
    /// Tokens of all prompts.
    pub prompt_tokens: u32,
    /// Those of them that engines found cached, where they said so.
    pub cached_tokens: Option<u32>,
    /// Tokens of all answers.
    pub output_tokens: u32,
    /// Who served it; the first, where several did.
    pub target: WorkerRank,
}

impl Watch {
    /// A request came for `model`, if that is served.
    pub(crate) fn start(
        app: &App,
        id: RequestId,
        headers: &HeaderMap,
        model: Option<&Arc<str>>,
        endpoint: Endpoint,
        stream: bool,
    ) -> Self {
        let endpoint = match endpoint {
            Endpoint::Chat => "chat_completions",
            Endpoint::Completions => "completions",
        };
        Self::start_at(app, id, headers, model, endpoint, stream)
    }

    /// The same, for any endpoint.
    pub(crate) fn start_at(
        app: &App,
        id: RequestId,
        headers: &HeaderMap,
        model: Option<&Arc<str>>,
        endpoint: &'static str,
        stream: bool,
    ) -> Self {
        let clock = app.clock();
        let watch = Self {
            metrics: app.metrics().clone(),
            clock,
            outcomes: app.outcomes().clone(),
            id,
            given: outcomes::given(headers).cloned(),
            received: clock.now(),
            placed: None,
            model: model.cloned().unwrap_or_else(|| UNKNOWN_MODEL.into()),
            endpoint,
            request_type: if stream { "stream" } else { "unary" },
            first_token: None,
            sent: None,
            traced: Traced::begin(app.options().tracer.as_ref(), headers),
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

    /// Where it counts.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// When the request came.
    pub(crate) fn received(&self) -> Time {
        self.received
    }

    /// Tells the engine whose trace its work belongs to.
    pub(crate) fn trace_to(&self, headers: &mut HeaderMap) {
        if let Some(traced) = &self.traced {
            traced.tell(headers);
        }
    }

    /// The router sent it somewhere.
    pub(crate) fn placed(&mut self, booking: &Booking) {
        self.placed = Some((booking.target(), booking.predicted_tokens()));
        if self.traced.is_some() && self.sent.is_none() {
            self.sent = Some(self.clock.now());
        }
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
        if let Some(cached) = totals.cached_tokens {
            metrics
                .cached_tokens
                .with_label_values(&model)
                .observe(cached.into());
        }
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
        reused.inc_by(totals.cached_tokens.unwrap_or(0).into());
        self.remember(totals.status, Some(totals), None);
        self.end("success", "");
    }

    /// The engine refused it, in words of its own.
    pub(crate) fn refused(mut self, status: u16) {
        self.remember(status, None, None);
        self.end("error", error_type(status, ""));
    }

    /// It failed; the error is given back for the client.
    pub(crate) fn fail(mut self, error: ApiError) -> ApiError {
        let kind = error_type(error.status, &error.kind);
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
        self.remember(error.status, None, Some(&error));
        self.end("error", kind);
        error
    }

    /// Keeps what became of it, and says so in one line.
    fn remember(&mut self, status: u16, totals: Option<&Totals>, error: Option<&ApiError>) {
        let given = self.given.take();
        let ended = Ended {
            id: self.id,
            given: given.and_then(|given| Some(given.to_str().ok()?.into())),
            status,
            target: self.placed.map(|(target, _)| target),
            prompt_tokens: totals.map(|totals| totals.prompt_tokens),
            predicted_tokens: self.placed.map(|(_, cached)| cached),
            cached_tokens: totals.and_then(|totals| totals.cached_tokens),
            output_tokens: totals.map(|totals| totals.output_tokens),
            first_token: self.first_token.map(|first| first - self.received),
            took: self.clock.now() - self.received,
        };
        self.say(&ended, error);
        if let Some(traced) = self.traced.take() {
            let times = Times {
                received: self.received,
                placed: self.sent,
                ended: self.received + ended.took,
            };
            traced.finish(self.clock, times, self.endpoint, &self.model, &ended);
        }
        self.outcomes.keep(ended);
    }

    fn say(&self, ended: &Ended, error: Option<&ApiError>) {
        let what = match ended.status {
            CLIENT_LEFT => "client left",
            ..400 => "request done",
            _ => "request failed",
        };
        tracing::info!(
            request = %self.id,
            client_request = ended.given.as_deref(),
            endpoint = self.endpoint,
            model = &*self.model,
            worker = ended.target.map(|target| target.worker.0),
            rank = ended.target.map(|target| target.rank.0),
            status = ended.status,
            prompt = ended.prompt_tokens,
            predicted = ended.predicted_tokens,
            cached = ended.cached_tokens,
            output = ended.output_tokens,
            ttft_ms = ended.first_token.map(|span| span.as_millis() as u64),
            total_ms = ended.took.as_millis() as u64,
            error = error.map(tracing::field::display),
            "{what}"
        );
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
            self.remember(CLIENT_LEFT, None, None);
            self.end("error", "cancelled");
        }
    }
}

/// The label that an error is counted under.
fn error_type(status: u16, kind: &str) -> &'static str {
    match status {
        404 => "not_found",
        499 => "cancelled",
        501 => "not_implemented",
        504 => "response_timeout",
        400..=498 => "validation",
        _ if kind == "service_unavailable" => "overload",
        503 => "unavailable",
        _ => "internal",
    }
}
