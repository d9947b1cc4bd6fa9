//! Workers that answer with errors: one is asked for a token, and is back when it gives one.
//!
//! A server may live on while its engine is dead: it answers `/health` for a moment more, and every request with an error, in
//! milliseconds. Only a token proves that its engine works.
//!
//! What always holds: nobody is asked whom no router has ejected for errors; a question is one token long, with a prompt shorter than a
//! block, and has [`TOKEN_TIMEOUT`] to be answered; between two questions the pause doubles up to [`PAUSE_MAX`].

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, VIA};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use kvasir_host::RouterHost;
use kvasir_router::{Input, TokenProbe};
use kvasir_types::WorkerId;
use kvasir_upstream::{Bounds, Pool, UpstreamError};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;
use tokio::sync::Notify;

use super::context::FleetContext;
use crate::models::model_of_prefill_pool;

/// An engine has this long to generate one token. A busy one may have long prompts to compute first.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer that is read.
const ANSWER_BYTES_MAX: usize = 256 << 10;
/// Between the first two questions.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Between two questions at most.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// The host by which SGLang knows that nobody is to be met.
const NOBODY: &str = "2.2.2.2";

/// Asks one worker for a token whenever a router waits for one.
pub(super) struct TokenProber {
    context: FleetContext,
    worker: WorkerId,
    /// A router may wait for a token.
    wanted: Arc<Notify>,
}

/// What came of asking.
enum Answer {
    Token,
    /// The engine has no route that generates, or does not let us use it.
    Unsupported,
    Failed(UpstreamError),
}

/// Any answer that has a choice.
#[derive(Deserialize)]
struct Completion {
    choices: Vec<IgnoredAny>,
}

/// Whom to ask, under which name, and who waits for it.
struct Question {
    pool: Pool,
    model: Arc<str>,
    /// It computes a part of requests and takes none without a place to meet the other.
    meets: bool,
    routers: Vec<Arc<RouterHost>>,
}

impl TokenProber {
    /// For a worker; `wanted` is notified when a router has ejected it.
    pub(super) fn new(context: &FleetContext, worker: WorkerId, wanted: &Arc<Notify>) -> Self {
        Self {
            context: context.clone(),
            worker,
            wanted: Arc::clone(wanted),
        }
    }

    /// Runs until it is dropped.
    pub(super) async fn run(self) {
        loop {
            self.ask_until_it_generates().await;
            self.wanted.notified().await;
        }
    }

    async fn ask_until_it_generates(&self) {
        let mut pause = FIRST_PAUSE;
        let mut is_first = true;
        while let Some(question) = self.question() {
            let asked = self.context.host.clock.now();
            let worker = question.pool.endpoint().clone();
            let supported = match question.ask().await {
                Answer::Token => {
                    tracing::info!(%worker, "engine generates: the worker gets requests again");
                    true
                }
                Answer::Unsupported => {
                    tracing::info!(%worker, "engine answers with errors and has no route that generates: the worker is back after a while");
                    false
                }
                Answer::Failed(error) => {
                    if std::mem::take(&mut is_first) {
                        tracing::warn!(%worker, %error,
                            "engine answers with errors and generates nothing; the worker gets no requests until it does");
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                    continue;
                }
            };
            let probe = TokenProbe {
                worker: self.worker,
                asked,
                supported,
            };
            for router in &question.routers {
                router.tell(Input::Generated(probe));
            }
            // A failure that came after the question is not outweighed by its answer.
            tokio::time::sleep(FIRST_PAUSE).await;
        }
    }

    /// Whom to ask; none if no router waits for a token of this worker.
    fn question(&self) -> Option<Question> {
        let mut question: Option<Question> = None;
        let pools = self.context.prefill_pools.all();
        for model in self.context.models.all().into_iter().chain(pools) {
            let Some(pool) = model.links().http(self.worker) else {
                continue;
            };
            if !model.host.ask(|router| router.awaits_token(self.worker)) {
                continue;
            }
            let question = question.get_or_insert_with(|| Question {
                pool,
                model: model_of_prefill_pool(&model.name).into(),
                meets: model.links().meets(self.worker),
                routers: Vec::new(),
            });
            let is_new = |known: &Arc<RouterHost>| !Arc::ptr_eq(known, &model.host);
            if question.routers.iter().all(is_new) {
                question.routers.push(Arc::clone(&model.host));
            }
        }
        question
    }
}

impl Question {
    async fn ask(&self) -> Answer {
        let mut completion = json!({"model": *self.model, "prompt": "1", "max_tokens": 1});
        if self.meets {
            completion["bootstrap_host"] = NOBODY.into();
            completion["bootstrap_room"] = 0.into();
        }
        let answer = self.post("/v1/completions", completion.to_string()).await;
        if !matches!(answer, Answer::Unsupported) {
            return answer;
        }
        let message = json!({"role": "user", "content": "1"});
        let chat = json!({"model": *self.model, "messages": [message], "max_tokens": 1});
        self.post("/v1/chat/completions", chat.to_string()).await
    }

    async fn post(&self, path: &'static str, body: String) -> Answer {
        let mut request = Request::new(Bytes::from(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static(path);
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(via) = self.pool.via() {
            headers.insert(VIA, via.clone());
        }
        let bounds = Bounds {
            timeout: TOKEN_TIMEOUT,
            answer_bytes_max: ANSWER_BYTES_MAX,
        };
        let body = match self.pool.fetch_ok(request, bounds).await {
            Ok(body) => body,
            Err(UpstreamError::Status(status)) if is_unsupported(status) => {
                return Answer::Unsupported;
            }
            Err(error) => return Answer::Failed(error),
        };
        match serde_json::from_slice::<Completion>(&body) {
            Ok(answer) if !answer.choices.is_empty() => Answer::Token,
            _ => Answer::Failed(UpstreamError::Unfinished),
        }
    }
}

/// Whether a refusal says nothing about the engine. One that is full is asked again.
fn is_unsupported(status: StatusCode) -> bool {
    let is_refusal = status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS;
    is_refusal || status == StatusCode::NOT_IMPLEMENTED
}
