//! One connection to a worker, and the answer that comes on it.
//!
//! A line has no task of its own: whoever waits for its answer drives it. So a slow client slows its engine, an
//! answer that nobody waits for closes its connection at once, and no byte crosses from task to task.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::futures::OwnedNotified;

use crate::WorkerAddress;
use crate::pool::Pool;
use crate::tls::WorkerTls;
use crate::wire::Wire;

/// A worker has this long to accept a connection (`DYN_TCP_CONNECT_TIMEOUT` of the seeds).
const CONNECT_PATIENCE: Duration = Duration::from_secs(3);

/// Why an engine gave no answer, or not all of it.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// It was removed while asked.
    #[error("the worker was taken away")]
    Gone,
    /// It does not accept connections in time.
    #[error("no connection within {} s", CONNECT_PATIENCE.as_secs())]
    ConnectTimeout,
    /// It cannot be connected to.
    #[error("cannot connect: {0}")]
    Connect(#[source] std::io::Error),
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(#[source] hyper::Error),
    /// The answer has no end.
    #[error("its stream ended before its answer did")]
    Unfinished,
    /// The path makes no address.
    #[error("the path makes no address: {0}")]
    Path(#[source] http::uri::InvalidUri),
    /// Nothing came in the time that it had.
    #[error("no answer in time")]
    AnswerTimeout,
    /// A stream stood still for so long.
    #[error("nothing came for {} s", .0.as_secs())]
    Silent(Duration),
    /// It refused.
    #[error("it answered {0}")]
    Status(StatusCode),
    /// It says that it failed.
    #[error("its engine failed")]
    Failed,
    /// More came than is read.
    #[error("its answer is too long")]
    TooLong,
}

/// A connection that is idle, or on which one answer is under way.
pub(crate) struct Line {
    sender: SendRequest<Full<Bytes>>,
    /// None once it has ended.
    connection: Option<Connection<TokioIo<Wire>, Full<Bytes>>>,
}

impl Line {
    /// A new connection.
    pub(crate) async fn open(
        address: &WorkerAddress,
        tls: &WorkerTls,
    ) -> Result<Self, UpstreamError> {
        let connect = Wire::open(address, tls);
        let stream = match tokio::time::timeout(CONNECT_PATIENCE, connect).await {
            Err(_) => return Err(UpstreamError::ConnectTimeout),
            Ok(stream) => stream.map_err(UpstreamError::Connect)?,
        };
        let (sender, connection) = http1::Builder::new()
            .handshake(TokioIo::new(stream))
            .await
            .map_err(UpstreamError::Broken)?;
        Ok(Self {
            sender,
            connection: Some(connection),
        })
    }

    /// Whether a request can go out on it. Notices an engine that closed it meanwhile.
    pub(crate) fn is_ready(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.connection.is_some() && self.sender.is_ready()
    }

    /// Sends `request` and waits for the head of the answer; dropping the future and the line cancels it.
    pub(crate) async fn ask(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, UpstreamError> {
        let mut answer = std::pin::pin!(self.sender.send_request(request));
        let head = poll_fn(|cx| {
            self.drive(cx);
            answer.as_mut().poll(cx)
        });
        head.await.map_err(UpstreamError::Broken)
    }

    fn drive(&mut self, cx: &mut Context<'_>) {
        let Some(connection) = &mut self.connection else {
            return;
        };
        if let Poll::Ready(outcome) = Pin::new(connection).poll(cx) {
            if let Err(error) = outcome {
                tracing::debug!(%error, "connection to a worker ended");
            }
            self.connection = None;
        }
    }
}

/// The body of an engine's answer. Read to its end, its connection goes back to the pool; dropped before, the
/// connection is closed and the engine stops working on it.
pub struct UpstreamBody {
    incoming: Incoming,
    line: Option<Line>,
    pool: Pool,
    place: Option<OwnedSemaphorePermit>,
    /// Who is woken when the pool is cut; made when there is first something to wait for.
    cut: Option<(Pin<Box<OwnedNotified>>, Waker)>,
}

impl UpstreamBody {
    pub(crate) fn new(
        incoming: Incoming,
        line: Line,
        pool: Pool,
        place: Option<OwnedSemaphorePermit>,
    ) -> Self {
        Self {
            incoming,
            line: Some(line),
            pool,
            place,
            cut: None,
        }
    }

    /// The next piece; `None` at the end.
    pub fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        loop {
            let Poll::Ready(frame) = self.poll_frame(cx) else {
                if self.is_cut(cx) {
                    self.line = None;
                    return Poll::Ready(Some(Err(UpstreamError::Gone)));
                }
                return Poll::Pending;
            };
            match frame {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
                Some(Err(error)) => {
                    self.line = None;
                    return Poll::Ready(Some(Err(UpstreamError::Broken(error))));
                }
                None => {
                    if let Some(line) = self.line.take() {
                        self.pool.give_back(line);
                    }
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        // The first look says that more is wanted; only then does the connection read on.
        if let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        if let Some(line) = &mut self.line {
            line.drive(cx);
        }
        Pin::new(&mut self.incoming).poll_frame(cx)
    }

    /// Whether the pool is cut; if not, `cx` is woken when it is.
    fn is_cut(&mut self, cx: &mut Context<'_>) -> bool {
        // Whoever polls is nearly always the same task, which is registered already.
        let registered = |(_, waker): &(_, Waker)| waker.will_wake(cx.waker());
        if !self.cut.as_ref().is_some_and(registered) {
            let mut cut = Box::pin(self.pool.cutting());
            let _ = cut.as_mut().poll(cx);
            self.cut = Some((cut, cx.waker().clone()));
        }
        self.pool.is_cut()
    }

    /// Closes the connection, as if it were dropped.
    pub fn close(&mut self) {
        self.line = None;
        self.place = None;
    }

    /// All of it, if it is no longer than `limit` bytes.
    pub async fn collect(mut self, limit: usize) -> Result<Bytes, UpstreamError> {
        let mut whole = BytesMut::new();
        while let Some(data) = poll_fn(|cx| self.poll_data(cx)).await {
            let data = data?;
            if whole.len() + data.len() > limit {
                return Err(UpstreamError::TooLong);
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }
}
