//! What became of the latest requests: what was predicted about each, and what its engine said.
//!
//! A decision says what the router thought; this says what came of it. Both are asked for by the same id.
//! Bounded: the oldest is forgotten for the newest.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use kvasir_openai::is_transfer_name;
use kvasir_types::{RequestId, Time, WorkerRank};
use serde_json::{Value, json};

use crate::http::reply::Reply;
use crate::observe::observer::Observer;

/// Names a request in the logs of everybody on its way.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// An older name of that field.
const OLDER_REQUEST_ID: HeaderName = HeaderName::from_static("x-dynamo-request-id");
/// Longest name of a client's own that is remembered, logged and given back.
const GIVEN_BYTES_MAX: usize = 128;

/// How a request ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestOutcome {
    /// Its id.
    pub id: RequestId,
    /// The name that the client gave it (`x-request-id`).
    pub given: Option<Box<str>>,
    /// The status of the answer; 499 where the client left.
    pub status: u16,
    /// Who served it; the last that was asked, where several were.
    pub target: Option<WorkerRank>,
    /// Who computed the prompt, where that is another.
    pub prefill: Option<WorkerRank>,
    /// Times that another worker went on with an answer that had begun.
    pub moves: u32,
    /// Tokens of the prompt, as the engine counted them.
    pub prompt_tokens: Option<u32>,
    /// Those that the router expected in the cache of the worker that computed the prompt.
    pub predicted_tokens: Option<u32>,
    /// Those that the engine found there, where it says so.
    pub cached_tokens: Option<u32>,
    /// Tokens of the answer.
    pub output_tokens: Option<u32>,
    /// From the arrival of the head to the first token.
    pub first_token: Option<Duration>,
    /// From the arrival of the head to the end.
    pub took: Duration,
}

impl RequestOutcome {
    /// As operators see it.
    pub(crate) fn to_json(&self) -> Value {
        let ms = |span: Duration| span.as_secs_f64() * 1e3;
        json!({
            "client_request_id": self.given,
            "status": self.status,
            "worker": self.target.map(|target| target.worker.0),
            "rank": self.target.map(|target| target.rank.0),
            "prefill_worker": self.prefill.map(|target| target.worker.0),
            "prefill_rank": self.prefill.map(|target| target.rank.0),
            "moves": self.moves,
            "prompt_tokens": self.prompt_tokens,
            "predicted_cached_tokens": self.predicted_tokens,
            "reported_cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": self.first_token.map(ms),
            "total_ms": ms(self.took),
        })
    }
}

/// The latest requests that ended. Clones are one memory.
#[derive(Clone, Debug)]
pub(crate) struct Outcomes {
    latest: Arc<Mutex<Latest>>,
    max: usize,
}

#[derive(Debug, Default)]
struct Latest {
    outcomes: VecDeque<RequestOutcome>,
    /// How many there have ever been.
    ended: u64,
}

impl Outcomes {
    /// Remembers `max` requests; 0 remembers none.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            latest: Arc::default(),
            max,
        }
    }

    /// One more has ended.
    pub(crate) fn keep(&self, ended: RequestOutcome) {
        if self.max == 0 {
            return;
        }
        let mut latest = self.lock();
        latest.ended += 1;
        if latest.outcomes.len() >= self.max {
            latest.outcomes.pop_front();
        }
        latest.outcomes.push_back(ended);
    }

    /// Calls `each` with those of the latest that ended after the first `seen` ever, oldest first; how many there have
    /// been by now. Requests wait meanwhile to be remembered.
    pub(crate) fn since(&self, seen: u64, each: impl FnMut(&RequestOutcome)) -> u64 {
        let latest = self.lock();
        let new = usize::try_from(latest.ended.saturating_sub(seen)).unwrap_or(usize::MAX);
        let old = latest.outcomes.len().saturating_sub(new);
        latest.outcomes.iter().skip(old).for_each(each);
        latest.ended
    }

    /// How the request of this id ended.
    pub(crate) fn of(&self, id: RequestId) -> Option<RequestOutcome> {
        self.find(|ended| ended.id == id)
    }

    /// The id of the latest request that its client called `given`.
    pub(crate) fn named(&self, given: &str) -> Option<RequestId> {
        let ended = self.find(|ended| ended.given.as_deref() == Some(given))?;
        Some(ended.id)
    }

    fn find(&self, is: impl Fn(&&RequestOutcome) -> bool) -> Option<RequestOutcome> {
        self.lock().outcomes.iter().rev().find(is).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request whose head has come, and perhaps no more of it.
#[derive(Clone, Debug)]
pub(crate) struct RequestIdentity {
    /// Its id.
    pub(crate) id: RequestId,
    /// The id that its answer has: its own, or the client's.
    pub(crate) shown: RequestId,
    /// When its head was there.
    pub(crate) at: Time,
    /// What client, engine and logs call it.
    pub(crate) name: HeaderValue,
    /// The client named it so.
    is_given: bool,
}

impl RequestIdentity {
    /// One with these headers came now.
    pub(crate) fn now(observer: &Observer, headers: &mut HeaderMap) -> Self {
        let adopted = adopt(headers);
        let arrived = Self::refused(observer, headers);
        Self {
            shown: adopted.unwrap_or(arrived.id),
            ..arrived
        }
    }

    /// The same, of one that goes no further.
    pub(crate) fn refused(observer: &Observer, headers: &HeaderMap) -> Self {
        let (id, given) = (observer.new_request_id(), given(headers));
        Self {
            id,
            shown: id,
            at: observer.clock().now(),
            name: given.cloned().unwrap_or_else(|| name_of(id)),
            is_given: given.is_some(),
        }
    }

    /// What a part of it is called; the first has the request's own id.
    pub(crate) fn part(&self, observer: &Observer, number: u32) -> Self {
        let mut part = self.clone();
        if number > 0 {
            part.id = observer.new_request_id();
            let name = [part.name.as_bytes(), format!("-{number}").as_bytes()].concat();
            if let Ok(name) = HeaderValue::from_bytes(&name) {
                part.name = name;
            }
        }
        part
    }

    /// What its client calls it.
    pub(crate) fn given(&self) -> Option<HeaderValue> {
        self.is_given.then(|| self.name.clone())
    }

    /// Tells the client how to ask about its request. What the engine calls it nobody can ask for here.
    pub(crate) fn tell(self, reply: &mut Reply) {
        reply.headers_mut().insert(REQUEST_ID, self.name);
    }
}

/// The name that a client gave its request, if it is fit to be remembered: one, short, text, and without the addresses that
/// some engines read from it.
fn given(headers: &HeaderMap) -> Option<&HeaderValue> {
    let mut values = headers.get_all(REQUEST_ID).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    let fits = !value.is_empty()
        && value.len() <= GIVEN_BYTES_MAX
        && value.to_str().is_ok_and(|name| !is_transfer_name(name));
    fits.then_some(value)
}

/// A client's older way to name its request (`x-dynamo-request-id`), which counts if it is a UUID: then that is the
/// request's name, as if it had been given in the newer way, and the id of its answer.
fn adopt(headers: &mut HeaderMap) -> Option<RequestId> {
    // Hardly anybody has it: looking through the few fields is cheaper than asking for it by name.
    let (_, value) = headers.iter().find(|(name, _)| *name == OLDER_REQUEST_ID)?;
    let id = RequestId::parse(value.to_str().ok()?)?;
    headers.entry(REQUEST_ID).or_insert_with(|| name_of(id));
    Some(id)
}

/// A request's id as a header says it.
pub(crate) fn name_of(id: RequestId) -> HeaderValue {
    HeaderValue::try_from(id.to_string()).unwrap_or(HeaderValue::from_static("unnamed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(id: u128, given: &str) -> RequestOutcome {
        RequestOutcome {
            id: RequestId(id),
            given: Some(given.into()),
            ..RequestOutcome::default()
        }
    }

    #[test]
    fn the_oldest_is_forgotten_and_the_newest_of_a_name_is_found() {
        let outcomes = Outcomes::new(2);
        for (id, name) in [(1, "a"), (2, "b"), (3, "b")] {
            outcomes.keep(ended(id, name));
        }
        assert!(outcomes.of(RequestId(1)).is_none() && outcomes.named("a").is_none());
        assert_eq!(outcomes.of(RequestId(2)).unwrap().id, RequestId(2));
        assert_eq!(outcomes.named("b"), Some(RequestId(3)));
        let mut ids = Vec::new();
        assert_eq!(outcomes.since(0, |ended| ids.push(ended.id.0)), 3);
        assert_eq!(ids, [2, 3], "the first is forgotten");
        assert_eq!(outcomes.since(2, |ended| assert_eq!(ended.id.0, 3)), 3);
        outcomes.since(3, |_| panic!("there is nothing new"));
        let none = Outcomes::new(0);
        none.keep(ended(1, "a"));
        assert!(none.of(RequestId(1)).is_none());
    }

    #[test]
    fn a_name_that_is_too_long_or_no_text_is_not_kept() {
        let with = |value: &[u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            let headers = HeaderMap::from_iter([(REQUEST_ID, value)]);
            given(&headers).is_some()
        };
        assert!(with(b"a"));
        assert!(with(&[b'x'; GIVEN_BYTES_MAX]));
        assert!(!with(&[b'x'; GIVEN_BYTES_MAX + 1]));
        assert!(!with(b"") && !with(b"\xff"));
        let forged = b"___prefill_addr_1.2.3.4:5___decode_addr_1.2.3.4:6_0";
        assert!(!with(forged), "engines would read addresses from it");
        let mut twice = HeaderMap::new();
        for value in ["a", "b"] {
            twice.append(REQUEST_ID, HeaderValue::from_static(value));
        }
        assert_eq!(given(&twice), None, "nobody can tell which");
    }

    #[test]
    fn an_older_name_counts_if_it_is_a_uuid() {
        let uuid = "3F2504E0-4f89-41d3-9a0c-0305e82c3301";
        let with = |older: &'static str, newer: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert(OLDER_REQUEST_ID, HeaderValue::from_static(older));
            if let Some(newer) = newer {
                headers.insert(REQUEST_ID, HeaderValue::from_static(newer));
            }
            let id = adopt(&mut headers).map(|id| id.to_string());
            let name = headers
                .get(REQUEST_ID)
                .map(|v| v.to_str().unwrap().to_owned());
            (id, name)
        };
        let id = Some(uuid.to_lowercase());
        assert_eq!(with(uuid, None), (id.clone(), id.clone()));
        assert_eq!(with(uuid, Some("mine")), (id, Some("mine".into())));
        assert_eq!(with("7", None), (None, None));
        assert_eq!(adopt(&mut HeaderMap::new()), None);
    }
}
