//! One connection to a worker's request port.
//!
//! Requests follow each other without waiting; acknowledgements come back in the same order and have no names. So a request
//! whose acknowledgement is overdue holds up all behind it, and the connection is given up with all of them.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kvasir_protocol::frame::Ack;
use kvasir_tasks::Tasks;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::sync::CancellationToken;

use crate::is_local_error;

/// Requests on their way whose acknowledgements have not come.
const UNACKED_MAX: usize = 4096;
/// Bytes that wait to be written before the next request is taken.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// Silence after which a connection that nobody uses is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Why a request was not acknowledged.
#[derive(Clone, Debug)]
pub(super) enum SendError {
    /// No connection could be made.
    Connect(String),
    /// This machine could not make one.
    Local(String),
    /// The connection broke, and the worker may have the request.
    Broken,
}

/// A request and who waits for its acknowledgement.
pub(super) struct Outgoing {
    pub(super) frame: Bytes,
    pub(super) ack: oneshot::Sender<Result<Ack, SendError>>,
}

/// A connection, or one that is being made. Clones are one.
#[derive(Clone)]
pub(super) struct Connection {
    requests: mpsc::Sender<Outgoing>,
    given_up: CancellationToken,
}

/// How a connection is made.
#[derive(Clone)]
pub(super) struct Connecting {
    pub(super) address: Arc<str>,
    pub(super) timeout: Duration,
    pub(super) tls: Option<TlsConnector>,
}

impl Connection {
    /// Begins to connect. Requests can be sent at once; they wait.
    pub(super) fn open(connecting: Connecting, buffer: usize, tasks: &Tasks) -> Self {
        let (requests, mut incoming) = mpsc::channel(buffer.max(1));
        let given_up = CancellationToken::new();
        let over = given_up.clone();
        tasks.background().spawn(async move {
            let error = tokio::select! {
                error = run(&connecting, &mut incoming) => error,
                () = over.cancelled() => SendError::Broken,
            };
            incoming.close();
            while let Ok(outgoing) = incoming.try_recv() {
                let _ = outgoing.ack.send(Err(error.clone()));
            }
        });
        Self { requests, given_up }
    }

    /// Whether requests can still be sent.
    pub(super) fn is_open(&self) -> bool {
        !self.requests.is_closed() && !self.given_up.is_cancelled()
    }

    /// Sends a request and waits for its acknowledgement.
    pub(super) async fn send(&self, frame: Bytes) -> Result<Ack, SendError> {
        let (ack, acked) = oneshot::channel();
        let sent = self.requests.send(Outgoing { frame, ack }).await;
        if sent.is_err() {
            return Err(SendError::Connect("the connection was just closed".into()));
        }
        acked.await.unwrap_or(Err(SendError::Broken))
    }

    /// Waits until the connection has ended.
    pub(super) async fn closed(&self) {
        self.requests.closed().await;
    }

    /// Closes the connection, with all that is on it.
    pub(super) fn give_up(&self) {
        self.given_up.cancel();
    }
}

async fn run(connecting: &Connecting, incoming: &mut mpsc::Receiver<Outgoing>) -> SendError {
    let socket = match timeout(connecting.timeout, connect(connecting)).await {
        Ok(Ok(socket)) => socket,
        Ok(Err(error)) if is_local_error(&error) => return SendError::Local(error.to_string()),
        Ok(Err(error)) => return SendError::Connect(error.to_string()),
        Err(_) => return SendError::Connect("no connection in time".into()),
    };
    serve(socket, incoming).await;
    SendError::Broken
}

trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

async fn connect(connecting: &Connecting) -> io::Result<Box<dyn Socket>> {
    let address = &*connecting.address;
    let socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    let Some(tls) = &connecting.tls else {
        return Ok(Box::new(socket));
    };
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    Ok(Box::new(tls.connect(name, socket).await?))
}

type Unacked = VecDeque<oneshot::Sender<Result<Ack, SendError>>>;

/// Writes requests and reads acknowledgements until the connection ends or nobody uses it.
async fn serve(socket: Box<dyn Socket>, incoming: &mut mpsc::Receiver<Outgoing>) {
    let (mut reader, mut writer) = tokio::io::split(socket);
    let (mut read, mut write) = (BytesMut::new(), BytesMut::new());
    let mut unacked = Unacked::new();
    loop {
        let has_room = write.len() < WRITE_BYTES_MAX && unacked.len() < UNACKED_MAX;
        let is_idle = unacked.is_empty() && write.is_empty();
        tokio::select! {
            count = reader.read_buf(&mut read) => {
                if !matches!(count, Ok(1..)) || !acknowledge(&mut read, &mut unacked) {
                    break;
                }
            }
            count = writer.write_buf(&mut write), if !write.is_empty() => {
                if !matches!(count, Ok(1..)) || (write.is_empty() && writer.flush().await.is_err()) {
                    break;
                }
            }
            next = incoming.recv(), if has_room => {
                let Some(outgoing) = next else { break };
                queue(outgoing, &mut write, &mut unacked);
                while write.len() < WRITE_BYTES_MAX && let Ok(outgoing) = incoming.try_recv() {
                    queue(outgoing, &mut write, &mut unacked);
                }
            }
            () = tokio::time::sleep(IDLE_TIMEOUT), if is_idle => break,
        }
    }
    for ack in unacked {
        let _ = ack.send(Err(SendError::Broken));
    }
}

fn queue(outgoing: Outgoing, write: &mut BytesMut, unacked: &mut Unacked) {
    // Whoever has left meanwhile wants no answer.
    if !outgoing.ack.is_closed() {
        write.extend_from_slice(&outgoing.frame);
        unacked.push_back(outgoing.ack);
    }
}

/// Hands acknowledgements to those who wait; false if there are more of them than requests, or one cannot be read.
fn acknowledge(read: &mut BytesMut, unacked: &mut Unacked) -> bool {
    loop {
        match Ack::take(read) {
            Ok(None) => return true,
            Ok(Some(ack)) => match unacked.pop_front() {
                Some(waiting) => drop(waiting.send(Ok(ack))),
                None => return false,
            },
            Err(_) => return false,
        }
    }
}
