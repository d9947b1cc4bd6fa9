//! An answer under way: tokens from workers become text, text becomes bytes for the client.
//!
//! It is polled by the connection that it is written to and owns everything that it uses. Dropping it at any
//! moment cancels the workers' streams, frees the bookings and counts the client as gone.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use kvasir_openai::{
    AnswerHead, ApiError, Choice, ResponseNvext, StreamWriter, Timing, Usage, WorkerIds,
    write_annotation, write_done, write_unary,
};
use kvasir_router::Outcome;
use kvasir_text::Detokenizer;
use kvasir_transport::{PlaneError, TokenStream};
use kvasir_types::{FinishReason, Time, Token, TokenItem, WorkerRank};

use crate::App;
use crate::host::Booking;
use crate::job::Job;
use crate::lane::{self, Lane};
use crate::prompt;
use crate::reply::{ByteSource, Cut};
use crate::watch::{Totals, Watch};

/// An answer of one or several choices.
pub(crate) struct Answer {
    app: Arc<App>,
    job: Job,
    lanes: Vec<Running>,
    watch: Option<Watch>,
    created: u64,
}

/// One choice under way.
struct Running {
    index: u32,
    /// `None` once the choice has ended.
    work: Option<(Booking, TokenStream)>,
    /// What came before anybody polled.
    first: Option<TokenItem>,
    /// Text to begin with, until it has been told.
    echo: String,
    text: Detokenizer,
    target: WorkerRank,
    prompt_tokens: u32,
    hit_rate: f64,
    cached_tokens: Option<u32>,
    generated: u32,
    dispatched: Time,
    first_token: Time,
    last_token: Time,
}

/// What one choice has to tell.
struct News {
    index: u32,
    text: String,
    tokens: Vec<Token>,
    finish: Option<FinishReason>,
}

impl Answer {
    /// An answer from lanes whose first tokens are here.
    pub(crate) fn new(app: Arc<App>, job: Job, lanes: Vec<Lane>, mut watch: Watch) -> Self {
        let now = app.clock().now();
        watch.first_token(now);
        if let Some(lane) = lanes.first() {
            watch.placed(lane.booking.sent());
        }
        let created = app.clock().unix_secs(watch.received());
        let running = (0..)
            .zip(lanes)
            .map(|(index, lane)| Running::new(index, lane, &job));
        Self {
            lanes: running.collect(),
            app,
            job,
            watch: Some(watch),
            created,
        }
    }

    fn head(&self) -> AnswerHead<'_> {
        AnswerHead {
            endpoint: self.job.endpoint,
            id: self.job.id,
            model: &self.job.model.name,
            created: self.created,
        }
    }

    /// The next news of any choice; `None` when all have ended.
    fn poll_news(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<News, ApiError>>> {
        let mut running = false;
        for lane in &mut self.lanes {
            let Poll::Ready(item) = lane.poll_item(cx) else {
                running = true;
                continue;
            };
            match item {
                None => {}
                Some(Ok(item)) => {
                    let now = self.app.clock().now();
                    return Poll::Ready(Some(Ok(lane.take(item, now, self.watch.as_ref()))));
                }
                Some(Err(error)) => {
                    tracing::warn!(request = %self.job.id, worker = %lane.target, %error, "answer broke off");
                    let failure = lane::failure(&self.app, &error);
                    lane.end(lane::outcome(&error));
                    return Poll::Ready(Some(Err(failure)));
                }
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
        while let Some(news) = poll_fn(|cx| self.poll_news(cx)).await {
            let news = match news {
                Ok(news) => news,
                Err(error) => return Err(self.fail(error)),
            };
            tokens.extend_from_slice(&news.tokens);
            if let Some(choice) = choices.get_mut(news.index as usize) {
                choice.text.push_str(&news.text);
                choice.finish = news.finish;
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

    /// What the client asked to be told about choice `index`.
    fn nvext(&self, index: u32, last: bool) -> ResponseNvext {
        let extra = &self.job.nvext.extra;
        let mut nvext = ResponseNvext::default();
        let Some(lane) = self.lanes.get(index as usize) else {
            return nvext;
        };
        if extra.worker_id {
            let ids = WorkerIds::aggregated(lane.target.worker.0, lane.target.rank.0);
            nvext.worker_id = Some(ids);
        }
        if extra.timing && last {
            nvext.timing = Some(self.timing(lane));
        }
        nvext
    }

    fn timing(&self, lane: &Running) -> Timing {
        let clock = self.app.clock();
        let received = self.watch.as_ref().map_or(Time::ZERO, Watch::received);
        let ms = |from: Time, to: Time| Some((to - from).as_secs_f64() * 1e3);
        Timing {
            request_received_ms: clock.unix_millis(received),
            prefill_wait_time_ms: ms(received, lane.dispatched),
            prefill_time_ms: ms(lane.dispatched, lane.first_token),
            ttft_ms: ms(received, lane.first_token),
            total_time_ms: ms(received, clock.now()),
            kv_hit_rate: Some(lane.hit_rate),
            router_queue_depth: Some(0),
            kv_transfer_estimated_latency_ms: None,
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
        if let Some(watch) = self.watch.take() {
            self.app
                .remember_worker(&totals, self.lanes.first().map(Running::latencies));
            watch.succeed(&totals);
        }
    }

    /// Ends the other choices too: an answer is whole or it failed.
    fn fail(&mut self, error: ApiError) -> ApiError {
        for lane in &mut self.lanes {
            lane.end(Outcome::Cancelled);
        }
        match self.watch.take() {
            Some(watch) => watch.fail(error),
            None => error,
        }
    }
}

impl Running {
    fn new(index: u32, lane: Lane, job: &Job) -> Self {
        Self {
            index,
            echo: job.echo_of(index).to_owned(),
            text: prompt::detokenizer(&job.text, &job.options),
            target: lane.booking.target(),
            work: Some((lane.booking, lane.stream)),
            first: Some(lane.first),
            prompt_tokens: lane.prompt_tokens,
            hit_rate: lane.hit_rate,
            cached_tokens: None,
            generated: 0,
            dispatched: lane.dispatched,
            first_token: lane.first_token,
            last_token: lane.first_token,
        }
    }

    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<TokenItem, PlaneError>>> {
        let Some((_, stream)) = &mut self.work else {
            return Poll::Ready(None);
        };
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let item = std::task::ready!(stream.poll_next(cx));
        Poll::Ready(Some(
            item.unwrap_or(Err(PlaneError::Disconnected(self.target.worker))),
        ))
    }

    /// Turns an item into text, and ends the choice where it stops.
    fn take(&mut self, item: TokenItem, now: Time, watch: Option<&Watch>) -> News {
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
        if let Some(watch) = watch {
            watch.tokens(tokens.len(), (now - self.last_token).as_secs_f64());
        }
        self.last_token = now;
        if finish.is_some() {
            self.end(Outcome::Completed {
                output_tokens: self.generated,
            });
        } else if let Some((booking, _)) = &self.work {
            booking.tokens(self.generated);
        }
        News {
            index: self.index,
            text,
            tokens,
            finish,
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
    begun: bool,
    ended: bool,
}

impl StreamedAnswer {
    /// Streams `answer`.
    pub(crate) fn new(answer: Answer) -> Self {
        let writer = StreamWriter::new(&answer.head(), answer.job.choices());
        Self {
            answer,
            writer,
            buffer: BytesMut::new(),
            begun: false,
            ended: false,
        }
    }

    fn write(&mut self, news: &News) {
        let mut nvext = self.answer.nvext(news.index, false);
        if self.answer.job.nvext.extra.completion_token_ids && !news.tokens.is_empty() {
            nvext.completion_token_ids = Some(news.tokens.clone());
        }
        if !news.text.is_empty() || nvext.completion_token_ids.is_some() {
            self.writer
                .text(&mut self.buffer, news.index, &news.text, None, &nvext);
        }
        if let Some(reason) = news.finish {
            let nvext = self.answer.nvext(news.index, true);
            self.writer
                .finish(&mut self.buffer, news.index, reason, &nvext);
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
                self.answer.succeed();
            }
            Err(error) => self.answer.fail(error).write_frame(&mut self.buffer),
        }
        write_done(&mut self.buffer);
        self.ended = true;
    }

    /// What the client wanted to be told before the first token.
    fn begin(&mut self) {
        self.begun = true;
        let job = &self.answer.job;
        if job.nvext.wants("request_id") {
            write_annotation(&mut self.buffer, "request_id", &job.id.to_string());
        }
    }
}

impl ByteSource for StreamedAnswer {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        if !self.begun {
            self.begin();
        }
        while !self.ended {
            match self.answer.poll_news(cx) {
                Poll::Ready(Some(Ok(news))) => self.write(&news),
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
