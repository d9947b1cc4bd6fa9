//! One question over HTTP: a connection of its own, a time limit, a bounded answer.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use kvasir_transport::Tasks;
use kvasir_upstream::{Wire, WorkerAddress, WorkerTls};

use crate::world::{Asked, Silence};

/// Longest answer that is read: a busy engine's page of metrics has some hundred kilobytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// How much of a refusal is shown.
const SHOWN_CHARS: usize = 160;

/// Who asks.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    tasks: Tasks,
    patience: Duration,
    tls: WorkerTls,
    authorization: Option<HeaderValue>,
}

impl Client {
    pub(crate) fn new(
        tasks: Tasks,
        patience: Duration,
        tls: WorkerTls,
        authorization: Option<HeaderValue>,
    ) -> Self {
        Self {
            tasks,
            patience,
            tls,
            authorization,
        }
    }

    /// The body of what is there.
    pub(crate) async fn get(&self, at: &WorkerAddress, path: &str) -> Asked<Bytes> {
        self.ask(Method::GET, at, path, String::new(), None).await
    }

    /// The body of the answer to a JSON document.
    pub(crate) async fn post(
        &self,
        at: &WorkerAddress,
        path: &str,
        body: &serde_json::Value,
        rank: Option<u32>,
    ) -> Asked<Bytes> {
        self.ask(Method::POST, at, path, body.to_string(), rank)
            .await
    }

    async fn ask(
        &self,
        method: Method,
        at: &WorkerAddress,
        path: &str,
        body: String,
        rank: Option<u32>,
    ) -> Asked<Bytes> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", at.prefix))
            .header(HOST, at.authority())
            .header(CONTENT_TYPE, "application/json");
        let key = at.api_key.as_ref().map(|key| key.header());
        if let Some(value) = key.or(self.authorization.as_ref()) {
            request = request.header(AUTHORIZATION, value);
        }
        if let Some(rank) = rank {
            request = request.header("x-data-parallel-rank", rank);
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| Silence::Unreadable(error.to_string()))?;
        let exchange = tokio::time::timeout(self.patience, self.exchange(at, request));
        let (status, body) = exchange
            .await
            .unwrap_or(Err(Silence::TimedOut(self.patience)))?;
        match status {
            StatusCode::OK => Ok(body),
            status => Err(Silence::Status(status.as_u16(), shown(&body))),
        }
    }

    async fn exchange(
        &self,
        at: &WorkerAddress,
        request: Request<Full<Bytes>>,
    ) -> Asked<(StatusCode, Bytes)> {
        let broken = |error: hyper::Error| Silence::Unreadable(error.to_string());
        let stream = Wire::open(at, &self.tls).await;
        let stream = stream.map_err(|error| unconnected(at, &error))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        self.tasks.spawn(async move {
            // How it ends is seen by who asked.
            let _ = connection.await;
        });
        let answer = sender.send_request(request).await.map_err(broken)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect();
        let body = body
            .await
            .map_err(|error| Silence::Unreadable(error.to_string()))?;
        Ok((status, body.to_bytes()))
    }
}

/// Why no connection came about: nobody is there, or nobody who is believed.
fn unconnected(at: &WorkerAddress, error: &io::Error) -> Silence {
    use io::ErrorKind::{InvalidData, Other, UnexpectedEof};
    match at.tls && matches!(error.kind(), InvalidData | Other | UnexpectedEof) {
        true => Silence::Insecure(error.to_string()),
        false => Silence::Unreachable(error.to_string()),
    }
}

/// How a refusal begins, in one line.
fn shown(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let parsed: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = parsed.as_ref().and_then(|value| {
        let error = value.get("error").unwrap_or(value);
        ["message", "detail"]
            .iter()
            .find_map(|name| error.get(*name)?.as_str())
    });
    let line = message.unwrap_or(&text).replace(['\n', '\r'], " ");
    line.chars().take(SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn a_refusal_is_shown_in_its_own_words() {
        let vllm = br#"{"error":{"message":"The model `x` does not exist.","code":404}}"#;
        assert_eq!(shown(vllm), "The model `x` does not exist.");
        assert_eq!(shown(br#"{"detail":"Not Found"}"#), "Not Found");
        assert_eq!(shown(b"<html>\n\xff"), "<html> \u{fffd}");
        assert_eq!(shown("x".repeat(1000).as_bytes()).len(), 160);
    }
}
