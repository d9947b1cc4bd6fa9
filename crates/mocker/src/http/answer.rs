//! Answers in vLLM's shapes, field by field in vLLM's order.

use std::fmt::Write;

use super::choice::{End, Piece};
use super::error::{ids, text};

const FINGERPRINT: &str = "\"system_fingerprint\":\"kvasir-mocker\"";

/// What all parts of one answer have in common.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) chat: bool,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

/// Tokens in and out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) prompt: u64,
    pub(crate) completion: u64,
    /// Prompt tokens from the cache, where the engine says them.
    pub(crate) cached: Option<u64>,
}

/// A complete choice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Whole {
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) end: Option<End>,
}

impl Head {
    fn open(&self, object: &str) -> String {
        format!(
            "{{\"id\":{},\"object\":\"{object}\",\"created\":{},\"model\":{}",
            text(&self.id),
            self.created,
            text(&self.model)
        )
    }

    const fn chunk_object(&self) -> &'static str {
        if self.chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        }
    }

    /// The first event of a choice: who speaks. Completions have none.
    pub(crate) fn role_event(
        &self,
        index: usize,
        prompt: Option<&[u32]>,
        usage: Option<Usage>,
    ) -> String {
        let mut event = self.open(self.chunk_object());
        let _ = write!(
            event,
            ",\"choices\":[{{\"index\":{index},\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\"finish_reason\":null}}]{},\"prompt_token_ids\":{},\"prompt_text\":null}}",
            running(usage),
            ids(prompt)
        );
        framed(&event)
    }

    /// An event with new text.
    pub(crate) fn piece_event(
        &self,
        index: usize,
        piece: &Piece,
        token_ids: bool,
        usage: Option<Usage>,
    ) -> String {
        let mut event = self.open(self.chunk_object());
        let (reason, stop) = ending(piece.end.as_ref());
        let tokens = ids(token_ids.then_some(piece.tokens.as_slice()));
        let stop = match (&piece.end, self.chat) {
            (None, true) => String::new(),
            _ => format!("\"stop_reason\":{stop},"),
        };
        let content = text(&piece.text);
        let _ = match self.chat {
            true => write!(
                event,
                ",\"choices\":[{{\"index\":{index},\"delta\":{{\"content\":{content}}},\"logprobs\":null,\"finish_reason\":{reason},{stop}\"token_ids\":{tokens}}}]"
            ),
            false => write!(
                event,
                ",\"choices\":[{{\"index\":{index},\"text\":{content},\"logprobs\":null,\"finish_reason\":{reason},{stop}\"prompt_token_ids\":null,\"token_ids\":{tokens}}}]"
            ),
        };
        event += &running(usage);
        if piece.end.is_some() && usage.is_none() {
            event += ",";
            event += FINGERPRINT;
        }
        framed(&(event + "}"))
    }

    /// The event after all choices: what it cost.
    pub(crate) fn usage_event(&self, usage: Usage) -> String {
        let event = self.open(self.chunk_object());
        let details = usage.cached.map_or_else(String::new, |cached| {
            format!(
                ",\"prompt_tokens_details\":{{\"cached_tokens\":{cached},\"created_cache_tokens\":null}}"
            )
        });
        framed(&format!(
            "{event},\"choices\":[],\"usage\":{{{}{details}}},{FINGERPRINT}}}",
            counts(usage)
        ))
    }

    /// The answer as one document.
    pub(crate) fn document(
        &self,
        choices: &[Whole],
        usage: Usage,
        prompt: Option<&[u32]>,
        transfer: Option<&str>,
    ) -> String {
        let object = if self.chat {
            "chat.completion"
        } else {
            "text_completion"
        };
        let token_ids = prompt.is_some();
        let list: Vec<String> = choices
            .iter()
            .enumerate()
            .map(|(at, c)| self.choice(at, c, token_ids, prompt))
            .collect();
        let details = usage.cached.map_or_else(
            || "null".to_owned(),
            |cached| {
                format!(
                    "{{\"cached_tokens\":{cached},\"created_cache_tokens\":null,\"multimodal_tokens\":null}}"
                )
            },
        );
        let usage = format!(
            "\"usage\":{{{},\"prompt_tokens_details\":{details},\"completion_tokens_details\":null}}",
            counts(usage)
        );
        let tail = match self.chat {
            true => format!(
                "\"prompt_logprobs\":null,\"prompt_token_ids\":{},\"prompt_text\":null,",
                ids(prompt)
            ),
            false => String::new(),
        };
        format!(
            "{},\"choices\":[{}],\"service_tier\":null,{FINGERPRINT},{usage},{tail}\"kv_transfer_params\":{},\"ec_transfer_params\":null,\"metrics\":null}}",
            self.open(object),
            list.join(","),
            transfer.unwrap_or("null")
        )
    }

    fn choice(
        &self,
        index: usize,
        choice: &Whole,
        token_ids: bool,
        prompt: Option<&[u32]>,
    ) -> String {
        let (reason, stop) = ending(choice.end.as_ref());
        let tokens = ids(token_ids.then_some(choice.tokens.as_slice()));
        let content = text(&choice.text);
        match self.chat {
            true => format!(
                "{{\"index\":{index},\"message\":{{\"role\":\"assistant\",\"content\":{content},\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,\"reasoning\":null}},\"logprobs\":null,\"finish_reason\":{reason},\"stop_reason\":{stop},\"token_ids\":{tokens},\"routed_experts\":null}}"
            ),
            false => format!(
                "{{\"index\":{index},\"text\":{content},\"logprobs\":null,\"finish_reason\":{reason},\"stop_reason\":{stop},\"token_ids\":{tokens},\"prompt_logprobs\":null,\"prompt_token_ids\":{},\"routed_experts\":null}}",
                ids(prompt)
            ),
        }
    }
}

/// Finish reason and stop reason as JSON.
fn ending(end: Option<&End>) -> (String, String) {
    let null = || "null".to_owned();
    match end {
        Some(End { reason, stop }) => (text(reason), stop.as_deref().map_or_else(null, text)),
        None => (null(), null()),
    }
}

fn counts(usage: Usage) -> String {
    format!(
        "\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{}",
        usage.prompt,
        usage.prompt + usage.completion,
        usage.completion
    )
}

fn running(usage: Option<Usage>) -> String {
    usage.map_or_else(String::new, |usage| {
        format!(
            ",\"usage\":{{{},\"completion_tokens_details\":null}}",
            counts(usage)
        )
    })
}

/// A server-sent event.
pub(crate) fn framed(json: &str) -> String {
    format!("data: {json}\n\n")
}
