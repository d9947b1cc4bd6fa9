//! Noise into every parser: no panic, whatever comes.

use bytes::Bytes;
use kvasir_openai::{
    BusyUpdate, ChatRequest, CompletionRequest, EventParser, HeaderHints, Nvext, Scan, Unknown,
    find_usage,
};
use proptest::prelude::*;

use crate::cases;

fn all_parsers(body: &[u8]) {
    let _ = ChatRequest::parse(body, Unknown::Refuse);
    let _ = CompletionRequest::parse(body, Unknown::Ignore);
    let _ = BusyUpdate::parse(body);
    let _ = find_usage(body);
    if let Ok(scan) = Scan::parse(body) {
        let bytes = Bytes::copy_from_slice(body);
        let _ = (scan.model(), scan.prompts(), scan.include_usage(), scan.n());
        let mut edits = scan.edit();
        edits.remove("nvext").ask_usage(false).set("priority", "1");
        let out = edits.apply(&bytes);
        assert!(Scan::parse(&out).is_ok(), "{out:?}");
    }
    if let Ok(text) = std::str::from_utf8(body) {
        let _ = Nvext::parse(text);
    }
    let mut parser = EventParser::new(64);
    parser.push(Bytes::copy_from_slice(body));
    while let Ok(Some(event)) = parser.next_event() {
        let _ = (event.data(), event.name(), event.is_done());
    }
}

/// Pieces that make bodies which are nearly right.
fn shards() -> impl Strategy<Value = Vec<&'static str>> {
    proptest::collection::vec(
        prop::sample::select(vec![
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "\\",
            "\\ud800",
            "\n",
            " ",
            "null",
            "true",
            "1",
            "-1",
            "1e999",
            "0.5",
            "\"model\"",
            "\"messages\"",
            "\"prompt\"",
            "\"nvext\"",
            "\"role\"",
            "\"user\"",
            "\"content\"",
            "\"stop\"",
            "\"tools\"",
            "\"stream_options\"",
            "\"agent_hints\"",
            "\"session_control\"",
            "\"é\"",
            "\u{feff}",
        ]),
        0..60,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn bytes(body in proptest::collection::vec(any::<u8>(), 0..300)) {
        all_parsers(&body);
    }

    #[test]
    fn shards_of_json(parts in shards()) {
        all_parsers(parts.concat().as_bytes());
    }

    /// Real bodies with bytes changed, cut out and doubled.
    #[test]
    fn damaged_bodies(
        which in any::<prop::sample::Index>(),
        at in any::<prop::sample::Index>(),
        len in 0usize..40,
        put in proptest::collection::vec(any::<u8>(), 0..4),
    ) {
        let cases = cases("dynamo-http");
        let mut body = which.get(&cases).body.clone().into_bytes();
        let at = at.index(body.len() + 1);
        let end = (at + len).min(body.len());
        body.splice(at..end, put);
        all_parsers(&body);
    }

    #[test]
    fn headers(pairs in proptest::collection::vec(("[ -~]{0,40}", "\\PC{0,20}"), 0..12)) {
        let hints = HeaderHints::read(pairs.iter().map(|(k, v)| (&**k, &**v)));
        hints.apply(&mut Nvext::default());
    }
}

/// Deep nesting ends in an error and not in a stack overflow.
#[test]
fn depth_is_bounded() {
    for open in ["[", "{\"a\":"] {
        let deep = open.repeat(200_000);
        all_parsers(deep.as_bytes());
        for field in ["messages", "prompt", "nvext", "stop", "tools", "logit_bias"] {
            let body = format!("{{\"model\":\"m\",\"messages\":[],\"{field}\":{deep}");
            all_parsers(body.as_bytes());
            let closed = format!(
                "{{\"{field}\":{}{}}}",
                "[".repeat(100_000),
                "]".repeat(100_000)
            );
            all_parsers(closed.as_bytes());
        }
    }
}
