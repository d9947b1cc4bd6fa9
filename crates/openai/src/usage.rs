//! Token counts of a request.
//!
//! Answers two questions: how are they written, and what did an engine report in its own answer? The
//! cached share that an engine reports is what the router compares its prediction with.

use bytes::{Bytes, BytesMut};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::answer::Endpoint;
use crate::json::Fields;
use crate::scan::Scan;
use crate::sse::Event;

/// Tokens in and out of one request, over all its choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Tokens of the prompt that the engine had in its cache, where it says so.
    pub cached_tokens: Option<u64>,
}

impl Usage {
    pub(crate) fn write(&self, out: &mut BytesMut, endpoint: Endpoint) {
        let mut fields = Fields::open(out);
        fields.int("prompt_tokens", self.prompt_tokens);
        fields.int("completion_tokens", self.completion_tokens);
        let total = self.prompt_tokens.saturating_add(self.completion_tokens);
        fields.int("total_tokens", total);
        if let Some(cached) = self.cached_tokens {
            let mut details = Fields::open(fields.key("prompt_tokens_details"));
            if endpoint == Endpoint::Completions {
                details.raw("audio_tokens", "null");
            }
            details.int("cached_tokens", cached);
            details.close();
        }
        fields.close();
    }
}

/// Usage found in an engine's answer or chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageChunk {
    /// What the engine counted.
    pub usage: Usage,
    /// The chunk carries usage and no choice: it can be left out for a client that did not ask.
    pub only_usage: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    usage: Option<RawUsage>,
}

#[derive(Deserialize)]
pub(crate) struct RawUsage {
    #[serde(default)]
    prompt_tokens: Option<u64>,
    #[serde(default)]
    completion_tokens: Option<u64>,
    #[serde(default)]
    prompt_tokens_details: Option<RawDetails>,
}

#[derive(Deserialize)]
pub(crate) struct RawDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl From<RawUsage> for Usage {
    fn from(raw: RawUsage) -> Self {
        Self {
            prompt_tokens: raw.prompt_tokens.unwrap_or(0),
            completion_tokens: raw.completion_tokens.unwrap_or(0),
            cached_tokens: raw.prompt_tokens_details.and_then(|d| d.cached_tokens),
        }
    }
}

/// Looks for usage in one JSON answer or chunk of an engine. Most chunks have none and cost one search for a
/// word; a text that contains the word costs a parse and is never taken for usage.
///
/// ```
/// # use kvasir_openai::find_usage;
/// let chunk = br#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}"#;
/// let found = find_usage(chunk).unwrap();
/// assert!(found.only_usage);
/// assert_eq!(found.usage.prompt_tokens, 7);
/// assert_eq!(find_usage(br#"{"choices":[{"text":"\"usage\":{}"}]}"#), None);
/// ```
#[must_use]
pub fn find_usage(json: &[u8]) -> Option<UsageChunk> {
    memchr::memmem::find(json, b"\"usage\"")?;
    let chunk: Chunk = serde_json::from_slice(json).ok()?;
    Some(UsageChunk {
        usage: chunk.usage?.into(),
        only_usage: chunk.choices.is_none_or(|c| c.is_empty()),
    })
}

/// The bytes of a chunk without its usage, for a client that did not ask for what we did. None when the event
/// passes as it is: it has no usage, or a `null` one, or is not JSON. A chunk that is usage alone
/// ([`UsageChunk::only_usage`]) is to be dropped whole instead.
///
/// ```
/// # use kvasir_openai::{Event, without_usage};
/// let raw = "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":{\"prompt_tokens\":7}}\n\n";
/// let event = Event { raw: raw.into() };
/// assert_eq!(without_usage(&event).unwrap(), "data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
/// ```
#[must_use]
pub fn without_usage(event: &Event) -> Option<Bytes> {
    let data = event.data()?;
    find_usage(&data)?;
    let data = Bytes::copy_from_slice(&data);
    let scan = Scan::parse(&data).ok()?;
    let json = scan.edit().remove("usage").apply(&data);
    let mut out = BytesMut::with_capacity(json.len() + 64);
    if let Some(name) = event.name() {
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b"\n");
    }
    for line in json.split(|b| matches!(b, b'\n' | b'\r')) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line);
        out.extend_from_slice(b"\n");
    }
    out.extend_from_slice(b"\n");
    Some(out.freeze())
}
