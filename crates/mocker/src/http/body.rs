//! Answers on their way out, and request bodies on their way in.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::sync::mpsc;

use super::error::Refusal;

/// Largest request body.
const BODY_BYTES_MAX: usize = 64 << 20;
/// Pieces of a stream that wait for a slow reader.
pub(crate) const PIECES_MAX: usize = 64;

/// An answer.
pub(crate) type Reply = Response<ReplyBody>;

/// The answer breaks off: the connection is cut.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the mock engine broke off, as it was told to")]
pub(crate) struct BrokenOff;

/// Where the pieces of a stream go.
pub(crate) type Pieces = mpsc::Sender<Result<Bytes, BrokenOff>>;

/// The body of an answer.
#[derive(Debug)]
pub(crate) enum ReplyBody {
    Whole(Option<Bytes>),
    Stream(mpsc::Receiver<Result<Bytes, BrokenOff>>),
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let next = match &mut *self {
            Self::Whole(bytes) => bytes.take().map(Ok),
            Self::Stream(pieces) => std::task::ready!(pieces.poll_recv(cx)),
        };
        Poll::Ready(next.map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Stream(_) => SizeHint::default(),
        }
    }
}

fn whole(status: StatusCode, content_type: Option<&'static str>, body: Bytes) -> Reply {
    let mut reply = Response::new(ReplyBody::Whole(Some(body).filter(|b| !b.is_empty())));
    *reply.status_mut() = status;
    if let Some(content_type) = content_type {
        let value = HeaderValue::from_static(content_type);
        reply.headers_mut().insert(CONTENT_TYPE, value);
    }
    reply
}

/// An answer of JSON.
pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    whole(status, Some("application/json"), body.into())
}

/// An answer of plain text, for Prometheus.
pub(crate) fn metrics(body: String) -> Reply {
    whole(
        StatusCode::OK,
        Some("text/plain; version=0.0.4; charset=utf-8"),
        body.into(),
    )
}

/// An answer without a body.
pub(crate) fn empty(status: StatusCode) -> Reply {
    whole(status, None, Bytes::new())
}

/// An answer that comes piece by piece.
pub(crate) fn stream() -> (Pieces, Reply) {
    let (sender, pieces) = mpsc::channel(PIECES_MAX);
    let mut reply = Response::new(ReplyBody::Stream(pieces));
    let value = HeaderValue::from_static("text/event-stream; charset=utf-8");
    reply.headers_mut().insert(CONTENT_TYPE, value);
    (sender, reply)
}

/// Reads a request's body.
pub(crate) async fn read<B>(mut body: B) -> Result<Bytes, Refusal>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return Err(Refusal::bad("the upload broke off", None));
        };
        if let Ok(data) = frame.into_data() {
            if all.len() + data.len() > BODY_BYTES_MAX {
                let status = StatusCode::PAYLOAD_TOO_LARGE;
                return Err(Refusal::server(status, "Request body too large"));
            }
            all.extend_from_slice(&data);
        }
    }
    Ok(all.freeze())
}
