//! One connection to a worker: a request out, its answer in, and again.
//!
//! A line has no task of its own: whoever waits for its answer drives it. So a slow client slows its engine, an
//! answer that nobody waits for closes its connection at once, and no byte crosses from task to task.
//!
//! What always holds: a line is kept only if its request went out whole, its answer was read to its end, nothing
//! came behind it, and neither side said that it closes.

use std::future::poll_fn;
use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::{Method, StatusCode};
use kvasir_types::HttpEndpoint;
use tokio::io::AsyncWrite;
use tokio_util::io::poll_read_buf;

use crate::UpstreamError;
use crate::framing::{Framing, Step};
use crate::head::{Ask, Head, Whom, bad};
use crate::tls::WorkerTls;
use crate::wire::Wire;

/// A worker has this long to accept a connection (Dynamo's `DYN_TCP_CONNECT_TIMEOUT`).
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes that are read at once, to begin with.
const READ_BYTES: usize = 8 << 10;
/// Bytes that are read at once when more keeps coming.
const READ_BYTES_MAX: usize = 128 << 10;
/// Room that must be left for a read.
const READ_BYTES_MIN: usize = 1 << 10;
/// Bodies up to this size are written in one piece with their heads.
const JOINED_BYTES_MAX: usize = 4 << 10;

/// A connection that is idle, or on which one answer is under way.
#[derive(Debug)]
pub(crate) struct Line {
    wire: Wire,
    /// What has come and is not taken yet.
    inbox: BytesMut,
    /// How much is read at once.
    read_bytes: usize,
    /// What has still to go out: the head, with a short body; a long one.
    head: BytesMut,
    body: Bytes,
    /// Written, but perhaps not sent by what lies between.
    unflushed: bool,
    method: Method,
    framing: Framing,
    /// The worker keeps it open after this answer.
    keeps: bool,
}

impl Line {
    /// A new connection.
    pub(crate) async fn open(
        endpoint: &HttpEndpoint,
        tls: &WorkerTls,
    ) -> Result<Self, UpstreamError> {
        let connect = Wire::open(endpoint, tls);
        let wire = match tokio::time::timeout(CONNECT_TIMEOUT, connect).await {
            Err(_) => return Err(UpstreamError::ConnectTimeout),
            Ok(wire) => wire.map_err(UpstreamError::Connect)?,
        };
        Ok(Self {
            wire,
            inbox: BytesMut::new(),
            read_bytes: READ_BYTES,
            head: BytesMut::new(),
            body: Bytes::new(),
            unflushed: false,
            method: Method::GET,
            framing: Framing::Ended,
            keeps: true,
        })
    }

    /// Whether another request can go out on it. Notices a worker that closed it meanwhile.
    pub(crate) fn is_ready(&mut self) -> bool {
        let idle = self.keeps && self.framing == Framing::Ended && self.is_sent();
        idle && self.inbox.is_empty() && self.is_silent()
    }

    /// Whether nothing came, not even the end.
    fn is_silent(&mut self) -> bool {
        match &self.wire {
            // Not by polling: a task that has had its share of turns would be told that nothing is there.
            Wire::Plain(stream) => {
                let read = stream.try_read(&mut [0]);
                matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Wire::Secure(_) => {
                let mut cx = Context::from_waker(Waker::noop());
                self.poll_read(&mut cx).is_pending()
            }
        }
    }

    /// Whether it failed as a connection does that was closed while it was idle: nothing of an answer came.
    pub(crate) fn was_stale(&self, error: &UpstreamError) -> bool {
        use io::ErrorKind::{
            BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof, WriteZero,
        };
        let UpstreamError::Broken(error) = error else {
            return false;
        };
        let closed = matches!(
            error.kind(),
            BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof | WriteZero
        );
        closed && self.inbox.is_empty()
    }

    /// Lets go of what a long answer needed.
    pub(crate) fn shrink(&mut self) {
        if self.inbox.capacity() > READ_BYTES {
            self.inbox = BytesMut::new();
        }
        self.read_bytes = READ_BYTES;
    }

    /// Sends a request and waits for the head of the answer; dropping the line cancels it.
    pub(crate) async fn ask(
        &mut self,
        ask: &Ask<'_>,
        whom: &Whom<'_>,
    ) -> Result<Head, UpstreamError> {
        self.head = ask.head(whom);
        if ask.body.len() <= JOINED_BYTES_MAX {
            self.head.extend_from_slice(ask.body);
        } else {
            self.body = ask.body.clone();
        }
        self.method.clone_from(ask.method);
        let head = poll_fn(|cx| self.poll_head(cx)).await;
        head.map_err(UpstreamError::Broken)
    }

    /// The next piece of the answer; `None` at its end.
    pub(crate) fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        let piece = ready!(self.poll_piece(cx));
        Poll::Ready(piece.map_err(UpstreamError::Broken).transpose())
    }

    /// Whether all of the answer was given out.
    pub(crate) fn is_at_end(&self) -> bool {
        self.framing == Framing::Ended
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Head>> {
        loop {
            let unsent = self.poll_send(cx);
            if !self.inbox.is_empty()
                && let Some(mut head) = Head::take(&mut self.inbox)?
            {
                if head.status == StatusCode::SWITCHING_PROTOCOLS {
                    return Poll::Ready(Err(bad("it changed the protocol")));
                }
                if !head.status.is_informational() {
                    self.framing = Framing::of(&self.method, head.status, &mut head.headers)?;
                    self.keeps &= head.keeps && self.framing != Framing::UntilClose;
                    return Poll::Ready(Ok(head));
                }
                continue;
            }
            // What came before the sending failed is heard; nothing more is waited for.
            match (self.poll_read(cx), unsent) {
                (Poll::Ready(Ok(1..)), _) => {}
                (_, Err(error)) | (Poll::Ready(Err(error)), Ok(())) => {
                    return Poll::Ready(Err(error));
                }
                (Poll::Ready(Ok(0)), Ok(())) => {
                    return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                }
                (Poll::Pending, Ok(())) => return Poll::Pending,
            }
        }
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        if !self.is_sent() {
            // An answer may begin before its question was sent; if the rest fails, the answer will tell.
            let _ = self.poll_send(cx);
        }
        loop {
            match self.framing.step(&mut self.inbox)? {
                Step::Data(data) => return Poll::Ready(Ok(Some(data))),
                Step::End => return Poll::Ready(Ok(None)),
                Step::More => {}
            }
            if ready!(self.poll_read(cx))? == 0 {
                self.keeps = false;
                if !self.framing.ends_with_connection() {
                    return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                }
                self.framing = Framing::Ended;
            }
        }
    }

    /// Sends what can be sent now. What fails is not sent any more, but an answer may have come before.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.poll_write_all(cx) {
            Poll::Ready(Err(error)) => {
                self.keeps = false;
                self.head.clear();
                self.body.clear();
                self.unflushed = false;
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn poll_write_all(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.head.is_empty() || !self.body.is_empty() {
            let wire = Pin::new(&mut self.wire);
            let written = ready!(if self.body.is_empty() {
                wire.poll_write(cx, &self.head)
            } else {
                let parts = [IoSlice::new(&self.head), IoSlice::new(&self.body)];
                wire.poll_write_vectored(cx, &parts)
            })?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_head = written.min(self.head.len());
            self.head.advance(of_head);
            self.body.advance(written - of_head);
            self.unflushed = true;
        }
        if self.unflushed {
            ready!(Pin::new(&mut self.wire).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    fn is_sent(&self) -> bool {
        self.head.is_empty() && self.body.is_empty() && !self.unflushed
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.inbox.capacity() - self.inbox.len() < READ_BYTES_MIN {
            self.inbox.reserve(self.read_bytes);
        }
        let room = self.inbox.capacity() - self.inbox.len();
        let count = ready!(poll_read_buf(Pin::new(&mut self.wire), cx, &mut self.inbox))?;
        if count == room {
            self.read_bytes = (self.read_bytes * 2).min(READ_BYTES_MAX);
        }
        Poll::Ready(Ok(count))
    }
}

#[cfg(test)]
mod tests;
