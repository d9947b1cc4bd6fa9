//! What a conversation's next turn will begin with.
//!
//! Answers one question: which body makes an engine compute that beginning, and nothing more?

use bytes::Bytes;

use crate::scan::Scan;

/// Fields that make the prompt; all others are left out.
const KEPT: [&str; 8] = [
    "model",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_special_tokens",
    "cache_salt",
];

/// The body that asks for one token after the conversation and the answer `said`. `None` if the body holds no
/// conversation, or one whose last message was to be continued.
#[must_use]
pub fn next_turn(scan: &Scan<'_>, said: &str) -> Option<Bytes> {
    let messages = scan.messages()?.trim_end().strip_suffix(']')?;
    if scan.continue_final_message() || messages.trim_end().ends_with('[') {
        return None;
    }
    let said = serde_json::to_string(said).ok()?;
    let mut out = format!(
        "{{\"messages\":{messages},{{\"role\":\"assistant\",\"content\":{said}}}],\
         \"add_generation_prompt\":false,\"max_tokens\":1,\"temperature\":0,\"stream\":false"
    );
    for key in KEPT {
        if let Some(value) = scan.raw(key) {
            out += &format!(",\"{key}\":{value}");
        }
    }
    out.push('}');
    Some(out.into())
}

/// The text of a whole chat answer, if it has one choice that is text alone.
///
/// ```
/// # use kvasir_openai::answer_text;
/// let answer = br#"{"choices":[{"message":{"content":"hi","tool_calls":[]}}]}"#;
/// assert_eq!(answer_text(answer).as_deref(), Some("hi"));
/// assert_eq!(answer_text(br#"{"choices":[]}"#), None);
/// ```
#[must_use]
pub fn answer_text(answer: &[u8]) -> Option<String> {
    let answer: serde_json::Value = serde_json::from_slice(answer).ok()?;
    let [choice] = answer.get("choices")?.as_array()?.as_slice() else {
        return None;
    };
    let message = choice.get("message")?;
    let calls = message.get("tool_calls").and_then(|calls| calls.as_array());
    if calls.is_some_and(|calls| !calls.is_empty()) {
        return None;
    }
    Some(message.get("content")?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_turn_begins_with_the_conversation_and_its_answer() {
        let body = br#"{"model":"m","stream":true,"n":1,"max_tokens":50,"messages":[{"role":"user","content":"a"} ],"tools":[1],"cache_salt":"s"}"#;
        let next = next_turn(&Scan::parse(body).unwrap(), "b \"c\"").unwrap();
        expect_test::expect![[r#"{"messages":[{"role":"user","content":"a"} ,{"role":"assistant","content":"b \"c\""}],"add_generation_prompt":false,"max_tokens":1,"temperature":0,"stream":false,"model":"m","tools":[1],"cache_salt":"s"}"#]]
            .assert_eq(std::str::from_utf8(&next).unwrap());
        for body in [
            r#"{"messages":[]}"#,
            r#"{"prompt":"a"}"#,
            r#"{"messages":[{"role":"assistant","content":"a"}],"continue_final_message":true}"#,
        ] {
            let scan = Scan::parse(body.as_bytes()).unwrap();
            assert_eq!(next_turn(&scan, "b"), None, "{body}");
        }
    }
}
