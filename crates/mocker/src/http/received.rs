//! The last requests that came, byte for byte: what a gateway in front really sent.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method};
use serde_json::{Value, json};

/// Requests that are kept.
const KEPT_MAX: usize = 32;
/// Bytes of bodies that are kept; the newest is kept whatever its size.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// One request.
#[derive(Debug)]
struct Request {
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

/// The last requests for answers.
#[derive(Debug, Default)]
pub(crate) struct Received {
    latest: Mutex<VecDeque<Request>>,
}

impl Received {
    /// Keeps a request, and forgets what there is no room for.
    pub(crate) fn keep(&self, parts: &Parts, body: &Bytes) {
        let request = Request {
            method: parts.method.clone(),
            path: parts.uri.to_string(),
            headers: parts.headers.clone(),
            body: body.clone(),
        };
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        latest.push_back(request);
        let bytes = |all: &VecDeque<Request>| all.iter().map(|r| r.body.len()).sum::<usize>();
        while latest.len() > KEPT_MAX || latest.len() > 1 && bytes(&latest) > KEPT_BYTES_MAX {
            latest.pop_front();
        }
    }

    /// What is kept, oldest first.
    pub(crate) fn list(&self) -> Value {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let row = |request: &Request| {
            let header = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
                json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())])
            };
            let headers: Vec<Value> = request.headers.iter().map(header).collect();
            json!({
                "method": request.method.as_str(),
                "path": request.path,
                "headers": headers,
                "body_hex": hex(&request.body),
            })
        };
        json!({ "requests": latest.iter().map(row).collect::<Vec<_>>() })
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        latest.clear();
    }
}

/// Any bytes as text: bodies need not be UTF-8.
fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |four: u8| char::from(DIGITS[usize::from(four & 15)]);
    bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(*byte)])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(received: &Received, body: Vec<u8>) {
        let (parts, ()) = http::Request::post("/v1/x?y=1")
            .body(())
            .unwrap()
            .into_parts();
        received.keep(&parts, &body.into());
    }

    #[test]
    fn the_oldest_is_forgotten_for_the_newest() {
        let received = Received::default();
        for n in 0..KEPT_MAX + 3 {
            keep(&received, vec![n as u8]);
        }
        let list = received.list();
        let bodies = list["requests"].as_array().unwrap();
        assert_eq!(bodies.len(), KEPT_MAX);
        assert_eq!(bodies[0]["body_hex"], "03");
        assert_eq!(hex(b"\x00\xa9\xff"), "00a9ff");
        assert_eq!(bodies[0]["path"], "/v1/x?y=1");
        keep(&received, vec![0; KEPT_BYTES_MAX + 1]);
        assert_eq!(received.list()["requests"].as_array().unwrap().len(), 1);
        received.clear();
        assert_eq!(received.list(), json!({"requests": []}));
    }
}
