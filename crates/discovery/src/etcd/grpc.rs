//! Calls of gRPC over one HTTP/2 connection.
//!
//! Answers one question: how does a message reach etcd, and its answers come back? A call is a POST whose body is one message behind
//! five bytes; its answers come likewise, and the status behind the last one. Watches keep their side of the call open.
//!
//! What always holds: an answer is at most [`MESSAGE_BYTES_MAX`] long; a connection whose other end vanished is noticed by its pings.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, TE};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::rt::Executor;
use hyper_util::rt::{TokioIo, TokioTimer};
use kvasir_tasks::Tasks;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

/// Longest message that is read. A page of keys is the longest there is.
const MESSAGE_BYTES_MAX: usize = 256 << 20;
/// Longest time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest time for an answer that comes at once.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two pings, and how long one may stay unanswered.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    /// Nobody is there, or the connection broke.
    #[error("{0}")]
    Unreachable(String),
    /// etcd says no.
    #[error("{message} (gRPC status {code})")]
    Status { code: u32, message: String },
}

impl CallError {
    /// What was asked for is not there.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Status { code: 5, .. })
    }

    /// Whoever asked has to say again who he is.
    pub(super) fn is_unauthenticated(&self) -> bool {
        match self {
            Self::Status { code, message } => *code == 16 || message.contains("invalid auth token"),
            Self::Unreachable(_) => false,
        }
    }
}

fn unreachable(error: impl std::fmt::Display) -> CallError {
    CallError::Unreachable(error.to_string())
}

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) tls: bool,
    pub(super) host: String,
    pub(super) port: u16,
}

/// One server, connected when it is first needed. Clones are one.
#[derive(Clone)]
pub(super) struct Channel {
    shared: Arc<Shared>,
}

struct Shared {
    addresses: Vec<Address>,
    tls: Option<TlsConnector>,
    tasks: Tasks,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connection: Option<SendRequest<MessageBody>>,
    /// Which address is tried next.
    next: usize,
    token: Option<HeaderValue>,
}

impl Channel {
    pub(super) fn new(addresses: Vec<Address>, tls: Option<TlsConnector>, tasks: &Tasks) -> Self {
        let shared = Shared {
            addresses,
            tls,
            tasks: tasks.clone(),
            state: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Every call carries it from now on.
    pub(super) fn set_token(&self, token: &str) {
        self.state().token = HeaderValue::from_str(token).ok();
    }

    /// One message for one.
    pub(super) async fn call(
        &self,
        path: &'static str,
        message: Vec<u8>,
    ) -> Result<Bytes, CallError> {
        let answer = async {
            let mut answers = self.open(path, message, false).await?;
            let first = answers.next().await?;
            first.ok_or_else(|| unreachable("etcd ended the call without an answer"))
        };
        let answer = timeout(CALL_TIMEOUT, answer).await;
        answer.unwrap_or_else(|_| Err(unreachable("etcd does not answer")))
    }

    /// One message, and whatever comes; the call stays open.
    pub(super) async fn stream(
        &self,
        path: &'static str,
        message: Vec<u8>,
    ) -> Result<Answers, CallError> {
        let opened = timeout(CALL_TIMEOUT, self.open(path, message, true)).await;
        opened.unwrap_or_else(|_| Err(unreachable("etcd does not answer")))
    }

    async fn open(
        &self,
        path: &'static str,
        message: Vec<u8>,
        stays_open: bool,
    ) -> Result<Answers, CallError> {
        let mut connection = self.connection().await?;
        let token = self.state().token.clone();
        let mut request = Request::post(format!("http://etcd{path}"))
            .header(CONTENT_TYPE, "application/grpc")
            .header(TE, "trailers")
            .body(MessageBody::new(&message, stays_open))
            .map_err(unreachable)?;
        if let Some(token) = token {
            request.headers_mut().insert("token", token);
        }
        let response = connection
            .send_request(request)
            .await
            .map_err(unreachable)?;
        Answers::new(response)
    }

    /// The connection, made if there is none.
    async fn connection(&self) -> Result<SendRequest<MessageBody>, CallError> {
        let (known, first) = {
            let state = self.state();
            (state.connection.clone(), state.next)
        };
        if let Some(known) = known.filter(|known| !known.is_closed()) {
            return Ok(known);
        }
        let count = self.shared.addresses.len().max(1);
        let mut failed = unreachable("no address of etcd is given");
        for turn in first..first + count {
            let Some(address) = self.shared.addresses.get(turn % count) else {
                break;
            };
            let connected = timeout(CONNECT_TIMEOUT, self.connect(address)).await;
            match connected.unwrap_or_else(|_| Err(unreachable("no connection in time"))) {
                Ok(connection) => {
                    let mut state = self.state();
                    state.next = turn;
                    state.connection = Some(connection.clone());
                    return Ok(connection);
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    async fn connect(&self, address: &Address) -> Result<SendRequest<MessageBody>, CallError> {
        let host = address.host.as_str();
        let socket = TcpStream::connect((host, address.port))
            .await
            .map_err(unreachable)?;
        let _ = socket.set_nodelay(true);
        let mut builder = Builder::new(OnTasks(self.shared.tasks.clone()));
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true);
        let Some(tls) = self.shared.tls.as_ref().filter(|_| address.tls) else {
            let (sender, connection) = builder
                .handshake(TokioIo::new(socket))
                .await
                .map_err(unreachable)?;
            self.shared.tasks.spawn(connection);
            return Ok(sender);
        };
        let name = ServerName::try_from(host.to_owned()).map_err(unreachable)?;
        let socket = tls.connect(name, socket).await.map_err(unreachable)?;
        let (sender, connection) = builder
            .handshake(TokioIo::new(socket))
            .await
            .map_err(unreachable)?;
        self.shared.tasks.spawn(connection);
        Ok(sender)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The answers of one call.
pub(super) struct Answers {
    body: Incoming,
    unread: BytesMut,
}

impl Answers {
    fn new(response: Response<Incoming>) -> Result<Self, CallError> {
        let status = response.status();
        if status != StatusCode::OK {
            return Err(unreachable(format!("HTTP status {status}: is this etcd?")));
        }
        // A call that fails at once has its status in the head.
        check(response.headers())?;
        Ok(Self {
            body: response.into_body(),
            unread: BytesMut::new(),
        })
    }

    /// The next message; none when the call has ended well.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, CallError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            let frame = match self.body.frame().await {
                None => return Ok(None),
                Some(frame) => frame.map_err(unreachable)?,
            };
            match frame.into_data() {
                Ok(data) => self.unread.extend_from_slice(&data),
                Err(frame) => {
                    if let Ok(trailers) = frame.into_trailers() {
                        check(&trailers)?;
                    }
                }
            }
        }
    }

    /// A message that has come to its end.
    fn take(&mut self) -> Result<Option<Bytes>, CallError> {
        let Some(head) = self.unread.get(..5) else {
            return Ok(None);
        };
        let mut head = head;
        let is_packed = head.get_u8() != 0;
        let length = head.get_u32() as usize;
        if is_packed || length > MESSAGE_BYTES_MAX {
            return Err(unreachable(format!(
                "etcd sent a message of {length} bytes"
            )));
        }
        if self.unread.len() < 5 + length {
            return Ok(None);
        }
        self.unread.advance(5);
        Ok(Some(self.unread.split_to(length).freeze()))
    }
}

/// What the fields at the end of a call say.
fn check(fields: &HeaderMap) -> Result<(), CallError> {
    let text = |name: &str| fields.get(name).and_then(|value| value.to_str().ok());
    match text("grpc-status") {
        None | Some("0") => Ok(()),
        Some(code) => Err(CallError::Status {
            code: code.parse().unwrap_or(2),
            message: text("grpc-message").unwrap_or("no reason given").to_owned(),
        }),
    }
}

/// One message, and then the end or nothing.
struct MessageBody {
    message: Option<Bytes>,
    stays_open: bool,
}

impl MessageBody {
    fn new(message: &[u8], stays_open: bool) -> Self {
        let mut framed = BytesMut::with_capacity(5 + message.len());
        framed.put_u8(0);
        framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
        framed.extend_from_slice(message);
        Self {
            message: Some(framed.freeze()),
            stays_open,
        }
    }
}

impl Body for MessageBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match (self.message.take(), self.stays_open) {
            (Some(message), _) => Poll::Ready(Some(Ok(Frame::data(message)))),
            (None, false) => Poll::Ready(None),
            // Nothing more is said: the call ends when its answers are dropped.
            (None, true) => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.message.is_none() && !self.stays_open
    }
}

/// Where a connection's own work runs.
#[derive(Clone)]
struct OnTasks(Tasks);

impl<F> Executor<F> for OnTasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, work: F) {
        self.0.spawn(work);
    }
}
