//! A stream whose client gets keep-alive comments before its engine answers.
//!
//! The head is sent after the first interval, so the engine's later answer is part of the stream, errors included. Another worker
//! can still answer, as the client has received only comments.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use kvasir_openai::{ApiError, write_done};
use tokio::time::Sleep;

use super::headers::is_event_stream;
use crate::http::reply::{self, ByteSource, Cut, Reply, ReplyBody};
use crate::proxy::relay::{error_tail, keep_alive};

/// Longest error of an engine that is passed on in a stream.
const ERROR_BYTES_MAX: usize = 64 << 10;

type AnswerFuture = Pin<Box<dyn Future<Output = Result<Reply, ApiError>> + Send>>;

/// Waits for `answer`; if it takes longer than `every`, and than `peek` where that is given, begins a stream that waits
/// with the client.
pub(super) async fn wait(
    answer: impl Future<Output = Result<Reply, ApiError>> + Send + 'static,
    every: Duration,
    peek: Option<Duration>,
) -> Result<Reply, ApiError> {
    let mut answer: AnswerFuture = Box::pin(answer);
    let head_after = peek.map_or(every, |peek| peek.max(every));
    match tokio::time::timeout(head_after, &mut answer).await {
        Ok(answered) => answered,
        Err(_) => Ok(reply::events(Box::new(KeepAliveStream {
            state: State::Waiting(answer),
            every,
            // Due at once: the interval has passed.
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
        }))),
    }
}

struct KeepAliveStream {
    state: State,
    every: Duration,
    timer: Pin<Box<Sleep>>,
}

enum State {
    Waiting(AnswerFuture),
    /// The engine streams.
    Streaming(ReplyBody),
    /// The engine answered with an error; its body is collected.
    Refused(ReplyBody, BytesMut),
    Ended,
}

impl ByteSource for KeepAliveStream {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        loop {
            match &mut self.state {
                State::Waiting(answer) => match answer.as_mut().poll(cx) {
                    Poll::Ready(Ok(reply)) => self.state = State::of(reply),
                    Poll::Ready(Err(error)) => {
                        self.state = State::Ended;
                        return Poll::Ready(Some(Ok(error_tail(&error))));
                    }
                    Poll::Pending => {
                        std::task::ready!(self.timer.as_mut().poll(cx));
                        let next = tokio::time::Instant::now() + self.every;
                        self.timer.as_mut().reset(next);
                        return Poll::Ready(Some(Ok(keep_alive())));
                    }
                },
                State::Streaming(body) => {
                    let frame = std::task::ready!(Pin::new(body).poll_frame(cx));
                    let data = frame.map(|frame| frame.map(|f| f.into_data().unwrap_or_default()));
                    return Poll::Ready(data);
                }
                State::Refused(body, words) => {
                    let frame = std::task::ready!(Pin::new(body).poll_frame(cx));
                    match frame.and_then(Result::ok).map(|frame| frame.into_data()) {
                        Some(Ok(data)) if words.len() + data.len() <= ERROR_BYTES_MAX => {
                            words.extend_from_slice(&data);
                        }
                        end => {
                            // A body that is too long would not be JSON when cut; an empty one says nothing.
                            let whole = !words.is_empty() && !matches!(end, Some(Ok(_)));
                            let last = match whole {
                                true => refusal(words),
                                false => error_tail(&ApiError::unavailable()),
                            };
                            self.state = State::Ended;
                            return Poll::Ready(Some(Ok(last)));
                        }
                    }
                }
                State::Ended => return Poll::Ready(None),
            }
        }
    }
}

impl State {
    fn of(reply: Reply) -> Self {
        let streams = reply.status().is_success() && is_event_stream(reply.headers());
        let body = reply.into_body();
        if streams {
            Self::Streaming(body)
        } else {
            Self::Refused(body, BytesMut::new())
        }
    }
}

/// An engine's error body as the last event of a stream.
fn refusal(words: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(words.len() + 32);
    out.extend_from_slice(b"data: ");
    let line_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
    for line in words.split(line_end) {
        out.extend_from_slice(line);
    }
    out.extend_from_slice(b"\n\n");
    write_done(&mut out);
    out.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_event_whatever_its_lines() {
        let frame = refusal(b"{\"error\":\r\n {\"code\": 400}}\n");
        assert_eq!(
            &frame[..],
            b"data: {\"error\": {\"code\": 400}}\n\ndata: [DONE]\n\n"
        );
    }
}
