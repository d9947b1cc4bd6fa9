//! Listening and serving connections, until told to stop.
//!
//! Shutdown has two steps. First the app is marked as draining: health says so, new work is refused, what
//! runs goes on. When the last request has ended (or patience has), connections are closed.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use kvasir_transport::Tasks;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::App;

/// Connections that are open at once; the next ones wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 32_768;
/// A client has this long to send its headers.
const HEADERS_PATIENCE: Duration = Duration::from_secs(30);
/// Pause after `accept` failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);
/// Idle connections have this long to take their last bytes once nothing runs any more.
const CLOSING_PATIENCE: Duration = Duration::from_secs(2);
/// Bytes that one HTTP/1 connection buffers of its headers.
const HEADER_BYTES_MAX: usize = 64 * 1024;

/// An HTTP server on one address.
pub struct Server {
    app: Arc<App>,
    tasks: Tasks,
    address: SocketAddr,
}

impl Server {
    /// Listens on `address` and serves `app`; port 0 takes a free one.
    pub async fn start(app: Arc<App>, address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let tasks = app.tasks().clone();
        tasks.spawn(accept_loop(listener, Arc::clone(&app), tasks.clone()));
        Ok(Self {
            app,
            tasks,
            address,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Refuses new work, waits at most `patience` for what runs, closes. Returns how many requests were
    /// cut off.
    pub async fn shut_down(self, patience: Duration) -> usize {
        self.app.start_draining();
        let _ = tokio::time::timeout(patience, self.app.in_flight().emptied()).await;
        let cut = self.app.in_flight().count();
        let closing = if cut == 0 {
            CLOSING_PATIENCE
        } else {
            Duration::ZERO
        };
        self.tasks.shut_down(closing).await;
        cut
    }
}

async fn accept_loop(listener: TcpListener, app: Arc<App>, tasks: Tasks) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            () = tasks.draining() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _peer)) => {
                let connection = serve_connection(stream, Arc::clone(&app), tasks.clone(), place);
                tasks.spawn(connection);
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed; waiting before the next try");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    app: Arc<App>,
    tasks: Tasks,
    _place: OwnedSemaphorePermit,
) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Request<Incoming>| {
        let app = Arc::clone(&app);
        async move { Ok::<_, Infallible>(app.handle(request).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_PATIENCE)
        .max_buf_size(HEADER_BYTES_MAX);
    builder.http2().timer(TokioTimer::new());
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = tasks.draining() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "connection ended early");
    }
}
