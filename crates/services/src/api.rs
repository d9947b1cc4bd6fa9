//! A request that came whole, and its answer.

use std::fmt::Display;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use tokio::sync::mpsc;

use crate::lift::Lifted;
use crate::reading::{AsksOfTokens, TokenIds};

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// `GET`, and `HEAD`.
    Get,
    /// `POST`.
    Post,
    /// `PATCH`.
    Patch,
    /// `DELETE`.
    Delete,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Ask {
    /// What is to be done.
    pub verb: Verb,
    /// With what, as it came: percent-encoded.
    pub path: String,
    /// What follows the question mark.
    pub query: Option<String>,
    /// The body.
    pub body: Bytes,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The status of HTTP.
    pub status: u16,
    /// What is said.
    pub body: AnswerBody,
}

/// What an answer says.
#[derive(Debug)]
pub enum AnswerBody {
    /// Nothing.
    Empty,
    /// JSON.
    Json(Bytes),
    /// JSON in parts, as it is written; `None` is its end, and without it the answer is cut.
    JsonParts(mpsc::Receiver<Option<Bytes>>),
    /// Plain text.
    Text(String),
    /// Bytes that only another service of ours reads.
    Bytes(Bytes),
}

/// A service.
pub trait Api: Send + Sync + 'static {
    /// Answers a request.
    fn answer(&self, ask: Ask) -> impl Future<Output = Answer> + Send;

    /// Brings its gauges up to date, before they are read.
    fn measure(&self) {}
}

/// What is said of something that worked and has nothing else to say.
#[derive(Serialize)]
struct Done {
    status: &'static str,
}

#[derive(Serialize)]
struct Problem<'t> {
    error: &'t str,
}

impl Answer {
    /// A value.
    pub(crate) fn json(status: u16, value: &impl Serialize) -> Self {
        // What is written here has no keys that are no text, the one thing that fails.
        let text = serde_json::to_vec(value).unwrap_or_default();
        Self {
            status,
            body: AnswerBody::Json(text.into()),
        }
    }

    /// It is done.
    pub(crate) fn done(status: u16) -> Self {
        Self::json(status, &Done { status: "ok" })
    }

    /// It is not, and why.
    pub(crate) fn error(status: u16, why: impl Display) -> Self {
        let error = &*why.to_string();
        Self::json(status, &Problem { error })
    }

    /// What a refusal says, for a log line.
    pub(crate) fn why(&self) -> String {
        match &self.body {
            AnswerBody::Json(text) => String::from_utf8_lossy(text).into_owned(),
            _ => format!("refused with {}", self.status),
        }
    }

    /// A code and no word.
    #[must_use]
    pub fn status(status: u16) -> Self {
        Self::empty(status)
    }

    /// Something could not be done.
    #[must_use]
    pub fn refusal(status: u16, why: &str) -> Self {
        Self::error(status, why)
    }

    /// A code and no word.
    pub(crate) fn empty(status: u16) -> Self {
        Self {
            status,
            body: AnswerBody::Empty,
        }
    }

    /// There is no such route; or there is, for other verbs.
    pub(crate) fn no_route(is_there: bool) -> Self {
        Self::empty(if is_there { 405 } else { 404 })
    }
}

/// Reads a body of which a list of tokens is the most.
pub(crate) fn read_tokens<T: DeserializeOwned + AsksOfTokens>(body: &[u8]) -> Result<T, Answer> {
    let quick = Lifted::of(body).and_then(|Lifted { rest, ids }| {
        let mut asked: T = serde_json::from_slice(&rest).ok()?;
        asked.put(TokenIds(ids));
        Some(asked)
    });
    // What is wrong with a body is said of the body as it came.
    quick.map_or_else(|| read(body), Ok)
}

/// Reads a body; what is wrong with it is said as Dynamo's services say it.
pub(crate) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Answer> {
    serde_json::from_slice(body).map_err(|error| {
        let (status, text) = match error.classify() {
            Category::Data => (
                422,
                "Failed to deserialize the JSON body into the target type",
            ),
            _ => (400, "Failed to parse the request body as JSON"),
        };
        Answer {
            status,
            body: AnswerBody::Text(format!("{text}: {error}")),
        }
    })
}

/// The value of a name in a query; the last one counts.
pub(crate) fn query_value(query: Option<&str>, name: &str) -> Option<String> {
    let pairs = query?.split('&').filter_map(|pair| pair.split_once('='));
    let mut found = pairs.filter(|(key, _)| *key == name);
    Some(percent_decoded(found.next_back()?.1))
}

/// Undoes percent-encoding; what is not valid stays as it is.
pub(crate) fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let hex = |at: usize| bytes.get(at).and_then(|b| char::from(*b).to_digit(16));
        match (byte, hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                at += 3;
            }
            (b'+', ..) => {
                out.push(b' ');
                at += 1;
            }
            _ => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_read_and_garbage_is_left() {
        let query = Some("model_name=org%2Fm&routing_group=a+b&model_name=x%zz");
        assert_eq!(query_value(query, "routing_group").unwrap(), "a b");
        assert_eq!(query_value(query, "model_name").unwrap(), "x%zz");
        assert_eq!(query_value(query, "other"), None);
        assert_eq!(percent_decoded("org%2Fm%2"), "org/m%2");
        assert_eq!(percent_decoded("%ff"), "%ff");
    }

    #[test]
    fn a_body_that_is_no_json_is_told_from_one_that_says_something_else() {
        let status = |body: &str| read::<Vec<u32>>(body.as_bytes()).unwrap_err().status;
        assert_eq!((status("[1"), status("[-1]"), status("")), (400, 422, 400));
    }
}
