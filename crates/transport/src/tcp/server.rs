//! The worker's side of requests over TCP.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use kvasir_protocol::frame::{Ack, FRAME_BYTES_MAX, RequestFrame};
use kvasir_tasks::Tasks;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::listen::BoundedListener;
use crate::{Dispatcher, EndpointHandler, ServedEndpoint};

/// Longest time for a handshake of TLS.
const TLS_TIMEOUT: Duration = Duration::from_secs(10);

/// Where and how a worker takes requests.
#[derive(Clone)]
pub struct ServerOptions {
    /// Where the listener is.
    pub bind: SocketAddr,
    /// Calls under way at once; one more is told that the worker is at capacity.
    pub capacity: usize,
    /// Largest request.
    pub message_bytes_max: usize,
    /// Connections at once; one more is closed.
    pub connections_max: usize,
    /// Takes secure connections, and no others.
    pub tls: Option<TlsAcceptor>,
}

impl ServerOptions {
    /// Listens there, with the usual limits.
    #[must_use]
    pub const fn new(bind: SocketAddr) -> Self {
        Self {
            bind,
            capacity: 16_384,
            message_bytes_max: FRAME_BYTES_MAX,
            connections_max: 4096,
            tls: None,
        }
    }
}

/// Takes requests over TCP for the endpoints of one process. Clones are one; the listener ends with its tasks.
#[derive(Clone)]
pub struct EndpointServer {
    dispatcher: Dispatcher,
    address: SocketAddr,
}

impl EndpointServer {
    /// Listens.
    pub async fn bind(options: ServerOptions, tasks: &Tasks) -> io::Result<Self> {
        let listener = TcpListener::bind(options.bind).await?;
        let server = Self {
            dispatcher: Dispatcher::new(options.capacity, tasks),
            address: listener.local_addr()?,
        };
        let accepting = accept(listener, server.dispatcher.clone(), options, tasks.clone());
        tasks.background().spawn(accepting);
        Ok(server)
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The endpoints and the calls under way.
    #[must_use]
    pub const fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// Serves `path`, such as `52156b15ad6774b/dynamo/backend/generate`, until what it returns is dropped.
    #[must_use]
    pub fn serve(&self, path: &str, handler: Arc<dyn EndpointHandler>) -> ServedEndpoint {
        self.dispatcher.serve(path, handler)
    }
}

async fn accept(
    listener: TcpListener,
    dispatcher: Dispatcher,
    options: ServerOptions,
    tasks: Tasks,
) {
    let listener = BoundedListener::new(listener, options.connections_max);
    loop {
        let (socket, permit) = listener.accept().await;
        let (dispatcher, options) = (dispatcher.clone(), options.clone());
        tasks.background().spawn(async move {
            let _ = serve(socket, &dispatcher, &options).await;
            drop(permit);
        });
    }
}

async fn serve(
    socket: TcpStream,
    dispatcher: &Dispatcher,
    options: &ServerOptions,
) -> io::Result<()> {
    socket.set_nodelay(true)?;
    match &options.tls {
        None => requests(socket, dispatcher, options.message_bytes_max).await,
        Some(tls) => {
            let socket = timeout(TLS_TIMEOUT, tls.accept(socket)).await??;
            requests(socket, dispatcher, options.message_bytes_max).await
        }
    }
}

/// Takes one request after the other. One that cannot be read ends the connection: where the next begins is not known.
async fn requests<S: AsyncRead + AsyncWrite + Unpin>(
    mut socket: S,
    dispatcher: &Dispatcher,
    max: usize,
) -> io::Result<()> {
    let (mut read, mut acks) = (BytesMut::new(), BytesMut::new());
    loop {
        while let Some(request) = RequestFrame::take(&mut read, max).map_err(io::Error::other)? {
            let ack = match std::str::from_utf8(&request.path) {
                Ok(path) => dispatcher.accept(path, request.payload),
                Err(_) => Ack::unknown_endpoint("that is no text"),
            };
            ack.encode(&mut acks);
        }
        if !acks.is_empty() {
            socket.write_all_buf(&mut acks).await?;
            socket.flush().await?;
        }
        if socket.read_buf(&mut read).await? == 0 {
            return Ok(());
        }
    }
}
