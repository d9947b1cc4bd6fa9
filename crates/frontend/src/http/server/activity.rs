//! Whether a client takes what it is sent: of a connection, and of each of its HTTP/2 streams.
//!
//! Progress is what the client takes, not what is handed to the HTTP library, which holds a whole answer if it gets
//! one. On a connection the socket says it ([`MeteredIo`]); on a stream of HTTP/2 it is the library that asks for the
//! next piece, so pieces are small there.
//!
//! What always holds: a stall is seen by looking twice, so that requests set no timers. A stream whose client does not
//! take it is reset alone; a connection is ended only if nothing moves on it and nothing but its client is waited for.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::rt::Executor;
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_types::Time;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::http::heads::Heads;
use crate::http::reply::{Cut, ReplyBody};

/// Bytes that an HTTP/2 stream hands over at once: what a client takes within its timeout, or it has stalled.
const PIECE_BYTES_MAX: usize = 16 << 10;

/// What one client's connection does.
#[derive(Debug)]
pub(super) struct Activity {
    /// What it sent since the last answer ended.
    pub(super) heads: Arc<Heads>,
    /// Requests that came. Only the connection's own task writes it.
    begun: AtomicU64,
    /// Requests whose answers are complete, or were left.
    ended: AtomicU64,
    /// Times that the socket was full, and that it took more. Only the connection's own task writes it.
    turns: AtomicU64,
    /// The socket is full: what is to be written waits for the client.
    is_full: AtomicBool,
    streams: Mutex<Streams>,
    clock: Clock,
    /// When it came, or its last request ended.
    rested_at: AtomicU64,
    /// Its place is needed: it is closed unless a request came.
    leaving: AtomicBool,
    asked_to_leave: Notify,
}

/// The HTTP/2 streams that are open.
#[derive(Debug, Default)]
struct Streams {
    open: HashMap<u64, Stream>,
    /// Whether there was ever one.
    had_any: bool,
    /// The one that came last, until its task is known.
    without_task: Option<u64>,
}

/// What the looks at one stream compare.
#[derive(Debug)]
struct Stream {
    pace: Arc<Pace>,
    /// What the last look saw.
    seen: u64,
    /// Where its answer is made and sent.
    task: Option<AbortHandle>,
}

/// How far an answer is: twice the number of times that it was asked for its next piece, and one more while a piece
/// was handed over that is not taken. Only the stream's own task writes it.
#[derive(Debug, Default)]
struct Pace(AtomicU64);

impl Pace {
    fn step(&self, handed: bool) {
        let steps = self.0.load(Ordering::Relaxed) | 1;
        let now = steps.wrapping_add(1) | u64::from(handed);
        self.0.store(now, Ordering::Relaxed);
    }
}

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ConnectionState {
    begun: u64,
    ended: u64,
    turns: u64,
}

impl Activity {
    pub(super) fn new(heads: Arc<Heads>, clock: Clock) -> Self {
        Self {
            clock,
            rested_at: AtomicU64::new(clock.now().as_nanos()),
            leaving: AtomicBool::new(false),
            asked_to_leave: Notify::new(),
            heads,
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            streams: Mutex::default(),
        }
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> ConnectionState {
        // Ends first: no request is seen to end that was not seen to begin.
        let ended = self.ended.load(Ordering::Acquire);
        ConnectionState {
            begun: self.begun.load(Ordering::Relaxed),
            ended,
            turns: self.turns.load(Ordering::Relaxed),
        }
    }

    /// Since when nothing is asked on it; none while something is.
    pub(super) fn idle_since(&self) -> Option<Time> {
        let seen = self.seen();
        let since = Time::from_nanos(self.rested_at.load(Ordering::Relaxed));
        (seen.begun == seen.ended).then_some(since)
    }

    /// Its place is needed.
    pub(super) fn ask_to_leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
        self.asked_to_leave.notify_one();
    }

    /// Whether it was asked to.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Waits until its place is needed.
    pub(super) async fn leaves(&self) {
        self.asked_to_leave.notified().await;
    }

    /// Waits until nothing has moved for `timeout`, at most for twice as long, and only the client could change that.
    /// Streams that stall meanwhile are reset. Says whether an answer is cut off by the end of the connection.
    pub(super) async fn stalled(&self, timeout: Duration, on_reset: impl Fn()) -> bool {
        let mut seen = self.seen();
        loop {
            tokio::time::sleep(timeout).await;
            for task in self.look_at_streams() {
                on_reset();
                task.abort();
            }
            let now = self.seen();
            let is_idle = now.begun == now.ended;
            let is_full = self.is_full.load(Ordering::Relaxed);
            if now == seen && (is_idle || is_full) {
                return is_full || !is_idle;
            }
            seen = now;
        }
    }

    /// The tasks of the streams whose clients took nothing since the last look.
    fn look_at_streams(&self) -> Vec<AbortHandle> {
        let mut stalled = Vec::new();
        for stream in self.streams().open.values_mut() {
            let now = stream.pace.0.load(Ordering::Relaxed);
            if now == stream.seen && now & 1 == 1 {
                stalled.extend(stream.task.take());
            }
            stream.seen = now;
        }
        stalled
    }

    /// Whether the client has asked anything by HTTP/2.
    pub(super) fn is_http2(&self) -> bool {
        self.streams().had_any
    }

    /// The socket took something, or it is full.
    fn turned(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::Relaxed);
        let turns = self.turns.load(Ordering::Relaxed);
        self.turns.store(turns.wrapping_add(1), Ordering::Relaxed);
    }
}

/// One request from its head to the end of its answer.
pub(super) struct RequestGuard {
    activity: Arc<Activity>,
    /// None on HTTP/1, where the socket says it all.
    stream: Option<Box<OneStream>>,
}

/// What a stream's own task knows of it.
struct OneStream {
    key: u64,
    pace: Arc<Pace>,
    /// What was too much to be handed over at once.
    rest: Bytes,
}

impl RequestGuard {
    /// Called by the connection's own task.
    pub(super) fn enter<B>(activity: &Arc<Activity>, request: &Request<B>) -> Self {
        let key = activity.begun.load(Ordering::Relaxed);
        activity.begun.store(key.wrapping_add(1), Ordering::Relaxed);
        activity.heads.ended();
        let stream = (request.version() > Version::HTTP_11).then(|| {
            let pace = Arc::<Pace>::default();
            let mut streams = activity.streams();
            streams.had_any = true;
            streams.without_task = Some(key);
            let stream = Stream {
                pace: Arc::clone(&pace),
                seen: 0,
                task: None,
            };
            streams.open.insert(key, stream);
            let rest = Bytes::new();
            Box::new(OneStream { key, pace, rest })
        });
        Self {
            activity: Arc::clone(activity),
            stream,
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        match &self.stream {
            // Its end is the beginning of the next one.
            None => self.activity.heads.next(),
            Some(stream) => {
                self.activity.streams().open.remove(&stream.key);
            }
        }
        let activity = &self.activity;
        let now = activity.clock.now().as_nanos();
        activity.rested_at.store(now, Ordering::Relaxed);
        activity.ended.fetch_add(1, Ordering::Release);
    }
}

/// An answer's body that notes when pieces of it are taken.
pub(super) struct CountedBody {
    pub(super) body: ReplyBody,
    pub(super) guard: RequestGuard,
}

impl OneStream {
    fn poll_piece(
        &mut self,
        body: &mut ReplyBody,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        if self.rest.is_empty() {
            let frame = Pin::new(body).poll_frame(cx);
            match frame.map_ok(Frame::into_data) {
                Poll::Ready(Some(Ok(Ok(data)))) => self.rest = data,
                Poll::Ready(Some(Ok(Err(frame)))) => return Poll::Ready(Some(Ok(frame))),
                Poll::Ready(Some(Err(cut))) => return Poll::Ready(Some(Err(cut))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => {
                    self.pace.step(false);
                    return Poll::Pending;
                }
            }
        }
        let piece = self.rest.split_to(self.rest.len().min(PIECE_BYTES_MAX));
        self.pace.step(true);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }
}

impl Body for CountedBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let Self { body, guard } = &mut *self;
        match &mut guard.stream {
            None => Pin::new(body).poll_frame(cx),
            Some(stream) => stream.poll_piece(body, cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        let has_rest = |stream: &OneStream| !stream.rest.is_empty();
        self.body.is_end_stream() && !self.guard.stream.as_deref().is_some_and(has_rest)
    }

    /// Asked once, before the first piece.
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Runs what the library spawns among our tasks: the streams of HTTP/2, each right after its request came.
#[derive(Clone)]
pub(super) struct TaskExecutor {
    pub(super) tasks: Tasks,
    pub(super) activity: Arc<Activity>,
}

impl<F> Executor<F> for TaskExecutor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        let task = self.tasks.spawn(future).abort_handle();
        let mut streams = self.activity.streams();
        // One that has ended already is not open any more.
        if let Some(key) = streams.without_task.take()
            && let Some(stream) = streams.open.get_mut(&key)
        {
            stream.task = Some(task);
        }
    }
}

/// A connection that notes when its socket is full and when it takes more.
pub(super) struct MeteredIo<S> {
    stream: S,
    activity: Arc<Activity>,
    is_full: bool,
}

impl<S> MeteredIo<S> {
    pub(super) fn new(stream: S, activity: Arc<Activity>) -> Self {
        Self {
            stream,
            activity,
            is_full: false,
        }
    }

    fn note<T>(&mut self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if self.is_full != written.is_pending() {
            self.is_full = written.is_pending();
            self.activity.turned(self.is_full);
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for MeteredIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for MeteredIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Under TLS the last bytes are written here.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.note(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
