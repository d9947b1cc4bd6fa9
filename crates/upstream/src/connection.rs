//! One HTTP/1.1 connection to a worker: it sends a request, reads the answer, and is reused.
//!
//! A connection has no task of its own: the task that waits for the answer drives it. So a slow client slows its engine, an
//! answer that is dropped closes its connection at once, and no byte crosses from task to task.
//!
//! What always holds: a connection is reused only if its request was sent whole, its answer was read to its end, no byte
//! followed it, and neither side announced that it closes.

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
use crate::head::{Destination, Head, UpstreamRequest, invalid};
use crate::socket::Socket;
use crate::tls::WorkerTls;

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

/// A connection that is idle or has one request in flight.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    /// Bytes that were read and not parsed yet.
    inbox: BytesMut,
    /// How much is read at once.
    read_bytes: usize,
    /// What is not sent yet: the head, with a short body; a long body.
    head: BytesMut,
    body: Bytes,
    /// Written, but not flushed.
    unflushed: bool,
    method: Method,
    framing: Framing,
    /// The connection stays open after this answer.
    keep_alive: bool,
}

impl Connection {
    /// A new connection.
    pub(crate) async fn open(
        endpoint: &HttpEndpoint,
        tls: &WorkerTls,
    ) -> Result<Self, UpstreamError> {
        let connect = Socket::open(endpoint, tls);
        let socket = match tokio::time::timeout(CONNECT_TIMEOUT, connect).await {
            Err(_) => return Err(UpstreamError::ConnectTimeout),
            Ok(socket) => socket.map_err(UpstreamError::of_connect)?,
        };
        Ok(Self {
            socket,
            inbox: BytesMut::new(),
            read_bytes: READ_BYTES,
            head: BytesMut::new(),
            body: Bytes::new(),
            unflushed: false,
            method: Method::GET,
            framing: Framing::Ended,
            keep_alive: true,
        })
    }

    /// Whether another request can go out on it. Notices a worker that closed it meanwhile.
    pub(crate) fn is_ready(&mut self) -> bool {
        let idle = self.keep_alive && self.framing == Framing::Ended && self.is_sent();
        idle && self.inbox.is_empty() && self.is_silent()
    }

    /// Whether nothing came, not even the end.
    fn is_silent(&mut self) -> bool {
        match &self.socket {
            // Not by polling: tokio tells a task that has used up its budget that nothing is there.
            Socket::Plain(stream) => {
                let read = stream.try_read(&mut [0]);
                matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Socket::Secure(_) => {
                let mut cx = Context::from_waker(Waker::noop());
                self.poll_read(&mut cx).is_pending()
            }
        }
    }

    /// Whether the error is that of a connection that was closed while it was idle: no byte of an answer came.
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

    /// Frees the buffers of a long answer.
    pub(crate) fn shrink(&mut self) {
        if self.inbox.capacity() > READ_BYTES {
            self.inbox = BytesMut::new();
        }
        self.read_bytes = READ_BYTES;
    }

    /// Sends a request and waits for the head of the answer; dropping the connection cancels it.
    pub(crate) async fn send(
        &mut self,
        request: &UpstreamRequest<'_>,
        destination: &Destination<'_>,
    ) -> Result<Head, UpstreamError> {
        self.head = request.head(destination);
        if request.body.len() <= JOINED_BYTES_MAX {
            self.head.extend_from_slice(request.body);
        } else {
            self.body = request.body.clone();
        }
        self.method.clone_from(request.method);
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

    /// Whether the answer was read to its end.
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
                    return Poll::Ready(Err(invalid("it switches protocols")));
                }
                if !head.status.is_informational() {
                    self.framing = Framing::of(&self.method, head.status, &mut head.headers)?;
                    self.keep_alive &= head.keep_alive && self.framing != Framing::UntilClose;
                    return Poll::Ready(Ok(head));
                }
                continue;
            }
            // An answer that came before sending failed is read; no more is waited for.
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
            // An answer may begin before the request was sent whole. If sending the rest fails, the answer says so.
            let _ = self.poll_send(cx);
        }
        loop {
            match self.framing.step(&mut self.inbox)? {
                Step::Data(data) => return Poll::Ready(Ok(Some(data))),
                Step::End => return Poll::Ready(Ok(None)),
                Step::More => {}
            }
            if ready!(self.poll_read(cx))? == 0 {
                self.keep_alive = false;
                if !self.framing.ends_with_connection() {
                    return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                }
                self.framing = Framing::Ended;
            }
        }
    }

    /// Sends what can be sent now. After an error nothing more is sent, but an answer may have come before.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.poll_write_all(cx) {
            Poll::Ready(Err(error)) => {
                self.keep_alive = false;
                self.head.clear();
                self.body = Bytes::new();
                self.unflushed = false;
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn poll_write_all(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.head.is_empty() || !self.body.is_empty() {
            let socket = Pin::new(&mut self.socket);
            let written = ready!(if self.body.is_empty() {
                socket.poll_write(cx, &self.head)
            } else {
                let parts = [IoSlice::new(&self.head), IoSlice::new(&self.body)];
                socket.poll_write_vectored(cx, &parts)
            })?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_head = written.min(self.head.len());
            self.head.advance(of_head);
            self.body.advance(written - of_head);
            self.unflushed = true;
        }
        // An empty rest would hold all of it for as long as the connection is kept.
        self.body = Bytes::new();
        if self.unflushed {
            ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
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
        let count = ready!(poll_read_buf(
            Pin::new(&mut self.socket),
            cx,
            &mut self.inbox
        ))?;
        if count == room {
            self.read_bytes = (self.read_bytes * 2).min(READ_BYTES_MAX);
        }
        Poll::Ready(Ok(count))
    }
}

#[cfg(test)]
mod tests;
