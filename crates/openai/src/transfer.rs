//! Fields by which engines hand caches to each other.
//!
//! Answers two questions: which parts of a client's body are words between router and engines, and which of an engine's
//! answer? They name memory of other engines: a client that could say them could read what is not its own, and one
//! forged object ends a vLLM engine. So they go from no client to an engine, and from no engine to a client.
//!
//! What always holds: a body or an answer without them goes on byte for byte.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;
use serde_json::value::RawValue;

use crate::object::{Object, Span, span_in};
use crate::scan::{Edits, Scan};
use crate::sse::Event;

/// Objects in a body in which vLLM looks for the same fields as beside them.
const CARRIERS: [&str; 3] = ["vllm_xargs", "sampling_params", "extra_args"];
/// How deep such objects are in each other: `sampling_params`, and `extra_args` in it.
const DEPTH_MAX: u32 = 2;
/// Every field of an answer that is not for clients ends so.
static ENDING: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"_params\""));

/// Whether a field of a body says from where or to where an engine moves a cache.
fn is_transfer(key: &str) -> bool {
    matches!(
        key,
        "kv_transfer_params"
            | "ec_transfer_params"
            | "disaggregated_params"
            | "disagg_prefill_dp_rank"
    ) || key.starts_with("bootstrap_")
}

/// Whether a field of an answer says it.
fn is_ticket(key: &str) -> bool {
    matches!(
        key,
        "kv_transfer_params" | "ec_transfer_params" | "disaggregated_params"
    )
}

/// Whether a header field lays such a value over the body (SGLang). Names are in lower case.
#[must_use]
pub fn is_override_header(name: &str) -> bool {
    name.starts_with("x-override-")
}

/// Whether a request's name holds the addresses of a transfer, as some connectors of vLLM read them from it.
#[must_use]
pub fn is_transfer_name(name: &str) -> bool {
    name.contains("___prefill_addr_") || name.contains("___decode_addr_")
}

impl Edits<'_, '_> {
    /// Takes out what only a router says to an engine.
    ///
    /// ```
    /// # use kvasir_openai::Scan;
    /// let body = bytes::Bytes::from_static(br#"{"model":"m","kv_transfer_params":{"do_remote_prefill":true}}"#);
    /// let scan = Scan::parse(&body)?;
    /// assert_eq!(scan.edit().remove_transfer().apply(&body), r#"{"model":"m"}"#);
    /// # Ok::<(), kvasir_openai::JsonError>(())
    /// ```
    pub fn remove_transfer(&mut self) -> &mut Self {
        self.remove_transfer_to(DEPTH_MAX)
    }

    fn remove_transfer_to(&mut self, depth: u32) -> &mut Self {
        self.remove_where(is_transfer);
        let carriers = self.object().fields().iter();
        let carriers = carriers.filter(|field| CARRIERS.contains(&&*field.key));
        let clean: Vec<(Span, Bytes)> = carriers
            .filter_map(|field| Some((field.span.clone(), without_nested(field.value, depth)?)))
            .collect();
        for (span, text) in clean {
            self.replace(span, &String::from_utf8_lossy(&text));
        }
        self
    }
}

/// An object in a body without those fields; none if it has none, or is no object.
fn without_nested(json: &str, depth: u32) -> Option<Bytes> {
    let depth = depth.checked_sub(1)?;
    let scan = Scan::parse(json.as_bytes()).ok()?;
    let mut edits = scan.edit();
    edits.remove_transfer_to(depth);
    (!edits.is_empty()).then(|| edits.apply(&Bytes::copy_from_slice(json.as_bytes())))
}

/// An engine's answer or chunk with `null` where it names a cache; none if it goes on as it is. Engines write `null`
/// there themselves for who did not ask.
#[must_use]
pub fn without_transfer(json: &Bytes) -> Option<Bytes> {
    if !may_have_ticket(json) {
        return None;
    }
    let scan = Scan::parse(json).ok()?;
    let mut edits = scan.edit();
    for span in tickets(scan.object()) {
        edits.replace(span, "null");
    }
    let choices: Option<Vec<&RawValue>> = scan
        .raw("choices")
        .and_then(|c| serde_json::from_str(c).ok());
    for choice in choices.unwrap_or_default() {
        let base = span_in(scan.object().body(), choice.get()).start;
        let Ok(choice) = Object::parse_str(choice.get()) else {
            continue;
        };
        for span in tickets(&choice) {
            edits.replace(base + span.start..base + span.end, "null");
        }
    }
    (!edits.is_empty()).then(|| edits.apply(json))
}

/// The same of an event.
#[must_use]
pub fn without_transfer_event(event: &Event) -> Option<Bytes> {
    if !may_have_ticket(&event.raw) {
        return None;
    }
    let data = Bytes::copy_from_slice(&event.data()?);
    let json = without_transfer(&data)?;
    let mut out = BytesMut::with_capacity(json.len() + 64);
    event.write_with(&json, &mut out);
    Some(out.freeze())
}

/// Where the values stand that are to go.
fn tickets(object: &Object<'_>) -> Vec<Span> {
    let fields = object.fields().iter();
    let told = fields.filter(|field| is_ticket(&field.key) && field.value != "null");
    told.map(|field| field.span.clone()).collect()
}

/// Whether a key may be one that is not for clients, and its value is not `null`. Most answers have none and cost
/// one search.
fn may_have_ticket(json: &[u8]) -> bool {
    ENDING.find_iter(json).any(|at| {
        let rest = json.get(at + ENDING.needle().len()..).unwrap_or_default();
        let value = rest.trim_ascii_start().strip_prefix(b":");
        value.is_some_and(|value| !value.trim_ascii_start().starts_with(b"null"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(body: &str) -> String {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let scan = Scan::parse(&body).unwrap();
        let out = scan.edit().remove_transfer().apply(&body);
        String::from_utf8(out.to_vec()).unwrap()
    }

    #[test]
    fn no_client_says_where_a_cache_is() {
        for (said, expected) in [
            (r#"{"kv_transfer_params":{"do_remote_prefill":true}}"#, "{}"),
            (
                r#"{"a":1, "bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":[7], "b":2}"#,
                r#"{"a":1, "b":2}"#,
            ),
            (
                r#"{"disagg_prefill_dp_rank":0,"disaggregated_params":{},"a":1}"#,
                r#"{"a":1}"#,
            ),
            // Escapes in the key, and twice the same: engines take the last.
            (
                r#"{"kv_transfer\u005fparams":{},"kv_transfer_params":null,"x":0}"#,
                r#"{"x":0}"#,
            ),
            // What vLLM puts beside the field itself.
            (
                r#"{"vllm_xargs":{"kv_transfer_params":"x","mine":1},"a":[ 1 ]}"#,
                r#"{"vllm_xargs":{"mine":1},"a":[ 1 ]}"#,
            ),
            (
                r#"{"sampling_params":{"n":1,"extra_args":{"kv_transfer_params":{}}}}"#,
                r#"{"sampling_params":{"n":1,"extra_args":{}}}"#,
            ),
        ] {
            assert_eq!(sent(said), expected, "{said}");
        }
    }

    #[test]
    fn what_only_looks_like_it_goes_out_byte_for_byte() {
        for body in [
            r#"{"messages":[{"role":"user","content":"\"kv_transfer_params\":{}"}], "n": 1}"#,
            r#"{"metadata":{"kv_transfer_params":1},"bootstrap":2}"#,
            r#"{"vllm_xargs":[1],"sampling_params":[{"n":1}]}"#,
            r#"{"vllm_xargs": { "mine" : 1 } }"#,
        ] {
            assert_eq!(sent(body), body);
        }
    }

    #[test]
    fn answers_name_no_cache() {
        let shown = |json: &str| without_transfer(&Bytes::copy_from_slice(json.as_bytes()));
        assert_eq!(
            shown(r#"{"choices":[{"text":"a","disaggregated_params": {"x":[1]}},{"disaggregated_params":null}],"kv_transfer_params" : {"remote_block_ids":[[1]]}}"#).unwrap(),
            r#"{"choices":[{"text":"a","disaggregated_params": null},{"disaggregated_params":null}],"kv_transfer_params" : null}"#
        );
        for as_it_is in [
            r#"{"choices":[],"kv_transfer_params":null,"ec_transfer_params": null}"#,
            r#"{"choices":[{"text":"the \"kv_transfer_params\":{} field"}]}"#,
            r#"{"choices":[{"message":{"kv_transfer_params":1}}]}"#,
            "[DONE]",
            "",
        ] {
            assert_eq!(shown(as_it_is), None, "{as_it_is}");
        }
    }

    #[test]
    fn events_name_no_cache() {
        let event = |raw: &'static str| Event { raw: raw.into() };
        let told = event("event: x\ndata: {\"choices\":[{\"disaggregated_params\":{}}]}\n\n");
        assert_eq!(
            without_transfer_event(&told).unwrap(),
            "event: x\ndata: {\"choices\":[{\"disaggregated_params\":null}]}\n\n"
        );
        let silent = event("data: {\"choices\":[],\"kv_transfer_params\":null}\n\n");
        assert_eq!(without_transfer_event(&silent), None);
    }
}
