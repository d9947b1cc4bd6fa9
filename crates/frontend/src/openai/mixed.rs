//! A completion of a model whose workers are reached in both ways.
//!
//! Answers one question: how is a request prepared when nobody knows yet which kind of worker will get it? It is booked first,
//! and goes the way of the worker that was chosen: an engine server gets the client's body, a token worker gets token ids, which
//! are made when the first one is chosen. Until an answer has begun, a worker of either kind can take over.
//!
//! What always holds: a request that token workers cannot take goes to engines alone, and they judge it; a request that any
//! worker could serve is not refused because another could not.

use std::sync::Arc;

use http::StatusCode;
use kvasir_host::Booking;
use kvasir_openai::{ApiError, Scan};
use kvasir_router::{Attempts, NextStep};
use kvasir_transport::PlaneError;
use kvasir_types::{AttemptError, FailureCause, TransportKind};
use kvasir_upstream::UpstreamError;

use super::generate::{self, CheckedBody, Ready};
use crate::App;
use crate::attempts::{self, OpenAttempt, UnplacedRequest};
use crate::http::long_work;
use crate::http::reply::{self, Reply};
use crate::models::ServedModel;
use crate::models::links::WorkerLink;
use crate::observe::request_record::RequestRecord;
use crate::proxy::{self, EngineAnswer, HttpAttempt, PreparedRequest};
use crate::request::client_request::ClientRequest;
use crate::tokens::answer::{Answer, StreamedAnswer};
use crate::tokens::job::Job;
use crate::tokens::lane::{self, Lane, TokenAnswer, TokenAttempt};

/// A completion for workers of either kind.
pub(super) struct MixedRequest {
    model: Arc<ServedModel>,
    ready: Box<PreparedRequest>,
    for_tokens: ForTokens,
}

/// Reads a completion for any of the model's workers.
pub(super) async fn prepare(
    app: &Arc<App>,
    asked: ClientRequest,
    scan: &Scan<'_>,
    model: &Arc<ServedModel>,
) -> Result<Ready, ApiError> {
    let checked = CheckedBody::parse(app, asked.endpoint, &asked.body).ok();
    let Some(body) = checked.filter(|_| model.text().is_some()) else {
        return proxy::prepare(app, asked, scan, model)
            .await
            .map(Ready::Http);
    };
    let for_tokens = ForTokens {
        asked: asked.clone(),
        body: Some(body),
        job: None,
        invalid: None,
    };
    let mut ready = proxy::prepare_whole(app, asked, scan, model).await?;
    ready.arrival.constraints.transport = None;
    Ok(Ready::Both(Box::new(MixedRequest {
        model: Arc::clone(model),
        ready,
        for_tokens,
    })))
}

/// Answers a completion by any of the model's workers.
pub(super) async fn answer(app: &Arc<App>, request: MixedRequest) -> Result<Reply, ApiError> {
    let MixedRequest {
        model,
        mut ready,
        for_tokens,
    } = request;
    if let Some(query) = ready.query.take() {
        return Box::pin(proxy::ask_only(app, *query, *ready)).await;
    }
    let keep_alive = proxy::keep_alive(app, ready.forward.is_stream());
    let answer = run(Arc::clone(app), model, ready, for_tokens);
    proxy::wait(Box::pin(answer), keep_alive).await
}

/// Sends the request to one worker after another until one answers, and passes the answer on.
async fn run(
    app: Arc<App>,
    model: Arc<ServedModel>,
    mut ready: Box<PreparedRequest>,
    for_tokens: ForTokens,
) -> Result<Reply, ApiError> {
    let mut attempts = Attempts::new(attempts::limits(&app, &model), true);
    let tokens = ready.arrival.isl_tokens;
    let mut opener = EitherAttempt {
        app: &app,
        model: &model,
        http: HttpAttempt::new(&ready.forward, tokens, &mut ready.record),
        tokens: for_tokens,
    };
    let unplaced = UnplacedRequest {
        app: &app,
        model: &model,
        arrival: &ready.arrival,
        blocks: &ready.blocks,
        migration: None,
    };
    let found = attempts::run(unplaced, &mut attempts, &mut opener).await;
    let EitherAttempt { http, tokens, .. } = opener;
    let unavailable = http.into_unavailable();
    // What follows the beginning of an engine's answer, only engines can do.
    ready.arrival.constraints.transport = Some(TransportKind::Http);
    let (answer, target, booking) = match (found, unavailable) {
        (Ok((booking, EitherAnswer::Http(answer))), _) => {
            (*answer, booking.target(), Some(booking))
        }
        (Ok((booking, EitherAnswer::Plane(answer))), _) => {
            let Some(job) = tokens.job else {
                return Err(ready.record.fail(ApiError::internal()));
            };
            let first = lane::first(&app, &job, booking, *answer, attempts);
            return by_tokens(app, job, first, ready.record).await;
        }
        // It was no request for a token worker after all: engines may take it.
        (Err(_), _) if tokens.invalid.is_some() => return ready.run().await,
        (Err(_), Some((answer, target))) => (answer, target, None),
        (Err(error), None) => return Err(ready.record.fail(error)),
    };
    let PreparedRequest {
        forward,
        arrival,
        record,
        ..
    } = *ready;
    Ok(forward.reply(answer, (target, booking), record, (arrival, attempts)))
}

/// The answer of a token worker that has begun.
async fn by_tokens(
    app: Arc<App>,
    job: Arc<Job>,
    first: Lane,
    record: RequestRecord,
) -> Result<Reply, ApiError> {
    let lanes = match generate::further_lanes(&app, &job, first).await {
        Ok(lanes) => lanes,
        Err(error) => return Err(record.fail(error)),
    };
    let stream = job.options.stream;
    let answer = Answer::new(app, job, lanes, record);
    match stream {
        true => Ok(reply::events(Box::new(StreamedAnswer::new(answer)))),
        false => Ok(reply::json(StatusCode::OK, answer.collect().await?)),
    }
}

/// The request as token workers get it: made when the first of them is chosen.
struct ForTokens {
    asked: ClientRequest,
    body: Option<CheckedBody>,
    job: Option<Arc<Job>>,
    /// Why token workers cannot take it.
    invalid: Option<ApiError>,
}

impl ForTokens {
    async fn job(
        &mut self,
        app: &Arc<App>,
        model: &Arc<ServedModel>,
    ) -> Result<&Arc<Job>, ApiError> {
        if let Some(body) = self.body.take() {
            let model = Some(Arc::clone(model));
            let job = match long_work::is_long(self.asked.body.len()) {
                false => generate::prepare(app, &self.asked, body, model).await,
                true => {
                    let (own, asked) = (Arc::clone(app), self.asked.clone());
                    let work = async move { generate::prepare(&own, &asked, body, model).await };
                    let job = Box::pin(app.long_work().drive(work)).await;
                    job.unwrap_or_else(|| Err(ApiError::internal()))
                }
            };
            match job {
                Ok(job) => self.job = Some(Arc::new(job)),
                Err(error) => self.invalid = Some(error),
            }
        }
        match (&self.job, &self.invalid) {
            (Some(job), _) => Ok(job),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Err(ApiError::internal()),
        }
    }
}

/// An attempt at a worker of either kind.
struct EitherAttempt<'a> {
    app: &'a Arc<App>,
    model: &'a Arc<ServedModel>,
    http: HttpAttempt<'a>,
    tokens: ForTokens,
}

/// An answer that has begun.
enum EitherAnswer {
    Http(Box<EngineAnswer>),
    Plane(Box<TokenAnswer>),
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
enum EitherError {
    #[error(transparent)]
    Http(#[from] UpstreamError),
    #[error(transparent)]
    Plane(#[from] PlaneError),
    /// Token workers cannot take the request.
    #[error("not a request for token workers: {0}")]
    Invalid(ApiError),
}

impl AttemptError for EitherError {
    fn failure_cause(&self) -> FailureCause {
        match self {
            Self::Http(error) => error.failure_cause(),
            Self::Plane(error) => error.failure_cause(),
            Self::Invalid(_) => FailureCause::Rejected,
        }
    }
}

impl OpenAttempt for EitherAttempt<'_> {
    type Answer = EitherAnswer;
    type Error = EitherError;

    async fn open(
        &mut self,
        booking: &Booking,
        attempts: &Attempts,
    ) -> Result<EitherAnswer, EitherError> {
        match self.model.links().get(booking.target().worker) {
            Some(WorkerLink::Plane { .. }) => {
                let job = self.tokens.job(self.app, self.model).await;
                let job = job.map_err(EitherError::Invalid)?;
                let mut attempt = TokenAttempt::first(self.app, job)
                    .ok_or_else(|| EitherError::Invalid(ApiError::internal()))?;
                let answer = attempt.open(booking, attempts).await?;
                Ok(EitherAnswer::Plane(Box::new(answer)))
            }
            Some(WorkerLink::Http(_)) | None => {
                let answer = self.http.open(booking, attempts).await?;
                Ok(EitherAnswer::Http(Box::new(answer)))
            }
        }
    }

    fn client_error(&self, error: &EitherError, next: NextStep) -> ApiError {
        match error {
            EitherError::Http(error) => self.http.client_error(error, next),
            EitherError::Plane(error) => lane::client_error(self.app, error),
            EitherError::Invalid(error) => error.clone(),
        }
    }
}
