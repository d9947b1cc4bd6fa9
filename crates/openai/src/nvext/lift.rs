//! What a client asked to be told that stands in the engine's own answer.
//!
//! Answers one question: which fields of an engine's answer or chunk belong into its `nvext`, too? Tokens of the answer
//! come only from engines that were asked for them; where the client did not ask for them itself, they are taken out
//! again and the answer is what the engine would have sent without.

use bytes::Bytes;
use serde_json::value::RawValue;

use super::answer::{Extra, ResponseNvext};
use crate::JsonText;
use crate::object::{Object, span_in};
use crate::scan::Scan;

/// The field that asks an engine for tokens.
const ASK: &str = "return_token_ids";

/// A body that asks its engine for the tokens of the answer; as it was if it cannot be read.
#[must_use]
pub fn ask_token_ids(body: &Bytes) -> Bytes {
    match Scan::parse(body) {
        Ok(scan) => scan.edit().set(ASK, "true").apply(body),
        Err(_) => body.clone(),
    }
}

/// Whether a client asks its engine for tokens itself.
#[must_use]
pub fn asks_token_ids(scan: &Scan<'_>) -> bool {
    scan.raw(ASK) == Some("true")
}

impl ResponseNvext {
    /// Takes over what is `wanted` of an engine's answer or chunk. Gives what the client is to get in its place, if the
    /// tokens in it are to be hidden and there are some.
    #[must_use]
    pub fn lift(&mut self, json: &Bytes, wanted: Extra, hide_ids: bool) -> Option<Bytes> {
        let scan = Scan::parse(json).ok()?;
        let mut edits = scan.edit();
        let mut hide = |span: std::ops::Range<usize>| {
            if hide_ids {
                edits.replace(span, "null");
            }
        };
        let top = |key: &str| scan.object().get(key).filter(|field| field.value != "null");
        if let Some(ids) = top("prompt_token_ids") {
            hide(ids.span.clone());
        }
        let logprobs = top("prompt_logprobs").map(|field| field.value);
        take(&mut self.prompt_logprobs, wanted.prompt_logprobs, logprobs);
        let choices: Vec<&RawValue> = serde_json::from_str(scan.raw("choices")?).ok()?;
        for choice in choices {
            let base = span_in(scan.object().body(), choice.get()).start;
            let Ok(choice) = Object::parse_str(choice.get()) else {
                continue;
            };
            let field = |key: &str| choice.get(key).filter(|field| field.value != "null");
            for key in ["token_ids", "prompt_token_ids"] {
                if let Some(ids) = field(key) {
                    hide(base + ids.span.start..base + ids.span.end);
                }
            }
            if let Some(ids) = field("token_ids").filter(|_| wanted.completion_token_ids) {
                let ids: Vec<u32> = serde_json::from_str(ids.value).unwrap_or_default();
                self.completion_token_ids
                    .get_or_insert_default()
                    .extend(ids);
            }
            let value = |key: &str| field(key).map(|field| field.value);
            take(
                &mut self.stop_reason,
                wanted.stop_reason,
                value("stop_reason"),
            );
            take(
                &mut self.routed_experts,
                wanted.routed_experts,
                value("routed_experts"),
            );
            take(
                &mut self.prompt_logprobs,
                wanted.prompt_logprobs,
                value("prompt_logprobs"),
            );
        }
        (!edits.is_empty()).then(|| edits.apply(json))
    }
}

/// The first that is told stays.
fn take(slot: &mut Option<JsonText>, wanted: bool, value: Option<&str>) {
    if wanted && slot.is_none() {
        *slot = value.map(JsonText::from_checked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: Extra = Extra {
        completion_token_ids: true,
        worker_id: false,
        timing: false,
        token_ids: false,
        stop_reason: false,
        engine_data: false,
        routed_experts: false,
        prompt_logprobs: false,
    };

    /// With tokens hidden, an answer is to the byte what vLLM sends who is not asked for them.
    #[test]
    fn tokens_come_out_and_leave_no_trace() {
        let asked = Bytes::from_static(
            br#"{"choices":[{"index":0,"text":"ab","stop_reason":"x","token_ids":[1, 2],"prompt_token_ids":[7]},{"index":1,"token_ids":[3]}],"prompt_token_ids":[7,8],"prompt_text":null}"#,
        );
        let mut nvext = ResponseNvext::default();
        let shown = nvext.lift(&asked, IDS, true).unwrap();
        assert_eq!(
            shown,
            &br#"{"choices":[{"index":0,"text":"ab","stop_reason":"x","token_ids":null,"prompt_token_ids":null},{"index":1,"token_ids":null}],"prompt_token_ids":null,"prompt_text":null}"#[..]
        );
        assert_eq!(nvext.completion_token_ids, Some(vec![1, 2, 3]));
        assert_eq!(nvext.stop_reason, None, "nobody asked for it");
        let mut again = ResponseNvext::default();
        assert_eq!(
            again.lift(&asked, IDS, false),
            None,
            "the client's own wish"
        );
        assert_eq!(again, nvext);
        assert_eq!(ResponseNvext::default().lift(&shown, IDS, true), None);
    }

    #[test]
    fn what_the_engine_says_is_told_as_it_says_it() {
        let answer = Bytes::from_static(
            br#"{"choices":[{"stop_reason":null,"routed_experts":[[1]]},{"stop_reason":151643}],"prompt_logprobs":[null,{"5":{"logprob":-1.5}}]}"#,
        );
        let wanted = Extra {
            stop_reason: true,
            routed_experts: true,
            prompt_logprobs: true,
            ..Extra::default()
        };
        let mut nvext = ResponseNvext::default();
        assert_eq!(nvext.lift(&answer, wanted, true), None);
        let whole = nvext.put_into(&answer);
        let value: serde_json::Value = serde_json::from_slice(&whole).unwrap();
        assert_eq!(
            value["nvext"],
            serde_json::json!({"stop_reason":151643,"routed_experts":[[1]],"prompt_logprobs":[null,{"5":{"logprob":-1.5}}]})
        );
    }

    #[test]
    fn what_is_no_answer_is_left_alone() {
        for odd in [
            "",
            "[DONE]",
            "{}",
            r#"{"choices":{}}"#,
            r#"{"choices":[1,[2]]}"#,
            r#"{"choices":[{"token_ids":"x"}]}"#,
        ] {
            let mut nvext = ResponseNvext::default();
            let odd = Bytes::from_static(odd.as_bytes());
            let shown = nvext.lift(&odd, IDS, false);
            assert_eq!(shown, None);
        }
    }

    #[test]
    fn a_body_asks_once() {
        let ask = |body: &'static str| ask_token_ids(&Bytes::from_static(body.as_bytes()));
        assert_eq!(ask(r#"{"a":1}"#), r#"{"return_token_ids":true,"a":1}"#);
        assert_eq!(
            ask(r#"{"return_token_ids": false}"#),
            r#"{"return_token_ids": true}"#
        );
        assert_eq!(ask("no"), "no");
    }
}
