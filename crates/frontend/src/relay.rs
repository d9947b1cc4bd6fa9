//! An engine's answer on its way through: bytes pass as they come, and are looked at on the way.
//!
//! What always holds: the client gets the engine's bytes in the engine's order. Only two things change them: a
//! usage event that we asked for and the client did not is left out, and `nvext` is added where the client
//! asked for it. A stream that breaks off ends with an error frame; an answer that is not a stream is cut.

use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use kvasir_openai::{ApiError, Event, EventParser, ResponseNvext, Usage, find_usage, write_done};
use kvasir_router::Outcome;
use kvasir_types::WorkerRank;

use crate::host::Booking;
use crate::reply::{ByteSource, Cut};
use crate::upstream::UpstreamBody;
use crate::watch::{Totals, Watch};

/// Largest event that is looked into; a larger one passes unseen.
const EVENT_BYTES_MAX: usize = 4 << 20;
/// How much of an answer that is no stream is kept to read its usage.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// What the client is told about its request, beside the engine's answer.
#[derive(Debug)]
pub(crate) struct Extras {
    /// On every chunk.
    pub(crate) each: ResponseNvext,
    /// On the last one.
    pub(crate) last: ResponseNvext,
}

impl Extras {
    /// An event with what the client asked for in it.
    fn put_into(&self, event: &Event) -> Bytes {
        let Some(data) = event.data() else {
            return event.raw.clone();
        };
        let last = memchr::memmem::find(&data, b"\"finish_reason\":\"").is_some();
        let chunk = if last { &self.last } else { &self.each }.put_into(&data);
        let mut out = BytesMut::with_capacity(chunk.len() + 8);
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&chunk);
        out.extend_from_slice(b"\n\n");
        out.freeze()
    }
}

/// One answer on its way through.
pub(crate) struct Relay {
    body: UpstreamBody,
    form: Form,
    booking: Option<Booking>,
    watch: Option<Watch>,
    target: WorkerRank,
    clock: kvasir_telemetry::Clock,
    usage: Usage,
    events: u32,
}

enum Form {
    /// Server-sent events.
    Events {
        parser: EventParser,
        /// Usage was our wish: its event is left out.
        hide_usage: bool,
        extras: Option<Box<Extras>>,
        ended: bool,
    },
    /// Anything else; the beginning is kept to read its usage.
    Plain(BytesMut),
}

impl Relay {
    /// Relays `body`, whose head was `head`.
    pub(crate) fn new(
        body: UpstreamBody,
        booking: Booking,
        watch: Watch,
        clock: kvasir_telemetry::Clock,
    ) -> Self {
        Self {
            body,
            form: Form::Plain(BytesMut::new()),
            target: booking.target(),
            booking: Some(booking),
            watch: Some(watch),
            clock,
            usage: Usage::default(),
            events: 0,
        }
    }

    /// The body is a stream of events.
    pub(crate) fn of_events(mut self, hide_usage: bool, extras: Option<Extras>) -> Self {
        let (parser, extras) = (EventParser::new(EVENT_BYTES_MAX), extras.map(Box::new));
        self.form = Form::Events {
            parser,
            hide_usage,
            extras,
            ended: false,
        };
        self
    }

    /// A piece of the engine's answer as the client gets it; may be empty.
    fn pass(&mut self, data: Bytes) -> Bytes {
        if let Some(watch) = &mut self.watch {
            watch.first_token(self.clock.now());
        }
        match &mut self.form {
            Form::Plain(kept) => {
                if kept.len() + data.len() <= ANSWER_BYTES_MAX {
                    kept.extend_from_slice(&data);
                }
                data
            }
            Form::Events { parser, .. } => {
                parser.push(data);
                self.pass_events()
            }
        }
    }

    fn pass_events(&mut self) -> Bytes {
        let Form::Events {
            parser,
            hide_usage,
            extras,
            ended,
        } = &mut self.form
        else {
            return Bytes::new();
        };
        let mut single: Option<Bytes> = None;
        let mut joined = BytesMut::new();
        loop {
            let event = match parser.next_event() {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(_) => {
                    // Too large to look into: it passes as it is.
                    joined.extend_from_slice(&single.take().unwrap_or_default());
                    joined.extend_from_slice(&parser.take_rest());
                    break;
                }
            };
            let found = event.data().and_then(|data| find_usage(&data));
            if let Some(chunk) = found {
                self.usage = chunk.usage;
            }
            if event.is_done() {
                *ended = true;
            } else {
                self.events += 1;
            }
            if *hide_usage && found.is_some_and(|chunk| chunk.only_usage) {
                continue;
            }
            let raw = match extras {
                Some(extras) if !event.is_done() => extras.put_into(&event),
                _ => event.raw,
            };
            match (single.take(), joined.is_empty()) {
                (None, true) => single = Some(raw),
                (first, _) => {
                    joined.extend_from_slice(&first.unwrap_or_default());
                    joined.extend_from_slice(&raw);
                }
            }
        }
        single.unwrap_or_else(|| joined.freeze())
    }

    fn finish(&mut self) {
        if let Form::Plain(kept) = &self.form {
            self.usage = find_usage(kept)
                .map(|chunk| chunk.usage)
                .unwrap_or_default();
        }
        let count = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        let totals = Totals {
            prompt_tokens: count(self.usage.prompt_tokens),
            cached_tokens: count(self.usage.cached_tokens.unwrap_or(0)),
            output_tokens: count(self.usage.completion_tokens),
            target: self.target,
        };
        if let Some(booking) = self.booking.take() {
            booking.finish(Outcome::Completed {
                output_tokens: totals.output_tokens,
            });
        }
        if let Some(watch) = self.watch.take() {
            watch.succeed(&totals);
        }
    }

    /// The engine broke off: its worker is set aside, the client is told as far as that is possible.
    fn break_off(&mut self, error: &crate::upstream::UpstreamError) -> Result<Bytes, Cut> {
        tracing::warn!(worker = %self.target, %error, events = self.events, "answer broke off");
        if let Some(booking) = self.booking.take() {
            booking.finish(Outcome::Unreachable);
        }
        let failure = ApiError::unavailable();
        let failure = match self.watch.take() {
            Some(watch) => watch.fail(failure),
            None => failure,
        };
        let Form::Events { parser, ended, .. } = &mut self.form else {
            return Err(Cut);
        };
        parser.take_rest();
        *ended = true;
        let mut frame = BytesMut::new();
        failure.write_frame(&mut frame);
        write_done(&mut frame);
        Ok(frame.freeze())
    }
}

impl ByteSource for Relay {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        if self.booking.is_none() {
            return Poll::Ready(None);
        }
        loop {
            match std::task::ready!(self.body.poll_data(cx)) {
                Some(Ok(data)) => {
                    let first = self.events == 0;
                    let bytes = self.pass(data);
                    if first && let Some(booking) = &self.booking {
                        booking.first_token();
                    }
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(bytes)));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(self.break_off(&error))),
                None => {
                    let rest = match &mut self.form {
                        Form::Events { parser, .. } => parser.take_rest(),
                        Form::Plain(_) => Bytes::new(),
                    };
                    self.finish();
                    return Poll::Ready((!rest.is_empty()).then_some(Ok(rest)));
                }
            }
        }
    }
}
