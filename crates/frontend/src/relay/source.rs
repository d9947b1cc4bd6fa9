//! The bytes of an engine's answer, as the client gets them.
//!
//! What always holds: the client gets the engine's bytes in the engine's order. Only two things change them: a
//! usage event that we asked for and the client did not is left out, and `nvext` is added where the client
//! asked for it. However the engine cuts its bytes, the client gets whole events.

use std::future::poll_fn;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use kvasir_openai::{Event, EventParser, ResponseNvext, Usage, find_usage};
use kvasir_telemetry::Clock;
use kvasir_types::Time;

use crate::upstream::{UpstreamBody, UpstreamError};

/// Largest event that is looked into; a larger one passes unseen.
const EVENT_BYTES_MAX: usize = 4 << 20;
/// Longest answer that is kept back until it is complete; a longer one passes as it comes.
const HELD_BYTES_MAX: usize = 4 << 20;

/// What the client is told about its request, beside the engine's answer.
#[derive(Debug)]
pub(crate) struct Extras {
    /// On every chunk, and in `last` too.
    pub(crate) each: ResponseNvext,
    /// On the last chunk; its times are filled in when that comes.
    pub(crate) last: ResponseNvext,
    /// When the request came.
    pub(crate) received: Time,
    /// When the first event came.
    pub(crate) first: Option<Time>,
    /// Reads the time.
    pub(crate) clock: Clock,
}

impl Extras {
    /// An event with what the client asked for in it.
    fn put_into_event(&mut self, event: &Event) -> Bytes {
        let Some(data) = event.data() else {
            return event.raw.clone();
        };
        let last = memchr::memmem::find(&data, b"\"finish_reason\":\"").is_some();
        let chunk = if last {
            self.closing().put_into(&data)
        } else {
            self.first.get_or_insert_with(|| self.clock.now());
            self.each.put_into(&data)
        };
        let mut out = BytesMut::with_capacity(chunk.len() + 8);
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&chunk);
        out.extend_from_slice(b"\n\n");
        out.freeze()
    }

    /// What is said at the end.
    fn closing(&mut self) -> &ResponseNvext {
        let (now, received) = (self.clock.now(), self.received);
        let since = |at: Time| Some((at - received).as_secs_f64() * 1e3);
        if let Some(timing) = &mut self.last.timing {
            timing.ttft_ms = self.first.and_then(since);
            timing.total_time_ms = since(now);
        }
        &self.last
    }
}

/// How an answer is read.
#[derive(Debug)]
pub(crate) enum Form {
    /// Server-sent events of a completion.
    Events {
        /// Usage was our wish: its event is left out.
        hide_usage: bool,
        /// What is put into each.
        extras: Option<Box<Extras>>,
        /// The connection's end is the only end of the body.
        until_close: bool,
    },
    /// A completion in one piece.
    Whole(Option<Box<Extras>>),
    /// Anything else, which nobody looks into.
    Opaque,
}

/// What can be said to the client for certain.
#[derive(Debug)]
pub(crate) enum Begun {
    /// The whole answer.
    Whole(Bytes),
    /// The answer has begun; the rest comes from [`Source::poll_bytes`].
    Partly(Bytes),
}

/// Reads an engine's answer.
pub(crate) struct Source {
    body: UpstreamBody,
    form: Form,
    parser: EventParser,
    /// What the engine counted.
    pub(crate) usage: Usage,
    /// Events that came, `[DONE]` not counted.
    pub(crate) events: u32,
    /// `[DONE]` came.
    done: bool,
}

impl Source {
    /// Reads `body` as `form` says.
    pub(crate) fn new(body: UpstreamBody, form: Form) -> Self {
        Self {
            body,
            form,
            parser: EventParser::new(EVENT_BYTES_MAX),
            usage: Usage::default(),
            events: 0,
            done: false,
        }
    }

    /// Whether an error can be told in the client's stream.
    pub(crate) fn is_events(&self) -> bool {
        matches!(self.form, Form::Events { .. })
    }

    /// Whether the client may get other bytes than the engine sent.
    pub(crate) fn is_edited(&self) -> bool {
        match &self.form {
            Form::Events { .. } => true,
            Form::Whole(extras) => extras.is_some(),
            Form::Opaque => false,
        }
    }

    /// Waits until there is something that will not have to be taken back: a first event, or all of a short
    /// answer. Until then another worker can answer in this one's place.
    pub(crate) async fn begin(&mut self) -> Result<Begun, UpstreamError> {
        if let Form::Whole(_) = self.form {
            return self.hold().await;
        }
        match poll_fn(|cx| self.poll_bytes(cx)).await {
            Some(Ok(bytes)) => Ok(Begun::Partly(bytes)),
            Some(Err(error)) => Err(error),
            None if self.is_events() => Err(UpstreamError::Unfinished),
            None => Ok(Begun::Whole(Bytes::new())),
        }
    }

    async fn hold(&mut self) -> Result<Begun, UpstreamError> {
        let mut held = Bytes::new();
        let mut joined = BytesMut::new();
        while let Some(data) = poll_fn(|cx| self.body.poll_data(cx)).await {
            let data = data?;
            if held.is_empty() && joined.is_empty() {
                held = data;
            } else {
                joined.extend_from_slice(&std::mem::take(&mut held));
                joined.extend_from_slice(&data);
            }
            if held.len() + joined.len() > HELD_BYTES_MAX {
                let begun = if held.is_empty() {
                    joined.freeze()
                } else {
                    held
                };
                return Ok(Begun::Partly(begun));
            }
        }
        let held = if held.is_empty() {
            joined.freeze()
        } else {
            held
        };
        self.usage = find_usage(&held).map(|c| c.usage).unwrap_or_default();
        Ok(Begun::Whole(match &mut self.form {
            Form::Whole(Some(extras)) => extras.closing().put_into(&held).freeze(),
            _ => held,
        }))
    }

    /// The next bytes for the client, never empty; `None` at the end.
    pub(crate) fn poll_bytes(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        loop {
            match std::task::ready!(self.body.poll_data(cx)) {
                Some(Ok(data)) => {
                    let bytes = match self.form {
                        Form::Events { .. } => {
                            self.parser.push(data);
                            self.whole_events()
                        }
                        _ => data,
                    };
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(bytes)));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(self.end()),
            }
        }
    }

    /// What is left when the body has ended.
    fn end(&mut self) -> Option<Result<Bytes, UpstreamError>> {
        let until_close = matches!(
            self.form,
            Form::Events {
                until_close: true,
                ..
            }
        );
        if until_close && !self.done {
            return Some(Err(UpstreamError::Unfinished));
        }
        let rest = self.parser.take_rest();
        (!rest.is_empty()).then_some(Ok(rest))
    }

    /// The whole events that came, as the client gets them; may be empty.
    fn whole_events(&mut self) -> Bytes {
        let mut single = Bytes::new();
        let mut joined = BytesMut::new();
        loop {
            let raw = match self.parser.next_event() {
                Ok(Some(event)) => self.look(event),
                Ok(None) => break,
                // Too large to look into: it passes as it is.
                Err(_) => Some(self.parser.take_rest()),
            };
            let Some(raw) = raw.filter(|raw| !raw.is_empty()) else {
                continue;
            };
            if single.is_empty() && joined.is_empty() {
                single = raw;
            } else {
                joined.extend_from_slice(&std::mem::take(&mut single));
                joined.extend_from_slice(&raw);
            }
        }
        if single.is_empty() {
            joined.freeze()
        } else {
            single
        }
    }

    /// One event as the client gets it; none if it is not for the client.
    fn look(&mut self, event: Event) -> Option<Bytes> {
        let Form::Events {
            hide_usage, extras, ..
        } = &mut self.form
        else {
            return Some(event.raw);
        };
        if event.is_done() {
            self.done = true;
            return Some(event.raw);
        }
        self.events = self.events.saturating_add(1);
        let found = event.data().and_then(|data| find_usage(&data));
        if let Some(chunk) = found {
            self.usage = chunk.usage;
            if *hide_usage && chunk.only_usage {
                return None;
            }
        }
        Some(match extras {
            Some(extras) => extras.put_into_event(&event),
            None => event.raw,
        })
    }
}
