//! One HTTP/1.1 connection to a worker: it sends a request, reads the answer, and is reused.
//!
//! A connection has no task of its own: the task that waits for the answer drives it. So a slow client slows its engine, an
//! answer that is dropped closes its connection at once, and no byte crosses from task to task.
//!
//! What always holds: a connection is reused only if its request was sent whole, its answer was read to its end, no byte
//! followed it, and neither side announced that it closes. Whether a byte followed is asked of the kernel, just before it is reused.

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
use crate::framing::{Chunk, Framing, Step};
use crate::head::{Destination, Head, UpstreamRequest, invalid};
use crate::socket::{Socket, Unread};
use crate::tls::WorkerTls;

/// A worker has this long to accept a connection (Dynamo's `DYN_TCP_CONNECT_TIMEOUT`).
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes that are read at once, to begin with.
const READ_BYTES: usize = 8 << 10;
/// Bytes that are read at once when more keeps coming.
const READ_BYTES_MAX: usize = 128 << 10;
/// Room that must be left for a read.
const READ_BYTES_MIN: usize = 1 << 10;
/// Bytes of a body that are handed to the socket at once, so that others on the thread get their turn.
const WRITE_BYTES_MAX: usize = 256 << 10;
/// Bodies up to this size are written in one piece with their heads.
const JOINED_BYTES_MAX: usize = 4 << 10;
/// Reads in which the end of an answer must have come whose data is complete.
const END_READS_MAX: u32 = 4;
/// Bytes that are read of it at once.
const END_BYTES: usize = 64;

/// Whether another request can go out on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// It can.
    Ready,
    /// The end of the last answer has not come yet, though all its data has.
    Unfinished,
    /// It cannot: the worker closed it, or it was not kept in step.
    Unfit,
    /// It cannot: the worker sent bytes that nobody asked for.
    Surplus,
}

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

    /// Whether another request can go out on it. Notices a worker that closed it meanwhile, and bytes that came meanwhile.
    pub(crate) fn readiness(&mut self) -> Readiness {
        match self.may_be_kept() {
            Readiness::Ready => self.look(),
            Readiness::Unfinished => match self.read_end() {
                Readiness::Ready if !self.inbox.is_empty() => Readiness::Surplus,
                Readiness::Ready => self.look(),
                other => other,
            },
            other => other,
        }
    }

    /// The same without asking the kernel, for a connection whose answer has just ended.
    pub(crate) fn may_be_kept(&self) -> Readiness {
        let is_kept = self.keep_alive && self.is_sent();
        match self.framing {
            _ if !is_kept => Readiness::Unfit,
            Framing::Ended if self.inbox.is_empty() => Readiness::Ready,
            Framing::Ended => Readiness::Surplus,
            Framing::Chunks(Chunk::Data(_)) | Framing::Length(_) | Framing::UntilClose => {
                Readiness::Unfit
            }
            Framing::Chunks(_) => Readiness::Unfinished,
        }
    }

    /// Whether nothing came, not even the end.
    fn look(&mut self) -> Readiness {
        match self.socket.unread() {
            Unread::Nothing => {}
            Unread::Surplus => return Readiness::Surplus,
            Unread::End => return Readiness::Unfit,
        }
        if let Socket::Secure(_) = self.socket {
            // What was decrypted already.
            let mut cx = Context::from_waker(Waker::noop());
            if self.poll_read(&mut cx).is_ready() {
                return Readiness::Unfit;
            }
        }
        Readiness::Ready
    }

    /// Reads what is left of an answer all of whose data has come: the closing chunk, which engines send apart.
    fn read_end(&mut self) -> Readiness {
        for _ in 0..END_READS_MAX {
            match self.framing.step(&mut self.inbox) {
                Ok(Step::End) => return Readiness::Ready,
                // The second half of a line end.
                Ok(Step::Data(data)) if data.trim_ascii().is_empty() => {}
                Ok(Step::Data(_)) => return Readiness::Surplus,
                Err(_) => return Readiness::Unfit,
                Ok(Step::More) => match self.read_now() {
                    Poll::Ready(Ok(1..)) => {}
                    Poll::Ready(_) => return Readiness::Unfit,
                    Poll::Pending => return Readiness::Unfinished,
                },
            }
        }
        Readiness::Unfit
    }

    /// Reads a little of what has come, without waiting.
    fn read_now(&mut self) -> Poll<io::Result<usize>> {
        if let Socket::Secure(_) = self.socket {
            let mut cx = Context::from_waker(Waker::noop());
            return self.poll_read(&mut cx);
        }
        let mut bytes = [0; END_BYTES];
        match self.socket.read_now(&mut bytes) {
            None => Poll::Pending,
            Some(Err(error)) => Poll::Ready(Err(error)),
            Some(Ok(count)) => {
                self.inbox
                    .extend_from_slice(bytes.get(..count).unwrap_or_default());
                Poll::Ready(Ok(count))
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
        if self.inbox.capacity() > READ_BYTES && self.inbox.is_empty() {
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

    /// Whether bytes were read that are not parsed yet.
    pub(crate) fn has_unparsed(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Whether the answer was read to its end. The closing chunk is taken if it is there.
    pub(crate) fn is_at_end(&mut self) -> bool {
        self.framing.close(&mut self.inbox);
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
                let piece = self.body.get(..WRITE_BYTES_MAX).unwrap_or(&self.body);
                let parts = [IoSlice::new(&self.head), IoSlice::new(piece)];
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
