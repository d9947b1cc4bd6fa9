//! One prompt on its way to one answer: look up, choose a worker, hand over, wait for the first token.
//!
//! A worker that fails before its first token is replaced by another, up to a limit; the client sees
//! nothing of it.

use std::sync::Arc;

use kvasir_openai::ApiError;
use kvasir_router::Outcome;
use kvasir_transport::{PlaneError, Retry, TokenStream};
use kvasir_types::{RequestId, Sampling, Time, Token, TokenItem, TokenRequest, WorkerRank};

use crate::host::Booking;
use crate::job::Job;
use crate::models::ServedModel;
use crate::{App, ask, place};

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
}

/// Starts one answer to `prompt` under `id`.
pub(crate) async fn start(
    app: &App,
    job: &Job,
    id: RequestId,
    prompt: &Arc<[Token]>,
) -> Result<Lane, ApiError> {
    let model = &job.model;
    let blocks = place::name_blocks(app, model, prompt, job.salt().unwrap_or_default());
    let mut arrival = ask::arrival(id, prompt.len(), &job.nvext, &job.headers);
    let sampling = job.sampling(prompt.len());
    for attempt in 0.. {
        let booking = place::book(app, model, arrival.clone(), &blocks)
            .await
            .map_err(|error| place::refusal(app, &error))?;
        let worker = booking.target().worker;
        let error = match dispatch(app, job, &booking, prompt, &sampling).await {
            Ok(begun) => return Ok(lane(app, model, booking, begun, prompt.len())),
            Err(error) => error,
        };
        let outcome = outcome(&error);
        tracing::warn!(request = %id, %worker, %error, attempt, "no first token");
        booking.finish(outcome);
        if error.retry() == Retry::Never || attempt >= app.options().retry_limit {
            return Err(failure(app, &error));
        }
        let labels = [&*model.name, "new_request"];
        app.metrics()
            .model_migration_total
            .with_label_values(&labels)
            .inc();
        arrival.failed.push(worker);
        arrival.last_failure = Some(outcome);
    }
    Err(ApiError::internal())
}

/// Where a prompt would go; nothing is booked.
pub(crate) async fn query(
    app: &App,
    job: &Job,
    prompt: &Arc<[Token]>,
) -> Result<WorkerRank, ApiError> {
    let blocks = place::name_blocks(app, &job.model, prompt, job.salt().unwrap_or_default());
    let mut arrival = ask::arrival(job.id, prompt.len(), &job.nvext, &job.headers);
    arrival.query_only = true;
    let booking = place::book(app, &job.model, arrival, &blocks)
        .await
        .map_err(|error| place::refusal(app, &error))?;
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
        lora: None,
        salt: job.salt().map(Into::into),
    };
    let dispatched = app.clock().now();
    app.metrics()
        .router_requests_started_total
        .with_label_values::<&str>(&[])
        .inc();
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
    let blocks = tokens.div_ceil(model.block_size.max(1) as usize).max(1);
    let hit_rate = (f64::from(booking.sent().overlap_blocks) / blocks as f64).min(1.0);
    let metrics = app.metrics();
    metrics
        .router_kv_hit_rate
        .with_label_values::<&str>(&[])
        .observe(hit_rate);
    let waited = (first_token - dispatched).as_secs_f64();
    metrics
        .router_time_to_first_token_seconds
        .with_label_values::<&str>(&[])
        .observe(waited);
    let phase = [&*model.name, "aggregated"];
    let selected = metrics
        .router_kv_selected_cached_prefix_tokens_total
        .with_label_values(&phase);
    selected.inc_by(booking.sent().cached_tokens.into());
    Lane {
        booking,
        stream,
        first,
        prompt_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        hit_rate,
        dispatched,
        first_token,
    }
}

/// How the router is to take a worker's failure.
pub(crate) fn outcome(error: &PlaneError) -> Outcome {
    match error {
        PlaneError::Gone(_) | PlaneError::Disconnected(_) => Outcome::Unreachable,
        PlaneError::Overloaded(_) => Outcome::Overloaded,
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
