//! Answers that break off and are resumed at another engine.
//!
//! Answers three questions: may the rest of an answer be asked of another engine, with which body, and how do
//! its chunks become the rest of the stream that the client already reads? The engine is given the prompt and
//! the text so far: a completion's prompt grows by it, a chat's last message is the answer so far, to be
//! continued.
//!
//! Invariants: what was asked for is refused here rather than answered almost right; outside the fields named
//! here the body is the client's; a grafted chunk differs from the engine's in its id, its time, its model,
//! its role and its usage alone.

mod graft;
mod progress;

use bytes::Bytes;
use kvasir_types::Token;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::answer::Endpoint;
use crate::completion::Prompt;
use crate::object::Object;
use crate::scan::Scan;

pub use graft::Graft;
pub use progress::{ChunkKind, Progress};

/// Tokens of a completion that names no limit.
const COMPLETION_TOKENS: u32 = 16;

/// Fields that bind the answer to a grammar, whose state cannot move.
const GUIDED: &[&str] = &[
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "regex",
    "ebnf",
];
/// Fields that make an engine tell more than text, which would begin anew.
const DETAILS: &[&str] = &[
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
];

/// Why an answer to this body could not be resumed elsewhere; a label for metrics and logs. `None`: it could, unless
/// its chunks show otherwise.
#[must_use]
pub fn obstacle(scan: &Scan<'_>, endpoint: Endpoint) -> Option<&'static str> {
    let given = |key: &str| {
        let raw = scan.raw(key);
        raw.is_some_and(|value| !matches!(value, "false" | "0" | "[]" | "{}"))
    };
    let many = |key: &str| scan.raw(key).is_some_and(|value| value != "1");
    if many("n") || many("best_of") || given("use_beam_search") {
        return Some("choices");
    }
    if GUIDED.iter().any(|key| scan.raw(key).is_some())
        || is_bound_format(scan)
        || is_bound_tool(scan)
    {
        return Some("guided");
    }
    // A completion's `logprobs` of 0 is a wish too.
    if DETAILS.iter().any(|key| given(key)) || scan.raw("logprobs") == Some("0") {
        return Some("logprobs");
    }
    if given("echo") {
        return Some("echo");
    }
    if given("suffix") {
        return Some("suffix");
    }
    if scan.raw("seed").is_some() && !is_zero(scan.raw("temperature")) {
        return Some("seed");
    }
    if given("stop") && given("include_stop_str_in_output") {
        return Some("stop");
    }
    if given("kv_transfer_params") {
        return Some("kv_transfer");
    }
    match endpoint {
        Endpoint::Completions => match scan.prompts().as_deref() {
            Some([_]) => None,
            Some(_) => Some("choices"),
            None => Some("prompt"),
        },
        Endpoint::Chat => match messages_with(scan, "") {
            Some(_) => None,
            None => Some("prompt"),
        },
    }
}

fn is_zero(number: Option<&str>) -> bool {
    number.and_then(|text| text.parse::<f64>().ok()) == Some(0.0)
}

fn is_bound_format(scan: &Scan<'_>) -> bool {
    let format = scan.raw("response_format");
    format.is_some_and(|format| {
        let object = Object::parse_str(format).unwrap_or_default();
        object.get("type").map(|kind| kind.value) != Some("\"text\"")
    })
}

fn is_bound_tool(scan: &Scan<'_>) -> bool {
    let choice = scan.raw("tool_choice");
    choice.is_some_and(|choice| !matches!(choice, "\"auto\"" | "\"none\""))
}

/// The most tokens that the client wants, as far as it says so.
#[must_use]
pub fn tokens_wanted(scan: &Scan<'_>, endpoint: Endpoint) -> Option<u32> {
    let otherwise = match endpoint {
        Endpoint::Chat => None,
        Endpoint::Completions => Some(COMPLETION_TOKENS),
    };
    scan.max_tokens().or(otherwise)
}

/// Whether an answer of which `progress` has come is asked for from its beginning: no word was said yet. White space alone is not gone
/// on from in a chat: engines look for where the last message ends by its words. The next answer's own white space takes
/// its place ([`Graft::starting_over`]).
#[must_use]
pub fn starts_over(scan: &Scan<'_>, endpoint: Endpoint, progress: &Progress) -> bool {
    let said = progress.text();
    let in_chat = endpoint == Endpoint::Chat && !scan.continue_final_message();
    said.is_empty() || in_chat && said.trim().is_empty()
}

/// The body that asks for the rest of an answer of which `progress` has come. `body` is the buffer that was
/// scanned; `encode` gives the tokens of a text, for prompts that are tokens. `None`: it cannot be asked.
#[must_use]
pub fn continued(
    scan: &Scan<'_>,
    body: &Bytes,
    endpoint: Endpoint,
    progress: &Progress,
    encode: impl Fn(&str) -> Option<Vec<Token>>,
) -> Option<Bytes> {
    // What was counted and not said is generated again.
    let (said, generated) = match starts_over(scan, endpoint, progress) {
        true => ("", 0),
        false => (progress.text(), progress.tokens()),
    };
    let mut edits = scan.edit();
    match endpoint {
        Endpoint::Completions => {
            let prompt = match scan.prompts()?.into_iter().next()? {
                Prompt::Text(prompt) => serde_json::to_string(&(prompt + said)),
                Prompt::Tokens(mut tokens) => {
                    tokens.extend(encode(said)?);
                    serde_json::to_string(&tokens)
                }
            };
            edits.set("prompt", &prompt.ok()?);
            let left = tokens_wanted(scan, endpoint)?.checked_sub(generated)?;
            edits.set("max_tokens", &left.to_string());
        }
        Endpoint::Chat => {
            // With nothing said yet the question is asked again as it was.
            if !said.is_empty() {
                edits.set("messages", &messages_with(scan, said)?);
                edits.set("add_generation_prompt", "false");
                edits.set("continue_final_message", "true");
            }
            for key in ["max_tokens", "max_completion_tokens"] {
                let wanted = scan.raw(key).and_then(|text| text.parse::<u32>().ok());
                if let Some(wanted) = wanted {
                    edits.set(key, &wanted.checked_sub(generated)?.to_string());
                }
            }
        }
    }
    let least = scan
        .raw("min_tokens")
        .and_then(|text| text.parse::<u32>().ok());
    if let Some(least) = least {
        edits.set("min_tokens", &least.saturating_sub(generated).to_string());
    }
    Some(edits.apply(body))
}

/// The messages with the answer so far at their end: in a message of its own, or in the last one where the
/// client asked for that to be continued.
fn messages_with(scan: &Scan<'_>, said: &str) -> Option<String> {
    let messages = scan.messages()?;
    let list: Vec<&RawValue> = serde_json::from_str(messages).ok()?;
    let last = list.last()?.get();
    if !scan.continue_final_message() {
        let said = serde_json::to_string(said).ok()?;
        let open = messages.trim_end().strip_suffix(']')?;
        return Some(format!(
            "{open},{{\"role\":\"assistant\",\"content\":{said}}}]"
        ));
    }
    let message = Object::parse_str(last).ok()?;
    let content = message.get("content")?;
    let begun = String::deserialize(&mut serde_json::Deserializer::from_str(content.value)).ok()?;
    let whole = serde_json::to_string(&(begun + said)).ok()?;
    let at = last.as_ptr() as usize - messages.as_ptr() as usize;
    let (start, end) = (at + content.span.start, at + content.span.end);
    Some([messages.get(..start)?, &whole, messages.get(end..)?].concat())
}

#[cfg(test)]
mod tests;
