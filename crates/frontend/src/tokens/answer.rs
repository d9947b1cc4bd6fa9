//! An answer under way: tokens from workers become text, text becomes bytes for the client.
//!
//! The client's connection polls it, and it owns everything that it uses. Dropping it at any moment cancels the workers' streams,
//! frees the bookings and counts a cancellation. If a worker fails, another resumes after the last token, where that is allowed.

mod dispatch;
mod logprobs;
mod next_turn;
mod resume_state;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use kvasir_host::{Booking, UsageReport};
use kvasir_openai::{
    AnswerHead, AnswerParts, ApiError, Choice, ResponseNvext, StreamWriter, Timing, TokenLogprob,
    Usage, WorkerIds, write_annotation, write_done, write_llm_metrics, write_unary,
};
use kvasir_router::Outcome;
use kvasir_text::Detokenizer;
use kvasir_transport::{PlaneError, TokenStream};
use kvasir_types::{AttemptError as _, FinishReason, Retry, Time, Token, TokenItem, WorkerRank};

use dispatch::Dispatcher;
use resume_state::{ChoiceResumeState, SilenceTimer};

use crate::App;
use crate::http::reply::{ByteSource, Cut};
use crate::models::prompt;
use crate::observe::request_record::{RequestRecord, Totals};
use crate::request::migrate;
use crate::request::response_extras;
use crate::tokens::bypass;
use crate::tokens::job::Job;
use crate::tokens::lane::{self, Lane};
use crate::tokens::reading::AnswerReader;
use crate::tokens::two_step::PrefillSummary;

/// An answer of one or several choices.
pub(crate) struct Answer {
    app: Arc<App>,
    job: Arc<Job>,
    lanes: Vec<ChoiceStream>,
    record: Option<RequestRecord>,
    created: u64,
}

/// One choice that is being generated.
struct ChoiceStream {
    index: u32,
    /// `None` once the choice has ended.
    work: Option<(Booking, TokenStream)>,
    /// Another worker is being asked to resume it.
    resuming: Option<ResumeFuture>,
    /// What is needed to resume it.
    resume: ChoiceResumeState,
    /// What came before the first poll.
    first: Option<TokenItem>,
    /// Its worker must send something before this expires.
    silence: Option<SilenceTimer>,
    /// The echoed prompt, until it has been sent.
    echo: String,
    text: Detokenizer,
    reader: AnswerReader,
    /// All text so far, where the next turn is to be prefilled.
    said: Option<String>,
    /// The first worker that served it.
    target: WorkerRank,
    /// Another worker resumed it, which is not recorded yet.
    resume_unrecorded: bool,
    /// How its prompt was computed, if by another worker.
    prefill: Option<PrefillSummary>,
    /// The prompt went past the workers for prompts.
    bypassed: bool,
    /// One worker had the prompt and nothing else: what it found cached can be compared with what was expected.
    is_whole: bool,
    prompt_tokens: u32,
    hit_rate: f64,
    cached_tokens: Option<u32>,
    generated: u32,
    dispatched: Time,
    first_token: Time,
    last_token: Time,
}

/// Another worker is asked to resume a choice.
type ResumeFuture = Pin<Box<dyn Future<Output = Result<Lane, ApiError>> + Send>>;

/// Why a choice has no next item.
enum ChoiceFailure {
    /// Its worker failed.
    Worker(PlaneError),
    /// No other worker could resume it.
    Move(ApiError),
}

/// What follows a worker's failure.
enum AfterFailure {
    /// Another worker is asked.
    Resume,
    /// This, in the worker's place.
    Item(TokenItem),
    /// The end.
    End(ApiError),
}

/// New text of one choice, as it was read.
struct ChoiceDelta {
    index: u32,
    parts: AnswerParts,
    tokens: Vec<Token>,
    /// Their log probabilities, where the client asks for them and the worker returns them.
    logprobs: Option<Vec<TokenLogprob>>,
    finish: Option<FinishReason>,
}

impl Answer {
    /// An answer from lanes whose first tokens are here.
    pub(crate) fn new(
        app: Arc<App>,
        job: Arc<Job>,
        lanes: Vec<Lane>,
        mut record: RequestRecord,
    ) -> Self {
        let now = app.clock().now();
        record.first_token(now);
        if let Some(lane) = lanes.first() {
            record.placed(&lane.booking);
            record.prefilled(lane.prefill.map(PrefillSummary::record));
        }
        let created = app.clock().unix_secs(record.received());
        let running = (0..)
            .zip(lanes)
            .map(|(index, lane)| ChoiceStream::new(index, lane, &app, &job));
        Self {
            lanes: running.collect(),
            app,
            job,
            record: Some(record),
            created,
        }
    }

    fn head(&self) -> AnswerHead<'_> {
        AnswerHead {
            endpoint: self.job.endpoint,
            id: self.job.shown,
            model: &self.job.model.name,
            created: self.created,
        }
    }

    /// The next delta of any choice; `None` when all have ended.
    fn poll_delta(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<ChoiceDelta, ApiError>>> {
        let mut running = false;
        for lane in &mut self.lanes {
            let item = loop {
                match lane.poll_item(cx) {
                    Poll::Ready(Some(Err(ChoiceFailure::Worker(error)))) => {
                        match lane.break_off(&self.app, &self.job, &error) {
                            AfterFailure::Resume => {}
                            AfterFailure::Item(item) => break Poll::Ready(Some(Ok(item))),
                            AfterFailure::End(failure) => break Poll::Ready(Some(Err(failure))),
                        }
                    }
                    Poll::Ready(Some(Err(ChoiceFailure::Move(failure)))) => {
                        break Poll::Ready(Some(Err(failure)));
                    }
                    Poll::Ready(Some(Ok(item))) => break Poll::Ready(Some(Ok(item))),
                    Poll::Ready(None) => break Poll::Ready(None),
                    Poll::Pending => break Poll::Pending,
                }
            };
            match item {
                Poll::Pending => running = true,
                Poll::Ready(None) => {}
                Poll::Ready(Some(Ok(item))) => {
                    lane.record_resume(self.record.as_mut());
                    let delta = lane.take(item, &self.app, &self.job, self.record.as_ref());
                    return Poll::Ready(Some(Ok(delta)));
                }
                Poll::Ready(Some(Err(failure))) => return Poll::Ready(Some(Err(failure))),
            }
        }
        if running {
            Poll::Pending
        } else {
            Poll::Ready(None)
        }
    }

    /// Waits for all of it and writes it as one body.
    pub(crate) async fn collect(mut self) -> Result<Bytes, ApiError> {
        let mut choices = vec![Choice::default(); self.lanes.len()];
        let mut tokens: Vec<Token> = Vec::new();
        while let Some(delta) = poll_fn(|cx| self.poll_delta(cx)).await {
            let delta = match delta {
                Ok(delta) => delta,
                Err(error) => return Err(self.fail(error)),
            };
            tokens.extend_from_slice(&delta.tokens);
            if let Some(choice) = choices.get_mut(delta.index as usize) {
                choice.parts.extend(delta.parts);
                choice.finish = delta.finish;
                if let Some(told) = delta.logprobs {
                    choice.logprobs.get_or_insert_default().extend(told);
                }
            }
        }
        let mut nvext = self.nvext(0, true);
        nvext.completion_token_ids = self.job.nvext.extra.completion_token_ids.then_some(tokens);
        let mut out = BytesMut::with_capacity(512);
        write_unary(
            &mut out,
            &self.head(),
            &choices,
            Some(&self.usage()),
            &nvext,
        );
        self.succeed();
        Ok(out.freeze())
    }

    /// The `nvext` that the client asked for, of choice `index`.
    fn nvext(&self, index: u32, last: bool) -> ResponseNvext {
        let extra = &self.job.nvext.extra;
        let mut nvext = ResponseNvext::default();
        let Some(lane) = self.lanes.get(index as usize) else {
            return nvext;
        };
        if extra.worker_id {
            let mut ids = WorkerIds::aggregated(lane.target.worker.0, lane.target.rank.0);
            if let Some(prefill) = &lane.prefill {
                ids.prefill_worker_id = Some(prefill.target.worker.0);
                ids.prefill_dp_rank = Some(prefill.target.rank.0);
            }
            nvext.worker_id = Some(ids);
        }
        if extra.timing && last {
            nvext.timing = Some(self.timing(lane));
        }
        nvext
    }

    fn timing(&self, lane: &ChoiceStream) -> Timing {
        let clock = self.app.clock();
        let received = self
            .record
            .as_ref()
            .map_or(Time::ZERO, RequestRecord::received);
        let ms = |from: Time, to: Time| Some((to - from).as_secs_f64() * 1e3);
        let prefill = lane.prefill.as_ref();
        let dispatched = prefill.map_or(lane.dispatched, |prefill| prefill.dispatched);
        let prefilled = prefill.and_then(|prefill| prefill.ended);
        Timing {
            request_received_ms: clock.unix_millis(received),
            prefill_wait_time_ms: ms(received, dispatched),
            prefill_time_ms: ms(dispatched, prefilled.unwrap_or(lane.first_token)),
            ttft_ms: ms(received, lane.first_token),
            total_time_ms: ms(received, clock.now()),
            kv_hit_rate: Some(prefill.map_or(lane.hit_rate, |prefill| prefill.hit_rate)),
            router_queue_depth: Some(self.job.queue_depth.into()),
            kv_transfer_estimated_latency_ms: prefilled.and_then(|at| ms(at, lane.first_token)),
        }
    }

    /// Tokens in and out. A prompt with several choices is counted once.
    fn usage(&self) -> Usage {
        let n = self.job.options.n.max(1) as usize;
        let per_prompt = || self.lanes.iter().step_by(n);
        let cached: Vec<u64> = per_prompt()
            .filter_map(|l| l.cached_tokens)
            .map(u64::from)
            .collect();
        Usage {
            prompt_tokens: per_prompt().map(|l| u64::from(l.prompt_tokens)).sum(),
            completion_tokens: self.lanes.iter().map(|l| u64::from(l.generated)).sum(),
            cached_tokens: (!cached.is_empty()).then(|| cached.iter().sum()),
        }
    }

    fn succeed(&mut self) {
        let usage = self.usage();
        let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        let totals = Totals {
            status: 200,
            prompt_tokens: count(usage.prompt_tokens),
            cached_tokens: usage.cached_tokens.map(count),
            output_tokens: count(usage.completion_tokens),
            target: self.lanes.first().map(|l| l.target).unwrap_or_default(),
        };
        if let Some(record) = self.record.take() {
            let latencies = self.lanes.first().map(ChoiceStream::latencies);
            record.meters().ended(&totals, latencies);
            record.succeed(&totals);
            let said = self.lanes.first_mut().and_then(|lane| lane.said.take());
            if let Some(said) = said {
                next_turn::prefill(&self.app, &self.job, totals.target, said);
            }
        }
    }

    /// Ends the other choices too: an answer is whole or it failed.
    fn fail(&mut self, error: ApiError) -> ApiError {
        for lane in &mut self.lanes {
            lane.end(Outcome::Cancelled);
        }
        match self.record.take() {
            Some(record) => record.fail(error),
            None => error,
        }
    }
}

impl ChoiceStream {
    fn new(index: u32, lane: Lane, app: &App, job: &Job) -> Self {
        let limits = &app.options().limits;
        Self {
            index,
            resuming: None,
            resume: ChoiceResumeState::new(index, &lane, app, job),
            silence: limits.stream_silence.map(SilenceTimer::new),
            echo: job.echo_of(index).to_owned(),
            text: prompt::detokenizer(&job.text, &job.options, job.reading.visible(&job.text)),
            reader: job.reading.reader(app.options().reasoning_field),
            said: job.chat.is_some().then(String::new),
            target: lane.booking.target(),
            resume_unrecorded: false,
            is_whole: lane.prefill.is_none(),
            work: Some((lane.booking, lane.stream)),
            first: Some(lane.first),
            prompt_tokens: lane.prompt_tokens,
            hit_rate: lane.hit_rate,
            cached_tokens: lane.prefill.and_then(|prefill| prefill.cached_tokens),
            prefill: lane.prefill,
            bypassed: lane.bypassed,
            generated: 0,
            dispatched: lane.dispatched,
            first_token: lane.first_token,
            last_token: lane.first_token,
        }
    }

    fn poll_item(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<TokenItem, ChoiceFailure>>> {
        if let Some(resuming) = &mut self.resuming {
            let resumed = std::task::ready!(resuming.as_mut().poll(cx));
            self.resuming = None;
            match resumed {
                Ok(lane) => self.adopt(lane),
                Err(error) => return Poll::Ready(Some(Err(ChoiceFailure::Move(error)))),
            }
        }
        let Some((booking, stream)) = &mut self.work else {
            return Poll::Ready(None);
        };
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let worker = booking.target().worker;
        let Poll::Ready(item) = stream.poll_next(cx) else {
            let silence = self.silence.as_mut();
            std::task::ready!(silence.map_or(Poll::Pending, |silence| silence.poll(cx)));
            tracing::warn!(%worker, "stream timeout");
            let silent = PlaneError::Disconnected(worker);
            return Poll::Ready(Some(Err(ChoiceFailure::Worker(silent))));
        };
        if let Some(silence) = &mut self.silence {
            silence.reset();
        }
        let item = item.unwrap_or(Err(PlaneError::Disconnected(worker)));
        Poll::Ready(Some(item.map_err(ChoiceFailure::Worker)))
    }

    /// Another worker resumes it.
    fn adopt(&mut self, lane: Lane) {
        self.resume.resumed(lane.attempts);
        (self.target, self.resume_unrecorded) = (lane.booking.target(), true);
        self.is_whole = false;
        self.work = Some((lane.booking, lane.stream));
        self.first = Some(lane.first);
        if let Some(silence) = &mut self.silence {
            silence.reset();
        }
    }

    /// Records once that another worker resumed it. Of several choices the first counts.
    fn record_resume(&mut self, record: Option<&mut RequestRecord>) {
        let moved = std::mem::take(&mut self.resume_unrecorded) && self.index == 0;
        if let (true, Some(record), Some((booking, _))) = (moved, record, &self.work) {
            record.moved(booking);
        }
    }

    /// Its worker failed: another one resumes it, or the choice ends.
    fn break_off(&mut self, app: &Arc<App>, job: &Arc<Job>, error: &PlaneError) -> AfterFailure {
        let outcome = Outcome::of_failure(error.failure_cause());
        let id = self
            .work
            .as_ref()
            .map(|(booking, _)| booking.placement().id);
        let worker = self
            .work
            .as_ref()
            .map(|(booking, _)| booking.target().worker);
        self.end(outcome);
        tracing::warn!(request = %job.id, worker = ?worker, %error, "answer broke off");
        let (Some(id), Some(worker)) = (id, worker) else {
            return AfterFailure::End(lane::client_error(app, error));
        };
        if error.retry() == Retry::Never {
            return AfterFailure::End(lane::client_error(app, error));
        }
        if self.generated >= job.sampling(self.prompt_tokens as usize).max_tokens {
            // All tokens have come; only the finish reason is missing.
            return AfterFailure::Item(TokenItem {
                finish: Some(FinishReason::Length),
                ..TokenItem::default()
            });
        }
        match self.resume.after_failure(id, worker, error.failure_cause()) {
            Ok(broken) => {
                let (app, job) = (Arc::clone(app), Arc::clone(job));
                let resuming = async move { lane::resume(&app, &job, broken).await };
                self.resuming = Some(Box::pin(resuming));
                AfterFailure::Resume
            }
            Err(obstacle) => {
                let limit = app.options().migration.limit_of(&job.model);
                migrate::count_obstacle(app.observer(), limit, &job.model.name, obstacle);
                AfterFailure::End(lane::client_error(app, error))
            }
        }
    }

    /// Turns an item into text, and ends the choice where it stops.
    fn take(
        &mut self,
        item: TokenItem,
        app: &App,
        job: &Job,
        record: Option<&RequestRecord>,
    ) -> ChoiceDelta {
        let now = app.clock().now();
        self.cached_tokens = self.cached_tokens.or(item.cached_tokens);
        let mut tokens = item.tokens;
        let mut text = std::mem::take(&mut self.echo);
        let mut finish = item.finish;
        if let Some(hit) = self.text.push(&tokens, &mut text) {
            tokens.truncate(hit.tokens_used);
            finish = Some(FinishReason::Stop);
        } else if finish.is_some() && self.text.finish(&mut text).is_some() {
            finish = Some(FinishReason::Stop);
        }
        self.generated = self.text.tokens();
        let logprobs = job.options.logprobs.filter(|_| !item.logprobs.is_empty());
        let logprobs =
            logprobs.map(|most| logprobs::of_tokens(&job.text, &tokens, &item.logprobs, most));
        if let Some(said) = &mut self.said {
            said.push_str(&text);
        }
        if let Some(record) = record {
            record.tokens(tokens.len(), (now - self.last_token).as_secs_f64());
        }
        self.last_token = now;
        if finish.is_some() {
            self.report_cached();
            self.end(Outcome::Completed {
                output_tokens: self.generated,
            });
        } else if let Some((booking, _)) = &self.work {
            booking.tokens(self.generated);
            self.resume.add(&tokens, app, &job.model.name);
        }
        ChoiceDelta {
            index: self.index,
            parts: self.reader.read(text, finish.is_some(), app),
            tokens,
            logprobs,
            finish,
        }
    }

    /// Has what the worker found in its cache compared with what was expected there.
    fn report_cached(&mut self) {
        if let Some((booking, _)) = self.work.as_mut().filter(|_| self.is_whole) {
            booking.reported(UsageReport {
                prompt: self.prompt_tokens,
                cached: self.cached_tokens,
                output: self.generated,
            });
        }
    }

    fn end(&mut self, outcome: Outcome) {
        if let Some((booking, _)) = self.work.take() {
            booking.finish(outcome);
        }
    }

    /// Time to the first token and between tokens, in seconds.
    fn latencies(&self) -> (f64, f64) {
        let first = (self.first_token - self.dispatched).as_secs_f64();
        let gaps = f64::from(self.generated.saturating_sub(1).max(1));
        (
            first,
            (self.last_token - self.first_token).as_secs_f64() / gaps,
        )
    }
}

/// An [`Answer`] as server-sent events.
pub(crate) struct StreamedAnswer {
    answer: Answer,
    writer: StreamWriter,
    buffer: BytesMut,
    /// Tells of what is complete before the answer is.
    dispatcher: Option<Dispatcher>,
    begun: bool,
    ended: bool,
}

impl StreamedAnswer {
    /// Streams `answer`.
    pub(crate) fn new(answer: Answer) -> Self {
        let writer = StreamWriter::new(&answer.head(), answer.job.choices());
        let events = answer.app.options().stream_dispatch;
        let dispatcher = Dispatcher::new(events, answer.lanes.len());
        Self {
            answer,
            writer,
            dispatcher,
            buffer: BytesMut::new(),
            begun: false,
            ended: false,
        }
    }

    fn write(&mut self, delta: &ChoiceDelta) {
        let mut nvext = self.answer.nvext(delta.index, false);
        if self.answer.job.nvext.extra.completion_token_ids && !delta.tokens.is_empty() {
            nvext.completion_token_ids = Some(delta.tokens.clone());
        }
        let told = delta.logprobs.as_deref();
        if let Some(dispatcher) = &mut self.dispatcher {
            let ended = delta.finish.is_some();
            dispatcher.note(delta.index, &delta.parts, ended, &mut self.buffer);
        }
        if !delta.parts.is_empty() || nvext.completion_token_ids.is_some() || told.is_some() {
            self.writer
                .parts(&mut self.buffer, delta.index, &delta.parts, told, &nvext);
        }
        if let Some(reason) = delta.finish {
            let nvext = self.answer.nvext(delta.index, true);
            self.writer
                .finish(&mut self.buffer, delta.index, reason, &nvext);
        }
    }

    fn end(&mut self, outcome: Result<(), ApiError>) {
        match outcome {
            Ok(()) => {
                if self.answer.job.options.include_usage {
                    let usage = self.answer.usage();
                    self.writer
                        .usage(&mut self.buffer, &usage, &ResponseNvext::default());
                }
                if response_extras::wants_metrics(&self.answer.job.nvext) {
                    write_llm_metrics(&mut self.buffer, &self.answer.usage());
                }
                self.answer.succeed();
            }
            Err(error) => self.answer.fail(error).write_frame(&mut self.buffer),
        }
        write_done(&mut self.buffer);
        self.ended = true;
    }

    /// The annotations that the client asked for before the first token.
    fn begin(&mut self) {
        self.begun = true;
        let job = &self.answer.job;
        let tokens = job.prompt_of(0).map(|tokens| &**tokens);
        if self.answer.lanes.iter().any(|lane| lane.bypassed) && job.nvext.wants(bypass::ANNOTATION)
        {
            write_annotation(&mut self.buffer, bypass::ANNOTATION, "true");
        }
        let notes = response_extras::notes(&job.nvext, job.shown, tokens, job.formatted.as_deref());
        self.buffer.extend_from_slice(&notes);
    }
}

impl ByteSource for StreamedAnswer {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        if !self.begun {
            self.begin();
        }
        while !self.ended {
            match self.answer.poll_delta(cx) {
                Poll::Ready(Some(Ok(delta))) => self.write(&delta),
                Poll::Ready(Some(Err(error))) => self.end(Err(error)),
                Poll::Ready(None) => self.end(Ok(())),
                Poll::Pending => break,
            }
        }
        match (self.buffer.is_empty(), self.ended) {
            (false, _) => Poll::Ready(Some(Ok(self.buffer.split().freeze()))),
            (true, true) => Poll::Ready(None),
            (true, false) => Poll::Pending,
        }
    }
}
