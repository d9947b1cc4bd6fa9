//! Token counts of a request.
//!
//! Answers two questions: how are they written, and what did an engine report in its own answer? The
//! cached share that an engine reports is what the router compares its prediction with.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::answer::Endpoint;
use crate::json::Fields;
use crate::scan::Scan;
use crate::sse::Event;
use crate::walk::{self, JsonField};

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

static WORD: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));

/// Looks for usage in one JSON answer or chunk of an engine. Most chunks have none and cost one search for a
/// word; a text that contains the word costs a walk over the fields and is never taken for usage.
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
    WORD.find(json)?;
    walk_for_usage(json).unwrap_or_else(|| read_usage(json))
}

/// The quick reading: only the usage is parsed. `None` where it is not sure.
fn walk_for_usage(json: &[u8]) -> Option<Option<UsageChunk>> {
    let (mut usage, mut choices, mut twice) = (None, None, false);
    walk::fields(
        std::str::from_utf8(json).ok()?,
        |JsonField { key, value }| {
            twice |= match key {
                "usage" => usage.replace(value).is_some(),
                "choices" => choices.replace(value).is_some(),
                _ => false,
            };
        },
    )?;
    let only_usage = match choices {
        None | Some("null") => true,
        Some(list) => list.strip_prefix('[')?.trim_start().starts_with(']'),
    };
    if twice {
        return None;
    }
    Some(
        usage
            .and_then(usage_in)
            .map(|usage| UsageChunk { usage, only_usage }),
    )
}

/// The counts in the text of a `usage` field; none if it is null, or no usage.
pub(crate) fn usage_in(field: &str) -> Option<Usage> {
    let raw: Option<RawUsage> = serde_json::from_str(field).ok()?;
    raw.map(Usage::from)
}

/// The reading that is always right.
fn read_usage(json: &[u8]) -> Option<UsageChunk> {
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
    event.write_with(&json, &mut out);
    Some(out.freeze())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::walk::tests::near_json;

    fn value() -> impl Strategy<Value = String> {
        let fixed = prop::sample::select(vec![
            "null",
            "[]",
            "[ \n]",
            "[{\"text\":\"\\\"usage\\\"\"}]",
            "[1,",
            "{}",
            "7",
            "{\"prompt_tokens\":7,\"completion_tokens\":2,\"x\":[]}",
            "{\"prompt_tokens\":-7}",
            "{\"prompt_tokens\":7,\"prompt_tokens\":8}",
            "{\"prompt_tokens\":null,\"prompt_tokens_details\":{\"cached_tokens\":5}}",
            "{\"prompt_tokens_details\":null}",
            "[1,2,{\"cached_tokens\":3}]",
        ]);
        prop_oneof![fixed.prop_map(str::to_owned), near_json()]
    }

    fn chunk() -> impl Strategy<Value = String> {
        let key = prop::sample::select(vec!["usage", "choices", "id", "us\\u0061ge"]);
        let fields = prop::collection::vec((key, value()), 0..4);
        fields.prop_map(|fields| {
            let fields: Vec<String> = fields
                .iter()
                .map(|(k, v)| format!("\"{k}\": {v}"))
                .collect();
            format!("{{{}}}", fields.join(","))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Where the quick reading has an answer, it is that of the whole parse.
        #[test]
        fn both_readings_agree(json in chunk()) {
            if let Some(quick) = walk_for_usage(json.as_bytes()) {
                prop_assert_eq!(quick, read_usage(json.as_bytes()), "{}", json);
            }
        }
    }

    /// The quick reading is the one in use on ordinary answers.
    #[test]
    fn ordinary_answers_are_walked() {
        let answer = br#"{"id":"a","choices":[{"index":0,"message":{"content":"\"usage\""}}],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        let found = walk_for_usage(answer).unwrap();
        assert_eq!(found, read_usage(answer));
        assert_eq!(found.unwrap().usage.cached_tokens, Some(4));
    }
}
