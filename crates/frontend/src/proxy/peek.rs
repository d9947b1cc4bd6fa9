//! What the first bytes of an answer show, before the client has any of it.
//!
//! Engines that answer 200 and then an error as the first event of the stream: the error becomes the status of the answer. A client that
//! reads only the status learns of the error, and so does a retry. And which request an answer names.

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use kvasir_openai::Event;
use serde::Deserialize;
use serde_json::Value;

use super::EngineAnswer;
use crate::proxy::relay::FirstBytes;

/// The fields of an error event.
#[derive(Deserialize)]
struct ErrorBody {
    #[serde(default)]
    error: Value,
    /// SGLang's older form has all at the top.
    #[serde(default)]
    object: Value,
    #[serde(default)]
    code: Value,
}

/// The same answer, unless its first event is an error: then that event is the whole answer, with its status.
pub(super) fn error_as_status(mut answer: EngineAnswer) -> EngineAnswer {
    let FirstBytes::Partial(first) = &answer.first else {
        return answer;
    };
    if !answer.source.is_events() {
        return answer;
    }
    let Some((status, body)) = error_in(first) else {
        return answer;
    };
    let headers = &mut answer.head.headers;
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    answer.head.status = status;
    answer.source.take_form();
    answer.source.close();
    answer.first = FirstBytes::Whole(body);
    answer
}

/// The id of a completion or of its first event, if that is its first field, as engines write it.
pub(super) fn answer_id(first: &[u8]) -> Option<&[u8]> {
    let json = first.strip_prefix(b"data:").unwrap_or(first);
    let mut rest = json.trim_ascii_start();
    for token in [&b"{"[..], b"\"id\"", b":", b"\""] {
        rest = rest.strip_prefix(token)?;
        if token != b"\"" {
            rest = rest.trim_ascii_start();
        }
    }
    let end = memchr::memchr(b'"', rest)?;
    rest.get(..end)
}

/// The status and the body of the error that a stream begins with.
fn error_in(first: &Bytes) -> Option<(StatusCode, Bytes)> {
    let end = memchr::memmem::find(first, b"\n\n").map_or(first.len(), |at| at + 2);
    let event = Event {
        raw: first.slice(..end),
    };
    let data = event.data()?;
    let body: ErrorBody = serde_json::from_slice(&data).ok()?;
    let code = match body.error {
        Value::Null if body.object == "error" => body.code,
        Value::Null => return None,
        // A string has no code, nor has an object without one.
        error => error.get("code").cloned().unwrap_or_default(),
    };
    // Some engines write a string there.
    let code = code.as_u64().or_else(|| code.as_str()?.parse().ok());
    let code = code.filter(|code| (400..600).contains(code)).unwrap_or(500);
    let status = u16::try_from(code)
        .ok()
        .and_then(|code| StatusCode::from_u16(code).ok())?;
    Some((status, Bytes::copy_from_slice(&data)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_from_answers() {
        let status = |text: &'static str| {
            let found = error_in(&Bytes::from_static(text.as_bytes()));
            found.map(|(status, words)| (status.as_u16(), words))
        };
        let vllm = "data: {\"error\": {\"message\": \"no\", \"code\": 400}}\n\ndata: [DONE]\n\n";
        assert_eq!(
            status(vllm),
            Some((
                400,
                "{\"error\": {\"message\": \"no\", \"code\": 400}}".into()
            ))
        );
        let sglang = "data: {\"object\":\"error\",\"message\":\"no\",\"code\":429}\n\n";
        assert_eq!(status(sglang).map(|(code, _)| code), Some(429));
        let odd = "data: {\"error\":{\"message\":\"no\",\"code\":200}}\n\n";
        assert_eq!(status(odd).map(|(code, _)| code), Some(500));
        for (error, code) in [
            ("{\"code\":\"400\"}", 400),
            ("{\"code\":\"rate_limit_exceeded\"}", 500),
            ("{\"code\":null}", 500),
            ("\"out of memory\"", 500),
        ] {
            let event = Bytes::from(format!("data: {{\"error\":{error}}}\n\n"));
            let found = error_in(&event).map(|(status, _)| status.as_u16());
            assert_eq!(found, Some(code), "{error}");
        }
        for answer in [
            "data: {\"choices\":[],\"error\":null}\n\n",
            "data: {\"object\":\"chat.completion.chunk\",\"code\":400}\n\n",
            "data: [DONE]\n\n",
            ": comment\n\n",
        ] {
            assert_eq!(status(answer), None, "{answer}");
        }
    }

    #[test]
    fn the_id_of_an_answer_is_its_first_field() {
        let id = |text: &'static str| answer_id(text.as_bytes()).map(String::from_utf8_lossy);
        for text in [
            r#"{"id":"chatcmpl-1","object":"x"}"#,
            "data: {\"id\": \"chatcmpl-1\"}\n\n",
            "data:{ \"id\" :\"chatcmpl-1\"",
        ] {
            assert_eq!(id(text).as_deref(), Some("chatcmpl-1"), "{text}");
        }
        for text in [
            r#"{"object":"x","id":"chatcmpl-1"}"#,
            r#"{"id":"chatcmpl-1"#,
            r#"{"id":1}"#,
            "",
            ": comment",
        ] {
            assert_eq!(id(text), None, "{text}");
        }
    }
}
