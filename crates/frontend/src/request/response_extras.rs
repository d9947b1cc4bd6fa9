//! What a client wants to be told beside its answer: annotations before and after the stream, and what only an engine
//! can tell.
//!
//! What always holds: fields that the client did not ask for cost nothing.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kvasir_openai::{Endpoint, Extra, Nvext, Scan, asks_token_ids, write_annotation};
use kvasir_types::{RequestId, Token};

use crate::http::long_work::LongWork;
use crate::models::ServedModel;
use crate::models::prompt;
use crate::models::tokenize::TextWork;

/// The annotation that says at the end what an answer amounted to.
const LLM_METRICS: &str = "llm_metrics";
/// The annotation that shows the prompt as the template prints it.
const FORMATTED_PROMPT: &str = "formatted_prompt";

/// What a client of an OpenAI worker wants to be told in its answer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExtraFields {
    /// Parts of the answer's `nvext`.
    pub(crate) extra: Extra,
    /// What the answer amounted to, before its `[DONE]`.
    pub(crate) metrics: bool,
    /// The client asks its engine for tokens itself: they stay where the engine puts them.
    own_ids: bool,
    /// Requests that waited in the router when this one came, where that is wanted.
    pub(crate) queue_depth: u32,
}

impl ExtraFields {
    /// Reads it.
    pub(crate) fn of(model: &ServedModel, nvext: &Nvext, scan: &Scan<'_>) -> Self {
        Self {
            extra: nvext.extra,
            metrics: wants_metrics(nvext),
            own_ids: nvext.extra.completion_token_ids && asks_token_ids(scan),
            queue_depth: queue_depth(model, nvext),
        }
    }

    /// Whether the engine is to be asked for the tokens of its answer, which the client did not ask it for.
    pub(crate) fn asks_ids(&self) -> bool {
        self.extra.completion_token_ids && !self.own_ids
    }

    /// Whether it is nothing that an answer can tell.
    pub(crate) fn is_nothing(&self) -> bool {
        let ours = self.extra.worker_id || self.extra.timing || self.metrics;
        !ours && !self.extra.is_of_engine()
    }
}

/// Whether the client wants to know what its answer amounted to.
pub(crate) fn wants_metrics(nvext: &Nvext) -> bool {
    nvext.wants(LLM_METRICS)
}

/// Requests that wait in the router, if the client wants to know.
pub(crate) fn queue_depth(model: &ServedModel, nvext: &Nvext) -> u32 {
    if !nvext.extra.timing {
        return 0;
    }
    let waiting = model.host.ask(|router| router.queued().0);
    u32::try_from(waiting).unwrap_or(u32::MAX)
}

/// Whether the client wants to see its prompt as the template prints it, in a stream.
pub(crate) fn wants_formatted(nvext: &Nvext) -> bool {
    nvext.wants(FORMATTED_PROMPT)
}

/// The prompt of a forwarded body as its engine's template prints it; none where no template and no tokenizer is at
/// hand. On a thread of its own, as a prompt may be long.
pub(crate) async fn formatted(
    pool: &LongWork,
    model: &ServedModel,
    endpoint: Endpoint,
    body: &Bytes,
    nvext: &Nvext,
) -> Option<String> {
    let text = Arc::clone(model.text()?);
    let clock = model.host.context().clock;
    let now = clock.unix_secs(clock.now());
    let (bytes, work) = (body.len(), TextWork::new(pool, model));
    let (body, ids) = (body.clone(), nvext.token_data.clone());
    let read = move || match ids {
        Some(ids) => text.tokenizer().decode(&ids, false).ok(),
        None => prompt::formatted(&text, &Scan::parse(&body).ok()?, endpoint, now),
    };
    work.elsewhere(bytes, read).await?.flatten()
}

/// What the client wants to be told before its stream, as far as it is known.
pub(crate) fn notes(
    nvext: &Nvext,
    id: RequestId,
    tokens: Option<&[Token]>,
    formatted: Option<&str>,
) -> Bytes {
    if nvext.annotations.is_empty() {
        return Bytes::new();
    }
    let mut out = BytesMut::new();
    if nvext.wants("request_id") {
        write_annotation(&mut out, "request_id", &id.to_string());
    }
    if let Some(tokens) = tokens.filter(|_| nvext.wants("token_ids")) {
        let listed = serde_json::to_string(tokens).unwrap_or_default();
        write_annotation(&mut out, "token_ids", &listed);
    }
    if let Some(prompt) = formatted.filter(|_| wants_formatted(nvext)) {
        write_annotation(&mut out, FORMATTED_PROMPT, prompt);
    }
    out.freeze()
}
