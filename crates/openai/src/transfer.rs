//! Fields by which engines hand caches to each other.
//!
//! Answers two questions: which parts of a client's body are words between router and engines, and which of an engine's
//! answer ([`answer`])? They name memory of other engines: a client that could say them could read what is not its own, and one
//! forged object ends a vLLM engine. So they go from no client to an engine, and from no engine to a client.
//!
//! What always holds: a body or an answer without them goes on byte for byte.

mod answer;

use bytes::Bytes;

use crate::object::Span;
use crate::scan::{Edits, Scan};

pub use answer::{TransferFilter, names_transfer, without_transfer};

/// Objects in a body in which vLLM looks for the same fields as beside them.
const CARRIERS: [&str; 3] = ["vllm_xargs", "sampling_params", "extra_args"];
/// How deep such objects are in each other: `sampling_params`, and `extra_args` in it.
const DEPTH_MAX: u32 = 2;
/// Fields that say from where or to where an engine moves a cache.
const FIELDS: [&str; 4] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "disagg_prefill_dp_rank",
];
/// All fields that begin so do, too.
const PREFIX: &str = "bootstrap_";

/// Whether a field is one of them.
fn is_transfer(key: &str) -> bool {
    FIELDS.contains(&key) || key.starts_with(PREFIX)
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
}
