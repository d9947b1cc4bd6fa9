//! Requests to the API server.
//!
//! Answers one question: how does a request reach the API server, and its answer come back? JSON over HTTP/1.1; a watch is an answer
//! that does not end, one JSON object a line. One connection serves one listing and the watch behind it, or one change.
//!
//! What always holds: an answer, a line and every wait are bounded; a server that vanished without a word is noticed by the keep-alive
//! of the socket; credentials are read anew for each connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, RETRY_AFTER, USER_AGENT};
use http::{HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::rt::{Read, Write};
use hyper_util::rt::TokioIo;
use kvasir_tasks::Tasks;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::access::{Access, KubernetesOptions, KubernetesOptionsError, ServerAddress};
use super::object::{BadAnswer, Status};

/// Longest answer that is read: a page of a list.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// Longest refusal that is read.
const REFUSAL_BYTES_MAX: usize = 64 << 10;
/// Longest line of a watch; the API server takes no object of more than 1.5 MB.
const LINE_BYTES_MAX: usize = 8 << 20;
/// Longest time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for an answer, or for a watch to begin.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest pause that a server may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// When a silent connection is first asked whether it lives, how often again, and how many silences end it.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(10);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEPALIVE_TRIES: u32 = 3;

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ApiError {
    /// Nobody is there, or the connection broke.
    #[error("{0}")]
    Unreachable(String),
    /// The credentials cannot be read.
    #[error("{0}")]
    Credentials(#[from] KubernetesOptionsError),
    /// The answer is none.
    #[error("{0}")]
    BadAnswer(#[from] BadAnswer),
    /// The API server says no.
    #[error("{message} (HTTP status {code})")]
    Refused {
        code: u16,
        message: String,
        /// It wants to be left alone for so long.
        retry_after: Option<Duration>,
    },
}

impl ApiError {
    /// What was asked for, or the version that was named, is gone.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Refused { code: 410, .. })
    }

    /// What was asked for is not there.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { code: 404, .. })
    }

    /// The credentials are not, or no longer, good for it.
    pub(super) fn is_unauthorized(&self) -> bool {
        matches!(self, Self::Refused { code: 401, .. })
    }

    /// The API server knows us and does not let us.
    pub(super) fn is_forbidden(&self) -> bool {
        matches!(self, Self::Refused { code: 403, .. })
    }

    /// How long the server wants to be left alone.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// What a watch ended with.
    pub(super) fn of_status(status: Status) -> Self {
        let message = match status.message.is_empty() {
            true => status.reason,
            false => status.message,
        };
        Self::Refused {
            code: status.code,
            message,
            retry_after: None,
        }
    }
}

fn unreachable(error: impl std::fmt::Display) -> ApiError {
    ApiError::Unreachable(error.to_string())
}

/// What can be asked of the API server. Clones are one.
#[derive(Clone)]
pub(super) struct ApiClient {
    options: Arc<KubernetesOptions>,
    tasks: Tasks,
}

impl ApiClient {
    pub(super) fn new(options: KubernetesOptions, tasks: &Tasks) -> Self {
        Self {
            options: Arc::new(options),
            tasks: tasks.clone(),
        }
    }

    /// A connection, with the credentials of now.
    pub(super) async fn connect(&self) -> Result<ApiConnection, ApiError> {
        let options = Arc::clone(&self.options);
        let access = tokio::task::spawn_blocking(move || Access::load(&options)).await;
        let access = access.map_err(unreachable)??;
        let opened = timeout(CONNECT_TIMEOUT, self.open(&access)).await;
        let sender = opened.map_err(|_| unreachable("no connection in time"))??;
        ApiConnection::new(sender, access)
    }

    async fn open(&self, access: &Access) -> Result<SendRequest<Full<Bytes>>, ApiError> {
        let ServerAddress { host, port, .. } = &access.server;
        let socket = TcpStream::connect((host.as_str(), *port)).await;
        let socket = socket.map_err(unreachable)?;
        let _ = socket.set_nodelay(true);
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_AFTER)
            .with_interval(KEEPALIVE_EVERY)
            .with_retries(KEEPALIVE_TRIES);
        let _ = SockRef::from(&socket).set_tcp_keepalive(&keepalive);
        match &access.tls {
            None => self.shake_hands(TokioIo::new(socket)).await,
            Some((connector, name)) => {
                let socket = connector.connect(name.clone(), socket).await;
                self.shake_hands(TokioIo::new(socket.map_err(unreachable)?))
                    .await
            }
        }
    }

    async fn shake_hands(
        &self,
        socket: impl Read + Write + Unpin + Send + 'static,
    ) -> Result<SendRequest<Full<Bytes>>, ApiError> {
        let (sender, connection) = Builder::new()
            .handshake(socket)
            .await
            .map_err(unreachable)?;
        self.tasks.spawn(connection);
        Ok(sender)
    }
}

/// One connection to the API server.
pub(super) struct ApiConnection {
    sender: SendRequest<Full<Bytes>>,
    access: Access,
    host: HeaderValue,
}

impl ApiConnection {
    fn new(sender: SendRequest<Full<Bytes>>, access: Access) -> Result<Self, ApiError> {
        let server = &access.server;
        let host = match server.host.contains(':') {
            true => format!("[{}]:{}", server.host, server.port),
            false => format!("{}:{}", server.host, server.port),
        };
        Ok(Self {
            sender,
            host: HeaderValue::from_str(&host).map_err(unreachable)?,
            access,
        })
    }

    /// The namespace that these credentials mean.
    pub(super) fn namespace(&self) -> &str {
        &self.access.namespace
    }

    /// One answer, whole.
    pub(super) async fn get(&mut self, path: &str) -> Result<Bytes, ApiError> {
        self.call(Method::GET, path, None).await
    }

    /// One answer, whole; a body comes with its kind.
    pub(super) async fn call(
        &mut self,
        method: Method,
        path: &str,
        body: Option<(&'static str, Vec<u8>)>,
    ) -> Result<Bytes, ApiError> {
        let answer = async {
            let response = self.send(method, path, body).await?;
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
            let body = body.collect().await.map_err(unreachable)?;
            Ok(body.to_bytes())
        };
        let answer = timeout(CALL_TIMEOUT, answer).await;
        answer.unwrap_or_else(|_| Err(unreachable("no answer in time")))
    }

    /// An answer that comes line by line. Nothing for `silence` ends it.
    pub(super) async fn lines(
        mut self,
        path: &str,
        silence: Duration,
    ) -> Result<AnswerLines, ApiError> {
        let response = timeout(CALL_TIMEOUT, self.send(Method::GET, path, None)).await;
        let response = response.unwrap_or_else(|_| Err(unreachable("no answer in time")))?;
        Ok(AnswerLines {
            body: response.into_body(),
            split: LineSplit::default(),
            silence,
            _sender: self.sender,
        })
    }

    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: Option<(&'static str, Vec<u8>)>,
    ) -> Result<Response<Incoming>, ApiError> {
        let (kind, body) = body.unzip();
        let body = Full::new(Bytes::from(body.unwrap_or_default()));
        let mut request = Request::new(body);
        *request.method_mut() = method;
        let uri = format!("{}{path}", self.access.server.prefix);
        *request.uri_mut() = uri.parse().map_err(unreachable)?;
        let headers = request.headers_mut();
        headers.insert(HOST, self.host.clone());
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static("kvasir"));
        if let Some(kind) = kind {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        }
        if let Some(bearer) = &self.access.bearer {
            headers.insert(AUTHORIZATION, bearer.clone());
        }
        self.sender.ready().await.map_err(unreachable)?;
        let response = self.sender.send_request(request).await;
        let response = response.map_err(unreachable)?;
        match response.status().is_success() {
            true => Ok(response),
            false => Err(refusal(response).await),
        }
    }
}

/// What an answer that is no success says.
async fn refusal(response: Response<Incoming>) -> ApiError {
    let status = response.status();
    let retry_after = retry_after(response.headers());
    let body = Limited::new(response.into_body(), REFUSAL_BYTES_MAX);
    let body = body.collect().await.map(|body| body.to_bytes());
    let said: Status = body
        .ok()
        .and_then(|body| serde_json::from_slice(&body).ok())
        .unwrap_or_default();
    let message = match said.message.is_empty() {
        true => status.canonical_reason().unwrap_or("refused").to_owned(),
        false => said.message,
    };
    ApiError::Refused {
        code: status.as_u16(),
        message,
        retry_after,
    }
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?;
    let wanted = Duration::from_secs(value.trim().parse().ok()?);
    Some(wanted.min(RETRY_AFTER_MAX))
}

/// The lines of one answer.
pub(super) struct AnswerLines {
    body: Incoming,
    split: LineSplit,
    silence: Duration,
    /// The connection ends with it.
    _sender: SendRequest<Full<Bytes>>,
}

impl AnswerLines {
    /// The next line that is not empty; none when the answer has ended.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            if let Some(line) = self.split.take()? {
                return Ok(Some(line));
            }
            let frame = timeout(self.silence, self.body.frame()).await;
            let frame = frame.map_err(|_| unreachable("nothing came for too long"))?;
            match frame {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame.map_err(unreachable)?.into_data() {
                        self.split.push(&data);
                    }
                }
            }
        }
    }
}

/// Bytes cut into lines, wherever they were cut before.
#[derive(Debug, Default)]
struct LineSplit {
    unread: BytesMut,
    /// So many bytes of it have no end of a line.
    searched: usize,
}

impl LineSplit {
    fn push(&mut self, data: &[u8]) {
        self.unread.extend_from_slice(data);
    }

    fn take(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            let tail = self.unread.get(self.searched..).unwrap_or_default();
            let Some(at) = tail.iter().position(|byte| *byte == b'\n') else {
                self.searched = self.unread.len();
                return match self.searched > LINE_BYTES_MAX {
                    true => Err(unreachable("a line is too long")),
                    false => Ok(None),
                };
            };
            let line = self.unread.split_to(self.searched + at + 1).freeze();
            self.searched = 0;
            let line = line.slice_ref(line.trim_ascii());
            if !line.is_empty() {
                return Ok(Some(line));
            }
        }
    }
}

/// A text as a value of a query.
pub(super) fn encode(text: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                out.push(char::from(byte));
            }
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way to cut three lines in two gives the same lines.
    #[test]
    fn lines_are_whole_however_they_arrive() {
        let text = b"{\"a\":1}\n\n{\"b\":\"\xc3\xa4\"}\r\n{}\n{\"rest";
        for cut in 0..=text.len() {
            let mut split = LineSplit::default();
            let mut lines = Vec::new();
            for part in [&text[..cut], &text[cut..]] {
                split.push(part);
                while let Some(line) = split.take().unwrap() {
                    lines.push(String::from_utf8(line.to_vec()).unwrap());
                }
            }
            assert_eq!(lines, ["{\"a\":1}", "{\"b\":\"ä\"}", "{}"], "cut at {cut}");
        }
    }

    #[test]
    fn a_line_is_bounded() {
        let mut split = LineSplit::default();
        split.push(&vec![b'x'; LINE_BYTES_MAX]);
        assert_eq!(split.take(), Ok(None));
        split.push(b"x");
        assert!(split.take().is_err());
    }

    #[test]
    fn values_of_a_query_are_coded() {
        assert_eq!(
            encode("app=vllm,tier in (a, b)"),
            "app%3Dvllm%2Ctier%20in%20%28a%2C%20b%29"
        );
    }
}
