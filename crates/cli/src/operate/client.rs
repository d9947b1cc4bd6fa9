//! One question to a running frontend, and its answer as JSON or text.
//!
//! Bounded in time and size. What can go wrong is said with what to do about it.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::uri::Scheme;
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use kvasir_config::{Settings, keys};
use kvasir_upstream::WorkerTls;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::wiring::{BadConfig, Failure};

/// Longest answer that is read.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Longest part of an answer that an error repeats.
const SHOWN_CHARS_MAX: usize = 300;

/// Where a frontend is and how to ask it.
pub(super) struct Client {
    /// As the user wrote it.
    url: String,
    host: String,
    port: u16,
    tls: Option<TlsConnector>,
    authority: HeaderValue,
    prefix: String,
    token: Option<HeaderValue>,
    patience: Duration,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum AskError {
    /// Nobody listens, or the way there is broken.
    Unreachable { url: String, cause: std::io::Error },
    /// It took too long.
    Late { url: String, patience: Duration },
    /// The connection broke, or the answer is too long.
    Broken { url: String, cause: String },
    /// A token is needed, or another one.
    Unauthorized { url: String, sent: bool },
    /// It answered with an error.
    Status {
        asked: String,
        status: StatusCode,
        message: String,
    },
    /// It answered something else than expected.
    Strange { asked: String, cause: String },
}

impl AskError {
    /// Whether there is no such thing there.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Status { status, .. } if *status == StatusCode::NOT_FOUND)
    }
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { url, cause } => write!(
                f,
                "no frontend answers at {url}: {cause}. Start one with `kvasir demo` or `kvasir frontend \
                 --worker URL`, or say where it is with --url (variable KVASIR_URL)"
            ),
            Self::Late { url, patience } => write!(
                f,
                "{url} did not answer within {} s (--timeout-secs)",
                patience.as_secs_f64()
            ),
            Self::Broken { url, cause } => write!(f, "{url} broke off its answer: {cause}"),
            Self::Unauthorized { url, sent: false } => write!(
                f,
                "{url} asks for a token: give it in a file with --admin-token-file, or in the variable KVASIR_ADMIN_TOKEN"
            ),
            Self::Unauthorized { url, sent: true } => write!(
                f,
                "{url} does not accept the token of --admin-token-file or KVASIR_ADMIN_TOKEN"
            ),
            Self::Status {
                asked,
                status,
                message,
            } => write!(f, "{asked}: {}: {message}", status.as_u16()),
            Self::Strange { asked, cause } => {
                write!(
                    f,
                    "{asked} answered something else than a frontend does: {cause}"
                )
            }
        }
    }
}

impl std::error::Error for AskError {}

impl Client {
    /// The frontend that `--url` names; an error names the option.
    pub(super) fn new(settings: &Settings) -> Result<Self, Failure> {
        let url: String = settings.get(keys::URL);
        let bad = |why: &str| BadConfig(format!("--url {url}: {why}"));
        let uri: Uri = url.parse().map_err(|_| bad("not an address"))?;
        let secure = uri.scheme() == Some(&Scheme::HTTPS);
        let authority = uri.authority().ok_or_else(|| bad("it names no host"))?;
        Ok(Self {
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority
                .port_u16()
                .unwrap_or(if secure { 443 } else { 80 }),
            tls: if secure { Some(tls(settings)?) } else { None },
            authority: HeaderValue::from_str(authority.as_str())
                .map_err(|_| bad("not an address"))?,
            prefix: uri.path().trim_end_matches('/').to_owned(),
            token: token(settings)?,
            patience: settings.get(keys::TIMEOUT_SECS),
            url: url.trim_end_matches('/').to_owned(),
        })
    }

    /// The address as the user wrote it.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Asks for a page of JSON.
    pub(super) async fn get(&self, path: &str) -> Result<Value, AskError> {
        self.send(&Method::GET, path, None).await
    }

    /// Asks for a page of text.
    pub(super) async fn page(&self, path: &str) -> Result<String, AskError> {
        let body = self.ask(&Method::GET, path, None).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Sends a request with or without a body of JSON; an empty answer is `null`.
    pub(super) async fn send(
        &self,
        method: &Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, AskError> {
        let answer = self.ask(method, path, body).await?;
        if answer.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&answer).map_err(|error| AskError::Strange {
            asked: format!("{}{path}", self.url),
            cause: error.to_string(),
        })
    }

    async fn ask(
        &self,
        method: &Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Bytes, AskError> {
        let answer = self.ask_unhurried(method, path, body);
        let answer = tokio::time::timeout(self.patience, answer).await;
        answer.unwrap_or_else(|_| {
            Err(AskError::Late {
                url: self.url.clone(),
                patience: self.patience,
            })
        })
    }

    async fn ask_unhurried(
        &self,
        method: &Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Bytes, AskError> {
        let broken = |cause: &dyn fmt::Display| AskError::Broken {
            url: self.url.clone(),
            cause: cause.to_string(),
        };
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
        let stream = stream.map_err(|cause| AskError::Unreachable {
            url: self.url.clone(),
            cause,
        })?;
        let Some(tls) = &self.tls else {
            return self.exchange(stream, method, path, body).await;
        };
        let name = ServerName::try_from(self.host.clone()).map_err(|error| broken(&error))?;
        let stream = tls.connect(name, stream).await.map_err(|cause| {
            let why = format!("{cause} (https; --tls-ca-path names whom to believe)");
            broken(&why)
        })?;
        self.exchange(stream, method, path, body).await
    }

    /// One request and its answer over a connection of their own.
    async fn exchange<S>(
        &self,
        stream: S,
        method: &Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Bytes, AskError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let broken = |cause: &dyn fmt::Display| AskError::Broken {
            url: self.url.clone(),
            cause: cause.to_string(),
        };
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| broken(&error))?;
        let request = self.request(method, path, body);
        let exchange = async {
            let response = sender.send_request(request).await;
            let response = response.map_err(|error| broken(&error))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX);
            let body = body.collect().await.map_err(|error| broken(&error))?;
            Ok((status, body.to_bytes()))
        };
        // The connection only carries the exchange: how that ends is what counts.
        let carry = async {
            let _ = connection.await;
            std::future::pending().await
        };
        let answered = tokio::select! {
            answered = exchange => answered,
            never = carry => never,
        };
        let (status, body) = answered?;
        self.judge(method, path, status, body)
    }

    fn request(&self, method: &Method, path: &str, body: Option<&Value>) -> Request<Full<Bytes>> {
        let content = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let mut request = Request::new(Full::new(content));
        *request.method_mut() = method.clone();
        let path = format!("{}{path}", self.prefix);
        *request.uri_mut() = path.parse().unwrap_or(Uri::from_static("/"));
        let headers = request.headers_mut();
        headers.insert(HOST, self.authority.clone());
        if body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        request
    }

    fn judge(
        &self,
        method: &Method,
        path: &str,
        status: StatusCode,
        body: Bytes,
    ) -> Result<Bytes, AskError> {
        if status.is_success() {
            return Ok(body);
        }
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            return Err(AskError::Unauthorized {
                url: self.url.clone(),
                sent: self.token.is_some(),
            });
        }
        Err(AskError::Status {
            asked: format!("{method} {}{path}", self.url),
            status,
            message: message(&body),
        })
    }
}

/// Whose certificates are believed; an error names the option.
fn tls(settings: &Settings) -> Result<TlsConnector, Failure> {
    let bad = |error: &dyn fmt::Display| BadConfig(format!("--tls-ca-path {error}"));
    let trusted = match settings.get(keys::TLS_CA_PATH) {
        Some(path) => WorkerTls::with_authority(&path).map_err(|error| bad(&error))?,
        None => WorkerTls::default(),
    };
    Ok(trusted.connector().map_err(|error| bad(&error))?)
}

/// What an error's body says, in one short line.
fn message(body: &[u8]) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let inner = value.get("error").unwrap_or(&value);
    let text = inner.get("message").unwrap_or(inner).as_str();
    let text = text.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned);
    let line: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(SHOWN_CHARS_MAX)
        .collect();
    line.trim().to_owned()
}

/// The header that shows who asks.
pub(crate) fn token(settings: &Settings) -> Result<Option<HeaderValue>, Failure> {
    let path = settings.get(keys::ADMIN_TOKEN_FILE);
    let token = match (settings.get(keys::ADMIN_TOKEN), &path) {
        (Some(token), _) => token,
        (None, Some(path)) => token_of_file(path)?,
        (None, None) => return Ok(None),
    };
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
        .map_err(|_| BadConfig("the token has characters that no header can carry".to_owned()))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

fn token_of_file(path: &Path) -> Result<String, Failure> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("--admin-token-file {shown}: {error}"))?;
    let mut lines = text.lines().map(str::trim);
    let token = lines.find(|line| !line.is_empty() && !line.starts_with('#'));
    match token {
        Some(token) => Ok(token.to_owned()),
        None => Err(format!("--admin-token-file {shown} holds no token").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_an_error_are_found_and_kept_short() {
        let flat = br#"{"message":"no such\nworker","type":"Not Found","code":404}"#;
        assert_eq!(message(flat), "no such worker");
        assert_eq!(message(br#"{"error":{"message":"bad"}}"#), "bad");
        assert_eq!(message(br#"{"error":"worse"}"#), "worse");
        assert_eq!(message(b"<html>"), "<html>");
        assert_eq!(message(&vec![b'x'; 5000]).len(), SHOWN_CHARS_MAX);
    }
}
