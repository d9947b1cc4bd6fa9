//! The streams of several answers as one.
//!
//! What always holds: the client gets whole events, each choice under its own number and all of them under one name; one usage and one `[DONE]` end the
//! stream; when a part fails, its error ends the stream and the other parts.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::Response;
use http_body::Body as _;
use kvasir_openai::resume::{ChunkKind, Progress};
use kvasir_openai::{
    ApiError, Event, EventParser, Usage, UsageSum, answer_name, find_usage, numbered_event,
    usage_event, write_done, write_llm_metrics,
};

use super::super::Forward;
use super::super::relay::error_tail;
use super::{PartReply, totals};
use crate::http::reply::{ByteSource, Cut, Reply, ReplyBody};
use crate::observe::request_record::RequestRecord;

/// Largest event that is looked into; a larger one ends the stream with an error.
const EVENT_BYTES_MAX: usize = 4 << 20;
/// What a stream is told of an annotation that only its end has.
const METRICS_EVENT: &str = "llm_metrics";

/// Several streams as one.
pub(super) struct BatchStream {
    forward: Arc<Forward>,
    parts: Vec<PartStream>,
    /// Which is looked at first: all have their turn.
    turn: usize,
    /// The name that all chunks have, as JSON text.
    id: Option<String>,
    usage: UsageSum,
    /// A chunk with a usage and no choice, as an engine writes it.
    template: Option<Event>,
    /// Until the end.
    record: Option<RequestRecord>,
    wants_usage: bool,
}

/// The stream of one answer.
struct PartStream {
    /// None once it has ended.
    body: Option<ReplyBody>,
    parser: EventParser,
    choice: u32,
    follows: bool,
}

/// What one event of a part is to the client.
enum Shown {
    Bytes(Bytes),
    Nothing,
    /// The engine failed, in these words.
    Failure(Bytes),
}

impl BatchStream {
    /// The reply that passes these streams on.
    pub(super) fn reply(
        forward: Arc<Forward>,
        replies: Vec<PartReply>,
        wants_usage: bool,
        record: RequestRecord,
    ) -> Result<Reply, ApiError> {
        let (mut head, mut parts) = (None, Vec::with_capacity(replies.len()));
        for part in replies {
            let (own, body) = part.reply.into_parts();
            head.get_or_insert(own);
            parts.push(PartStream {
                body: Some(body),
                parser: EventParser::new(EVENT_BYTES_MAX),
                choice: part.choice,
                follows: part.follows,
            });
        }
        let Some(head) = head else {
            return Err(record.fail(ApiError::internal()));
        };
        let stream = Self {
            wants_usage,
            forward,
            parts,
            turn: 0,
            id: None,
            usage: UsageSum::default(),
            template: None,
            record: Some(record),
        };
        let body = ReplyBody::stream(Box::new(stream));
        Ok(Response::from_parts(head, body))
    }

    /// The next bytes of a part as the client gets them; none if there are none for it, or the part has ended.
    fn poll_part(
        &mut self,
        at: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ApiError>>> {
        loop {
            let Some(part) = self.parts.get_mut(at) else {
                return Poll::Ready(None);
            };
            let Some(body) = &mut part.body else {
                return Poll::Ready(None);
            };
            let data = match std::task::ready!(Pin::new(body).poll_frame(cx)) {
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
                Some(Err(Cut)) => return Poll::Ready(Some(Err(ApiError::unavailable()))),
                None => {
                    part.body = None;
                    return Poll::Ready(None);
                }
            };
            part.parser.push(data);
            let mut out = BytesMut::new();
            loop {
                let event = match self.parts.get_mut(at).map(|part| part.parser.next_event()) {
                    Some(Ok(Some(event))) => event,
                    Some(Ok(None)) | None => break,
                    Some(Err(_)) => return Poll::Ready(Some(Err(ApiError::unavailable()))),
                };
                match self.show(at, event) {
                    Shown::Bytes(bytes) => out.extend_from_slice(&bytes),
                    Shown::Nothing => {}
                    Shown::Failure(said) => {
                        out.extend_from_slice(&said);
                        self.refuse(&mut out);
                        return Poll::Ready(Some(Ok(out.freeze())));
                    }
                }
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(out.freeze())));
            }
        }
    }

    fn show(&mut self, at: usize, event: Event) -> Shown {
        let Some((choice, follows)) = self.parts.get(at).map(|part| (part.choice, part.follows))
        else {
            return Shown::Nothing;
        };
        let Some(data) = event.data() else {
            // Annotations are those of the whole request; comments keep its connection alive.
            let is_shown = match event.name() {
                Some(METRICS_EVENT) => false,
                Some(_) => at == 0,
                None => true,
            };
            return match is_shown {
                true => Shown::Bytes(event.raw),
                false => Shown::Nothing,
            };
        };
        if event.is_done() {
            return Shown::Nothing;
        }
        if self.id.is_none() {
            self.id = answer_name(&data);
        }
        if find_usage(&data).is_some_and(|found| found.only_usage) {
            if let Some(usage) = raw_usage(&data) {
                self.usage.add(&usage, follows);
            }
            drop(data);
            self.template.get_or_insert(event);
            return Shown::Nothing;
        }
        if data.starts_with(b"{\"error\"")
            && Progress::default().add_chunk(&data) == ChunkKind::Failure
        {
            drop(data);
            return Shown::Failure(event.raw);
        }
        drop(data);
        let id = self.id.as_deref().unwrap_or("null");
        match numbered_event(&event, choice, id) {
            Some(bytes) => Shown::Bytes(bytes),
            None => Shown::Bytes(event.raw),
        }
    }

    /// The engine of a part failed and said so: the stream ends with it.
    fn refuse(&mut self, out: &mut BytesMut) {
        write_done(out);
        self.parts.clear();
        if let Some(record) = self.record.take() {
            record.refused(500);
        }
    }

    /// What all parts amount to, and the end.
    fn end(&mut self, record: RequestRecord) -> Bytes {
        let mut out = BytesMut::new();
        let counted = self.usage.json().and_then(|usage| {
            let json = format!("{{\"usage\":{usage}}}");
            Some(find_usage(json.as_bytes())?.usage)
        });
        if let (true, Some(template), Some(usage)) =
            (self.wants_usage, &self.template, self.usage.json())
            && let Some(event) = usage_event(template, usage, self.id.as_deref())
        {
            out.extend_from_slice(&event);
        }
        let counted: Usage = counted.unwrap_or_default();
        if self.forward.extra_fields().metrics && counted != Usage::default() {
            write_llm_metrics(&mut out, &counted);
        }
        write_done(&mut out);
        record.succeed(&totals(200, counted));
        out.freeze()
    }
}

/// The usage of a chunk as it was written.
fn raw_usage(data: &[u8]) -> Option<String> {
    let object = kvasir_openai::Object::parse(data).ok()?;
    object.get("usage").map(|usage| usage.value.to_owned())
}

impl ByteSource for BatchStream {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        let count = self.parts.len();
        let mut waits = false;
        for step in 0..count {
            let at = (self.turn + step) % count;
            match self.poll_part(at, cx) {
                Poll::Pending => waits = true,
                Poll::Ready(None) => {}
                Poll::Ready(Some(Ok(bytes))) => {
                    self.turn = at + 1;
                    return Poll::Ready(Some(Ok(bytes)));
                }
                Poll::Ready(Some(Err(error))) => {
                    self.parts.clear();
                    let error = match self.record.take() {
                        Some(record) => record.fail(error),
                        None => error,
                    };
                    return Poll::Ready(Some(Ok(error_tail(&error))));
                }
            }
        }
        if waits {
            return Poll::Pending;
        }
        match self.record.take() {
            Some(record) => Poll::Ready(Some(Ok(self.end(record)))),
            None => Poll::Ready(None),
        }
    }
}
