//! An engine's answer on its way to the client, with its booking and its count.
//!
//! What always holds: a stream that breaks off ends with an error frame and `[DONE]`; any other answer that
//! breaks off is cut, so that nobody takes it for whole; the booking ends with the answer, whichever way.

mod source;

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use kvasir_openai::{ApiError, write_comment, write_done};
use kvasir_router::Outcome;
use kvasir_telemetry::Clock;
use kvasir_types::{Time, WorkerRank};
use tokio::time::{Instant, Sleep};

use crate::host::Booking;
use crate::picture::Report;
use crate::reply::{ByteSource, Cut};
use crate::upstream::UpstreamError;
use crate::watch::{Totals, Watch};

pub(crate) use source::{Begun, Extras, Form, Source};

/// The text of a comment that keeps a silent stream alive.
const KEEP_ALIVE: &str = "keep-alive";

/// What happens while an engine is silent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Patience {
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
}

/// What ends with the answer.
pub(crate) struct Books {
    booking: Booking,
    watch: Watch,
    clock: Clock,
    first: Time,
    status: StatusCode,
}

impl Books {
    /// The answer has begun now, with this status.
    pub(crate) fn open(
        booking: Booking,
        mut watch: Watch,
        clock: Clock,
        status: StatusCode,
    ) -> Self {
        let first = clock.now();
        if status.is_success() {
            booking.first_token();
            watch.first_token(first);
        }
        Self {
            booking,
            watch,
            clock,
            first,
            status,
        }
    }

    /// The answer is complete.
    pub(crate) fn close(mut self, source: &Source) {
        let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        if !self.status.is_success() {
            self.booking.finish(Outcome::Failed);
            return self.watch.refused(self.status.as_u16());
        }
        let totals = Totals {
            status: self.status.as_u16(),
            prompt_tokens: count(source.usage.prompt_tokens),
            cached_tokens: source.usage.cached_tokens.map(count),
            output_tokens: count(source.usage.completion_tokens),
            target: self.booking.target(),
        };
        self.booking.reported(Report {
            prompt: totals.prompt_tokens,
            cached: source.usage.cached_tokens.map(count),
            output: totals.output_tokens,
        });
        self.booking.finish(Outcome::Completed {
            output_tokens: totals.output_tokens,
        });
        if let Some(after_first) = totals.output_tokens.checked_sub(1) {
            let took = (self.clock.now() - self.first).as_secs_f64();
            self.watch.tokens(1, 0.0);
            self.watch.tokens(after_first as usize, took);
        }
        self.watch.succeed(&totals);
    }

    /// The engine broke off: its worker is set aside.
    fn break_off(self, error: &UpstreamError, events: u32) -> ApiError {
        let worker: WorkerRank = self.booking.target();
        tracing::warn!(%worker, %error, events, "answer broke off");
        self.booking.finish(Outcome::Unreachable);
        self.watch.fail(ApiError::unavailable())
    }
}

impl Relay {
    /// Relays an answer of which `held` has come.
    pub(crate) fn new(source: Source, held: Bytes, books: Books, patience: Patience) -> Self {
        let silence = source.is_events().then(|| Silence::new(patience)).flatten();
        Self {
            source,
            held: Some(held),
            books: Some(books),
            silence: silence.map(Box::new),
        }
    }

    fn break_off(&mut self, error: &UpstreamError) -> Result<Bytes, Cut> {
        let events = self.source.events;
        let failure = self
            .books
            .take()
            .map(|books| books.break_off(error, events));
        match failure {
            Some(failure) if self.source.is_events() => Ok(last_words(&failure)),
            _ => Err(Cut),
        }
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
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        if let Some(held) = self.held.take().filter(|held| !held.is_empty()) {
            return Poll::Ready(Some(Ok(held)));
        }
        if self.books.is_none() {
            return Poll::Ready(None);
        }
        let next = match self.source.poll_bytes(cx) {
            Poll::Ready(next) => next,
            Poll::Pending => {
                let silence = self.silence.as_mut();
                return match silence.map_or(Poll::Pending, |silence| silence.poll(cx)) {
                    Poll::Pending => Poll::Pending,
                    Poll::Ready(Quiet::Comment) => Poll::Ready(Some(Ok(sign_of_life()))),
                    Poll::Ready(Quiet::TooLong(limit)) => {
                        Poll::Ready(Some(self.break_off(&UpstreamError::Silent(limit))))
                    }
                };
            }
        };
        Poll::Ready(match next {
            Some(Ok(bytes)) => {
                if let Some(silence) = &mut self.silence {
                    silence.heard();
                }
                Some(Ok(bytes))
            }
            Some(Err(error)) => Some(self.break_off(&error)),
            None => {
                if let Some(books) = self.books.take() {
                    books.close(&self.source);
                }
                None
            }
        })
    }
}

/// How long an engine has been silent. Its timer is set when it is first needed and then runs on, so that an
/// event costs a look at the time and no more.
struct Silence {
    patience: Patience,
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
    fn new(patience: Patience) -> Option<Self> {
        let first = [patience.comment, patience.silence].into_iter().flatten();
        let timer = tokio::time::sleep(first.min()?);
        let now = Instant::now();
        Some(Self {
            patience,
            heard: now,
            told: now,
            timer: Box::pin(timer),
        })
    }

    fn heard(&mut self) {
        self.heard = Instant::now();
        self.told = self.heard;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Quiet> {
        loop {
            std::task::ready!(self.timer.as_mut().poll(cx));
            let now = Instant::now();
            if let Some(limit) = self.patience.silence
                && now >= self.heard + limit
            {
                return Poll::Ready(Quiet::TooLong(limit));
            }
            let told = self
                .patience
                .comment
                .is_some_and(|every| now >= self.told + every);
            if told {
                self.told = now;
            }
            let ends = self.patience.silence.map(|limit| self.heard + limit);
            let comment = self.patience.comment.map(|every| self.told + every);
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
