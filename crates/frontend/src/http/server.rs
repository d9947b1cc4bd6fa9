//! Listening and serving connections, until told to stop.
//!
//! Shutdown has three steps. First the app is leaving: health says so, so that nobody sends new work, connections end
//! with their next answer, and what comes is served. Then it is draining: new work is refused, what runs goes on. When
//! the last request has ended (or the timeout has), connections are closed.

mod accept;
mod activity;
pub(crate) mod connections;

use std::convert::Infallible;
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Version};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use kvasir_tasks::{OnWake, RuntimeThreads, ThreadSlot};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

use crate::http::context::HttpContext;
use crate::http::event_loop_lag;
use crate::http::framing;
use crate::http::heads::TappedIo;
use crate::http::limits::{HTTP2_HEADER_MARGIN, Limits};
use crate::http::reply::Reply;
use crate::http::tls::ServerTls;
use accept::Client;
use activity::{Activity, CountedBody, MeteredIo, RequestGuard, TaskExecutor};

/// A connection whose place is needed and whose client sent a piece of a head has so long for the rest.
const LEAVE_GRACE: Duration = Duration::from_secs(1);
/// What is said of an idle connection whose place is needed.
const SHED: &str = "a connection is idle and its place is needed: it is closed";
/// Idle connections have this long to take their last bytes once nothing runs any more.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(2);
/// Requests that one HTTP/2 connection has under way at once.
const STREAMS_MAX: u32 = 1024;
/// Bytes of an answer that one HTTP/2 stream holds for a client that does not take them.
const STREAM_BYTES_MAX: usize = 64 << 10;

/// Bytes that the kernel keeps of an answer beyond what it has sent to the client. With megabytes, its room for more
/// would be seen minutes after a slow client took the first of them.
const UNSENT_BYTES_MAX: u32 = 64 << 10;

/// Which listener a request came in at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// Clients'; operators' too, unless they have one of their own.
    Data,
    /// Operators' own.
    Admin,
}

/// What a server serves.
pub trait Service: Send + Sync + 'static {
    /// Its limits and its state.
    fn http(&self) -> &HttpContext;

    /// Answers one request that came in at `door`.
    fn handle(
        self: &Arc<Self>,
        request: Request<Incoming>,
        door: Door,
    ) -> impl Future<Output = Reply> + Send;

    /// It is served from now on.
    fn started(self: &Arc<Self>) {}

    /// A connection ended by an error, perhaps because its head could not be read.
    fn connection_failed(&self, error: &(dyn Error + 'static));
}

/// Threads that do nothing but serve, each with connections to engines of its own.
pub fn http_threads(count: usize) -> io::Result<RuntimeThreads> {
    RuntimeThreads::start("http", count, kvasir_upstream::set_thread_slot)
}

/// An HTTP server on one address, or two.
pub struct HttpServer<S> {
    service: Arc<S>,
    address: SocketAddr,
    admin: Option<SocketAddr>,
    /// Where it listens, for a process that takes over from this one.
    sockets: Vec<(Door, OwnedFd)>,
    /// Connections are served until this is dropped.
    _threads: Option<Arc<RuntimeThreads>>,
}

impl<S: Service> HttpServer<S> {
    /// Listens on `address` and serves on the caller's runtime; port 0 takes a free one.
    pub async fn start(service: Arc<S>, address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        Self::start_with(service, listener, None)
    }

    /// The same, with threads that do nothing but serve.
    pub async fn start_on(
        threads: RuntimeThreads,
        service: Arc<S>,
        address: SocketAddr,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        Self::start_with(service, listener, Some(Arc::new(threads)))
    }

    /// The same at a socket that somebody else has opened. Must be called in a runtime.
    pub fn start_at(
        threads: RuntimeThreads,
        service: Arc<S>,
        listener: std::net::TcpListener,
    ) -> io::Result<Self> {
        Self::start_with(service, adopt(listener)?, Some(Arc::new(threads)))
    }

    fn start_with(
        service: Arc<S>,
        listener: TcpListener,
        threads: Option<Arc<RuntimeThreads>>,
    ) -> io::Result<Self> {
        let socket = listener.as_fd().try_clone_to_owned()?;
        let address = open_door(&service, Door::Data, listener, threads.clone())?;
        let http = service.http();
        if let Some(tls) = &http.tls {
            tls.follow(&http.tasks);
        }
        if let Some(threads) = &threads {
            threads.on_each(|| event_loop_lag::watch(http.metrics.clone(), http.clock));
        }
        service.started();
        Ok(Self {
            service,
            address,
            admin: None,
            sockets: vec![(Door::Data, socket)],
            _threads: threads,
        })
    }

    /// Listens on `address`, too, for operators.
    pub async fn start_admin(&mut self, address: SocketAddr) -> io::Result<()> {
        self.open_admin(TcpListener::bind(address).await?)
    }

    /// The same at a socket that somebody else has opened. Must be called in a runtime.
    pub fn start_admin_at(&mut self, listener: std::net::TcpListener) -> io::Result<()> {
        self.open_admin(adopt(listener)?)
    }

    fn open_admin(&mut self, listener: TcpListener) -> io::Result<()> {
        let socket = listener.as_fd().try_clone_to_owned()?;
        self.sockets.push((Door::Admin, socket));
        self.admin = Some(open_door(&self.service, Door::Admin, listener, None)?);
        Ok(())
    }

    /// The sockets that it listens at, by door.
    pub fn sockets(&self) -> impl Iterator<Item = (Door, BorrowedFd<'_>)> {
        self.sockets
            .iter()
            .map(|(door, socket)| (*door, socket.as_fd()))
    }

    /// Where it listens for operators, if that is elsewhere.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin
    }

    /// What it serves.
    #[must_use]
    pub fn service(&self) -> &Arc<S> {
        &self.service
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Refuses new work, waits at most `timeout` for what runs, closes. Returns how many requests were
    /// cut off.
    pub async fn shut_down(self, timeout: Duration) -> usize {
        let http = self.service.http();
        http.start_draining();
        let _ = tokio::time::timeout(timeout, http.in_flight.emptied()).await;
        let cut = http.in_flight.count();
        let closing = if cut == 0 {
            CLOSING_TIMEOUT
        } else {
            Duration::ZERO
        };
        http.tasks.shut_down(closing).await;
        cut
    }
}

/// A socket of another process, in the way that tasks use sockets.
fn adopt(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

fn open_door<S: Service>(
    service: &Arc<S>,
    door: Door,
    listener: TcpListener,
    threads: Option<Arc<RuntimeThreads>>,
) -> io::Result<SocketAddr> {
    // Accepted connections have it from their listener.
    #[cfg(target_os = "linux")]
    if let Err(error) = socket2::SockRef::from(&listener).set_tcp_notsent_lowat(UNSENT_BYTES_MAX) {
        tracing::debug!(%error, "unsent bytes of a connection are not bounded by the kernel");
    }
    let address = listener.local_addr()?;
    let tasks = &service.http().tasks;
    tasks.spawn(accept::accept_loop(
        listener,
        Arc::clone(service),
        door,
        threads,
    ));
    Ok(address)
}

/// Serves a connection on another thread than the one that accepted it.
fn serve_on<S: Service>(
    slot: ThreadSlot,
    stream: TcpStream,
    service: Arc<S>,
    client: Client,
) -> impl Future<Output = ()> {
    let stream = stream.into_std();
    async move {
        match stream.and_then(TcpStream::from_std) {
            Ok(stream) => serve(stream, service, client).await,
            Err(error) => tracing::warn!(%error, "a connection was lost between two threads"),
        }
        drop(slot);
    }
}

async fn serve<S: Service>(stream: TcpStream, service: Arc<S>, client: Client) {
    match service.http().tls.clone() {
        None => serve_connection(stream, service, &client).await,
        // In a box, so that plain connections do not carry its room.
        Some(tls) => Box::pin(serve_secure(stream, tls, service, client)).await,
    }
}

/// The same under TLS; a client has as long for its handshake as for anything else.
async fn serve_secure<S: Service>(
    stream: TcpStream,
    tls: ServerTls,
    service: Arc<S>,
    client: Client,
) {
    let timeout = service.http().limits.client_stall;
    let handshake = tokio::time::timeout(timeout, tls.acceptor().accept(stream));
    let shaken = tokio::select! {
        shaken = handshake => shaken,
        () = client.open.activity.leaves() => return tracing::debug!("{SHED}"),
    };
    match shaken {
        Ok(Ok(stream)) => serve_connection(stream, service, &client).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS with a client"),
        Err(_) => tracing::debug!("client stalled in its TLS handshake"),
    }
}

async fn serve_connection<S: Service>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    service: Arc<S>,
    client: &Client,
) {
    let (http, door) = (service.http(), client.door);
    let (limits, tasks) = (http.limits, http.tasks.clone());
    let activity = Arc::clone(&client.open.activity);
    let (counted, served) = (Arc::clone(&activity), Arc::clone(&service));
    let answer = service_fn(move |mut request: Request<Incoming>| {
        framing::note_doubt(&mut request, &counted.heads);
        let is_http1 = request.version() <= Version::HTTP_11;
        let guard = RequestGuard::enter(&counted, &request);
        let service = Arc::clone(&served);
        async move {
            // In a box of its own: the library keeps the room of this future for as long as the connection is
            // open, and a stream is open long after its head was made.
            let mut reply = Box::pin(service.handle(request, door)).await;
            if is_http1 && service.http().is_closing() {
                framing::close_after(&mut reply);
            }
            Ok::<_, Infallible>(reply.map(|body| CountedBody { body, guard }))
        }
    });
    let on_tasks = TaskExecutor {
        tasks: tasks.clone(),
        activity: Arc::clone(&activity),
    };
    let builder = http_builder(on_tasks, &limits);
    let heads = Arc::clone(&activity.heads);
    let stream = MeteredIo::new(TappedIo::new(stream, heads), Arc::clone(&activity));
    let connection = builder.serve_connection(TokioIo::new(stream), answer);
    tokio::pin!(connection);
    let on_reset = || http.client_stalled("its stream is reset");
    let stalled = activity.stalled(limits.client_stall, on_reset);
    tokio::pin!(stalled);
    let (mut stage, mut leave) = (ShutdownStage::Serving, LeaveStage::Stays);
    let outcome = loop {
        let (next, leaves) = (stage.end(http), leave.end(&activity));
        let event = std::pin::pin!(async {
            tokio::select! {
                cut = &mut stalled => ConnectionEvent::Stalled(cut),
                () = next => ConnectionEvent::Stage,
                () = leaves => ConnectionEvent::Leave,
            }
        });
        match OnWake::new(event).interrupt(connection.as_mut()).await {
            Ok(outcome) => break outcome,
            Err(ConnectionEvent::Stalled(cut)) => return connection_stalled(http, cut),
            Err(ConnectionEvent::Stage) => stage = stage.next(),
            Err(ConnectionEvent::Leave) => {
                leave = leave.next();
                if leave == LeaveStage::Overdue && activity.idle_since().is_some() {
                    return tracing::debug!("{SHED}");
                }
                connection.as_mut().graceful_shutdown();
            }
        }
        // Connections of HTTP/1 end with their next answer while the server leaves; when it drains, all of them do.
        if stage == ShutdownStage::Draining
            || (stage == ShutdownStage::Leaving && activity.is_http2())
        {
            connection.as_mut().graceful_shutdown();
        }
    };
    if let Err(error) = outcome {
        service.connection_failed(&*error);
    }
}

/// What happens to a connection beside its requests.
enum ConnectionEvent {
    /// Its client does not move; an answer is cut off by that or not.
    Stalled(bool),
    /// The server's end has come nearer.
    Stage,
    /// Its place is needed, or was for a while.
    Leave,
}

/// How far a connection is whose place is needed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LeaveStage {
    Stays,
    /// It ends with the request that just came, or at once if none did.
    Leaves,
    /// Nothing but a piece of a head came.
    Overdue,
}

impl LeaveStage {
    fn next(self) -> Self {
        match self {
            Self::Stays => Self::Leaves,
            Self::Leaves | Self::Overdue => Self::Overdue,
        }
    }

    /// Waits for the next stage.
    async fn end(self, activity: &Activity) {
        match self {
            Self::Stays => activity.leaves().await,
            Self::Leaves => tokio::time::sleep(LEAVE_GRACE).await,
            Self::Overdue => std::future::pending().await,
        }
    }
}

/// How far the server's end has come, as a connection sees it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ShutdownStage {
    Serving,
    Leaving,
    Draining,
}

impl ShutdownStage {
    fn next(self) -> Self {
        match self {
            Self::Serving => Self::Leaving,
            Self::Leaving | Self::Draining => Self::Draining,
        }
    }

    /// Waits for the next stage.
    async fn end(self, http: &HttpContext) {
        match self {
            Self::Serving => http.closing().await,
            Self::Leaving => http.tasks.draining().await,
            Self::Draining => std::future::pending().await,
        }
    }
}

fn http_builder(on_tasks: TaskExecutor, limits: &Limits) -> auto::Builder<TaskExecutor> {
    let mut builder = auto::Builder::new(on_tasks);
    builder
        .http1()
        .timer(TokioTimer::new())
        // `Activity::stalled` watches the head too, without setting a timer for each request.
        .header_read_timeout(None)
        .max_buf_size(limits.header_bytes_max);
    let header_bytes = u32::try_from(limits.header_bytes_max).unwrap_or(u32::MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(header_bytes.saturating_mul(HTTP2_HEADER_MARGIN))
        .max_concurrent_streams(STREAMS_MAX)
        .max_send_buf_size(STREAM_BYTES_MAX)
        .keep_alive_interval(limits.client_stall);
    builder
}

/// The client left its connection as it was for too long; `cut`: with an answer on it.
fn connection_stalled(http: &HttpContext, cut: bool) {
    match cut {
        true => http.client_stalled("its connection is closed"),
        false => tracing::debug!("a connection is idle for too long: it is closed"),
    }
}
