//! One question to a worker, and why it brought nothing.

use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, Request, StatusCode};
use kvasir_types::HttpEndpoint;
use kvasir_upstream::{Bounds, UpstreamError, WorkerTls, error_message};

use crate::observations::{ProbeError, ProbeResult};

/// Longest answer that is read: a busy engine's page of metrics has some hundred kilobytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Who asks.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    inner: kvasir_upstream::Client,
}

impl Client {
    pub(crate) fn new(timeout: Duration, tls: WorkerTls) -> Self {
        let bounds = Bounds {
            timeout,
            answer_bytes_max: ANSWER_BYTES_MAX,
        };
        Self {
            inner: kvasir_upstream::Client::new(tls, bounds),
        }
    }

    /// The body of what is there.
    pub(crate) async fn get(&self, at: &HttpEndpoint, path: &str) -> ProbeResult<Bytes> {
        self.ask(Method::GET, at, path, String::new(), None).await
    }

    /// The body of the answer to a JSON document.
    pub(crate) async fn post(
        &self,
        at: &HttpEndpoint,
        path: &str,
        body: &serde_json::Value,
        rank: Option<u32>,
    ) -> ProbeResult<Bytes> {
        self.ask(Method::POST, at, path, body.to_string(), rank)
            .await
    }

    async fn ask(
        &self,
        method: Method,
        at: &HttpEndpoint,
        path: &str,
        body: String,
        rank: Option<u32>,
    ) -> ProbeResult<Bytes> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(CONTENT_TYPE, "application/json");
        if let Some(rank) = rank {
            request = request.header("x-data-parallel-rank", rank);
        }
        let request = request
            .body(Bytes::from(body))
            .map_err(|error| ProbeError::Unreadable(error.to_string()))?;
        let answer = self.inner.fetch(at, request).await;
        let answer = answer.map_err(|error| self.silence(at, &error))?;
        match answer.status() {
            StatusCode::OK => Ok(answer.into_body()),
            status => Err(ProbeError::Status(
                status.as_u16(),
                error_message(answer.body()),
            )),
        }
    }

    fn silence(&self, at: &HttpEndpoint, error: &UpstreamError) -> ProbeError {
        match error {
            UpstreamError::Connect(cause) if error.is_tls_failure(at) => {
                ProbeError::Insecure(cause.to_string())
            }
            UpstreamError::Connect(cause) => ProbeError::Unreachable(cause.to_string()),
            UpstreamError::ConnectTimeout | UpstreamError::Local(_) => {
                ProbeError::Unreachable(error.to_string())
            }
            UpstreamError::AnswerTimeout => ProbeError::TimedOut(self.inner.timeout()),
            error => ProbeError::Unreadable(error.to_string()),
        }
    }
}
