//! The demo's load: a few people who talk to the model over HTTP, as real clients would.
//!
//! Each conversation keeps its history, so that every turn's prompt begins with the one before. The cached
//! share and the worker come from the answer itself (`nvext.extra_fields`).

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method};
use kvasir_frontend::App;
use kvasir_openai::EventParser;
use kvasir_types::Rng;
use kvasir_upstream::{Pool, UpstreamRequest};
use serde_json::{Value, json};

use super::summary::{Summary, Turn};
use crate::wiring::Failure;

/// People who talk at once.
const PEOPLE: u64 = 6;
/// Turns of one conversation; then the person begins another.
const TURNS: usize = 6;
/// Longest pause between an answer and the next question.
const THINK_MAX_MS: u64 = 400;
/// Pause after a request that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Largest event that is read.
const EVENT_BYTES_MAX: usize = 1 << 20;

const SYSTEM: &str = "You are the help desk of a small shipping company. Answer in plain words, name the \
    next step, and never promise a date that the schedule does not hold. Parcels leave the depot at six in the \
    morning and at two in the afternoon. Letters leave once a day. Heavy goods need a booking two days ahead.";

const QUESTIONS: &[&str] = &[
    "When does my parcel leave if I bring it at noon?",
    "And if I bring it in the evening?",
    "How do I book heavy goods for next week?",
    "My letter has not arrived. What should I do first?",
    "Can you send it again, with a signature this time?",
    "What does it cost to change the address on the way?",
    "Who do I call when the driver cannot find the door?",
    "Please sum up what we have agreed on.",
];

/// What all clients share.
#[derive(Clone)]
pub(crate) struct Traffic {
    server: Pool,
    model: Arc<str>,
    app: Arc<App>,
    summary: Arc<Mutex<Summary>>,
}

impl Traffic {
    /// Clients of `server`; what comes of their turns goes to `summary`.
    pub(crate) fn new(
        server: Pool,
        model: Arc<str>,
        app: Arc<App>,
        summary: Arc<Mutex<Summary>>,
    ) -> Self {
        Self {
            server,
            model,
            app,
            summary,
        }
    }

    /// Starts the people; each talks until the tasks are drained.
    pub(crate) fn start(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        for _ in 0..PEOPLE {
            let (traffic, rng) = (self.clone(), rng.fork());
            let tasks = self.app.tasks();
            let draining = tasks.clone();
            tasks.spawn(async move {
                tokio::select! {
                    () = traffic.talk(rng) => {}
                    () = draining.draining() => {}
                }
            });
        }
    }

    async fn talk(&self, mut rng: Rng) {
        loop {
            if let Err(error) = self.conversation(&mut rng).await {
                if self.app.is_draining() {
                    return;
                }
                tracing::warn!(%error, "a conversation broke off");
                self.summary
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .add_failure();
                tokio::time::sleep(AFTER_FAILURE).await;
            }
        }
    }

    async fn conversation(&self, rng: &mut Rng) -> Result<(), Failure> {
        let mut messages = vec![json!({ "role": "system", "content": SYSTEM })];
        for _ in 0..TURNS {
            let question = QUESTIONS[rng.below(QUESTIONS.len() as u64) as usize];
            messages.push(json!({ "role": "user", "content": question }));
            let (turn, answer) = self.turn(&messages).await?;
            messages.push(json!({ "role": "assistant", "content": answer }));
            self.summary
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .add(&turn);
            tokio::time::sleep(Duration::from_millis(rng.below(THINK_MAX_MS))).await;
        }
        Ok(())
    }

    async fn turn(&self, messages: &[Value]) -> Result<(Turn, String), Failure> {
        let body = json!({
            "model": &*self.model,
            "messages": messages,
            "max_tokens": 64,
            "stream": true,
            "stream_options": { "include_usage": true },
            "nvext": { "extra_fields": ["worker_id"] },
        });
        let json = HeaderValue::from_static("application/json");
        let request = UpstreamRequest {
            method: &Method::POST,
            path: "/v1/chat/completions",
            headers: &HeaderMap::new(),
            also: Some((&CONTENT_TYPE, &json)),
            body: &Bytes::from(body.to_string()),
            fresh: false,
        };
        let start = self.app.clock().now();
        let response = self.server.send(&request).await?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!("the server answered {status}").into());
        }
        let mut body = response.into_body();
        let mut heard = Heard::default();
        let mut events = EventParser::new(EVENT_BYTES_MAX);
        while let Some(data) = poll_fn(|cx| body.poll_data(cx)).await {
            events.push(data?);
            while let Some(event) = events.next_event()? {
                let chunk = event
                    .data()
                    .and_then(|data| serde_json::from_slice(&data).ok());
                if let Some(chunk) = chunk {
                    heard.chunk(&chunk, self.app.clock().now() - start);
                }
            }
        }
        Ok((heard.turn, heard.text))
    }
}

/// An answer as it comes.
struct Heard {
    turn: Turn,
    text: String,
}

impl Default for Heard {
    fn default() -> Self {
        let turn = Turn {
            worker: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            ttft: Duration::ZERO,
        };
        Self {
            turn,
            text: String::new(),
        }
    }
}

impl Heard {
    fn chunk(&mut self, chunk: &Value, since_start: Duration) {
        if let Some(text) = chunk["choices"][0]["delta"]["content"].as_str() {
            if self.text.is_empty() {
                self.turn.ttft = since_start;
            }
            self.text.push_str(text);
        }
        if let Some(worker) = chunk["nvext"]["worker_id"]["decode_worker_id"].as_u64() {
            self.turn.worker = worker;
        }
        let usage = &chunk["usage"];
        if let Some(prompt) = usage["prompt_tokens"].as_u64() {
            self.turn.prompt_tokens = prompt;
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
            self.turn.cached_tokens = cached.unwrap_or(0);
        }
    }
}
