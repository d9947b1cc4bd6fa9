//! One question to a running frontend, and its answer as JSON or text.
//!
//! Bounded in time and size. What can go wrong is said with what to do about it.

use std::fmt;
use std::io::ErrorKind;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use kvasir_config::{Settings, keys};
use kvasir_types::HttpEndpoint;
use kvasir_upstream::{Bounds, UpstreamError, WorkerTls, error_message, parse_url};
use serde_json::Value;

use crate::wiring::{self, BadConfig, Failure};

/// Longest answer that is read.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Where a frontend is and how to ask it.
pub(super) struct Client {
    address: HttpEndpoint,
    /// The address as it is shown.
    url: String,
    token: Option<HeaderValue>,
    inner: kvasir_upstream::Client,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum AskError {
    /// Nobody listens, or the way there is broken.
    Unreachable { url: String, cause: String },
    /// It took too long.
    Late { url: String, timeout: Duration },
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
            Self::Late { url, timeout } => write!(
                f,
                "{url} did not answer within {} s (--timeout-secs)",
                timeout.as_secs_f64()
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
        Self::waiting(settings, settings.get(keys::TIMEOUT_SECS))
    }

    /// The same, giving each answer so long.
    pub(super) fn waiting(settings: &Settings, timeout: Duration) -> Result<Self, Failure> {
        let url: String = settings.get(keys::URL);
        let address = parse_url(&url).map_err(|error| BadConfig(format!("--url: {error}")))?;
        let bounds = Bounds {
            timeout,
            answer_bytes_max: ANSWER_BYTES_MAX,
        };
        let tls = frontend_tls(settings)?;
        if address.tls {
            let usable = tls.connector();
            usable.map_err(|error| BadConfig(format!("--tls-ca-path {error}")))?;
        }
        Ok(Self {
            url: address.to_string(),
            address,
            token: token(settings)?,
            inner: kvasir_upstream::Client::new(tls, bounds),
        })
    }

    /// The address, as it is shown.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// What to say of a server that has no `route`, which every frontend has at its operators' door.
    pub(super) fn without(&self, route: &str) -> String {
        format!(
            "{} has no {route}: that is not a Kvasir frontend, or its admin routes are switched off \
             (--disable-frontend-admin-api) or listen elsewhere (--admin-port; say where with --url)",
            self.url
        )
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

    /// Asks for a page whose status is part of what it says.
    pub(super) async fn status(&self, path: &str) -> Result<(StatusCode, String), AskError> {
        let request = self.request(&Method::GET, path, None);
        let answer = self.inner.fetch(&self.address, request).await;
        let answer = answer.map_err(|error| self.unanswered(error))?;
        let status = answer.status();
        let text = String::from_utf8_lossy(&answer.into_body()).into_owned();
        Ok((status, text))
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
        let request = self.request(method, path, body);
        let answer = self.inner.fetch(&self.address, request).await;
        let answer = answer.map_err(|error| self.unanswered(error))?;
        self.judge(method, path, answer.status(), answer.into_body())
    }

    fn unanswered(&self, error: UpstreamError) -> AskError {
        let url = self.url.clone();
        let distrusted = error.is_tls_failure(&self.address);
        match error {
            UpstreamError::Connect(cause) if distrusted => AskError::Broken {
                url,
                cause: format!("{cause} (https; --tls-ca-path names whom to believe)"),
            },
            // The other side is there and speaks something else.
            UpstreamError::Connect(cause) if cause.kind() == ErrorKind::InvalidInput => {
                AskError::Broken {
                    url,
                    cause: cause.to_string(),
                }
            }
            UpstreamError::Connect(cause) => AskError::Unreachable {
                url,
                cause: cause.to_string(),
            },
            UpstreamError::ConnectTimeout => AskError::Unreachable {
                url,
                cause: error.to_string(),
            },
            UpstreamError::AnswerTimeout => AskError::Late {
                url,
                timeout: self.inner.timeout(),
            },
            error => AskError::Broken {
                url,
                cause: error.to_string(),
            },
        }
    }

    fn request(&self, method: &Method, path: &str, body: Option<&Value>) -> Request<Bytes> {
        let content = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let mut request = Request::new(content);
        *request.method_mut() = method.clone();
        *request.uri_mut() = path.parse().unwrap_or(Uri::from_static("/"));
        let headers = request.headers_mut();
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
            message: error_message(&body),
        })
    }
}

/// Whose certificates are believed when a frontend is reached by https; an error names the option.
fn frontend_tls(settings: &Settings) -> Result<WorkerTls, Failure> {
    let Some(path) = settings.get(keys::TLS_CA_PATH) else {
        return Ok(WorkerTls::default());
    };
    let tls = WorkerTls::with_authority(&path);
    tls.map_err(|error| BadConfig(format!("--tls-ca-path {error}")).into())
}

/// The header that shows who asks.
fn token(settings: &Settings) -> Result<Option<HeaderValue>, Failure> {
    let path = settings.get(keys::ADMIN_TOKEN_FILE);
    let token = match (settings.get(keys::ADMIN_TOKEN), &path) {
        (Some(token), _) => token,
        (None, Some(path)) => {
            let tokens = wiring::key_file("--admin-token-file", Some(path.clone()))?;
            tokens.first().unwrap_or_default().to_owned()
        }
        (None, None) => return Ok(None),
    };
    let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
        .map_err(|_| BadConfig("the token has characters that no header can carry".to_owned()))?;
    value.set_sensitive(true);
    Ok(Some(value))
}
