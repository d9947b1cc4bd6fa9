//! A request to an engine behind HTTP: it is sent, and the beginning of the answer is awaited.
//!
//! What always holds: until an answer has begun, the client has received nothing, so that another worker can answer.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response};
use kvasir_host::Booking;
use kvasir_openai::{ApiError, ask_token_ids, names_transfer};
use kvasir_router::{Attempts, GiveUp, NextStep, Placement};
use kvasir_types::{AttemptError as _, FailureCause, WorkerRank};
use kvasir_upstream::{UpstreamBody, UpstreamError, UpstreamRequest};

use super::kept_prompt::DecodeLeg;
use super::{EngineAnswer, Forward, Kind, PreparedRequest, headers, outgoing, peek, two_step};
use crate::attempts::{self, OpenAttempt, UnplacedRequest};
use crate::http::long_work;
use crate::http::reply::Reply;
use crate::models::ServedModel;
use crate::observe::outcomes::REQUEST_ID;
use crate::observe::request_record::RequestRecord;
use crate::proxy::relay::{FirstBytes, Form, Source};

/// The client's error when two workers failed under the request.
const FAILED_TWICE: &str = "Two workers failed while they had this request. It may be what makes them fail, so it was not sent to a third";

/// The client's error when a request may have been run and must not be run twice.
const NOT_SENT_AGAIN: &str = "The worker failed before it answered. It may have run the request, so it was not sent to another worker";

/// The client's error when an engine refuses its request with words about other engines.
const REFUSED_WITH_TRANSFER: &str = "The engine refuses the request. What it says names other engines: the operator finds it in the router's log";
/// Bytes of it that are logged.
const TOLD_BYTES_MAX: usize = 2048;

/// The client's error when this machine cannot open a connection to any worker.
const NO_ROOM: &str = "This router cannot open another connection to a worker: try again";
/// Times that a connection is tried while this machine has no descriptor for it.
const LOCAL_TRIES_MAX: u32 = 10;
/// Between two of them.
const LOCAL_PAUSE: Duration = Duration::from_millis(50);

/// After this time a request that passes unread is taken for begun.
const UNREAD_SPAN: Duration = Duration::from_millis(50);

/// An attempt at an engine behind HTTP.
pub(crate) struct HttpAttempt<'a> {
    forward: &'a Forward,
    /// Tokens of the prompt.
    tokens: u32,
    record: &'a mut RequestRecord,
    /// The last answer that said that its engine failed or is not available, and who gave it. It is the answer if no other engine
    /// gives one.
    unavailable: Option<Box<(EngineAnswer, WorkerRank)>>,
    /// What it sends instead of the request, if another engine computes the prompt.
    leg: Option<Box<DecodeLeg>>,
}

impl<'a> HttpAttempt<'a> {
    /// For a prompt of so many tokens.
    pub(crate) fn new(forward: &'a Forward, tokens: u32, record: &'a mut RequestRecord) -> Self {
        Self {
            forward,
            tokens,
            record,
            unavailable: None,
            leg: None,
        }
    }

    /// Another engine computes the prompt.
    pub(super) fn transfer(&mut self, leg: Option<DecodeLeg>) {
        self.leg = leg.map(Box::new);
    }

    /// The last answer that said that its engine is not available, and who gave it.
    pub(crate) fn into_unavailable(self) -> Option<(EngineAnswer, WorkerRank)> {
        self.unavailable.map(|answer| *answer)
    }
}

impl OpenAttempt for HttpAttempt<'_> {
    type Answer = EngineAnswer;
    type Error = UpstreamError;

    async fn open(
        &mut self,
        booking: &Booking,
        attempts: &Attempts,
    ) -> Result<EngineAnswer, UpstreamError> {
        self.record.placed(booking);
        if let Some(leg) = &mut self.leg {
            leg.begin(self.forward);
        }
        let opened = self.forward.open(booking, self.tokens, self.leg.as_deref());
        let opened = opened.await;
        if let Some(leg) = &mut self.leg {
            return transferred(leg, opened);
        }
        let answer = opened?;
        let Some(error) = answer.failure() else {
            return Ok(answer);
        };
        let next = attempts.next_step(error.failure_cause());
        if next == NextStep::GiveUp(GiveUp::FailedTwice) {
            attempts::warn_failed_twice(booking.placement().id, attempts, booking.target());
        }
        if next != NextStep::TryNext {
            return Ok(answer);
        }
        self.unavailable = Some(Box::new((answer, booking.target())));
        Err(error)
    }

    fn client_error(&self, error: &UpstreamError, next: NextStep) -> ApiError {
        match (next, error.failure_cause()) {
            (NextStep::GiveUp(GiveUp::MayHaveRun), _) => ApiError::new(502, NOT_SENT_AGAIN),
            (NextStep::GiveUp(GiveUp::FailedTwice), _) => ApiError::new(502, FAILED_TWICE),
            (_, FailureCause::Timeout) => ApiError::deadline(),
            (_, FailureCause::Local) => ApiError::new(503, NO_ROOM),
            _ => ApiError::unavailable(),
        }
    }
}

/// What came of asking an engine to answer a prompt that another has computed. One that fails may lack the prompt: it is asked again to compute it.
fn transferred(
    leg: &mut DecodeLeg,
    opened: Result<EngineAnswer, UpstreamError>,
) -> Result<EngineAnswer, UpstreamError> {
    let error = match opened {
        Ok(mut answer) => match answer.failure() {
            Some(error) if error.failure_cause() != FailureCause::Rejected => error,
            // Any engine would refuse it.
            Some(_) => {
                answer.keep_transfer_back();
                return Ok(answer);
            }
            None => return Ok(answer),
        },
        Err(error) => error,
    };
    leg.failed(&error);
    Err(error)
}

impl EngineAnswer {
    /// Why it is none, if it says so: its status, or an error in place of the first event.
    pub(super) fn failure(&self) -> Option<UpstreamError> {
        let status = self.head.status;
        match self.source.begins_with_failure() {
            _ if !status.is_success() => Some(UpstreamError::Status(status)),
            true => Some(UpstreamError::ErrorEvent),
            false => None,
        }
    }

    /// An engine that refuses a request may repeat what it was sent, and with it what another said of its memory: then the client is told
    /// that it was refused.
    fn keep_transfer_back(&mut self) {
        let FirstBytes::Whole(told) = &mut self.first else {
            return;
        };
        if names_transfer(told) {
            let status = self.head.status.as_u16();
            tracing::warn!(status, told = %String::from_utf8_lossy(&told[..told.len().min(TOLD_BYTES_MAX)]), "an engine refuses a request and names the transfer");
            *told = ApiError::new(status, REFUSED_WITH_TRANSFER).to_body();
            self.source.is_cleaned = true;
        }
    }
}

impl PreparedRequest {
    /// Sends the request to one worker after another until one answers, and passes the answer on.
    pub(crate) async fn run(mut self: Box<Self>) -> Result<Reply, ApiError> {
        if let Some((batch, route)) = self.batch.take() {
            return Box::pin(super::batch::run(self, *batch, route)).await;
        }
        self.run_one().await
    }

    /// The same of one that is not cut.
    pub(super) async fn run_one(mut self: Box<Self>) -> Result<Reply, ApiError> {
        if let Some(plan) = self.prefill.take() {
            // In a box: requests of one engine do not carry its room.
            return Box::pin(two_step::run(self, plan)).await;
        }
        let forward = &self.forward;
        let mut attempts = Attempts::new(
            attempts::limits(&forward.app, &forward.model),
            forward.is_idempotent(),
        );
        let tokens = self.arrival.isl_tokens;
        let mut opener = HttpAttempt::new(forward, tokens, &mut self.record);
        let unplaced = UnplacedRequest {
            app: &forward.app,
            model: &forward.model,
            arrival: &self.arrival,
            blocks: &self.blocks,
            migration: None,
        };
        let found = attempts::run(unplaced, &mut attempts, &mut opener).await;
        let (answer, target, booking) = match (found, opener.into_unavailable()) {
            (Ok((booking, answer)), _) => (answer, booking.target(), Some(booking)),
            (Err(_), Some((answer, target))) => (answer, target, None),
            (Err(error), None) => return Err(self.record.fail(error)),
        };
        let Self {
            forward,
            arrival,
            record,
            ..
        } = *self;
        Ok(forward.reply(answer, (target, booking), record, (arrival, attempts)))
    }
}

impl Forward {
    /// Whether running the request twice does no harm.
    pub(super) fn is_idempotent(&self) -> bool {
        !matches!(self.kind, Kind::Opaque { idempotent: false })
    }

    /// Sends the request to the booked worker and waits for the first bytes of its answer, whatever its status.
    async fn open(
        &self,
        booking: &Booking,
        tokens: u32,
        leg: Option<&DecodeLeg>,
    ) -> Result<EngineAnswer, UpstreamError> {
        if let Some(span) = self.prefill_span(booking.placement(), tokens) {
            booking.presume_prefill(span);
        }
        // In one place: moved into the timeout it would have its room twice.
        let attempt = std::pin::pin!(self.try_worker(booking.placement(), tokens, leg));
        let answer = tokio::time::timeout(self.first_byte_timeout(), attempt).await;
        answer.unwrap_or(Err(UpstreamError::AnswerTimeout))
    }

    /// How long the prefill of a unary request likely takes; none for streams, which show it. What a route that passes
    /// unread computes is not known: it is taken for begun soon.
    fn prefill_span(&self, sent: &Placement, tokens: u32) -> Option<Duration> {
        match self.kind {
            Kind::Completion { stream: true, .. } => return None,
            Kind::Completion { .. } => {}
            Kind::Opaque { .. } => return Some(UNREAD_SPAN),
        }
        let uncached = tokens.saturating_sub(sent.cached_tokens);
        let times = self.model.host.prefill_times();
        Some(times.estimate(sent.target, uncached))
    }

    /// Sends `body` to a worker and waits for the head of its answer.
    pub(super) async fn send(
        &self,
        target: WorkerRank,
        body: &Bytes,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        self.send_as(target, &self.headers, body, self.urgency)
            .await
    }

    /// The same with other headers, and another urgency where the body says one.
    pub(super) async fn send_as(
        &self,
        target: WorkerRank,
        headers: &HeaderMap,
        body: &Bytes,
        urgency: Option<i32>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        self.send_to(&self.model, target, headers, body, urgency)
            .await
    }

    /// The same to a worker of any model.
    pub(super) async fn send_to(
        &self,
        model: &ServedModel,
        target: WorkerRank,
        headers: &HeaderMap,
        body: &Bytes,
        urgency: Option<i32>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let pool = model.links().http(target.worker);
        let pool = pool.ok_or(UpstreamError::Absent)?;
        let has_ranks = model.has_ranks(target.worker);
        let rank = has_ranks.then(|| headers::rank_field(target.rank));
        let urgency = urgency.filter(|_| pool.larger_first());
        let asks_ids = self.extra_fields().asks_ids() && pool.returns_token_ids();
        let changed = match urgency.is_some() || asks_ids {
            true => Some(Box::pin(self.changed_for(body.clone(), urgency, asks_ids)).await),
            false => None,
        };
        let body = changed.as_ref().unwrap_or(body);
        let request = UpstreamRequest {
            method: &self.method,
            path: self.path.as_str(),
            headers,
            also: rank.as_ref().map(|(name, value)| (name, value)),
            body,
            fresh: !self.is_idempotent(),
        };
        let mut tries = 1;
        loop {
            match pool.send(&request).await {
                Err(UpstreamError::Local(error)) if tries < LOCAL_TRIES_MAX => {
                    tries += 1;
                    self.make_room(&error).await;
                }
                answer => return answer,
            }
        }
    }

    /// This machine has no descriptor for a connection: idle ones give theirs.
    async fn make_room(&self, error: &std::io::Error) {
        let shortage = &self.app.http().shortage;
        shortage.struck("connecting to a worker", error);
        self.model.links().close_idle();
        // In a box: requests that find a connection do not carry its room.
        Box::pin(tokio::time::sleep(LOCAL_PAUSE)).await;
    }

    /// The body as one kind of engine wants it.
    async fn changed_for(&self, body: Bytes, urgency: Option<i32>, asks_ids: bool) -> Bytes {
        let change = move |body: &Bytes| {
            let turned = urgency.and_then(|urgency| outgoing::larger_first(body, urgency));
            let body = turned.as_ref().unwrap_or(body);
            match asks_ids {
                true => ask_token_ids(body),
                false => body.clone(),
            }
        };
        if !long_work::is_long(body.len()) {
            return change(&body);
        }
        let own = body.clone();
        let changed = self.app.long_work().drive(async move { change(&own) });
        changed.await.unwrap_or(body)
    }

    async fn try_worker(
        &self,
        sent: &Placement,
        tokens: u32,
        leg: Option<&DecodeLeg>,
    ) -> Result<EngineAnswer, UpstreamError> {
        let mut answer = self.begin(sent, tokens, leg).await?;
        if self.is_of_another(&answer) {
            if leg.is_some() {
                return Err(UpstreamError::Unfinished);
            }
            // In a box: it hardly ever happens, and each request would have its room.
            answer = Box::pin(self.begin(sent, tokens, None)).await?;
        }
        Ok(match self.app.options().error_peek {
            Some(_) => peek::error_as_status(answer),
            None => answer,
        })
    }

    /// Whether the answer of a completion names another request than this one, where its engine names requests.
    fn is_of_another(&self, answer: &EngineAnswer) -> bool {
        if !matches!(self.kind, Kind::Completion { .. }) || !answer.head.status.is_success() {
            return false;
        }
        let (FirstBytes::Whole(first) | FirstBytes::Partial(first)) = &answer.first;
        let ours = self.headers.get(&REQUEST_ID).map(HeaderValue::as_bytes);
        match (peek::answer_id(first), ours) {
            (Some(id), Some(ours)) if !ours.is_empty() => {
                let names_ours = memchr::memmem::find(id, ours).is_some();
                answer.source.body().is_named_otherwise(names_ours)
            }
            _ => false,
        }
    }

    /// Sends the request and waits for the beginning of its answer.
    async fn begin(
        &self,
        sent: &Placement,
        tokens: u32,
        leg: Option<&DecodeLeg>,
    ) -> Result<EngineAnswer, UpstreamError> {
        let dispatched = self.app.clock().now();
        self.model.placements.dispatched();
        let _inside = self.model.placements.enter(kvasir_host::Stage::Dispatch);
        let body = leg.map_or(&self.body, |leg| &leg.body);
        let response = self.send(sent.target, body).await?;
        let (head, body) = response.into_parts();
        let prefill = leg.map(|leg| leg.prefill);
        let form = self.form(&head, || self.extras(sent, tokens, dispatched, prefill));
        let resume = self
            .resume_state()
            .filter(|_| matches!(form, Form::Events { .. }));
        let mut source = Source::new(body, form, resume);
        source.filter_text(headers::is_text(&head.headers));
        source.keep_text(self.prefills_next_turn());
        let mut first = source.first_bytes().await?;
        if leg.is_some() && self.begins_with_role() {
            // A transfer that fails is said after the role: until a token came, another engine can answer.
            first = Box::pin(source.first_content(first)).await?;
        }
        Ok(EngineAnswer {
            dispatched,
            prefill,
            bypassed: false,
            head,
            source,
            first,
        })
    }

    /// Whether a stream of its answer begins with an event that has no token.
    fn begins_with_role(&self) -> bool {
        self.path.path().ends_with("/chat/completions")
    }

    pub(super) fn first_byte_timeout(&self) -> Duration {
        let limits = &self.app.options().limits;
        match (self.kind, limits.stream_silence) {
            (Kind::Completion { stream: true, .. }, Some(silence)) => {
                silence.min(limits.first_byte)
            }
            _ => limits.first_byte,
        }
    }
}
