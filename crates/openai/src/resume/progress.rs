//! What has come of a streamed answer.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::usage::{RawUsage, Usage};

/// Longest text that is kept for resuming.
const TEXT_BYTES_MAX: usize = 4 << 20;

/// What has come of a streamed answer of one choice, as far as going on elsewhere needs it.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    text: String,
    /// Tokens, counted by the engine or else by chunks.
    tokens: u32,
    usage: Option<Usage>,
    head: Option<Head>,
    finished: bool,
    obstacle: Option<&'static str>,
}

/// What every chunk of an answer repeats, as JSON text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) id: Option<Box<str>>,
    pub(super) created: Option<Box<str>>,
    pub(super) model: Option<Box<str>>,
    pub(super) object: Option<Box<str>>,
}

/// What one chunk was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkKind {
    /// Part of the answer, with what the engine counted until then, where it says so.
    Part(Option<Usage>),
    /// The engine says that it failed: nothing more will come, though the client could have had more.
    Failure,
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    created: Option<&'a RawValue>,
    #[serde(borrow, default)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
    #[serde(default)]
    choices: Vec<Part>,
    #[serde(default)]
    usage: Option<RawUsage>,
    /// An object, or only a text.
    #[serde(default)]
    error: Option<Value>,
    /// Beside `object` in SGLang's older errors.
    #[serde(default)]
    code: Option<Value>,
}

#[derive(Deserialize)]
struct Part {
    #[serde(default)]
    index: u32,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    delta: Option<Delta>,
    #[serde(default)]
    logprobs: Option<IgnoredAny>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

#[derive(Default, Deserialize)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    function_call: Option<IgnoredAny>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    refusal: Option<IgnoredAny>,
}

/// A code that is a status, as a number or a text.
fn status_code(code: &Value) -> Option<u64> {
    code.as_u64().or_else(|| code.as_str()?.parse().ok())
}

impl Delta {
    fn obstacle(&self) -> Option<&'static str> {
        let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if self
            .tool_calls
            .as_ref()
            .is_some_and(|calls| !calls.is_empty())
            || self.function_call.is_some()
        {
            return Some("tool_call");
        }
        if said(&self.reasoning_content) || said(&self.reasoning) {
            return Some("reasoning");
        }
        self.refusal.map(|_| "refusal")
    }
}

impl Progress {
    /// The text that the client has.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Tokens that it took, as the engine counts them; where it does not, chunks with text.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// What the engine counted last.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// The client knows why the answer ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// What came that cannot be continued, if something did.
    #[must_use]
    pub fn obstacle(&self) -> Option<&'static str> {
        self.obstacle
    }

    /// Whether no chunk has come: comments do not count.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head().is_none()
    }

    pub(super) fn head(&self) -> Option<&Head> {
        self.head.as_ref()
    }

    /// Takes in the data of one event.
    pub fn add_chunk(&mut self, data: &[u8]) -> ChunkKind {
        let chunk: Chunk<'_> = match serde_json::from_slice(data) {
            Ok(chunk) => chunk,
            Err(_) => {
                self.obstacle.get_or_insert("unknown_chunk");
                return ChunkKind::Part(None);
            }
        };
        let is_error = |object: &RawValue| object.get() == "\"error\"";
        if chunk.error.is_some() || chunk.object.is_some_and(is_error) {
            let inner = chunk.error.as_ref().and_then(|error| error.get("code"));
            return match inner.or(chunk.code.as_ref()).and_then(status_code) {
                Some(500..) | None if !self.finished => ChunkKind::Failure,
                _ => {
                    self.obstacle.get_or_insert("refusal");
                    ChunkKind::Part(None)
                }
            };
        }
        let head = self.head.is_none().then(|| Head {
            id: chunk.id.map(|raw| raw.get().into()),
            created: chunk.created.map(|raw| raw.get().into()),
            model: chunk.model.map(|raw| raw.get().into()),
            object: chunk.object.map(|raw| raw.get().into()),
        });
        self.head = head.or(self.head.take());
        let before = self.text.len();
        for part in chunk.choices {
            self.part(part);
        }
        let usage = chunk.usage.map(Usage::from);
        match usage {
            Some(usage) => self.tokens = u32::try_from(usage.completion_tokens).unwrap_or(u32::MAX),
            None if self.text.len() > before && self.usage.is_none() => {
                self.tokens = self.tokens.saturating_add(1);
            }
            None => {}
        }
        self.usage = usage.or(self.usage);
        ChunkKind::Part(usage)
    }

    fn part(&mut self, part: Part) {
        let delta = part.delta.unwrap_or_default();
        let several = (part.index > 0).then_some("choices");
        let details = part.logprobs.map(|_| "logprobs");
        self.finished |= part.finish_reason.is_some();
        self.obstacle = self.obstacle.or(several).or(details).or(delta.obstacle());
        for text in [part.text, delta.content].into_iter().flatten() {
            if self.text.len() + text.len() > TEXT_BYTES_MAX {
                self.obstacle.get_or_insert("too_long");
                return;
            }
            self.text.push_str(&text);
        }
    }
}
