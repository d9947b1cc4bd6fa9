//! An engine's answer on its way to the client, with its booking and its count.
//!
//! What always holds: a stream that breaks off goes on elsewhere where it may, and else ends with an error
//! frame and `[DONE]`; any other answer that breaks off is cut, so that nobody takes it for whole; the booking
//! ends with the answer, whichever way.

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
use kvasir_types::{Time, WorkerRank};
use kvasir_upstream::UpstreamError;
use tokio::time::{Instant, Sleep};

use crate::http::reply::{ByteSource, Cut};
use crate::observe::request_record::{Totals, Watch};
use crate::proxy::{Moved, Moving, NextTurn, Rest, Resume};

pub(crate) use source::{Begun, Extras, Form, Hide, Source, Thread};

/// The text of a comment that keeps a silent stream alive.
const KEEP_ALIVE: &str = "keep-alive";

/// What happens while an engine is silent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timeouts {
    /// A comment goes to the client so often (`--http-sse-keep-alive-interval-ms`).
    pub(crate) comment: Option<Duration>,
    /// Then its stream is given up (`--http-backend-stream-timeout-secs`).
    pub(crate) silence: Option<Duration>,
}

/// One answer on its way through.
pub(crate) struct Relay {
    source: Source,
    /// What came before the client's head was sent.
    held: Option<Bytes>,
    books: Option<Books>,
    silence: Option<Box<Silence>>,
    /// What it takes to ask another worker for the rest.
    resume: Option<Box<Resume>>,
    /// Another worker is asked for the rest.
    moving: Option<Moving>,
    /// What follows the answer.
    next: Option<NextTurn>,
}

/// What ends with the answer.
pub(crate) struct Books {
    /// None while another worker is asked to go on.
    booking: Option<Booking>,
    /// Who serves it, or did last.
    target: WorkerRank,
    watch: Watch,
    clock: Clock,
    /// When it was handed over, and when it began.
    dispatched: Time,
    first: Time,
    status: StatusCode,
    /// Tokens after which the router is told how far the answer is: those of a block. None for what is no
    /// completion.
    every: Option<u32>,
    /// Tokens that were counted, and when.
    counted: (u32, Time),
}

/// How an answer began.
pub(crate) struct Began {
    /// When it was handed over.
    pub(crate) dispatched: Time,
    /// With this status.
    pub(crate) status: StatusCode,
    /// Tokens in a block, if it is a completion.
    pub(crate) block_size: Option<u32>,
    /// The client sees the first token when it comes, and not at the end.
    pub(crate) is_stream: bool,
    /// Who answers.
    pub(crate) target: WorkerRank,
}

impl Books {
    /// The answer has begun now. No booking: its worker was left for others, who did no better.
    pub(crate) fn open(
        booking: Option<Booking>,
        mut watch: Watch,
        clock: Clock,
        began: &Began,
    ) -> Self {
        let first = clock.now();
        if let Some(booking) = booking.as_ref().filter(|_| began.status.is_success()) {
            booking.first_token();
            if began.is_stream {
                watch.first_token(first);
            }
        }
        Self {
            target: began.target,
            booking,
            watch,
            clock,
            dispatched: began.dispatched,
            first,
            status: began.status,
            every: began.block_size,
            counted: (0, first),
        }
    }

    /// More has come: at every block the router is told, and the time between tokens is measured.
    fn count(&mut self, source: &Source) {
        let tokens = source.tokens();
        let (counted, since) = self.counted;
        let new = tokens.saturating_sub(counted);
        if self.every.is_none_or(|every| new < every.max(1)) {
            return;
        }
        let now = self.clock.now();
        self.watch.tokens(new as usize, (now - since).as_secs_f64());
        self.counted = (tokens, now);
        if let Some(booking) = &self.booking {
            booking.tokens(tokens);
        }
    }

    /// The answer is complete.
    pub(crate) fn close(self, source: &Source) {
        let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        if !self.status.is_success() {
            if let Some(booking) = self.booking {
                booking.finish(match self.status.is_server_error() {
                    true => Outcome::Broken,
                    false => Outcome::Failed,
                });
            }
            return self.watch.refused(self.status.as_u16());
        }
        if self.every.is_none() {
            if let Some(booking) = self.booking {
                booking.finish(Outcome::Completed { output_tokens: 0 });
            }
            return self.watch.passed(self.status.as_u16());
        }
        let totals = Totals {
            status: self.status.as_u16(),
            prompt_tokens: count(source.usage.prompt_tokens),
            cached_tokens: source.usage.cached_tokens.map(count),
            output_tokens: count(source.usage.completion_tokens),
            target: self.target,
        };
        if let Some(mut booking) = self.booking {
            if !source.is_grafted() {
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
        self.watch.tokens(left as usize, waited);
        let gaps = f64::from(totals.output_tokens.saturating_sub(1).max(1));
        let first = (self.first - self.dispatched).as_secs_f64();
        let between = (now - self.first).as_secs_f64() / gaps;
        let latencies = source.is_events().then_some((first, between));
        // What several workers did is no figure of one of them, which may have left.
        match source.is_grafted() {
            true => self.watch.meters().placements().ended_elsewhere(),
            false => self.watch.meters().ended(&totals, latencies),
        }
        self.watch.succeed(&totals);
    }

    /// The engine broke off: its booking ends. Gives the worker and what is thought of it.
    fn lose(&mut self, error: &UpstreamError, events: u32) -> Option<(WorkerRank, Outcome)> {
        let booking = self.booking.take()?;
        let worker = booking.target();
        tracing::warn!(%worker, %error, events, "answer broke off");
        let outcome = match error {
            UpstreamError::Failed => Outcome::Failed,
            _ => Outcome::Unreachable,
        };
        booking.finish(outcome);
        Some((worker, outcome))
    }

    /// Another worker goes on.
    fn go_on(&mut self, booking: Booking) {
        booking.first_token();
        self.watch.moved(&booking);
        self.target = booking.target();
        self.booking = Some(booking);
    }
}

/// What the client gets next.
type Next = Option<Result<Bytes, Cut>>;

impl Relay {
    /// Relays an answer of which `held` has come.
    pub(crate) fn new(
        source: Source,
        held: Bytes,
        books: Books,
        timeouts: Timeouts,
        resume: Option<Box<Resume>>,
    ) -> Self {
        let silence = source.is_events().then(|| Silence::new(timeouts)).flatten();
        Self {
            source,
            held: Some(held),
            books: Some(books),
            silence: silence.map(Box::new),
            resume,
            moving: None,
            next: None,
        }
    }

    /// What is to follow the answer, once it is complete.
    pub(crate) fn then(&mut self, next: Option<NextTurn>) {
        self.next = next;
    }

    /// The engine broke off: another one is asked for the rest, or this is the last that the client gets.
    fn break_off(&mut self, error: &UpstreamError) -> Option<Next> {
        let lost = self.books.as_mut()?.lose(error, self.source.events);
        let is_events = self.source.is_events();
        if let (Some(resume), Some((worker, outcome))) = (&mut self.resume, lost) {
            match resume.rest(&mut self.source, worker, outcome) {
                Rest::Ask(moving) => {
                    self.source.let_go();
                    self.moving = Some(moving);
                    return None;
                }
                Rest::Words(words) => {
                    self.close();
                    return Some(Some(Ok(words)));
                }
                Rest::None => {}
            }
        }
        Some(self.give_up(ApiError::unavailable(), is_events))
    }

    fn give_up(&mut self, failure: ApiError, is_events: bool) -> Next {
        let failure = self.books.take()?.watch.fail(failure);
        if !is_events {
            return Some(Err(Cut));
        }
        let Some(words) = self.source.last_words.take() else {
            return Some(Ok(last_words(&failure)));
        };
        let mut out = BytesMut::from(&words[..]);
        write_done(&mut out);
        Some(Ok(out.freeze()))
    }

    /// Something came. The end of a body of known length is here: the connection asks for no more.
    fn came(&mut self) {
        if let Some(books) = &mut self.books {
            books.count(&self.source);
        }
        if self.source.is_over() {
            self.close();
        }
    }

    fn close(&mut self) {
        if let Some(books) = self.books.take() {
            books.close(&self.source);
        }
        if let (Some(next), Some(said)) = (self.next.take(), self.source.gathered()) {
            next.prefill(said);
        }
    }

    /// Waits for another worker to go on.
    fn poll_move(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        let Some(moving) = &mut self.moving else {
            return Poll::Ready(None);
        };
        let Poll::Ready(moved) = moving.as_mut().poll(cx) else {
            let silence = self.silence.as_mut();
            return match silence.map_or(Poll::Pending, |silence| silence.poll_comment(cx)) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(()) => Poll::Ready(Some(Ok(sign_of_life()))),
            };
        };
        self.moving = None;
        let moved = match moved {
            Ok(moved) => moved,
            Err(error) => return Poll::Ready(self.give_up(error, true)),
        };
        if let Some(resume) = &mut self.resume {
            resume.moved(&moved);
        }
        let Moved {
            source,
            begun,
            booking,
            ..
        } = moved;
        self.source = source;
        if let Some(books) = &mut self.books {
            books.go_on(booking);
        }
        if let Some(silence) = &mut self.silence {
            silence.heard();
        }
        Poll::Ready(Some(Ok(begun)))
    }
}

/// The frames that end a stream that cannot be completed.
pub(crate) fn last_words(failure: &ApiError) -> Bytes {
    let mut frame = BytesMut::new();
    failure.write_frame(&mut frame);
    write_done(&mut frame);
    frame.freeze()
}

/// A comment that says that the stream lives.
pub(crate) fn sign_of_life() -> Bytes {
    let mut out = BytesMut::new();
    write_comment(&mut out, KEEP_ALIVE);
    out.freeze()
}

impl ByteSource for Relay {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        if let Some(held) = self.held.take().filter(|held| !held.is_empty()) {
            self.came();
            return Poll::Ready(Some(Ok(held)));
        }
        loop {
            if self.books.is_none() {
                return Poll::Ready(None);
            }
            if self.moving.is_some() {
                return self.poll_move(cx);
            }
            let error = match self.source.poll_bytes(cx) {
                Poll::Ready(Some(Ok(bytes))) => {
                    if let Some(silence) = &mut self.silence {
                        silence.heard();
                    }
                    self.came();
                    if let Some(resume) = &mut self.resume {
                        resume.watch_length(&mut self.source.thread);
                    }
                    return Poll::Ready(Some(Ok(bytes)));
                }
                Poll::Ready(Some(Err(error))) if !self.source.is_done() => error,
                // All was said, however the connection then ended.
                Poll::Ready(Some(Err(_)) | None) => {
                    self.close();
                    return Poll::Ready(None);
                }
                Poll::Pending => {
                    let silence = self.silence.as_mut();
                    match silence.map_or(Poll::Pending, |silence| silence.poll(cx)) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(Quiet::Comment) => {
                            return Poll::Ready(Some(Ok(sign_of_life())));
                        }
                        Poll::Ready(Quiet::TooLong(_)) if self.source.is_done() => {
                            self.close();
                            return Poll::Ready(None);
                        }
                        Poll::Ready(Quiet::TooLong(limit)) => UpstreamError::Silent(limit),
                    }
                }
            };
            if let Some(next) = self.break_off(&error) {
                return Poll::Ready(next);
            }
        }
    }
}

/// How long an engine has been silent. Its timer is set when it is first needed and then runs on, so that an
/// event costs a look at the time and no more.
struct Silence {
    timeouts: Timeouts,
    /// The engine was last heard then.
    heard: Instant,
    /// The client last heard something then.
    told: Instant,
    timer: Pin<Box<Sleep>>,
}

/// What to do about a silence.
enum Quiet {
    Comment,
    TooLong(Duration),
}

impl Silence {
    fn new(timeouts: Timeouts) -> Option<Self> {
        let first = [timeouts.comment, timeouts.silence].into_iter().flatten();
        let timer = tokio::time::sleep(first.min()?);
        let now = Instant::now();
        Some(Self {
            timeouts,
            heard: now,
            told: now,
            timer: Box::pin(timer),
        })
    }

    fn heard(&mut self) {
        self.heard = Instant::now();
        self.told = self.heard;
    }

    /// Ready when the client is to be told that its stream lives; no silence is too long.
    fn poll_comment(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match std::task::ready!(self.poll(cx)) {
                Quiet::Comment => return Poll::Ready(()),
                Quiet::TooLong(_) => self.heard = Instant::now(),
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Quiet> {
        loop {
            std::task::ready!(self.timer.as_mut().poll(cx));
            let now = Instant::now();
            if let Some(limit) = self.timeouts.silence
                && now >= self.heard + limit
            {
                return Poll::Ready(Quiet::TooLong(limit));
            }
            let told = self
                .timeouts
                .comment
                .is_some_and(|every| now >= self.told + every);
            if told {
                self.told = now;
            }
            let ends = self.timeouts.silence.map(|limit| self.heard + limit);
            let comment = self.timeouts.comment.map(|every| self.told + every);
            let Some(next) = ends.into_iter().chain(comment).min() else {
                return Poll::Pending;
            };
            self.timer.as_mut().reset(next);
            if told {
                return Poll::Ready(Quiet::Comment);
            }
        }
    }
}
