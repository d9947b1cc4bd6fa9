//! One request over HTTP, with a time limit and a bounded answer.
//!
//! [`Pool::fetch`] uses a kept connection, [`Client`] opens a new one: the doctor, the operators' commands and the exporter of
//! spans send too seldom to keep any.

use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode};
use kvasir_types::HttpEndpoint;

use crate::{Pool, UpstreamBody, UpstreamError, UpstreamRequest, WorkerTls};

/// How much of an error body is shown.
const SHOWN_CHARS_MAX: usize = 300;

/// Limits of one request and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// From the first byte sent to the last one read; a new connection included.
    pub timeout: Duration,
    /// Longest answer that is read.
    pub answer_bytes_max: usize,
}

/// Sends requests to any address, each on a new connection.
#[derive(Clone, Debug)]
pub struct Client {
    tls: WorkerTls,
    bounds: Bounds,
}

impl Client {
    /// Trusts the certificates that `tls` trusts.
    #[must_use]
    pub fn new(tls: WorkerTls, bounds: Bounds) -> Self {
        Self { tls, bounds }
    }

    /// How long an answer may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.bounds.timeout
    }

    /// As [`Pool::fetch`] does.
    pub async fn fetch(
        &self,
        at: &HttpEndpoint,
        request: Request<Bytes>,
    ) -> Result<Response<Bytes>, UpstreamError> {
        let pool = Pool::new(at.clone(), self.tls.clone());
        pool.fetch(request, self.bounds).await
    }
}

impl Pool {
    /// Sends `request`, whose address is a path below the worker's, and waits for all of the answer, whatever its
    /// status. `host` is filled in, and the worker's key if it has one.
    pub async fn fetch(
        &self,
        request: Request<Bytes>,
        bounds: Bounds,
    ) -> Result<Response<Bytes>, UpstreamError> {
        in_time(bounds, async {
            let (head, body) = self.head(&request).await?.into_parts();
            let body = body.collect(bounds.answer_bytes_max).await?;
            Ok(Response::from_parts(head, body))
        })
        .await
    }

    /// The same where only the body counts: any status but 200 is an error, and what comes with it is not read.
    pub async fn fetch_ok(
        &self,
        request: Request<Bytes>,
        bounds: Bounds,
    ) -> Result<Bytes, UpstreamError> {
        in_time(bounds, async {
            let answer = self.head(&request).await?;
            match answer.status() {
                StatusCode::OK => answer.into_body().collect(bounds.answer_bytes_max).await,
                status => Err(UpstreamError::Status(status)),
            }
        })
        .await
    }

    async fn head(
        &self,
        request: &Request<Bytes>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let path = request.uri().path_and_query();
        let request = UpstreamRequest {
            method: request.method(),
            path: path.map_or("/", PathAndQuery::as_str),
            headers: request.headers(),
            also: None,
            body: request.body(),
            fresh: false,
        };
        self.send(&request).await
    }
}

async fn in_time<T>(
    bounds: Bounds,
    exchange: impl Future<Output = Result<T, UpstreamError>>,
) -> Result<T, UpstreamError> {
    let answered = tokio::time::timeout(bounds.timeout, exchange).await;
    answered.unwrap_or(Err(UpstreamError::AnswerTimeout))
}

impl UpstreamError {
    /// Whether the server at `at` failed the TLS handshake: its certificate is not trusted, or it speaks no TLS.
    #[must_use]
    pub fn is_tls_failure(&self, at: &HttpEndpoint) -> bool {
        use std::io::ErrorKind::{InvalidData, Other, UnexpectedEof};
        let Self::Connect(error) = self else {
            return false;
        };
        at.tls && matches!(error.kind(), InvalidData | Other | UnexpectedEof)
    }
}

/// The message of an error body, in one short line: its `message` or `detail` where it has one, else its first characters.
#[must_use]
pub fn error_message(body: &[u8]) -> String {
    let read: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let inner = read.get("error").unwrap_or(&read);
    let named = ["message", "detail"]
        .iter()
        .find_map(|name| inner.get(name)?.as_str());
    let text = named.or(inner.as_str()).map(str::to_owned);
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    let line = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let line: String = line.take(SHOWN_CHARS_MAX).collect();
    line.trim().to_owned()
}

#[cfg(test)]
mod tests;
