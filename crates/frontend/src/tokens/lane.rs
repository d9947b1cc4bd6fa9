//! One prompt on its way to one answer: look up, choose a worker, hand over, wait for the first token.
//!
//! A worker that fails before its first token is replaced by another, up to a limit; the client sees
//! nothing of it. An answer that breaks off later goes on from its last token, likewise.

use std::sync::Arc;

use kvasir_host::Booking;
use kvasir_openai::ApiError;
use kvasir_router::Outcome;
use kvasir_transport::{PlaneError, Retry, TokenStream};
use kvasir_types::{
    RequestId, Sampling, Time, Token, TokenItem, TokenRequest, WorkerId, WorkerRank,
};

use crate::App;
use crate::models::ServedModel;
use crate::request::ask;
use crate::request::migrate::{Move, Stage};
use crate::request::route_error;
use crate::tokens::job::Job;

/// One answer under way: its first tokens are here.
#[derive(Debug)]
pub(crate) struct Lane {
    /// Its place on the worker.
    pub(crate) booking: Booking,
    /// What the worker sends.
    pub(crate) stream: TokenStream,
    /// What it has sent already.
    pub(crate) first: TokenItem,
    /// Tokens of its prompt.
    pub(crate) prompt_tokens: u32,
    /// Share of the prompt's blocks that the worker was thought to hold.
    pub(crate) hit_rate: f64,
    /// When it was handed over.
    pub(crate) dispatched: Time,
    /// When the first tokens came.
    pub(crate) first_token: Time,
    /// Workers that were tried, this one included.
    pub(crate) tried: u32,
    /// Workers that failed it.
    pub(crate) failed: Vec<WorkerId>,
}

/// What is asked of workers, one after the other, until one begins to answer.
struct Errand {
    id: RequestId,
    /// The prompt, and what has been answered of it.
    tokens: Arc<[Token]>,
    sampling: Sampling,
    stage: Stage,
    /// Workers that may be tried.
    tries: u32,
    /// Workers that failed it, and how the last one did.
    failed: Vec<WorkerId>,
    last_failure: Option<Outcome>,
}

/// Starts one answer to `prompt` under `id`.
pub(crate) async fn start(
    app: &App,
    job: &Job,
    id: RequestId,
    prompt: &Arc<[Token]>,
) -> Result<Lane, ApiError> {
    let errand = Errand {
        id,
        tokens: Arc::clone(prompt),
        sampling: job.sampling(prompt.len()),
        stage: Stage::New,
        tries: app.options().retry_limit.saturating_add(1),
        failed: Vec::new(),
        last_failure: None,
    };
    errand.run(app, job, None).await
}

/// An answer that broke off, as it goes on elsewhere.
pub(crate) struct Broken {
    /// The request.
    pub(crate) id: RequestId,
    /// The prompt and every token that came.
    pub(crate) tokens: Arc<[Token]>,
    /// How many of them came.
    pub(crate) generated: u32,
    /// Workers that failed it.
    pub(crate) failed: Vec<WorkerId>,
    /// How the last of them did.
    pub(crate) outcome: Outcome,
    /// Workers that may be tried.
    pub(crate) tries: u32,
}

/// Goes on with an answer that broke off; what comes is what has not come yet.
pub(crate) async fn go_on(app: &App, job: &Job, broken: Broken) -> Result<Lane, ApiError> {
    let moving = Move::begin(app.observer(), &job.model.name, Stage::Ongoing);
    let prompt = broken
        .tokens
        .len()
        .saturating_sub(broken.generated as usize);
    let mut sampling = job.sampling(prompt);
    sampling.max_tokens = sampling.max_tokens.saturating_sub(broken.generated);
    sampling.min_tokens = sampling.min_tokens.saturating_sub(broken.generated);
    let errand = Errand {
        id: broken.id,
        tokens: broken.tokens,
        sampling,
        stage: Stage::Ongoing,
        tries: broken.tries,
        failed: broken.failed,
        last_failure: Some(broken.outcome),
    };
    errand.run(app, job, Some(moving)).await
}

impl Errand {
    async fn run(mut self, app: &App, job: &Job, moving: Option<Move>) -> Result<Lane, ApiError> {
        let mut moving = moving;
        let found = self.find(app, job, &mut moving).await;
        if let Some(moving) = moving {
            moving.settle(found.is_ok());
        }
        found
    }

    async fn find(
        &mut self,
        app: &App,
        job: &Job,
        moving: &mut Option<Move>,
    ) -> Result<Lane, ApiError> {
        let model = &job.model;
        let salt = job.salt().unwrap_or_default();
        let blocks = model.name_blocks(&self.tokens, salt);
        let mut arrival = ask::arrival(self.id, self.tokens.len(), &job.nvext, &job.headers);
        for tried in 1..=self.tries {
            arrival.failed.clone_from(&self.failed);
            arrival.resumed = self.stage == Stage::Ongoing;
            arrival.last_failure = self.last_failure;
            if let Some(moving) = moving {
                moving.attempt();
            }
            let booking = model
                .book(arrival.clone(), &blocks)
                .await
                .map_err(|error| route_error::answer(app, &error))?;
            let worker = booking.target().worker;
            let error = match dispatch(app, job, &booking, &self.tokens, &self.sampling).await {
                Ok(begun) => {
                    let mut lane = lane(app, model, booking, begun, self.tokens.len());
                    lane.tried = tried;
                    lane.failed = std::mem::take(&mut self.failed);
                    return Ok(lane);
                }
                Err(error) => error,
            };
            let outcome = outcome(&error);
            tracing::warn!(request = %self.id, %worker, %error, tried, "no first token");
            booking.finish(outcome);
            if error.retry() == Retry::Never || tried == self.tries {
                return Err(failure(app, &error));
            }
            moving.get_or_insert_with(|| Move::begin(app.observer(), &model.name, self.stage));
            self.failed.push(worker);
            self.last_failure = Some(outcome);
        }
        Err(ApiError::unavailable())
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
    arrival.query_only = true;
    let booking = job
        .model
        .book(arrival, &blocks)
        .await
        .map_err(|error| route_error::answer(app, &error))?;
    Ok(booking.target())
}

/// A worker's stream whose first item is here, and when it was asked for.
type Begun = (TokenStream, TokenItem, Time);

async fn dispatch(
    app: &App,
    job: &Job,
    booking: &Booking,
    prompt: &Arc<[Token]>,
    sampling: &Sampling,
) -> Result<Begun, PlaneError> {
    let target = booking.target();
    let request = TokenRequest {
        id: booking.sent().id,
        model: Arc::clone(&job.model.name),
        tokens: Arc::clone(prompt),
        sampling: sampling.clone(),
        rank: target.rank,
        priority: job
            .nvext
            .hints
            .priority
            .or(job.options.priority)
            .unwrap_or(0),
        lora: job.model.lora.clone(),
        salt: job.salt().map(Into::into),
    };
    let dispatched = app.clock().now();
    job.model.placements.dispatched();
    let _inside = job.model.placements.enter(kvasir_host::Stage::Dispatch);
    let mut stream = job.plane.send(target.worker, request).await?;
    match stream.next().await {
        Some(first) => Ok((stream, first?, dispatched)),
        None => Err(PlaneError::Disconnected(target.worker)),
    }
}

fn lane(app: &App, model: &ServedModel, booking: Booking, begun: Begun, tokens: usize) -> Lane {
    let (stream, first, dispatched) = begun;
    booking.first_token();
    let first_token = app.clock().now();
    let waited = first_token - dispatched;
    let meters = &model.placements;
    let hit_rate = meters.begun(booking.sent(), tokens, model.block_size, (waited, true));
    Lane {
        booking,
        stream,
        first,
        prompt_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        hit_rate,
        dispatched,
        first_token,
        tried: 1,
        failed: Vec::new(),
    }
}

/// How the router is to take a worker's failure.
pub(crate) fn outcome(error: &PlaneError) -> Outcome {
    match error {
        PlaneError::Gone(_) | PlaneError::Disconnected(_) => Outcome::Unreachable,
        PlaneError::Overloaded(_) => Outcome::Overloaded,
        PlaneError::Engine(_) => Outcome::Broken,
        _ => Outcome::Failed,
    }
}

/// What the client is told when no worker gave it a first token.
pub(crate) fn failure(app: &App, error: &PlaneError) -> ApiError {
    match error {
        PlaneError::Overloaded(_) => ApiError::overloaded(app.options().overload_status),
        PlaneError::Rejected(message) => ApiError::bad_request(message.clone()),
        PlaneError::Engine(_) => ApiError::internal(),
        _ => ApiError::unavailable(),
    }
}
