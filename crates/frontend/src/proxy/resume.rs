//! Answers of engines behind HTTP that break off: another engine is asked for the rest.
//!
//! What always holds: the client gets no text twice and misses none; the request for the rest holds all text that the client has;
//! a worker that failed the request is not asked again.

use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kvasir_host::{Booking, PromptBlocks};
use kvasir_openai::resume::{Graft, continued, starts_over};
use kvasir_openai::{ApiError, Endpoint, Nvext, Scan, write_done};
use kvasir_router::{Arrival, Attempts, GiveUp, NextStep, Outcome};
use kvasir_types::{FailureCause, WorkerId, WorkerRank};
use kvasir_upstream::UpstreamError;

use super::{Forward, headers};
use crate::attempts::{self, OpenAttempt, UnplacedRequest};
use crate::http::long_work;
use crate::models::tokenize;
use crate::proxy::relay::{FirstBytes, Form, ResumeState, Source};
use crate::request::migrate::{self, Migration, ResumeObstacle};

/// What is needed to ask another worker for the rest of an answer.
pub(crate) struct Resume {
    forward: Arc<Forward>,
    endpoint: Endpoint,
    arrival: Arrival,
    attempts: Attempts,
    /// Most tokens that the client wants.
    max_tokens: Option<u32>,
    /// Why the request cannot be resumed, whatever its answer is.
    obstacle: Option<&'static str>,
    too_long: bool,
    /// Tokens that had come when another worker was last asked for the rest.
    resumed_at: u32,
}

/// What a request's body says about resuming its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResumeTerms {
    pub(super) endpoint: Endpoint,
    pub(super) max_tokens: Option<u32>,
    pub(super) obstacle: Option<&'static str>,
}

/// The rest of an answer, from another worker.
pub(crate) struct ResumedAnswer {
    pub(crate) source: Source,
    pub(crate) first: Bytes,
    pub(crate) booking: Booking,
    pub(crate) attempts: Attempts,
}

/// Another worker is asked for the rest of an answer.
pub(crate) type ResumeFuture =
    Pin<Box<dyn Future<Output = Result<ResumedAnswer, ApiError>> + Send>>;

/// How the rest is read, whichever worker it comes from.
struct ReaderState {
    form: Form,
    resume: Box<ResumeState>,
}

/// What follows when the worker of an answer fails.
pub(crate) enum Continuation {
    /// Another worker is asked for the rest.
    Resume(ResumeFuture),
    /// All text has come; only these last chunks are missing.
    FinalChunks(Bytes),
    /// Nothing: the answer fails.
    None,
}

impl Resume {
    pub(super) fn new(
        forward: Arc<Forward>,
        terms: ResumeTerms,
        (arrival, attempts): (Arrival, Attempts),
    ) -> Self {
        Self {
            forward,
            endpoint: terms.endpoint,
            arrival,
            attempts,
            max_tokens: terms.max_tokens,
            obstacle: terms.obstacle,
            too_long: false,
            resumed_at: 0,
        }
    }

    /// Drops the state of an answer that has grown too long to be resumed.
    pub(crate) fn check_length(&mut self, resume: &mut Option<Box<ResumeState>>) {
        let Some(state) = resume else {
            return;
        };
        let progress = &state.progress;
        if state.is_grafted() {
            let tokens = progress.tokens().saturating_sub(self.resumed_at);
            self.attempts.progressed(tokens);
        }
        let prompt = progress.usage().map(|usage| usage.prompt_tokens);
        let prompt = prompt.and_then(|tokens| u32::try_from(tokens).ok());
        let prompt = prompt.unwrap_or(self.arrival.isl_tokens);
        let app = &self.forward.app;
        let too_long = app
            .options()
            .migration
            .is_too_long(prompt, progress.tokens());
        if too_long && !std::mem::replace(&mut self.too_long, true) {
            migrate::count_too_long(app.observer(), &self.forward.model.name);
        }
        // Chunks of a resumed answer are grafted to its end.
        if too_long && !state.is_grafted() {
            *resume = None;
        }
    }

    /// The worker failed while it was answering: how the answer continues.
    pub(crate) fn after_failure(
        &mut self,
        source: &mut Source,
        worker: WorkerId,
        cause: FailureCause,
    ) -> Continuation {
        self.check_length(&mut source.resume);
        let resume = source.resume.take();
        if let Some(graft) = resume.as_ref().and_then(|r| Graft::new(&r.progress)) {
            let progress = resume.as_ref().map(|r| &r.progress);
            let finished = progress.is_some_and(|p| p.is_finished());
            let full = progress.is_some_and(|p| self.max_tokens.is_some_and(|n| p.tokens() >= n));
            if finished || full {
                return Continuation::FinalChunks(self.final_chunks(&graft, finished, source));
            }
        }
        match self.resume(resume, source, worker, cause) {
            Ok(future) => Continuation::Resume(future),
            Err(obstacle) => {
                let app = &self.forward.app;
                let limit = app.options().migration.limit_of(&self.forward.model);
                migrate::count_obstacle(app.observer(), limit, &self.forward.model.name, obstacle);
                Continuation::None
            }
        }
    }

    /// Another worker has taken over.
    pub(crate) fn resumed(&mut self, attempts: Attempts) {
        self.attempts = attempts;
    }

    fn final_chunks(&self, graft: &Graft, finished: bool, source: &Source) -> Bytes {
        let mut out = BytesMut::new();
        if !finished {
            out.extend_from_slice(&graft.length_event(self.endpoint));
        }
        if source.owes_usage() {
            out.extend_from_slice(&graft.usage_event().unwrap_or_default());
        }
        write_done(&mut out);
        out.freeze()
    }

    fn resume(
        &mut self,
        resume: Option<Box<ResumeState>>,
        source: &mut Source,
        worker: WorkerId,
        cause: FailureCause,
    ) -> Result<ResumeFuture, ResumeObstacle> {
        let seen = resume.as_ref().and_then(|r| r.progress.obstacle());
        if let Some(why) = self.obstacle.or(seen) {
            return Err(ResumeObstacle::NotLegal(why));
        }
        if self.too_long {
            return Err(ResumeObstacle::TooLong);
        }
        match self.attempts.fail(worker, cause).1 {
            NextStep::TryNext => {}
            NextStep::GiveUp(GiveUp::FailedTwice) => {
                attempts::warn_failed_twice(self.arrival.id, &self.attempts, worker);
                return Err(ResumeObstacle::FailedTwice);
            }
            NextStep::GiveUp(_) => return Err(ResumeObstacle::Limit),
        }
        let resume = resume.ok_or(ResumeObstacle::NotLegal("nothing_said"))?;
        self.resumed_at = resume.progress.tokens();
        let rest = UnpreparedRest {
            forward: Arc::clone(&self.forward),
            endpoint: self.endpoint,
            form: source.take_form(),
            resume,
        };
        let (arrival, attempts) = (self.arrival.clone(), self.attempts.clone());
        Ok(Box::pin(rest.run(arrival, attempts)))
    }

    /// How an attempt ends for the router that fails so.
    pub(crate) fn outcome(&self, cause: FailureCause) -> Outcome {
        self.attempts.outcome(cause)
    }
}

/// The rest of an answer is wanted; the request for it is not written yet.
struct UnpreparedRest {
    forward: Arc<Forward>,
    endpoint: Endpoint,
    form: Form,
    resume: Box<ResumeState>,
}

/// The request for the rest, and what its prompt is.
struct PreparedRest {
    attempt: ResumeAttempt,
    blocks: PromptBlocks,
    tokens: u32,
}

impl UnpreparedRest {
    async fn run(
        self,
        mut arrival: Arrival,
        mut attempts: Attempts,
    ) -> Result<ResumedAnswer, ApiError> {
        let forward = Arc::clone(&self.forward);
        let (app, model) = (&forward.app, &forward.model);
        let rest = match long_work::is_long(forward.body.len()) {
            false => self.prepare().await,
            true => {
                let prepared = app.long_work().drive(self.prepare());
                prepared
                    .await
                    .unwrap_or(Err(ResumeObstacle::NotLegal("prompt")))
            }
        };
        let rest = rest.map_err(|obstacle| {
            let limit = app.options().migration.limit_of(model);
            migrate::count_obstacle(app.observer(), limit, &model.name, obstacle);
            ApiError::unavailable()
        })?;
        let PreparedRest {
            mut attempt,
            blocks,
            tokens,
        } = rest;
        arrival.isl_tokens = tokens;
        let migration = Migration::begin(app.observer(), &model.name, attempts.phase());
        let unplaced = UnplacedRequest {
            app,
            model,
            arrival: &arrival,
            blocks: &blocks,
            migration: Some(migration),
        };
        let (booking, (source, first)) =
            attempts::run(unplaced, &mut attempts, &mut attempt).await?;
        Ok(ResumedAnswer {
            source,
            first,
            booking,
            attempts,
        })
    }

    /// Writes the request and reads its prompt. Both take as long as the client's body is.
    async fn prepare(self) -> Result<PreparedRest, ResumeObstacle> {
        let body = self.body();
        let (body, starts_over) = body.ok_or(ResumeObstacle::NotLegal("prompt"))?;
        let resume = self.resume.grafted(starts_over);
        let resume = resume.ok_or(ResumeObstacle::NotLegal("nothing_said"))?;
        let (blocks, tokens) = name_blocks(&self.forward, self.endpoint, &body).await;
        let attempt = ResumeAttempt {
            forward: self.forward,
            body,
            reader: Some(ReaderState {
                form: self.form,
                resume: Box::new(resume),
            }),
        };
        Ok(PreparedRest {
            attempt,
            blocks,
            tokens,
        })
    }

    /// The body that asks for the rest, and whether it asks for all.
    fn body(&self) -> Option<(Bytes, bool)> {
        let (forward, progress) = (&self.forward, &self.resume.progress);
        let scan = Scan::parse(&forward.body).ok()?;
        let text = forward.model.text().cloned();
        let encode = |said: &str| text.as_ref()?.encode(said, false).ok();
        let body = continued(&scan, &forward.body, self.endpoint, progress, encode)?;
        Some((body, starts_over(&scan, self.endpoint, progress)))
    }
}

/// The names of the blocks of the prompt and the answer so far, and how many tokens they are.
async fn name_blocks(forward: &Forward, endpoint: Endpoint, body: &Bytes) -> (PromptBlocks, u32) {
    let Ok(scan) = Scan::parse(body) else {
        return (PromptBlocks::none(), 1);
    };
    let (app, model) = (&forward.app, &forward.model);
    let nvext = Nvext::default();
    let reading = tokenize::read(app.long_work(), model, endpoint, &scan, body, &nvext).await;
    let tokens = &reading.tokens;
    let salt = scan.cache_salt();
    let mut blocks = model.name_blocks(tokens, salt.as_deref().unwrap_or_default());
    blocks.set_guessed(reading.guessed());
    let count = u32::try_from(tokens.len()).unwrap_or(u32::MAX).max(1);
    (blocks, count)
}

/// A request for the rest of an answer.
struct ResumeAttempt {
    forward: Arc<Forward>,
    body: Bytes,
    /// None while an attempt is made.
    reader: Option<ReaderState>,
}

impl ResumeAttempt {
    /// Sends the request and reads the first bytes; the reader comes back with an error.
    async fn try_open(
        &self,
        target: WorkerRank,
        reader: ReaderState,
    ) -> Result<(Source, Bytes), (UpstreamError, ReaderState)> {
        let forward = &self.forward;
        let timeout = forward.first_byte_timeout();
        let answer = tokio::time::timeout(timeout, forward.send(target, &self.body)).await;
        let (head, body) = match answer.unwrap_or(Err(UpstreamError::AnswerTimeout)) {
            Ok(response) => response.into_parts(),
            Err(error) => return Err((error, reader)),
        };
        if !head.status.is_success() || !headers::is_event_stream(&head.headers) {
            return Err((UpstreamError::Status(head.status), reader));
        }
        let mut form = reader.form;
        form.set_until_close(headers::is_until_close(&head.headers));
        form.served_by(target);
        let mut source = Source::new(body, form, Some(reader.resume));
        let first = tokio::time::timeout(timeout, source.first_bytes()).await;
        let error = match first.unwrap_or(Err(UpstreamError::AnswerTimeout)) {
            Ok(_) if source.begins_with_failure() => UpstreamError::ErrorEvent,
            Ok(FirstBytes::Partial(bytes)) => return Ok((source, bytes)),
            Ok(FirstBytes::Whole(_)) => UpstreamError::Unfinished,
            Err(error) => error,
        };
        let reader = ReaderState {
            form: source.take_form(),
            resume: source.resume.take().unwrap_or_default(),
        };
        Err((error, reader))
    }
}

impl OpenAttempt for ResumeAttempt {
    type Answer = (Source, Bytes);
    type Error = UpstreamError;

    async fn open(
        &mut self,
        booking: &Booking,
        _: &Attempts,
    ) -> Result<(Source, Bytes), UpstreamError> {
        let reader = self.reader.take().ok_or(UpstreamError::Unfinished)?;
        match self.try_open(booking.target(), reader).await {
            Ok(opened) => Ok(opened),
            Err((error, reader)) => {
                self.reader = Some(reader);
                Err(error)
            }
        }
    }

    fn client_error(&self, _: &UpstreamError, _: NextStep) -> ApiError {
        ApiError::unavailable()
    }
}
