//! One request as two engines get it: one computes the prompt, the other answers.
//!
//! Answers two questions: which bytes does each of them get, and what did the first say of where the prompt is? The words are those of vLLM with a
//! connector (`kv_transfer_params`) and of SGLang (`bootstrap_*`), as recorded in `testdata/vllm-disagg`.
//!
//! What always holds: but for the fields named here, an engine gets the client's bytes; what one engine says of its memory goes to the other unread.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;
use serde_json::value::RawValue;

use crate::answer::Endpoint;
use crate::json::write_json_str;
use crate::object::Object;
use crate::scan::{Edits, Scan};
use crate::usage::{Usage, find_usage, usage_in};
use crate::walk;

/// The field by which vLLM's connectors are told of a transfer, and tell of one.
const TRANSFER: &str = "kv_transfer_params";
/// What asks for one.
const ASK: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false}"#;
/// What only an answer of more than one token needs. vLLM refuses the first two beside one token that is not streamed.
const OF_ANSWERS: [&str; 13] = [
    "stream_options",
    "min_tokens",
    "n",
    "best_of",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "echo",
    "return_token_ids",
    "include_stop_str_in_output",
    "stop_sequences",
    "background",
];

/// Which API a body is of, where a prompt can be computed by one engine and answered by another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LegApi {
    /// Completions of either kind, and Anthropic's messages: `max_tokens`.
    #[default]
    Completions,
    /// OpenAI's responses: `max_output_tokens`, and an answer that may be stored.
    Responses,
}

/// How many answers a body asks for: its prompts, each as often as `n` says.
#[must_use]
pub fn answers_wanted(scan: &Scan<'_>, endpoint: Endpoint) -> usize {
    let each = usize::try_from(scan.n()).unwrap_or(usize::MAX);
    prompt_count(scan, endpoint).saturating_mul(each)
}

/// How many prompts a body has.
fn prompt_count(scan: &Scan<'_>, endpoint: Endpoint) -> usize {
    if endpoint == Endpoint::Chat {
        return 1;
    }
    let prompt = scan.raw("prompt").unwrap_or_default();
    let Some(list) = prompt.strip_prefix('[') else {
        return 1;
    };
    // A list of numbers is one prompt of tokens.
    if !list.trim_start().starts_with(['"', '[']) {
        return 1;
    }
    serde_json::from_str::<Vec<&RawValue>>(prompt).map_or(1, |prompts| prompts.len())
}

/// Whether a vLLM engine can answer the body from a prompt that another has computed: one answer, and nothing that it computes the
/// prompt itself for.
#[must_use]
pub fn is_transferable(scan: &Scan<'_>, endpoint: Endpoint) -> bool {
    answers_wanted(scan, endpoint) == 1 && has_plain_answers(scan)
}

/// Whether a body asks for nothing that an engine computes the prompt itself for.
#[must_use]
pub fn has_plain_answers(scan: &Scan<'_>) -> bool {
    let is_plain = |key: &str| {
        scan.raw(key)
            .is_none_or(|value| matches!(value, "false" | "0"))
    };
    let best_of = scan.raw("best_of");
    ["prompt_logprobs", "echo", "use_beam_search"]
        .into_iter()
        .all(is_plain)
        && best_of.is_none_or(|count| matches!(count, "0" | "1"))
}

/// Whether a vLLM engine can answer a body of `/v1/responses` so: its prompt is in the body, and no tool of the engine's own makes others.
#[must_use]
pub fn is_response_transferable(scan: &Scan<'_>) -> bool {
    #[derive(serde::Deserialize)]
    struct Tool<'a> {
        #[serde(borrow, default, rename = "type")]
        kind: std::borrow::Cow<'a, str>,
    }
    let tools = scan.raw("tools").map(serde_json::from_str::<Vec<Tool<'_>>>);
    let has_own_tools = match tools {
        None => false,
        Some(Ok(tools)) => tools.iter().any(|tool| tool.kind != "function"),
        Some(Err(_)) => true,
    };
    let is_plain = |key: &str| scan.raw(key).is_none_or(|value| value == "false");
    !has_own_tools && is_plain("previous_response_id") && is_plain("background")
}

/// The body that asks a vLLM engine to compute the prompt and to keep it for another. Never streamed: a stream does not say where the prompt is.
///
/// ```
/// # use kvasir_openai::{LegApi, prefill_leg};
/// let body = bytes::Bytes::from_static(br#"{"prompt":"a","max_tokens":9,"stream":true,"n":1}"#);
/// assert_eq!(
///     prefill_leg(&body, LegApi::Completions).unwrap(),
///     r#"{"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false},"prompt":"a","max_tokens":1,"stream":false}"#
/// );
/// ```
#[must_use]
pub fn prefill_leg(body: &Bytes, api: LegApi) -> Option<Bytes> {
    one_token(body, ASK, api)
}

/// The body that lets a vLLM engine fetch a prompt and throw it away: only that frees it where it was computed.
#[must_use]
pub fn release_leg(body: &Bytes, params: &str, api: LegApi) -> Option<Bytes> {
    one_token(body, params, api)
}

fn one_token(body: &Bytes, params: &str, api: LegApi) -> Option<Bytes> {
    let object = Object::parse(body).ok()?;
    let mut edits = Edits::of(&object);
    edits.remove_where(|name| OF_ANSWERS.contains(&name));
    edits.set(TRANSFER, params);
    match api {
        LegApi::Completions => edits.set("max_tokens", "1"),
        // Nobody will ask for it.
        LegApi::Responses => edits.set("max_output_tokens", "1").set("store", "false"),
    };
    if object.get("stream").is_some() {
        edits.set("stream", "false");
    }
    // The newer name wins where it stands.
    if object.get("max_completion_tokens").is_some() {
        edits.set("max_completion_tokens", "1");
    }
    Some(edits.apply(body))
}

/// The body that lets a vLLM engine answer from a prompt that another has computed.
#[must_use]
pub fn decode_leg(body: &Bytes, params: &str) -> Option<Bytes> {
    with_fields(body, &[(TRANSFER, params)])
}

/// The body with these fields set.
fn with_fields(body: &Bytes, fields: &[(&'static str, &str)]) -> Option<Bytes> {
    if let Some(set) = put_in_front(body, fields) {
        return Some(set);
    }
    let object = Object::parse(body).ok()?;
    let mut edits = Edits::of(&object);
    for (name, value) in fields {
        edits.set(name, value);
    }
    Some(edits.apply(body))
}

/// The same of a body that has none of them, which is copied and not read. `None` where it may have one: a name that does not stand in it
/// could only be written with escapes of letters.
fn put_in_front(body: &[u8], fields: &[(&'static str, &str)]) -> Option<Bytes> {
    let may_have = |word: &[u8]| memchr::memmem::find(body, word).is_some();
    let opening = body.len() - body.trim_ascii_start().strip_prefix(b"{")?.len();
    let (brace, rest) = body.split_at(opening);
    let has_others = rest.trim_ascii_start().starts_with(b"\"");
    if !has_others || may_have(b"\\u") || fields.iter().any(|(name, _)| may_have(name.as_bytes())) {
        return None;
    }
    let grown: usize = fields
        .iter()
        .map(|(n, value)| n.len() + value.len() + 4)
        .sum();
    let mut out = BytesMut::with_capacity(body.len() + grown);
    out.extend_from_slice(brace);
    for (name, value) in fields {
        out.extend_from_slice(b"\"");
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b"\":");
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b",");
    }
    out.extend_from_slice(rest);
    Some(out.freeze())
}

/// Where two SGLang engines meet for one request.
#[derive(Clone, Copy, Debug)]
pub struct BootstrapFields<'a> {
    /// Host of the engine that computes the prompt.
    pub host: &'a str,
    /// Its port for meetings.
    pub port: u16,
    /// Unlike that of any other request under way there.
    pub room: u64,
    /// The rank that computes the prompt, where there are several.
    pub prefill_rank: Option<u32>,
}

/// The body as both SGLang engines get it.
#[must_use]
pub fn bootstrap_leg(body: &Bytes, fields: BootstrapFields<'_>) -> Option<Bytes> {
    let mut host = BytesMut::new();
    match fields.host.contains(':') && !fields.host.starts_with('[') {
        true => write_json_str(&mut host, &format!("[{}]", fields.host)),
        false => write_json_str(&mut host, fields.host),
    }
    let host = String::from_utf8_lossy(&host);
    let (port, room) = (fields.port.to_string(), fields.room.to_string());
    let rank = fields.prefill_rank.map(|rank| rank.to_string());
    let set = [
        ("bootstrap_host", &*host),
        ("bootstrap_port", &*port),
        ("bootstrap_room", &*room),
        (
            "disagg_prefill_dp_rank",
            rank.as_deref().unwrap_or_default(),
        ),
    ];
    let count = set.len() - usize::from(rank.is_none());
    with_fields(body, set.get(..count)?)
}

/// What an engine says that has computed a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefillAnswer {
    /// Where the prompt is: JSON text for the engine that answers. None where a vLLM engine says nothing.
    pub transfer_params: Option<String>,
    /// What it counted.
    pub usage: Usage,
}

impl PrefillAnswer {
    /// Reads an answer; what is not there is not said.
    ///
    /// ```
    /// # use kvasir_openai::PrefillAnswer;
    /// let answer = PrefillAnswer::read(br#"{"usage":{"prompt_tokens":7},"kv_transfer_params":{"remote_port":1}}"#);
    /// assert_eq!(answer.transfer_params.unwrap(), r#"{"remote_port":1}"#);
    /// assert_eq!(answer.usage.prompt_tokens, 7);
    /// ```
    #[must_use]
    pub fn read(answer: &[u8]) -> Self {
        Self::find(answer).unwrap_or_else(|| Self {
            transfer_params: transfer_params(answer),
            usage: find_usage(answer).map(|c| c.usage).unwrap_or_default(),
        })
    }

    /// The quick reading, which looks for the two fields alone. `None` where it is not sure: one of them is there several times, or not at all.
    fn find(answer: &[u8]) -> Option<Self> {
        let answer = std::str::from_utf8(answer).ok()?;
        let [params, usage] = &*WORDS;
        Some(Self {
            transfer_params: told_params(only_value(answer, params)?),
            usage: usage_in(only_value(answer, usage)?).unwrap_or_default(),
        })
    }
}

/// The names in quotes, which are escaped inside of texts.
static WORDS: LazyLock<[Finder<'static>; 2]> = LazyLock::new(|| {
    [
        Finder::new(b"\"kv_transfer_params\""),
        Finder::new(b"\"usage\""),
    ]
});

/// The value of the one field that has this name, in whatever object.
fn only_value<'a>(json: &'a str, name: &Finder<'_>) -> Option<&'a str> {
    let bytes = json.as_bytes();
    let mut found = name.find_iter(bytes);
    let (at, None) = (found.next()?, found.next()) else {
        return None;
    };
    let before = at.checked_sub(1).and_then(|at| bytes.get(at))?;
    let colon = walk::blank(bytes, at + name.needle().len());
    if *before == b'\\' || *bytes.get(colon)? != b':' {
        return None;
    }
    let start = walk::blank(bytes, colon + 1);
    json.get(start..walk::value(bytes, start)?)
}

/// What a vLLM engine says of where the prompt is that it has computed. The reading that is always right.
fn transfer_params(answer: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Told<'a> {
        #[serde(borrow, default)]
        kv_transfer_params: Option<&'a RawValue>,
    }
    let answer: Told<'_> = serde_json::from_slice(answer).ok()?;
    told_params(answer.kv_transfer_params?.get())
}

/// The text of an object that says something.
fn told_params(params: &str) -> Option<String> {
    let inner = params.strip_prefix('{')?.trim_start();
    (!inner.starts_with('}')).then(|| params.to_owned())
}

#[cfg(test)]
mod tests;
