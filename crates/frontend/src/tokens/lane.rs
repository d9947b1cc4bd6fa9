//! One prompt and its answer: look up, choose a worker, hand over, wait for the first token.
//!
//! A worker that fails before its first token is replaced by another, up to a limit; the client does not notice. An answer that
//! breaks off later is resumed after its last token, likewise.

use std::sync::Arc;

use kvasir_host::{Booking, PromptBlocks};
use kvasir_openai::ApiError;
use kvasir_router::{Attempts, NextStep, Pin};
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
use crate::tokens::bypass;
use crate::tokens::job::Job;
use crate::tokens::two_step::{self, PrefillSummary, Transfer};

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
    /// How its prompt was computed, if by another worker.
    pub(crate) prefill: Option<PrefillSummary>,
    /// It was computed by who answers, though there are workers for prompts.
    pub(crate) bypassed: bool,
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

/// Starts one answer to `prompt` under `id`, over a prefill worker where there are some.
pub(crate) async fn start(
    app: &Arc<App>,
    job: &Arc<Job>,
    id: RequestId,
    prompt: &Arc<[Token]>,
) -> Result<Lane, ApiError> {
    let attempt = TokenAttempt::new(app, job, prompt);
    let attempts = Attempts::new(attempts::limits(app, &job.model), true);
    two_step::run(attempt, id, attempts, None).await
}

/// The same at one worker, which computes all of it.
pub(crate) async fn start_whole(
    app: &Arc<App>,
    job: &Arc<Job>,
    id: RequestId,
    prompt: &Arc<[Token]>,
) -> Result<Lane, ApiError> {
    let mut attempt = TokenAttempt::new(app, job, prompt);
    let attempts = Attempts::new(attempts::limits(app, &job.model), true);
    attempt.run(id, attempts, None, None).await
}

/// Resumes an answer that broke off; what comes is what has not come yet.
pub(crate) async fn resume(
    app: &Arc<App>,
    job: &Arc<Job>,
    broken: BrokenAnswer,
) -> Result<Lane, ApiError> {
    let migration = Migration::begin(app.observer(), &job.model.name, broken.attempts.phase());
    let prompt = broken
        .tokens
        .len()
        .saturating_sub(broken.generated as usize);
    let mut sampling = job.sampling(prompt);
    sampling.max_tokens = sampling.max_tokens.saturating_sub(broken.generated);
    sampling.min_tokens = sampling.min_tokens.saturating_sub(broken.generated);
    let attempt = TokenAttempt {
        app: Arc::clone(app),
        job: Arc::clone(job),
        tokens: broken.tokens,
        sampling,
        blocks: None,
        transfer: None,
        bypass: None,
        sent_as: None,
    };
    two_step::run(attempt, broken.id, broken.attempts, Some(migration)).await
}

/// An attempt at a token worker.
#[derive(Clone)]
pub(crate) struct TokenAttempt {
    app: Arc<App>,
    job: Arc<Job>,
    /// The prompt, and what has been answered of it.
    tokens: Arc<[Token]>,
    sampling: Sampling,
    /// Names of its blocks, once they were asked for.
    blocks: Option<PromptBlocks>,
    /// Where the prompt is, if another worker has it.
    transfer: Option<Transfer>,
    /// Who computes prompt and answer, past the workers for prompts.
    bypass: Option<WorkerRank>,
    /// What workers call it, if not by the request's id.
    sent_as: Option<RequestId>,
}

impl TokenAttempt {
    fn new(app: &Arc<App>, job: &Arc<Job>, prompt: &Arc<[Token]>) -> Self {
        Self {
            app: Arc::clone(app),
            job: Arc::clone(job),
            tokens: Arc::clone(prompt),
            sampling: job.sampling(prompt.len()),
            blocks: None,
            transfer: None,
            bypass: None,
            sent_as: None,
        }
    }

    /// The same, past the workers for prompts.
    pub(crate) fn bypassing(&self, target: WorkerRank) -> Self {
        Self {
            bypass: Some(target),
            ..self.clone()
        }
    }

    /// For the first choice; none if there is no prompt.
    pub(crate) fn first(app: &Arc<App>, job: &Arc<Job>) -> Option<Self> {
        Some(Self::new(app, job, job.prompt_of(0)?))
    }

    /// What all attempts share.
    pub(crate) fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// What it is an attempt at.
    pub(crate) fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// The prompt, and what has been answered of it.
    pub(crate) fn tokens(&self) -> &Arc<[Token]> {
        &self.tokens
    }

    /// Names of the blocks, which are made once.
    pub(crate) fn blocks(&mut self) -> PromptBlocks {
        let (job, tokens) = (&self.job, &self.tokens);
        let salt = job.salt().unwrap_or_default();
        let made = || job.model.name_blocks(tokens, salt);
        self.blocks.get_or_insert_with(made).clone()
    }

    /// The same as another pool of the model's workers counts them.
    pub(crate) fn blocks_in(&mut self, pool: &ServedModel) -> PromptBlocks {
        match pool.block_size == self.job.model.block_size {
            true => self.blocks(),
            false => {
                let salt = self.job.salt().unwrap_or_default();
                pool.name_blocks(&self.tokens, salt)
            }
        }
    }

    /// Another worker has the prompt.
    pub(crate) fn set_transfer(&mut self, transfer: Transfer) {
        self.transfer = Some(transfer);
    }

    /// Workers are to call it by another id: one of them may still be about to forget the first.
    pub(crate) fn rename(&mut self) {
        self.sent_as = Some(self.app.observer().new_request_id());
    }

    /// Tries workers until one begins to answer. `prefill` says how the prompt was computed, if elsewhere.
    pub(crate) async fn run(
        &mut self,
        id: RequestId,
        mut attempts: Attempts,
        migration: Option<Migration>,
        prefill: Option<PrefillSummary>,
    ) -> Result<Lane, ApiError> {
        let (app, job) = (Arc::clone(&self.app), Arc::clone(&self.job));
        let blocks = self.blocks();
        let mut arrival = ask::arrival(id, self.tokens.len(), &job.nvext, &job.headers);
        arrival.constraints.transport = Some(TransportKind::Plane);
        if let Some(transfer) = &self.transfer {
            let keeps_credit = app.options().bypass.is_some();
            two_step::decode_overrides(&mut arrival.overrides, keeps_credit);
            transfer.constrain(&mut arrival.constraints);
        }
        if let Some(target) = self.bypass {
            arrival.pin = Pin {
                worker: Some(target.worker),
                rank: Some(target.rank),
            };
        }
        let unplaced = UnplacedRequest {
            app: &app,
            model: &job.model,
            arrival: &arrival,
            blocks: &blocks,
            migration,
        };
        let (booking, answer) = attempts::run(unplaced, &mut attempts, self).await?;
        attempts.end_transfer();
        let tokens = self.tokens.len();
        let lane = lane(&app, &job.model, booking, answer, tokens, attempts);
        Ok(Lane {
            prefill,
            bypassed: self.bypass.is_some(),
            ..lane
        })
    }

    /// What a worker is sent.
    pub(crate) fn request(&self, booking: &Booking) -> TokenRequest {
        let job = &self.job;
        let priority = job.nvext.hints.priority.or(job.options.priority);
        let mut context = job.context();
        if let Some(transfer) = &self.transfer {
            context.prefill = Some(transfer.prefill);
            context.bootstrap.clone_from(&transfer.bootstrap);
            context.prefill_result.clone_from(&transfer.result);
        }
        context
            .annotations
            .retain(|name| **name != *bypass::ANNOTATION);
        if self.bypass.is_some() {
            context.annotations.push(bypass::ANNOTATION.into());
        }
        TokenRequest {
            id: self.sent_as.unwrap_or(booking.placement().id),
            model: Arc::clone(&job.model.name),
            tokens: Arc::clone(&self.tokens),
            sampling: self.sampling.clone(),
            rank: booking.target().rank,
            priority: priority.unwrap_or(0),
            lora: job.model.lora.clone(),
            salt: job.salt().map(Into::into),
            context,
        }
    }
}

/// A worker's stream, its first item, and when the request was handed over.
pub(crate) type TokenAnswer = (TokenStream, TokenItem, Time);

impl OpenAttempt for TokenAttempt {
    type Answer = TokenAnswer;
    type Error = PlaneError;

    async fn open(&mut self, booking: &Booking, _: &Attempts) -> Result<TokenAnswer, PlaneError> {
        let target = booking.target();
        let request = self.request(booking);
        let model = &self.job.model;
        let dispatched = self.app.clock().now();
        model.placements.dispatched();
        let _inside = model.placements.enter(kvasir_host::Stage::Dispatch);
        let plane = model.links().plane(target.worker);
        let plane = plane.ok_or(PlaneError::Gone(target.worker))?;
        let mut stream = plane.send(target.worker, request).await?;
        match stream.next().await {
            Some(first) => Ok((stream, first?, dispatched)),
            None => Err(PlaneError::Disconnected(target.worker)),
        }
    }

    fn client_error(&self, error: &PlaneError, _: NextStep) -> ApiError {
        client_error(&self.app, error)
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
        prefill: None,
        bypassed: false,
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
