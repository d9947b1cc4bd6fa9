//! What is counted and said about one HTTP request, from its arrival to its end.
//!
//! What always holds: every request that was started is ended once; one that is dropped on the way was left
//! by its client.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use kvasir_host::Booking;
use kvasir_openai::{ApiError, Endpoint};
use kvasir_telemetry::Clock;
use kvasir_types::{RequestId, Time, WorkerRank};
use tokio::sync::watch;

use crate::observe::meter::{ModelMeters, RequestKind};
use crate::observe::observer::Observer;
use crate::observe::outcomes::{Outcomes, RequestIdentity, RequestOutcome};
use crate::observe::spans::{RequestTrace, Times};

/// The status under which a request is remembered whose client left.
const CLIENT_LEFT: u16 = 499;

/// Watches one HTTP request.
#[derive(Debug)]
pub(crate) struct RequestRecord {
    meters: Arc<ModelMeters>,
    clock: Clock,
    outcomes: Outcomes,
    id: RequestId,
    /// The client's own name of it.
    given: Option<HeaderValue>,
    received: Time,
    placed: Option<RoutedTo>,
    /// Who computed the prompt for that one.
    prefilled: Option<PrefilledBy>,
    /// Times that another worker went on with the answer.
    moves: u32,
    asking: RequestKind,
    first_token: Option<Time>,
    /// It was first sent to a worker then.
    sent: Option<Time>,
    traced: Option<Box<RequestTrace>>,
    /// It is a part of another request, which alone is counted; where it was sent is told here.
    part: Option<PartRoute>,
    ended: bool,
}

/// Where a part of a request was last sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct PartRoute(Arc<watch::Sender<Option<RoutedTo>>>);

impl PartRoute {
    /// Waits until it is sent to the worker that is to answer it.
    pub(crate) async fn placed(&self) {
        // The sender is ours: it does not go.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }
}

/// Where a request was sent, and how much of its prompt was expected to be cached there.
#[derive(Clone, Copy, Debug)]
struct RoutedTo {
    target: WorkerRank,
    tokens: u32,
    blocks: u32,
}

/// A worker that computed the prompt for the one that answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefilledBy {
    pub(crate) target: WorkerRank,
    /// Tokens of the prompt that were expected in its cache.
    pub(crate) predicted_tokens: u32,
    /// Those that it found there, where it says so.
    pub(crate) cached_tokens: Option<u32>,
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

impl RequestRecord {
    /// A request came for `model`, if that is served.
    pub(crate) fn start(
        observer: &Observer,
        arrived: &RequestIdentity,
        headers: &HeaderMap,
        meters: Option<&Arc<ModelMeters>>,
        endpoint: Endpoint,
        stream: bool,
    ) -> Self {
        Self::begin(
            observer,
            arrived,
            headers,
            meters,
            RequestKind::completion(endpoint, stream),
        )
    }

    /// The same, for a route that only engines know.
    pub(crate) fn start_at(
        observer: &Observer,
        arrived: &RequestIdentity,
        headers: &HeaderMap,
        meters: Option<&Arc<ModelMeters>>,
        path: &str,
        stream: bool,
    ) -> Self {
        Self::begin(
            observer,
            arrived,
            headers,
            meters,
            RequestKind::route(path, stream),
        )
    }

    pub(crate) fn begin(
        observer: &Observer,
        arrived: &RequestIdentity,
        headers: &HeaderMap,
        meters: Option<&Arc<ModelMeters>>,
        asking: RequestKind,
    ) -> Self {
        let clock = observer.clock();
        let meters = meters.unwrap_or_else(|| observer.meters_of_unknown());
        meters.started(&asking);
        Self {
            meters: Arc::clone(meters),
            clock,
            outcomes: observer.outcomes().clone(),
            id: arrived.id,
            given: arrived.given(),
            received: arrived.at,
            placed: None,
            prefilled: None,
            moves: 0,
            asking,
            first_token: None,
            sent: None,
            traced: RequestTrace::begin(observer.tracer(), headers),
            part: None,
            ended: false,
        }
    }

    /// That of a part of this request: it counts the tokens of its answer and nothing else.
    pub(crate) fn part(&self, route: &PartRoute) -> Self {
        Self {
            meters: Arc::clone(&self.meters),
            clock: self.clock,
            outcomes: self.outcomes.clone(),
            id: self.id,
            given: None,
            received: self.received,
            placed: None,
            prefilled: None,
            moves: 0,
            asking: self.asking,
            first_token: None,
            sent: None,
            traced: None,
            part: Some(route.clone()),
            ended: true,
        }
    }

    /// Its first part was sent there.
    pub(crate) fn placed_as(&mut self, route: &PartRoute) {
        let to = *route.0.borrow();
        if let Some(to) = to {
            self.place(to);
        }
    }

    /// Where it counts.
    pub(crate) fn meters(&self) -> &ModelMeters {
        &self.meters
    }

    /// When the head of the request was there.
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
        let to = RoutedTo {
            target: booking.target(),
            tokens: booking.predicted_tokens(),
            blocks: booking.placement().overlap_blocks,
        };
        match &self.part {
            Some(route) => drop(route.0.send_replace(Some(to))),
            None => self.place(to),
        }
    }

    /// Another worker than the one that answers computed the prompt.
    pub(crate) fn prefilled(&mut self, by: Option<PrefilledBy>) {
        self.prefilled = by;
    }

    fn place(&mut self, to: RoutedTo) {
        if self.placed.is_none() {
            self.meters.metrics().tasks_started_total.inc();
        }
        self.placed = Some(to);
        if self.traced.is_some() && self.sent.is_none() {
            self.sent = Some(self.clock.now());
        }
    }

    /// Another worker goes on with the answer.
    pub(crate) fn moved(&mut self, booking: &Booking) {
        self.moves = self.moves.saturating_add(1);
        self.placed(booking);
    }

    /// The client is about to see its first token.
    pub(crate) fn first_token(&mut self, now: Time) {
        if self.first_token.is_none() && self.part.is_none() {
            self.first_token = Some(now);
            self.meters.first_token(now - self.received);
        }
    }

    /// `count` tokens came `seconds` after those before them.
    pub(crate) fn tokens(&self, count: usize, seconds: f64) {
        self.meters.tokens(count, seconds);
    }

    /// The whole answer was made.
    pub(crate) fn succeed(mut self, totals: &Totals) {
        if self.part.is_some() {
            return;
        }
        self.meters.answered(totals);
        let took = self.remember(totals.status, Some(totals), None);
        self.end(None, took);
    }

    /// The answer of a route that only engines know was passed on; nobody counted its tokens.
    pub(crate) fn passed(mut self, status: u16) {
        if self.part.is_some() {
            return;
        }
        let took = self.remember(status, None, None);
        self.end(None, took);
    }

    /// The engine refused it, in words of its own.
    pub(crate) fn refused(mut self, status: u16) {
        if self.part.is_some() {
            return;
        }
        let took = self.remember(status, None, None);
        self.end(Some(error_type(status, "")), took);
    }

    /// It failed; the error is given back for the client.
    pub(crate) fn fail(mut self, error: ApiError) -> ApiError {
        if self.part.is_some() {
            return error;
        }
        let kind = error_type(error.status, &error.kind);
        if kind == "overload" {
            let labels = [self.meters.model(), self.asking.endpoint];
            let rejected = &self.meters.metrics().model_rejection_total;
            rejected.with_label_values(&labels).inc();
        }
        let took = self.remember(error.status, None, Some(&error));
        self.end(Some(kind), took);
        error
    }

    /// Keeps what became of it, and says so in one line. Gives how long it took.
    fn remember(
        &mut self,
        status: u16,
        totals: Option<&Totals>,
        error: Option<&ApiError>,
    ) -> Duration {
        let given = self.given.take();
        let ended = RequestOutcome {
            id: self.id,
            given: given.and_then(|given| Some(given.to_str().ok()?.into())),
            status,
            target: self.placed.map(|placed| placed.target),
            prefill: self.prefilled.map(|by| by.target),
            moves: self.moves,
            prompt_tokens: totals.map(|totals| totals.prompt_tokens),
            predicted_tokens: (self.prefilled.map(|by| by.predicted_tokens))
                .or(self.placed.map(|placed| placed.tokens)),
            cached_tokens: (self.prefilled.and_then(|by| by.cached_tokens))
                .or(totals.and_then(|totals| totals.cached_tokens)),
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
            let (endpoint, model) = (self.asking.endpoint, self.meters.model());
            traced.finish(self.clock, times, endpoint, model, &ended);
        }
        let took = ended.took;
        self.outcomes.keep(ended);
        took
    }

    fn say(&self, ended: &RequestOutcome, error: Option<&ApiError>) {
        let what = match ended.status {
            CLIENT_LEFT => "client left",
            ..400 => "request done",
            _ => "request failed",
        };
        let placed = self.placed.filter(|_| self.meters.by_cache());
        tracing::info!(
            request = %self.id,
            client_request = ended.given.as_deref(),
            endpoint = self.asking.endpoint,
            model = self.meters.model(),
            worker = ended.target.map(|target| target.worker.0),
            rank = ended.target.map(|target| target.rank.0),
            moves = (ended.moves > 0).then_some(ended.moves),
            status = ended.status,
            prompt = ended.prompt_tokens,
            overlap_blocks = placed.map(|placed| placed.blocks),
            predicted = ended.predicted_tokens,
            cached = ended.cached_tokens,
            output = ended.output_tokens,
            ttft_ms = ended.first_token.map(|span| span.as_millis() as u64),
            total_ms = ended.took.as_millis() as u64,
            error = error.map(tracing::field::display),
            "{what}"
        );
    }

    fn end(&mut self, error_type: Option<&'static str>, took: Duration) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.meters.over(&self.asking, error_type, took);
        if self.first_token.is_none() {
            self.meters.begun_or_given_up();
        }
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        if !self.ended {
            let metrics = self.meters.metrics();
            let labels = self.meters.labels(&self.asking);
            let cancelled = &metrics.model_cancellation_total;
            cancelled.with_label_values(&labels).inc();
            metrics.disconnected_clients.inc();
            let took = self.remember(CLIENT_LEFT, None, None);
            self.end(Some("cancelled"), took);
        }
    }
}

/// The label that an error is counted under.
pub(crate) fn error_type(status: u16, kind: &str) -> &'static str {
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
