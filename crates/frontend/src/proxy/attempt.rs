//! A request at one worker after another, until one answers or enough were asked.
//!
//! What always holds: nothing has been said to the client; whoever failed is not asked again while others are left;
//! what may have had an effect beyond its answer is not run twice.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use kvasir_host::{Booking, PromptBlocks};
use kvasir_openai::{ApiError, ask_token_ids};
use kvasir_router::{Arrival, Outcome, Sent};
use kvasir_types::WorkerRank;
use kvasir_upstream::{Ask, UpstreamBody, UpstreamError};

use super::{Forward, Kind, Opened, headers, outgoing, peek};
use crate::http::reply::Reply;
use crate::observe::request_record::Watch;
use crate::proxy::relay::{Form, Source};
use crate::request::migrate::{Move, Stage};
use crate::request::route_error;

/// What is said when a request may have been run, and nobody knows what came of it.
const NOT_SENT_AGAIN: &str = "The worker broke off before it answered. It may have run the request, so that it was not sent to another one";

impl Forward {
    pub(super) async fn run(
        self,
        mut arrival: Arrival,
        blocks: PromptBlocks,
        mut watch: Watch,
    ) -> Result<Reply, ApiError> {
        let limit = self.app.options().retry_limit;
        let mut why = ApiError::unavailable();
        let mut moving: Option<Move> = None;
        let mut again = false;
        let mut refused = None;
        for attempt in 0..=limit {
            let mut attempted = arrival.clone();
            attempted.again = again;
            let booking = match self.model.book(attempted, &blocks).await {
                Ok(booking) => booking,
                Err(error) => {
                    why = route_error::answer_after(&self.app, &error, why);
                    break;
                }
            };
            let target = booking.target();
            watch.placed(&booking);
            let failure = match self.open(&booking, arrival.isl_tokens).await {
                Ok(opened) if attempt < limit && self.is_refusal(opened.head.status) => {
                    let status = opened.head.status;
                    // If nobody else answers, this is the answer.
                    refused = Some((opened, target));
                    UpstreamError::Status(status)
                }
                Ok(opened) => {
                    if let Some(moving) = moving {
                        moving.settle(true);
                    }
                    let place = (target, Some(booking));
                    return Ok(self.answer(opened, place, watch, arrival));
                }
                Err(error) => error,
            };
            tracing::warn!(worker = %target, error = %failure, attempt, "no answer");
            why = match failure {
                _ if self.may_have_run(&failure) => ApiError::new(502, NOT_SENT_AGAIN),
                UpstreamError::AnswerTimeout => ApiError::deadline(),
                _ => ApiError::unavailable(),
            };
            let outcome = outcome(&failure);
            booking.finish(outcome);
            if self.may_have_run(&failure) {
                break;
            }
            arrival.failed.push(target.worker);
            arrival.last_failure = Some(outcome);
            // Who hung up may take it after all; who was silent has had its time.
            again = matches!(outcome, Outcome::Unreachable)
                && !matches!(failure, UpstreamError::AnswerTimeout | UpstreamError::Mute);
            if attempt < limit {
                let new = || Move::begin(self.app.observer(), &self.model.name, Stage::New);
                moving.get_or_insert_with(new).attempt();
            }
        }
        if let Some(moving) = moving {
            moving.settle(false);
        }
        match refused {
            Some((opened, target)) => Ok(self.answer(opened, (target, None), watch, arrival)),
            None => Err(watch.fail(why)),
        }
    }

    /// Whether an engine's refusal says nothing about the request, so that another may take it.
    fn is_refusal(&self, status: StatusCode) -> bool {
        match self.kind {
            // Whoever stands between us and the engine does not know either how far that came.
            Kind::Opaque { pure: false } => status == StatusCode::SERVICE_UNAVAILABLE,
            _ => try_elsewhere(status),
        }
    }

    /// Whether the request may have been run and must not be run twice.
    fn may_have_run(&self, failure: &UpstreamError) -> bool {
        let refused = matches!(failure, UpstreamError::Status(_));
        matches!(self.kind, Kind::Opaque { pure: false }) && !refused && !failure.sent_nothing()
    }

    /// Waits for the beginning of an answer; an engine's refusal is one too.
    async fn open(&self, booking: &Booking, tokens: u32) -> Result<Opened, UpstreamError> {
        let timeout = self.first_byte_timeout();
        let attempt = self.attempt(booking.sent(), tokens);
        let timed_out = Err(UpstreamError::AnswerTimeout);
        let Some(prefill) = self.prefill_span(booking.sent(), tokens) else {
            let opened = tokio::time::timeout(timeout, attempt).await;
            return opened.unwrap_or(timed_out);
        };
        let mut attempt = std::pin::pin!(attempt);
        let prefill = prefill.min(timeout);
        if let Ok(opened) = tokio::time::timeout(prefill, &mut attempt).await {
            return opened;
        }
        booking.likely_begun();
        let opened = tokio::time::timeout(timeout - prefill, attempt).await;
        opened.unwrap_or(timed_out)
    }

    /// How long the prompt of an answer in one piece likely takes; none where that is seen, or not known.
    fn prefill_span(&self, sent: &Sent, tokens: u32) -> Option<Duration> {
        let Kind::Completion { stream: false, .. } = self.kind else {
            return None;
        };
        let uncached = tokens.saturating_sub(sent.cached_tokens);
        self.model
            .host
            .prefill_times()
            .estimate(sent.target, uncached)
    }

    /// Sends `body` to a worker and waits for the head of its answer.
    pub(super) async fn ask(
        &self,
        target: WorkerRank,
        body: &Bytes,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        self.ask_as(target, &self.headers, body, self.urgency).await
    }

    /// The same with other headers, and another urgency where the body says one.
    pub(super) async fn ask_as(
        &self,
        target: WorkerRank,
        headers: &HeaderMap,
        body: &Bytes,
        urgency: Option<i32>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let pool = self.workers.get(target.worker);
        let pool = pool.ok_or(UpstreamError::Absent)?;
        let has_ranks = self.model.has_ranks(target.worker);
        let rank = has_ranks.then(|| headers::rank_field(target.rank));
        let urgency = urgency.filter(|_| pool.larger_first());
        let turned = urgency.and_then(|urgency| outgoing::larger_first(body, urgency));
        let body = turned.as_ref().unwrap_or(body);
        let asks_ids = self.wanted().asks_ids() && pool.tells_token_ids();
        let with_ids = asks_ids.then(|| ask_token_ids(body));
        let body = with_ids.as_ref().unwrap_or(body);
        let ask = Ask {
            method: &self.method,
            path: self.path.as_str(),
            headers,
            also: rank.as_ref().map(|(name, value)| (name, value)),
            body,
            fresh: matches!(self.kind, Kind::Opaque { pure: false }),
        };
        pool.send(&ask).await
    }

    async fn attempt(&self, sent: &Sent, tokens: u32) -> Result<Opened, UpstreamError> {
        let dispatched = self.app.clock().now();
        self.model.placements.dispatched();
        let _inside = self.model.placements.enter(kvasir_host::Stage::Dispatch);
        let response = self.ask(sent.target, &self.body).await?;
        let (head, body) = response.into_parts();
        let form = self.form(&head, || self.extras(sent, tokens, dispatched));
        let thread = self
            .thread()
            .filter(|_| matches!(form, Form::Events { .. }));
        let mut source = Source::new(body, form, thread);
        source.gather(self.looks_ahead());
        let begun = source.begin().await?;
        let opened = Opened {
            dispatched,
            head,
            source,
            begun,
        };
        Ok(match self.app.options().error_peek {
            Some(_) => peek::error_as_status(opened),
            None => opened,
        })
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

/// How the router is to take a worker's failure.
pub(super) fn outcome(error: &UpstreamError) -> Outcome {
    match error {
        UpstreamError::Status(_) => Outcome::Overloaded,
        _ => Outcome::Unreachable,
    }
}

/// Whether an engine's refusal says nothing about the request, so that another may take it.
pub(super) fn try_elsewhere(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT
    )
}
