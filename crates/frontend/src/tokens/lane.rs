//! One prompt and its answer: look up, choose a worker, hand over, wait for the first token.
//!
//! A worker that fails before its first token is replaced by another, up to a limit; the client does not notice. An answer that
//! breaks off later is resumed after its last token, likewise.

use std::sync::Arc;

use kvasir_host::Booking;
use kvasir_openai::ApiError;
use kvasir_router::{Attempts, NextStep};
use kvasir_transport::{PlaneError, TokenStream};
use kvasir_types::{
    RequestId, Sampling, Time, Token, TokenItem, TokenRequest, TransportKind, WorkerRank,
};

use crate::App;
use crate::attempts::{self, OpenAttempt, UnplacedRequest};
use crate::models::ServedModel;
use crate::request::ask;
use crate::request::migrate::Migration;
use crate::request::route_error;
use crate::tokens::job::Job;

/// One answer whose first tokens have come.
#[derive(Debug)]
pub(crate) struct Lane {
    /// Its booking at the worker.
    pub(crate) booking: Booking,
    /// What the worker sends.
    pub(crate) stream: TokenStream,
    /// What it has sent already.
    pub(crate) first: TokenItem,
    /// Tokens of its prompt.
    pub(crate) prompt_tokens: u32,
    /// Share of the prompt's blocks that the worker was expected to hold.
    pub(crate) hit_rate: f64,
    /// When it was handed over.
    pub(crate) dispatched: Time,
    /// When the first tokens came.
    pub(crate) first_token: Time,
    /// The attempts that led here.
    pub(crate) attempts: Attempts,
}

/// An answer that broke off.
pub(crate) struct BrokenAnswer {
    /// The request.
    pub(crate) id: RequestId,
    /// The prompt and every token that came.
    pub(crate) tokens: Arc<[Token]>,
    /// How many of them came.
    pub(crate) generated: u32,
    /// The attempts so far.
    pub(crate) attempts: Attempts,
}

/// Starts one answer to `prompt` under `id`.
pub(crate) async fn start(
    app: &App,
    job: &Job,
    id: RequestId,
    prompt: &Arc<[Token]>,
) -> Result<Lane, ApiError> {
    let attempt = TokenAttempt::new(app, job, prompt);
    let attempts = Attempts::new(attempts::limits(app, &job.model), true);
    attempt.run(id, attempts, None).await
}

/// Resumes an answer that broke off; what comes is what has not come yet.
pub(crate) async fn resume(app: &App, job: &Job, broken: BrokenAnswer) -> Result<Lane, ApiError> {
    let migration = Migration::begin(app.observer(), &job.model.name, broken.attempts.phase());
    let prompt = broken
        .tokens
        .len()
        .saturating_sub(broken.generated as usize);
    let mut sampling = job.sampling(prompt);
    sampling.max_tokens = sampling.max_tokens.saturating_sub(broken.generated);
    sampling.min_tokens = sampling.min_tokens.saturating_sub(broken.generated);
    let attempt = TokenAttempt {
        app,
        job,
        tokens: broken.tokens,
        sampling,
    };
    attempt
        .run(broken.id, broken.attempts, Some(migration))
        .await
}

/// An attempt at a token worker.
pub(crate) struct TokenAttempt<'a> {
    app: &'a App,
    job: &'a Job,
    /// The prompt, and what has been answered of it.
    tokens: Arc<[Token]>,
    sampling: Sampling,
}

impl<'a> TokenAttempt<'a> {
    fn new(app: &'a App, job: &'a Job, prompt: &Arc<[Token]>) -> Self {
        Self {
            app,
            job,
            tokens: Arc::clone(prompt),
            sampling: job.sampling(prompt.len()),
        }
    }

    /// For the first choice; none if there is no prompt.
    pub(crate) fn first(app: &'a App, job: &'a Job) -> Option<Self> {
        Some(Self::new(app, job, job.prompt_of(0)?))
    }

    async fn run(
        mut self,
        id: RequestId,
        mut attempts: Attempts,
        migration: Option<Migration>,
    ) -> Result<Lane, ApiError> {
        let (app, job) = (self.app, self.job);
        let salt = job.salt().unwrap_or_default();
        let blocks = job.model.name_blocks(&self.tokens, salt);
        let mut arrival = ask::arrival(id, self.tokens.len(), &job.nvext, &job.headers);
        arrival.constraints.transport = Some(TransportKind::Plane);
        let unplaced = UnplacedRequest {
            app,
            model: &job.model,
            arrival: &arrival,
            blocks: &blocks,
            migration,
        };
        let (booking, answer) = attempts::run(unplaced, &mut attempts, &mut self).await?;
        let tokens = self.tokens.len();
        Ok(lane(app, &job.model, booking, answer, tokens, attempts))
    }
}

/// A worker's stream, its first item, and when the request was handed over.
pub(crate) type TokenAnswer = (TokenStream, TokenItem, Time);

impl OpenAttempt for TokenAttempt<'_> {
    type Answer = TokenAnswer;
    type Error = PlaneError;

    async fn open(&mut self, booking: &Booking, _: &Attempts) -> Result<TokenAnswer, PlaneError> {
        let (app, job) = (self.app, self.job);
        let target = booking.target();
        let request = TokenRequest {
            id: booking.placement().id,
            model: Arc::clone(&job.model.name),
            tokens: Arc::clone(&self.tokens),
            sampling: self.sampling.clone(),
            rank: target.rank,
            priority: job
                .nvext
                .hints
                .priority
                .or(job.options.priority)
                .unwrap_or(0),
            lora: job.model.lora.clone(),
            salt: job.salt().map(Into::into),
            context: job.context(),
        };
        let dispatched = app.clock().now();
        job.model.placements.dispatched();
        let _inside = job.model.placements.enter(kvasir_host::Stage::Dispatch);
        let plane = job.model.links().plane(target.worker);
        let plane = plane.ok_or(PlaneError::Gone(target.worker))?;
        let mut stream = plane.send(target.worker, request).await?;
        match stream.next().await {
            Some(first) => Ok((stream, first?, dispatched)),
            None => Err(PlaneError::Disconnected(target.worker)),
        }
    }

    fn client_error(&self, error: &PlaneError, _: NextStep) -> ApiError {
        client_error(self.app, error)
    }
}

/// Where a prompt would go; nothing is booked.
pub(crate) async fn query(
    app: &App,
    job: &Job,
    prompt: &Arc<[Token]>,
) -> Result<WorkerRank, ApiError> {
    let blocks = job
        .model
        .name_blocks(prompt, job.salt().unwrap_or_default());
    let mut arrival = ask::arrival(job.id, prompt.len(), &job.nvext, &job.headers);
    arrival.constraints.transport = Some(TransportKind::Plane);
    arrival.query_only = true;
    let booking = job
        .model
        .book(Box::new(arrival), &blocks)
        .await
        .map_err(|error| route_error::answer(app.options().overload_status, &error))?;
    Ok(booking.target())
}

/// The first choice of a job, which a worker has begun to answer.
pub(crate) fn first(
    app: &App,
    job: &Job,
    booking: Booking,
    answer: TokenAnswer,
    attempts: Attempts,
) -> Lane {
    let tokens = job.prompt_of(0).map_or(0, |prompt| prompt.len());
    lane(app, &job.model, booking, answer, tokens, attempts)
}

fn lane(
    app: &App,
    model: &ServedModel,
    booking: Booking,
    (stream, first, dispatched): TokenAnswer,
    tokens: usize,
    attempts: Attempts,
) -> Lane {
    booking.first_token();
    let first_token = app.clock().now();
    let waited = first_token - dispatched;
    let meters = &model.placements;
    let hit_rate = meters.begun(
        booking.placement(),
        tokens,
        model.block_size,
        (waited, true),
    );
    Lane {
        booking,
        stream,
        first,
        prompt_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        hit_rate,
        dispatched,
        first_token,
        attempts,
    }
}

/// What the client is told when a worker failed and no other is asked.
pub(crate) fn client_error(app: &App, error: &PlaneError) -> ApiError {
    match error {
        PlaneError::Overloaded(_) => ApiError::overloaded(app.options().overload_status),
        PlaneError::Rejected(message) => ApiError::bad_request(message.clone()),
        PlaneError::Engine(_) => ApiError::backend(500, "", app.options().overload_status),
        PlaneError::Protocol { .. } => ApiError::internal(),
        PlaneError::Timeout { .. } => ApiError::deadline(),
        _ => ApiError::unavailable(),
    }
}
