//! One request as two engines get it: one computes the prompt, the other answers.
//!
//! Answers two questions: which bytes does each of them get, and what did the first say of where the prompt is? The words are those of vLLM with a
//! connector (`kv_transfer_params`) and of SGLang (`bootstrap_*`), as recorded in `testdata/vllm-disagg`.
//!
//! What always holds: but for the fields named here, an engine gets the client's bytes; what one engine says of its memory goes to the other unread.

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::answer::Endpoint;
use crate::json::write_json_str;
use crate::scan::Scan;

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
    let scan = Scan::parse(body).ok()?;
    let mut edits = scan.edit();
    for field in OF_ANSWERS {
        edits.remove(field);
    }
    edits.set(TRANSFER, params);
    match api {
        LegApi::Completions => edits.set("max_tokens", "1"),
        // Nobody will ask for it.
        LegApi::Responses => edits.set("max_output_tokens", "1").set("store", "false"),
    };
    if scan.object().get("stream").is_some() {
        edits.set("stream", "false");
    }
    // The newer name wins where it stands.
    if scan.object().get("max_completion_tokens").is_some() {
        edits.set("max_completion_tokens", "1");
    }
    Some(edits.apply(body))
}

/// The body that lets a vLLM engine answer from a prompt that another has computed.
#[must_use]
pub fn decode_leg(body: &Bytes, params: &str) -> Option<Bytes> {
    let scan = Scan::parse(body).ok()?;
    Some(scan.edit().set(TRANSFER, params).apply(body))
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
    let scan = Scan::parse(body).ok()?;
    let mut host = bytes::BytesMut::new();
    match fields.host.contains(':') && !fields.host.starts_with('[') {
        true => write_json_str(&mut host, &format!("[{}]", fields.host)),
        false => write_json_str(&mut host, fields.host),
    }
    let mut edits = scan.edit();
    edits
        .set("bootstrap_host", &String::from_utf8_lossy(&host))
        .set("bootstrap_port", &fields.port.to_string())
        .set("bootstrap_room", &fields.room.to_string());
    if let Some(rank) = fields.prefill_rank {
        edits.set("disagg_prefill_dp_rank", &rank.to_string());
    }
    Some(edits.apply(body))
}

/// What a vLLM engine says of where the prompt is that it has computed: JSON text for the engine that answers. None where it says nothing.
#[must_use]
pub fn transfer_params(answer: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct PrefillAnswer<'a> {
        #[serde(borrow, default)]
        kv_transfer_params: Option<&'a RawValue>,
    }
    let answer: PrefillAnswer<'_> = serde_json::from_slice(answer).ok()?;
    let params = answer.kv_transfer_params?.get();
    let inner = params.strip_prefix('{')?.trim_start();
    (!inner.starts_with('}')).then(|| params.to_owned())
}

#[cfg(test)]
mod tests;
