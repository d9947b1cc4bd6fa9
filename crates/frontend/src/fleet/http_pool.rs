//! A shared cache that answers over HTTP.
//!
//! Answers one question: how is any external pool asked which blocks of a prompt it holds? A POST of JSON with the prompt's token ids; an
//! answer with ranges of blocks, or with the number of leading tokens. The form is documented in `docs/guide/shared-cache.md`.
//!
//! What always holds: an answer is read up to [`ANSWER_BYTES_MAX`]; what is not of the form is an error, and an error is no credit.
//!
//! Elsewhere: the deadline, how many questions are under way, and what follows from failures (`kvasir_host`: `SharedCache`).

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Uri};
use kvasir_host::{CachePool, PoolFuture, PoolPrompt, SharedRanges};
use kvasir_upstream::{Bounds, Pool, WorkerTls, parse_url};
use serde::{Deserialize, Serialize};

/// Longest answer that is read.
const ANSWER_BYTES_MAX: usize = 256 << 10;
/// An exchange that outlives its question by so much is cut: questions have a shorter deadline of their own.
const EXCHANGE_MAX: Duration = Duration::from_secs(10);

/// A pool behind a URL.
pub struct HttpPool {
    pool: Pool,
    path: Uri,
}

/// Why an address cannot be a pool's.
#[derive(Debug, thiserror::Error)]
#[error("it is no URL of the form http://host:port/path: {0}")]
pub struct HttpPoolError(String);

impl fmt::Debug for HttpPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.pool.endpoint();
        write!(f, "HttpPool({at}{})", self.path)
    }
}

/// What is asked.
#[derive(Serialize)]
struct Question<'a> {
    model: &'a str,
    block_size: u32,
    tokens: &'a [u32],
    #[serde(skip_serializing_if = "str::is_empty")]
    cache_salt: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    lora: &'a str,
}

/// What is answered: one of the two.
#[derive(Deserialize)]
struct HeldBlocks {
    #[serde(default)]
    ranges: Option<Vec<(u32, u32)>>,
    #[serde(default)]
    tokens: Option<u64>,
}

impl HttpPool {
    /// The pool at this URL.
    pub fn new(url: &str, tls: &WorkerTls) -> Result<Self, HttpPoolError> {
        let bad = |error: &dyn fmt::Display| HttpPoolError(error.to_string());
        let (scheme, rest) = url.split_once("://").ok_or(bad(&"no scheme"))?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let endpoint = parse_url(&format!("{scheme}://{authority}"));
        let endpoint = endpoint.map_err(|error| bad(&error))?;
        let path = format!("/{path}").parse::<Uri>();
        Ok(Self {
            pool: Pool::new(endpoint, tls.clone()),
            path: path.map_err(|error| bad(&error))?,
        })
    }

    async fn ask(&self, prompt: &PoolPrompt) -> Result<SharedRanges, String> {
        let question = Question {
            model: &prompt.model,
            block_size: prompt.block_size,
            tokens: &prompt.tokens,
            cache_salt: &prompt.salt,
            lora: &prompt.lora,
        };
        let body = serde_json::to_vec(&question).map_err(|error| error.to_string())?;
        let mut request = Request::new(Bytes::from(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.path.clone();
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(CONTENT_TYPE, json);
        let bounds = Bounds {
            timeout: EXCHANGE_MAX,
            answer_bytes_max: ANSWER_BYTES_MAX,
        };
        let answer = self.pool.fetch_ok(request, bounds).await;
        let answer = answer.map_err(|error| error.to_string())?;
        read(&answer, prompt.block_size)
    }
}

impl CachePool for HttpPool {
    fn find<'a>(&'a self, prompt: &'a PoolPrompt) -> PoolFuture<'a> {
        Box::pin(self.ask(prompt))
    }
}

/// What an answer says.
fn read(answer: &[u8], block_size: u32) -> Result<SharedRanges, String> {
    let held: HeldBlocks =
        serde_json::from_slice(answer).map_err(|error| format!("its answer: {error}"))?;
    match (held.ranges, held.tokens) {
        (Some(ranges), _) => Ok(SharedRanges::from_ranges(
            ranges.into_iter().map(|(start, end)| start..end),
        )),
        (None, Some(tokens)) => {
            let blocks = tokens / u64::from(block_size.max(1));
            let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
            Ok(SharedRanges::from_ranges(std::iter::once(0..blocks)))
        }
        (None, None) => Err("its answer has neither ranges nor tokens".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_ranges_of_blocks_or_a_number_of_leading_tokens() {
        let ranges = |answer: &str| {
            let found = read(answer.as_bytes(), 16);
            found.map(|found| format!("{:?}", found.ranges()))
        };
        for (answer, expected) in [
            (r#"{"ranges":[[4,6],[0,2],[9,9]]}"#, "[0..2, 4..6]"),
            (r#"{"tokens":47,"more":1}"#, "[0..2]"),
            (r#"{"tokens":15}"#, "[]"),
            (r#"{"ranges":[]}"#, "[]"),
        ] {
            assert_eq!(ranges(answer).as_deref(), Ok(expected));
        }
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"ranges":[[1]]}"#,
            r#"{"ranges":[[-1,2]]}"#,
        ] {
            assert!(ranges(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_path_and_its_query_are_kept() {
        let at =
            |url: &str| HttpPool::new(url, &WorkerTls::default()).map(|pool| format!("{pool:?}"));
        assert_eq!(
            at("http://h:1/a/b?c=d").unwrap(),
            "HttpPool(http://h:1/a/b?c=d)"
        );
        assert_eq!(at("http://h:1").unwrap(), "HttpPool(http://h:1/)");
        assert!(at("h:1/find").is_err() && at("http://h:1/ x").is_err());
    }
}
