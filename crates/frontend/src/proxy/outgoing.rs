//! The body as an engine gets it.
//!
//! What always holds: what the client did not ask us to change and we do not need to learn goes out byte for byte.

use bytes::Bytes;
use kvasir_openai::{Endpoint, Nvext, Scan};

/// The body that the engine gets: the client's, less what is ours and plus what we need to learn.
pub(super) fn body(
    scan: &Scan<'_>,
    body: &Bytes,
    nvext: &Nvext,
    endpoint: Endpoint,
    follow: bool,
) -> Bytes {
    let stream = scan.stream();
    let mut edits = scan.edit();
    edits.remove("nvext").remove_transfer();
    let asked = scan.include_usage() && (scan.continuous_usage() || !follow);
    if stream && !asked {
        edits.ask_usage(follow);
    }
    if let Some(salt) = &nvext.cache_salt {
        edits.set(
            "cache_salt",
            &serde_json::Value::from(salt.as_str()).to_string(),
        );
    }
    if let Some(urgency) = nvext.hints.priority {
        edits.set("priority", &urgency.saturating_neg().to_string());
    }
    if nvext.greedy {
        edits.set("temperature", "0");
    }
    if let Some(ids) = nvext
        .token_data
        .as_ref()
        .filter(|_| endpoint == Endpoint::Completions)
    {
        edits.set("prompt", &serde_json::to_string(ids).unwrap_or_default());
    }
    edits.apply(body)
}

/// The same body for an engine that takes the larger priority first.
pub(super) fn larger_first(body: &Bytes, urgency: i32) -> Option<Bytes> {
    let scan = Scan::parse(body).ok()?;
    scan.raw("priority")?;
    let mut edits = scan.edit();
    Some(edits.set("priority", &urgency.to_string()).apply(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_without_extensions_goes_out_byte_for_byte() {
        let body = Bytes::from_static(b"{ \"model\":\"m\",  \"prompt\" : \"a\",\"x\":[1, 2] }");
        let scan = Scan::parse(&body).unwrap();
        assert_eq!(
            super::body(&scan, &body, &Nvext::default(), Endpoint::Chat, false),
            body
        );
    }

    #[test]
    fn only_extensions_change() {
        let body = Bytes::from_static(
            b"{\"model\":\"m\", \"nvext\":{\"agent_hints\":{\"priority\":3}},\"stream\":true, \"x\": 1}",
        );
        let scan = Scan::parse(&body).unwrap();
        let nvext = Nvext::parse(scan.nvext().unwrap()).unwrap();
        let out = super::body(&scan, &body, &nvext, Endpoint::Chat, false);
        let text = std::str::from_utf8(&out).unwrap();
        assert!(
            text.ends_with("\"model\":\"m\", \"stream\":true, \"x\": 1}"),
            "{text}"
        );
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["priority"], -3, "vLLM takes the smaller first");
        assert_eq!(value["stream_options"]["include_usage"], true);
        assert!(value.get("nvext").is_none());
        let turned = larger_first(&out, 3).unwrap();
        let as_text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        assert_eq!(
            as_text(&turned),
            as_text(&out).replace("\"priority\":-3", "\"priority\":3"),
            "nothing else changes"
        );
    }

    #[test]
    fn extensions_that_engines_have_fields_for_become_those() {
        let body = Bytes::from_static(
            b"{\"prompt\":\"a\",\"temperature\": 1.5,\"nvext\":{\"greed_sampling\":true,\"token_data\":[5,6]}}",
        );
        let scan = Scan::parse(&body).unwrap();
        let nvext = Nvext::of_scan(&scan).unwrap();
        let out = super::body(&scan, &body, &nvext, Endpoint::Completions, false);
        assert_eq!(out, "{\"prompt\":[5,6],\"temperature\": 0}");
        // A chat's prompt is made by the engine.
        let chat = super::body(&scan, &body, &nvext, Endpoint::Chat, false);
        assert_eq!(chat, "{\"prompt\":\"a\",\"temperature\": 0}");
    }
}
