//! Answers of OpenAI workers that break off: another engine is asked for the rest.
//!
//! What always holds: the client gets no text twice and misses none; what the rest was asked with holds every
//! word that the client has; a worker that failed the request is not asked again.

use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kvasir_host::{Booking, PromptBlocks};
use kvasir_openai::resume::{Graft, continued};
use kvasir_openai::{ApiError, Endpoint, Nvext, Scan, write_done};
use kvasir_router::{Arrival, Outcome};
use kvasir_types::{WorkerId, WorkerRank};
use kvasir_upstream::UpstreamError;

use super::attempt::{outcome, try_elsewhere};
use super::{Forward, headers};
use crate::models::tokenize;
use crate::proxy::relay::{Begun, Form, Source, Thread};
use crate::request::migrate::{self, Move, Stage, Stay};
use crate::request::route_error;

/// What is needed to ask for the rest of an answer.
pub(crate) struct Resume {
    forward: Arc<Forward>,
    endpoint: Endpoint,
    arrival: Arrival,
    /// Most tokens that the client wants.
    wanted: Option<u32>,
    /// Why the request cannot go on, whatever comes of it.
    obstacle: Option<&'static str>,
    moves: u32,
    too_long: bool,
}

/// What a request says about going on elsewhere, read from its body.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) endpoint: Endpoint,
    pub(super) wanted: Option<u32>,
    pub(super) obstacle: Option<&'static str>,
}

/// The rest of an answer, from another worker.
pub(crate) struct Moved {
    pub(crate) source: Source,
    pub(crate) begun: Bytes,
    pub(crate) booking: Booking,
    tried: u32,
    failed: Vec<WorkerId>,
}

/// A worker that is asked for the rest of an answer.
pub(crate) type Moving = Pin<Box<dyn Future<Output = Result<Moved, ApiError>> + Send>>;

/// How the rest is read, from whichever worker it comes.
struct Kit {
    form: Form,
    thread: Box<Thread>,
}

/// What is done about an answer that broke off.
pub(crate) enum Rest {
    /// Another worker is asked.
    Ask(Moving),
    /// Everything has come but these last words.
    Words(Bytes),
    /// Nothing.
    None,
}

impl Resume {
    pub(super) fn new(forward: Arc<Forward>, terms: Terms, arrival: Arrival) -> Self {
        Self {
            forward,
            endpoint: terms.endpoint,
            arrival,
            wanted: terms.wanted,
            obstacle: terms.obstacle,
            moves: 0,
            too_long: false,
        }
    }

    /// Looks whether the answer has grown past what may go on; then its thread is cut.
    pub(crate) fn watch_length(&mut self, thread: &mut Option<Box<Thread>>) {
        let Some(kept) = thread else {
            return;
        };
        let progress = &kept.progress;
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
        // Chunks that go on from another engine's are grafted to their end.
        if too_long && !kept.is_grafted() {
            *thread = None;
        }
    }

    /// The worker failed: the rest of its answer.
    pub(crate) fn rest(&mut self, source: &mut Source, worker: WorkerRank, how: Outcome) -> Rest {
        self.watch_length(&mut source.thread);
        let thread = source.thread.take();
        if let Some(graft) = thread.as_ref().and_then(|t| Graft::new(&t.progress)) {
            let progress = thread.as_ref().map(|t| &t.progress);
            let finished = progress.is_some_and(|p| p.is_finished());
            let full = progress.is_some_and(|p| self.wanted.is_some_and(|n| p.tokens() >= n));
            if finished || full {
                return Rest::Words(self.last_words(&graft, finished, source));
            }
        }
        match self.move_on(thread, source, worker, how) {
            Ok(rest) => rest,
            Err(stay) => {
                let app = &self.forward.app;
                let limit = app.options().migration.limit;
                migrate::count_stay(app.observer(), limit, &self.forward.model.name, stay);
                Rest::None
            }
        }
    }

    /// The answer went on.
    pub(crate) fn moved(&mut self, moved: &Moved) {
        self.moves = self.moves.saturating_add(moved.tried);
        self.arrival.failed.clone_from(&moved.failed);
    }

    fn last_words(&self, graft: &Graft, finished: bool, source: &Source) -> Bytes {
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

    fn move_on(
        &mut self,
        thread: Option<Box<Thread>>,
        source: &mut Source,
        worker: WorkerRank,
        how: Outcome,
    ) -> Result<Rest, Stay> {
        let seen = thread.as_ref().and_then(|t| t.progress.obstacle());
        if let Some(why) = self.obstacle.or(seen) {
            return Err(Stay::NotLegal(why));
        }
        if self.too_long {
            return Err(Stay::TooLong);
        }
        let limit = self.forward.app.options().migration.limit;
        let tries = limit.saturating_sub(self.moves);
        if tries == 0 {
            return Err(Stay::Limit);
        }
        let thread = thread.ok_or(Stay::NotLegal("nothing_said"))?;
        let body = self.body(&thread).ok_or(Stay::NotLegal("prompt"))?;
        let thread = thread.go_on().ok_or(Stay::NotLegal("nothing_said"))?;
        self.arrival.failed.push(worker.worker);
        self.arrival.last_failure = Some(how);
        self.arrival.resumed = true;
        let errand = Errand {
            forward: Arc::clone(&self.forward),
            endpoint: self.endpoint,
            arrival: self.arrival.clone(),
            body,
            tries,
        };
        let kit = Kit {
            form: source.take_form(),
            thread: Box::new(thread),
        };
        Ok(Rest::Ask(Box::pin(errand.run(kit))))
    }

    fn body(&self, thread: &Thread) -> Option<Bytes> {
        let forward = &self.forward;
        let scan = Scan::parse(&forward.body).ok()?;
        let text = forward.model.text().cloned();
        let encode = |said: &str| text.as_ref()?.encode(said, false).ok();
        continued(
            &scan,
            &forward.body,
            self.endpoint,
            &thread.progress,
            encode,
        )
    }
}

/// The rest of an answer on its way to another worker.
struct Errand {
    forward: Arc<Forward>,
    endpoint: Endpoint,
    arrival: Arrival,
    body: Bytes,
    /// Workers that may be tried.
    tries: u32,
}

impl Errand {
    async fn run(mut self, kit: Kit) -> Result<Moved, ApiError> {
        let forward = Arc::clone(&self.forward);
        let moving = Move::begin(forward.app.observer(), &forward.model.name, Stage::Ongoing);
        let found = self.find(kit, &moving).await;
        moving.settle(found.is_ok());
        found
    }

    async fn find(&mut self, mut kit: Kit, moving: &Move) -> Result<Moved, ApiError> {
        let forward = Arc::clone(&self.forward);
        let (app, model) = (&forward.app, &forward.model);
        let blocks = self.name_blocks().await;
        for tried in 1..=self.tries {
            moving.attempt();
            let booking = model
                .book(self.arrival.clone(), &blocks)
                .await
                .map_err(|error| route_error::answer_after(app, &error, ApiError::unavailable()))?;
            let target = booking.target();
            let error = match self.open(target, kit).await {
                Ok((source, begun)) => {
                    return Ok(Moved {
                        source,
                        begun,
                        booking,
                        tried,
                        failed: std::mem::take(&mut self.arrival.failed),
                    });
                }
                Err((error, back)) => {
                    kit = back;
                    error
                }
            };
            tracing::warn!(worker = %target, %error, tried, "the answer does not go on here");
            if matches!(error, UpstreamError::Status(status) if !try_elsewhere(status)) {
                // What this engine refuses the others refuse too.
                booking.finish(Outcome::Failed);
                break;
            }
            let outcome = outcome(&error);
            booking.finish(outcome);
            self.arrival.failed.push(target.worker);
            self.arrival.last_failure = Some(outcome);
        }
        Err(ApiError::unavailable())
    }

    /// The names of the blocks of the prompt and what has been answered of it.
    async fn name_blocks(&mut self) -> PromptBlocks {
        let forward = &self.forward;
        let body = self.body.clone();
        let Ok(scan) = Scan::parse(&body) else {
            return PromptBlocks::none();
        };
        let (app, model) = (&forward.app, &forward.model);
        let nvext = Nvext::default();
        let reading = tokenize::read(app.clock(), model, self.endpoint, &scan, &body, &nvext).await;
        let tokens = &reading.tokens;
        self.arrival.isl_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX).max(1);
        let salt = scan.cache_salt();
        let salt = salt.as_deref().unwrap_or_default();
        let mut blocks = model.name_blocks(tokens, salt);
        blocks.set_guessed(reading.guessed());
        blocks
    }

    /// Waits for the first of the rest.
    async fn open(
        &self,
        target: WorkerRank,
        kit: Kit,
    ) -> Result<(Source, Bytes), (UpstreamError, Kit)> {
        let forward = &self.forward;
        let timeout = forward.first_byte_timeout();
        let asked = tokio::time::timeout(timeout, forward.ask(target, &self.body)).await;
        let (head, body) = match asked.unwrap_or(Err(UpstreamError::AnswerTimeout)) {
            Ok(response) => response.into_parts(),
            Err(error) => return Err((error, kit)),
        };
        if !head.status.is_success() || !headers::is_event_stream(&head.headers) {
            return Err((UpstreamError::Status(head.status), kit));
        }
        let mut form = kit.form;
        form.set_until_close(headers::is_until_close(&head.headers));
        form.served_by(target);
        let mut source = Source::new(body, form, Some(kit.thread));
        let begun = tokio::time::timeout(timeout, source.begin()).await;
        let error = match begun.unwrap_or(Err(UpstreamError::AnswerTimeout)) {
            Ok(Begun::Partly(bytes)) => return Ok((source, bytes)),
            Ok(Begun::Whole(_)) => UpstreamError::Unfinished,
            Err(error) => error,
        };
        let kit = Kit {
            form: source.take_form(),
            thread: source.thread.take().unwrap_or_default(),
        };
        Err((error, kit))
    }
}
