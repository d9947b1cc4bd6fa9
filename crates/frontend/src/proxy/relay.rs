//! Passes an engine's answer on to the client, and accounts for it.
//!
//! What always holds: a stream that breaks off is resumed at another worker where that is possible, else it ends with an error
//! frame and `[DONE]`; any other answer that breaks off is cut, so that the client does not take it for complete; the booking ends
//! with the answer, whichever way.

mod extras;
mod source;

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use kvasir_host::{Booking, UsageReport};
use kvasir_openai::{ApiError, write_comment, write_done};
use kvasir_router::Outcome;
use kvasir_telemetry::Clock;
use kvasir_types::{AttemptError as _, Time, WorkerId, WorkerRank};
use kvasir_upstream::UpstreamError;
use tokio::time::{Instant, Sleep};

use crate::http::reply::{ByteSource, Cut};
use crate::observe::request_record::{RequestRecord, Totals};
use crate::proxy::{Continuation, NextTurn, Resume, ResumeFuture, ResumedAnswer};

pub(crate) use extras::Extras;
pub(crate) use source::{FirstBytes, Form, HiddenUsage, ResumeState, Source};

/// The text of a comment that keeps a silent stream alive.
const KEEP_ALIVE: &str = "keep-alive";

/// What happens while an engine is silent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timeouts {
    /// The client gets a comment this often (`--http-sse-keep-alive-interval-ms`).
    pub(crate) comment: Option<Duration>,
    /// The stream fails after this long (`--http-backend-stream-timeout-secs`).
    pub(crate) silence: Option<Duration>,
}

/// One answer that is passed on.
pub(crate) struct Relay {
    source: Source,
    /// Bytes that came before the head was sent to the client.
    held: Option<Bytes>,
    accounting: Option<Accounting>,
    idle: Option<Box<IdleTimer>>,
    /// What is needed to ask another worker for the rest.
    resume: Option<Box<Resume>>,
    /// Another worker is being asked for the rest.
    resuming: Option<ResumeFuture>,
    /// What follows the answer.
    next: Option<NextTurn>,
}

/// What is booked, counted and logged for one answer.
pub(crate) struct Accounting {
    /// None while another worker is asked to resume it.
    booking: Option<Booking>,
    /// The worker that serves it, or did last.
    target: WorkerRank,
    record: RequestRecord,
    clock: Clock,
    /// When the request was sent, and when the answer start.
    dispatched: Time,
    first: Time,
    status: StatusCode,
    /// How its attempt ends if the answer is an error.
    failure: Outcome,
    /// The router is told the length of the answer every so many tokens, those of a block. None if it is no completion.
    every: Option<u32>,
    /// Tokens that were counted last, and when.
    counted: (u32, Time),
    is_transferred: bool,
}

/// How and where an answer start.
pub(crate) struct AnswerStart {
    /// When the request was sent.
    pub(crate) dispatched: Time,
    /// When the answer began.
    pub(crate) first: Time,
    /// Its status.
    pub(crate) status: StatusCode,
    /// How its attempt ends if the answer is an error.
    pub(crate) failure: Outcome,
    /// Tokens in a block, if it is a completion.
    pub(crate) block_size: Option<u32>,
    /// The client gets tokens as they come.
    pub(crate) is_stream: bool,
    /// Its prompt was computed by another engine, which alone can say what it found cached.
    pub(crate) is_transferred: bool,
    /// The worker that answers.
    pub(crate) target: WorkerRank,
}

impl Accounting {
    /// The answer has begun. It has no booking if other workers were tried since and failed.
    pub(crate) fn begin(
        booking: Option<Booking>,
        mut record: RequestRecord,
        clock: Clock,
        start: &AnswerStart,
    ) -> Self {
        let first = start.first;
        if let Some(booking) = booking.as_ref().filter(|_| start.status.is_success()) {
            booking.first_token();
            if start.is_stream {
                record.first_token(first);
            }
        }
        Self {
            target: start.target,
            booking,
            record,
            clock,
            dispatched: start.dispatched,
            first,
            status: start.status,
            failure: start.failure,
            every: start.block_size,
            counted: (0, first),
            is_transferred: start.is_transferred,
        }
    }

    /// Bytes came: once per block the router is told, and the time between tokens is measured.
    fn count(&mut self, source: &Source) {
        let tokens = source.tokens();
        let (counted, since) = self.counted;
        let new = tokens.saturating_sub(counted);
        if self.every.is_none_or(|every| new < every.max(1)) {
            return;
        }
        let now = self.clock.now();
        self.record
            .tokens(new as usize, (now - since).as_secs_f64());
        self.counted = (tokens, now);
        if let Some(booking) = &self.booking {
            booking.tokens(tokens);
        }
    }

    /// The answer is complete.
    pub(crate) fn close(self, source: &Source) {
        let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        if !self.status.is_success() || source.is_failed() {
            if let Some(booking) = self.booking {
                booking.finish(self.failure);
            }
            let status = match self.status.is_success() {
                true => StatusCode::INTERNAL_SERVER_ERROR,
                false => self.status,
            };
            return self.record.refused(status.as_u16());
        }
        if self.every.is_none() {
            if let Some(booking) = self.booking {
                booking.finish(Outcome::Completed { output_tokens: 0 });
            }
            return self.record.passed(self.status.as_u16());
        }
        let totals = Totals {
            status: self.status.as_u16(),
            prompt_tokens: count(source.usage.prompt_tokens),
            cached_tokens: source.usage.cached_tokens.map(count),
            output_tokens: count(source.usage.completion_tokens),
            target: self.target,
        };
        if let Some(mut booking) = self.booking {
            if !source.is_grafted() && !self.is_transferred {
                booking.reported(UsageReport {
                    prompt: totals.prompt_tokens,
                    cached: source.usage.cached_tokens.map(count),
                    output: totals.output_tokens,
                });
            }
            booking.finish(Outcome::Completed {
                output_tokens: totals.output_tokens,
            });
        }
        let now = self.clock.now();
        let (counted, since) = self.counted;
        let left = totals.output_tokens.saturating_sub(counted);
        // The first token came when the time began: nothing was waited for it.
        let waited = if counted == 0 && left < 2 {
            0.0
        } else {
            (now - since).as_secs_f64()
        };
        self.record.tokens(left as usize, waited);
        let gaps = f64::from(totals.output_tokens.saturating_sub(1).max(1));
        let first = (self.first - self.dispatched).as_secs_f64();
        let between = (now - self.first).as_secs_f64() / gaps;
        let latencies = source.is_events().then_some((first, between));
        // What several workers did is no figure of one of them, which may have left.
        match source.is_grafted() {
            true => self.record.meters().placements().ended_elsewhere(),
            false => self.record.meters().ended(&totals, latencies),
        }
        self.record.succeed(&totals);
    }

    /// The worker failed: its booking ends. Returns the worker.
    fn fail_worker(
        &mut self,
        error: &UpstreamError,
        outcome: Outcome,
        events: u32,
    ) -> Option<WorkerId> {
        let booking = self.booking.take()?;
        let worker = booking.target();
        tracing::warn!(%worker, %error, events, "answer broke off");
        booking.finish(outcome);
        Some(worker.worker)
    }

    /// Another worker resumes the answer.
    fn resume(&mut self, booking: Booking) {
        booking.first_token();
        self.record.moved(&booking);
        self.target = booking.target();
        self.booking = Some(booking);
    }
}

/// What the client gets next.
type Next = Option<Result<Bytes, Cut>>;

impl Relay {
    /// Passes on an answer that begins with `held`.
    pub(crate) fn new(
        source: Source,
        held: Bytes,
        accounting: Accounting,
        timeouts: Timeouts,
        resume: Option<Box<Resume>>,
    ) -> Self {
        let idle = source
            .is_events()
            .then(|| IdleTimer::new(timeouts))
            .flatten();
        Self {
            source,
            held: Some(held),
            accounting: Some(accounting),
            idle: idle.map(Box::new),
            resume,
            resuming: None,
            next: None,
        }
    }

    /// Sets what follows the answer once it is complete.
    pub(crate) fn then(&mut self, next: Option<NextTurn>) {
        self.next = next;
    }

    /// The engine failed: another is asked for the rest (`None`), or these are the last bytes.
    fn break_off(&mut self, error: &UpstreamError) -> Option<Next> {
        let events = self.source.events;
        let cause = error.failure_cause();
        let outcome = match &self.resume {
            Some(resume) => resume.outcome(cause),
            None => Outcome::of_failure(cause),
        };
        let accounting = self.accounting.as_mut()?;
        let worker = accounting.fail_worker(error, outcome, events);
        let is_events = self.source.is_events();
        if let (Some(resume), Some(worker)) = (&mut self.resume, worker) {
            match resume.after_failure(&mut self.source, worker, cause) {
                Continuation::Resume(resuming) => {
                    self.source.close();
                    self.resuming = Some(resuming);
                    return None;
                }
                Continuation::FinalChunks(chunks) => {
                    self.close();
                    return Some(Some(Ok(chunks)));
                }
                Continuation::None => {}
            }
        }
        Some(self.give_up(ApiError::unavailable(), is_events))
    }

    fn give_up(&mut self, failure: ApiError, is_events: bool) -> Next {
        let failure = self.accounting.take()?.record.fail(failure);
        if !is_events {
            return Some(Err(Cut));
        }
        let Some(event) = self.source.error_event.take() else {
            return Some(Ok(error_tail(&failure)));
        };
        let mut out = BytesMut::from(&event[..]);
        write_done(&mut out);
        Some(Ok(out.freeze()))
    }

    /// Bytes came, and go to the client now. A stream ends with `[DONE]`, whatever its engine sends after it, and whether the client waits
    /// for the end of the body or not; a body of known length ends with its last byte: hyper does not poll again for its end.
    fn received(&mut self) {
        if let Some(accounting) = &mut self.accounting {
            accounting.count(&self.source);
        }
        if self.source.is_ended() || self.source.is_done() {
            self.close();
        }
    }

    fn close(&mut self) {
        if let Some(accounting) = self.accounting.take() {
            accounting.close(&self.source);
        }
        if let (Some(next), Some(text)) = (self.next.take(), self.source.kept_text()) {
            next.prefill(text);
        }
    }

    /// Waits for another worker to resume the answer.
    fn poll_resume(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        let Some(resuming) = &mut self.resuming else {
            return Poll::Ready(None);
        };
        let Poll::Ready(resumed) = resuming.as_mut().poll(cx) else {
            let idle = self.idle.as_mut();
            return match idle.map_or(Poll::Pending, |idle| idle.poll_comment(cx)) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(()) => Poll::Ready(Some(Ok(keep_alive()))),
            };
        };
        self.resuming = None;
        let ResumedAnswer {
            source,
            first,
            booking,
            attempts,
        } = match resumed {
            Ok(answer) => answer,
            Err(error) => return Poll::Ready(self.give_up(error, true)),
        };
        if let Some(resume) = &mut self.resume {
            resume.resumed(attempts);
        }
        self.source = source;
        if let Some(accounting) = &mut self.accounting {
            accounting.resume(booking);
        }
        if let Some(idle) = &mut self.idle {
            idle.reset();
        }
        self.received();
        Poll::Ready(Some(Ok(first)))
    }
}

/// The frames that end a stream that cannot be completed.
pub(crate) fn error_tail(failure: &ApiError) -> Bytes {
    let mut frame = BytesMut::new();
    failure.write_frame(&mut frame);
    write_done(&mut frame);
    frame.freeze()
}

/// A comment that keeps the stream alive.
pub(crate) fn keep_alive() -> Bytes {
    let mut out = BytesMut::new();
    write_comment(&mut out, KEEP_ALIVE);
    out.freeze()
}

impl ByteSource for Relay {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        if let Some(held) = self.held.take().filter(|held| !held.is_empty()) {
            self.received();
            return Poll::Ready(Some(Ok(held)));
        }
        loop {
            if self.accounting.is_none() {
                return Poll::Ready(None);
            }
            if self.resuming.is_some() {
                return self.poll_resume(cx);
            }
            let error = match self.source.poll_bytes(cx) {
                Poll::Ready(Some(Ok(bytes))) => {
                    if let Some(idle) = &mut self.idle {
                        idle.reset();
                    }
                    self.received();
                    if let Some(resume) = &mut self.resume {
                        resume.check_length(&mut self.source.resume);
                    }
                    return Poll::Ready(Some(Ok(bytes)));
                }
                Poll::Ready(Some(Err(error))) => error,
                Poll::Ready(None) => {
                    self.close();
                    return Poll::Ready(None);
                }
                Poll::Pending => {
                    let idle = self.idle.as_mut();
                    match idle.map_or(Poll::Pending, |idle| idle.poll(cx)) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(Due::Comment) => {
                            return Poll::Ready(Some(Ok(keep_alive())));
                        }
                        Poll::Ready(Due::Timeout(limit)) => UpstreamError::StreamTimeout(limit),
                    }
                }
            };
            if let Some(next) = self.break_off(&error) {
                return Poll::Ready(next);
            }
        }
    }
}

/// How long an engine has been silent. Its timer is not reset by events, so that an event costs a look at the time and no more.
struct IdleTimer {
    timeouts: Timeouts,
    /// When bytes last came from the engine.
    received: Instant,
    /// When bytes last went to the client.
    sent: Instant,
    timer: Pin<Box<Sleep>>,
}

/// What is due.
enum Due {
    Comment,
    Timeout(Duration),
}

impl IdleTimer {
    fn new(timeouts: Timeouts) -> Option<Self> {
        let first = [timeouts.comment, timeouts.silence].into_iter().flatten();
        let timer = tokio::time::sleep(first.min()?);
        let now = Instant::now();
        Some(Self {
            timeouts,
            received: now,
            sent: now,
            timer: Box::pin(timer),
        })
    }

    fn reset(&mut self) {
        self.received = Instant::now();
        self.sent = self.received;
    }

    /// Ready when a comment is due; there is no timeout.
    fn poll_comment(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match std::task::ready!(self.poll(cx)) {
                Due::Comment => return Poll::Ready(()),
                Due::Timeout(_) => self.received = Instant::now(),
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Due> {
        loop {
            std::task::ready!(self.timer.as_mut().poll(cx));
            let now = Instant::now();
            if let Some(limit) = self.timeouts.silence
                && now >= self.received + limit
            {
                return Poll::Ready(Due::Timeout(limit));
            }
            let comment_due = self
                .timeouts
                .comment
                .is_some_and(|every| now >= self.sent + every);
            if comment_due {
                self.sent = now;
            }
            let ends = self.timeouts.silence.map(|limit| self.received + limit);
            let comment = self.timeouts.comment.map(|every| self.sent + every);
            let Some(next) = ends.into_iter().chain(comment).min() else {
                return Poll::Pending;
            };
            self.timer.as_mut().reset(next);
            if comment_due {
                return Poll::Ready(Due::Comment);
            }
        }
    }
}
