//! Answers on their way to the client: whole, or as they come.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use kvasir_openai::ApiError;

use crate::http::framing;
use crate::http::in_flight::Ticket;

/// An answer.
pub type Reply = Response<ReplyBody>;

/// An answer that cannot be completed: the connection is cut, so that nobody takes it for whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker broke off before its answer was complete")]
pub struct Cut;

/// Something that is asked for the next bytes of an answer. Dropping it cancels what stands behind.
pub trait ByteSource: Send {
    /// The next bytes; `None` at the end.
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>>;
}

/// The body of an answer.
pub struct ReplyBody {
    content: Content,
    /// The request is under way until this is dropped.
    ticket: Option<Ticket>,
}

enum Content {
    Whole(Bytes),
    Stream(Box<dyn ByteSource>),
    Ended,
}

impl ReplyBody {
    /// A body that comes as `source` gives it.
    #[must_use]
    pub fn stream(source: Box<dyn ByteSource>) -> Self {
        Self {
            content: Content::Stream(source),
            ticket: None,
        }
    }

    /// Keeps `ticket` until the body has been sent or dropped.
    pub fn hold(&mut self, ticket: Ticket) {
        self.ticket = Some(ticket);
    }

    fn end(&mut self) {
        self.content = Content::Ended;
        self.ticket = None;
    }
}

impl From<Bytes> for ReplyBody {
    fn from(bytes: Bytes) -> Self {
        let content = if bytes.is_empty() {
            Content::Ended
        } else {
            Content::Whole(bytes)
        };
        Self {
            content,
            ticket: None,
        }
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let next = match &mut self.content {
            Content::Ended => None,
            Content::Whole(bytes) => {
                let bytes = std::mem::take(bytes);
                self.end();
                Some(Ok(bytes))
            }
            Content::Stream(source) => {
                let next = std::task::ready!(source.poll_bytes(cx));
                if !matches!(next, Some(Ok(_))) {
                    self.end();
                }
                next
            }
        };
        Poll::Ready(next.map(|bytes| bytes.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.content, Content::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Ended => SizeHint::with_exact(0),
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Stream(_) => SizeHint::default(),
        }
    }
}

/// A whole answer of JSON.
#[must_use]
pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    whole(
        status,
        HeaderValue::from_static("application/json"),
        body.into(),
    )
}

/// A whole answer of any type.
#[must_use]
pub(crate) fn whole(status: StatusCode, content_type: HeaderValue, body: Bytes) -> Reply {
    let mut reply = Response::new(ReplyBody::from(body));
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, content_type);
    reply
}

/// An answer of server-sent events.
#[must_use]
pub(crate) fn events(source: Box<dyn ByteSource>) -> Reply {
    let mut reply = Response::new(ReplyBody::stream(source));
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    reply
}

/// An answer that says no.
#[must_use]
pub(crate) fn error(error: &ApiError) -> Reply {
    refusal(error, error.to_body())
}

/// The same, as Anthropic's API says it.
#[must_use]
pub(crate) fn anthropic_error(error: &ApiError) -> Reply {
    refusal(error, error.to_anthropic_body().freeze())
}

fn refusal(error: &ApiError, body: Bytes) -> Reply {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut reply = json(status, body);
    if error.status == StatusCode::UNAUTHORIZED {
        reply
            .headers_mut()
            .insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if error.leaves_body() {
        // What is left of the body is read for a while and then not: the next request needs another connection.
        framing::close_after(&mut reply);
    }
    if error.status == StatusCode::SERVICE_UNAVAILABLE || error.is_overload() {
        let secs = error.retry_after_secs.unwrap_or(1);
        reply
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(secs));
    }
    reply
}

/// Says which methods a path is there for.
pub(crate) fn allow(reply: &mut Reply, methods: &'static str) {
    let methods = HeaderValue::from_static(methods);
    reply.headers_mut().insert(ALLOW, methods);
}
