//! `/tokenize` of an engine: its own tokens for a prompt, asked over HTTP.
//!
//! What always holds: a question takes [`TIMEOUT`] at most, [`TRIES_MAX`] engines are asked one after the other, and
//! few questions run at once; only engines that serve are asked; one that does not offer it, or does not answer, is
//! left alone for a while and the others are asked; what was answered is kept within [`CACHE_BYTES_MAX`].

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use kvasir_openai::{Endpoint, Prompt, Scan, write_json_str};
use kvasir_types::{Token, WorkerId};
use kvasir_upstream::{Bounds, Pool, UpstreamError};

use crate::models::links::Links;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// A request waits this long for its tokens; without them it is routed by its bytes.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(150);
/// Questions under way at once, for one model.
const ASKING_MAX: usize = 32;
/// Engines that are asked for one prompt.
const TRIES_MAX: usize = 2;
/// Failures in a row after which an engine is not asked for [`PAUSE`].
const FAILURES_MAX: u32 = 3;
/// Engines whose manners are remembered before those that are gone are forgotten.
const MANNERS_MAX: usize = 8_192;
/// How long engines that do not answer are left alone.
const PAUSE: Duration = Duration::from_secs(5);
/// How long an engine that says that it has no such route is left alone.
const ABSENT_PAUSE: Duration = Duration::from_secs(60);
/// Longest question: an engine takes longer than [`TIMEOUT`] for more.
const QUESTION_BYTES_MAX: usize = 512 << 10;
/// What a question may take; the answer holds some two million tokens.
const QUESTION: Bounds = Bounds {
    timeout: TIMEOUT,
    answer_bytes_max: 16 << 20,
};
/// Memory for answers, questions included.
pub(super) const CACHE_BYTES_MAX: usize = 16 << 20;
/// Fields of a chat that `/tokenize` takes, beside the messages.
const CHAT_FIELDS: [&str; 6] = [
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "tools",
];
/// Fields that change the prompt and that `/tokenize` does not take.
const UNKNOWN_FIELDS: [&str; 2] = ["documents", "reasoning_effort"];

/// Tokens from a model's engines.
pub(super) struct Remote {
    chat: Mutex<Manners>,
    completions: Mutex<Manners>,
    cache: Mutex<Cache>,
    asking: Semaphore,
    turn: AtomicUsize,
}

/// How each engine takes one kind of question; those that were never asked are not here.
type Manners = HashMap<WorkerId, Manner>;

/// How one engine takes one kind of question.
#[derive(Debug, Default)]
struct Manner {
    failures: u32,
    not_before: Option<Instant>,
    answered: bool,
}

/// What was answered, by question.
#[derive(Default)]
struct Cache {
    by_question: HashMap<Bytes, Arc<[Token]>>,
    /// Oldest first.
    order: VecDeque<Bytes>,
    used: usize,
}

#[derive(Deserialize)]
struct TokenizeAnswer {
    tokens: Vec<Token>,
}

impl Default for Remote {
    fn default() -> Self {
        Self {
            chat: Mutex::default(),
            completions: Mutex::default(),
            cache: Mutex::default(),
            asking: Semaphore::new(ASKING_MAX),
            turn: AtomicUsize::new(0),
        }
    }
}

impl Remote {
    /// Whether engines have answered lately.
    pub(super) fn is_offered(&self) -> bool {
        [&self.chat, &self.completions]
            .iter()
            .any(|manners| lock(manners).values().any(|manner| manner.answered))
    }

    /// The tokens of a body's first prompt, and whether that is its only one; `None` if nobody says. `is_up` says
    /// whether an engine may be asked.
    pub(super) async fn tokens(
        &self,
        workers: &Links,
        scan: &Scan<'_>,
        endpoint: Endpoint,
        is_up: impl Fn(WorkerId) -> bool,
    ) -> Option<(Vec<Token>, bool)> {
        let (question, alone) =
            question(scan, endpoint).filter(|(asked, _)| asked.len() <= QUESTION_BYTES_MAX)?;
        if let Some(known) = lock(&self.cache).get(&question) {
            return Some((known.to_vec(), alone));
        }
        let manners = match endpoint {
            Endpoint::Chat => &self.chat,
            Endpoint::Completions => &self.completions,
        };
        let _place = self.asking.try_acquire().ok()?;
        let mut asked: Option<WorkerId> = None;
        for _ in 0..TRIES_MAX {
            let fit = |worker| asked != Some(worker) && is_up(worker);
            let (worker, pool) = self.next(workers, manners, fit)?;
            let answer = ask(&pool, &question).await;
            self.learn(manners, workers, worker, answer.as_ref().err());
            match answer {
                Ok(tokens) => {
                    lock(&self.cache).put(question, tokens.as_slice().into());
                    return Some((tokens, alone));
                }
                Err(error) => {
                    tracing::debug!(worker = %pool.endpoint(), %error, "no tokens from the engine");
                    asked = Some(worker);
                }
            }
        }
        None
    }

    /// The next to be asked: in turn among those that did not fail last time, else among those that did.
    fn next(
        &self,
        workers: &Links,
        manners: &Mutex<Manners>,
        fit: impl Fn(WorkerId) -> bool,
    ) -> Option<(WorkerId, Pool)> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let (manners, now) = (lock(manners), Instant::now());
        let manner = |worker: &WorkerId| manners.get(worker);
        let may = |worker| fit(worker) && manner(&worker).is_none_or(|m| m.may_be_asked(now));
        let well = |worker| may(worker) && manner(&worker).is_none_or(|m| m.failures == 0);
        workers
            .any_http(turn, well)
            .or_else(|| workers.any_http(turn, may))
    }

    fn learn(
        &self,
        manners: &Mutex<Manners>,
        workers: &Links,
        worker: WorkerId,
        error: Option<&UpstreamError>,
    ) {
        let mut manners = lock(manners);
        if manners.len() >= MANNERS_MAX {
            manners.retain(|id, _| workers.get(*id).is_some());
        }
        manners.entry(worker).or_default().learn(error);
    }
}

impl Manner {
    fn may_be_asked(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| now >= at)
    }

    fn learn(&mut self, error: Option<&UpstreamError>) {
        match error {
            None => {
                *self = Self {
                    answered: true,
                    ..Self::default()
                };
            }
            // The route is not there, or does not take this kind of question.
            Some(UpstreamError::Status(status)) if is_absent(*status) => {
                *self = Self {
                    not_before: Some(Instant::now() + ABSENT_PAUSE),
                    ..Self::default()
                };
            }
            // This prompt is refused; the next one may not be. Or it was never sent.
            Some(UpstreamError::Status(status)) if status.is_client_error() => {}
            Some(error) if error.is_local() => {}
            Some(_) => {
                self.failures = self.failures.saturating_add(1);
                if self.failures >= FAILURES_MAX {
                    *self = Self {
                        not_before: Some(Instant::now() + PAUSE),
                        ..Self::default()
                    };
                }
            }
        }
    }
}

fn is_absent(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::NOT_IMPLEMENTED
            | StatusCode::UNPROCESSABLE_ENTITY
            | StatusCode::FORBIDDEN
    )
}

impl Cache {
    fn get(&self, question: &Bytes) -> Option<Arc<[Token]>> {
        self.by_question.get(question).cloned()
    }

    fn put(&mut self, question: Bytes, tokens: Arc<[Token]>) {
        let cost = cost(&question, &tokens);
        if cost > CACHE_BYTES_MAX / 4 || self.by_question.contains_key(&question) {
            return;
        }
        while self.used + cost > CACHE_BYTES_MAX {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            if let Some(tokens) = self.by_question.remove(&oldest) {
                self.used -= self::cost(&oldest, &tokens);
            }
        }
        self.used += cost;
        self.order.push_back(question.clone());
        self.by_question.insert(question, tokens);
    }
}

/// Memory of one answer, about.
fn cost(question: &Bytes, tokens: &Arc<[Token]>) -> usize {
    question.len() + size_of_val(&**tokens) + 256
}

/// The body of the question, and whether its prompt is the only one.
fn question(scan: &Scan<'_>, endpoint: Endpoint) -> Option<(Bytes, bool)> {
    let mut out = BytesMut::from(&b"{"[..]);
    if let Some(model) = scan.raw("model") {
        field(&mut out, "model", model);
    }
    let alone = match endpoint {
        Endpoint::Chat => {
            if UNKNOWN_FIELDS.iter().any(|key| scan.raw(key).is_some()) {
                return None;
            }
            let messages = scan.messages()?;
            if messages.len() > QUESTION_BYTES_MAX {
                return None;
            }
            field(&mut out, "messages", messages);
            for key in CHAT_FIELDS {
                if let Some(value) = scan.raw(key) {
                    field(&mut out, key, value);
                }
            }
            true
        }
        Endpoint::Completions => {
            let (Prompt::Text(prompt), alone) = scan.first_prompt(0)? else {
                return None;
            };
            let mut text = BytesMut::new();
            write_json_str(&mut text, &prompt);
            field(&mut out, "prompt", std::str::from_utf8(&text).ok()?);
            if let Some(special) = scan.raw("add_special_tokens") {
                field(&mut out, "add_special_tokens", special);
            }
            alone
        }
    };
    out.extend_from_slice(b"}");
    Some((out.freeze(), alone))
}

fn field(out: &mut BytesMut, key: &str, value: &str) {
    if out.len() > 1 {
        out.extend_from_slice(b",");
    }
    out.extend_from_slice(format!("\"{key}\":").as_bytes());
    out.extend_from_slice(value.as_bytes());
}

async fn ask(pool: &Pool, question: &Bytes) -> Result<Vec<Token>, UpstreamError> {
    let mut request = Request::new(question.clone());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static("/tokenize");
    let json = HeaderValue::from_static("application/json");
    request.headers_mut().insert(CONTENT_TYPE, json);
    let body = pool.fetch_ok(request, QUESTION).await?;
    let answer: Result<TokenizeAnswer, _> = serde_json::from_slice(&body);
    match answer {
        Ok(answer) if !answer.tokens.is_empty() => Ok(answer.tokens),
        _ => Err(UpstreamError::Status(StatusCode::NOT_IMPLEMENTED)),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(body: &str, endpoint: Endpoint) -> Option<(String, bool)> {
        let scan = Scan::parse(body.as_bytes()).unwrap();
        let (question, alone) = question(&scan, endpoint)?;
        Some((String::from_utf8(question.to_vec()).unwrap(), alone))
    }

    #[test]
    fn only_what_makes_the_prompt_is_asked() {
        let chat = r#"{"model":"m","temperature":1,"messages":[{"role":"user", "content":"a"}],"tools":[1],"stream":true}"#;
        let question = r#"{"model":"m","messages":[{"role":"user", "content":"a"}],"tools":[1]}"#;
        assert_eq!(asked(chat, Endpoint::Chat), Some((question.into(), true)));
        let several = r#"{"prompt":["a \"b\"","c"],"add_special_tokens":false}"#;
        let question = r#"{"prompt":"a \"b\"","add_special_tokens":false}"#;
        assert_eq!(
            asked(several, Endpoint::Completions),
            Some((question.into(), false))
        );
        for body in [r#"{"prompt":[1,2]}"#, r#"{"prompt":5}"#, "{}"] {
            assert_eq!(asked(body, Endpoint::Completions), None, "{body}");
        }
        let effort = r#"{"messages":[],"reasoning_effort":"low"}"#;
        assert_eq!(asked(effort, Endpoint::Chat), None);
    }

    #[test]
    fn the_cache_stays_within_its_bytes() {
        let mut cache = Cache::default();
        let tokens: Arc<[Token]> = vec![7; 100_000].into();
        for at in 0..200u32 {
            cache.put(Bytes::from(format!("question {at}")), Arc::clone(&tokens));
            assert!(cache.used <= CACHE_BYTES_MAX);
        }
        assert!(cache.get(&Bytes::from("question 0")).is_none());
        assert_eq!(cache.get(&Bytes::from("question 199")), Some(tokens));
        assert_eq!(cache.order.len(), cache.by_question.len());
        let huge: Arc<[Token]> = vec![7; CACHE_BYTES_MAX].into();
        cache.put(Bytes::from("huge"), huge);
        assert!(cache.get(&Bytes::from("huge")).is_none());
    }

    #[test]
    fn engines_that_do_not_answer_are_left_alone() {
        let mut manner = Manner::default();
        for _ in 1..FAILURES_MAX {
            manner.learn(Some(&UpstreamError::AnswerTimeout));
            assert!(manner.not_before.is_none());
        }
        manner.learn(Some(&UpstreamError::AnswerTimeout));
        assert!(manner.not_before.is_some());
        manner.learn(None);
        assert!(manner.answered && manner.not_before.is_none());
        manner.learn(Some(&UpstreamError::Status(StatusCode::BAD_REQUEST)));
        assert!(manner.answered, "one prompt was refused");
        manner.learn(Some(&UpstreamError::Status(StatusCode::NOT_FOUND)));
        assert!(!manner.answered && manner.not_before.is_some());
    }
}
