//! A client's body: what is scanned is what `serde_json` finds, and a change changes nothing else.

use std::collections::BTreeMap;

use bytes::Bytes;
use kvasir_openai::resume::{Progress, continued, obstacle};
use kvasir_openai::{
    ChatRequest, CompletionRequest, Endpoint, Nvext, Scan, Unknown, content_spans, next_turn,
};
use serde_json::value::RawValue;

pub(crate) const WORDS: &[&str] = &[
    "\"model\":\"m\",",
    "\"stream\":true,",
    "\"stream_options\":{\"include_usage\":false},",
    "\"stream_options\":{},",
    "\"nvext\":{\"annotations\":[\"x\"]},",
    "\"nvext\":null,",
    "\"max_tokens\":5,",
    "\"prompt\":[1,2,3],",
    "\"prompt\":\"a\",",
    "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],",
    "\"n\":2,",
    "\"\\u006dodel\":",
    "\\uD83D",
    "1e999",
    "-0",
    "[[[[",
    "{}",
    ",",
    " ",
];

type Fields = BTreeMap<String, Box<RawValue>>;

pub(crate) fn check(bytes: &[u8]) -> bool {
    let reference = serde_json::from_slice::<Fields>(bytes);
    let scan = Scan::parse(bytes);
    let strict = [Unknown::Refuse, Unknown::Ignore].map(|unknown| {
        let chat = ChatRequest::parse(bytes, unknown).ok();
        let completion = CompletionRequest::parse(bytes, unknown).ok();
        chat.map(|chat| chat.model)
            .or(completion.map(|completion| completion.model))
    });
    let (Ok(reference), Ok(scan)) = (&reference, &scan) else {
        assert!(
            reference.is_err() && scan.is_err(),
            "one reader only: {reference:?}, {scan:?}"
        );
        assert!(strict.iter().all(Option::is_none));
        return false;
    };
    for model in strict.into_iter().flatten() {
        assert_eq!(scan.model().as_deref(), Some(&*model));
    }
    compare(reference, scan);
    edit(reference, scan, bytes);
    resume(scan, bytes);
    true
}

/// Every field is found, with the value that counts.
fn compare(reference: &Fields, scan: &Scan<'_>) {
    for (key, value) in reference {
        let found = scan.object().get(key).map(|field| field.value);
        assert_eq!(found, Some(value.get()), "{key}");
    }
    for field in scan.object().fields() {
        assert!(reference.contains_key(&*field.key));
        assert_eq!(
            scan.object().body().get(field.span.clone()),
            Some(field.value)
        );
    }
    let raw = |key: &str| reference.get(key).map(|value| value.get());
    assert_eq!(scan.stream(), raw("stream") == Some("true"));
    let model = raw("model").and_then(|text| serde_json::from_str::<String>(text).ok());
    assert_eq!(scan.model().map(|model| model.into_owned()), model);
    let n = raw("n").and_then(|text| serde_json::from_str::<u32>(text).ok());
    assert_eq!(scan.n(), n.unwrap_or(1));
    if let Some(text) = scan.nvext() {
        let _ = Nvext::parse(text);
    }
    let contents = scan.messages().and_then(content_spans);
    assert_eq!(scan.content_spans(), contents.as_deref());
    if let Some(messages) = scan.messages()
        && let Some(spans) = contents
    {
        let quoted = |span: &std::ops::Range<usize>| messages.get(span.start - 1..span.end + 1);
        let is_text = |text: &str| serde_json::from_str::<&RawValue>(text).is_ok();
        assert!(spans.iter().all(|span| quoted(span).is_some_and(is_text)));
    }
}

/// What goes out differs in what was to be changed, and in nothing else.
fn edit(reference: &Fields, scan: &Scan<'_>, bytes: &[u8]) {
    let body = Bytes::copy_from_slice(bytes);
    assert_eq!(scan.edit().apply(&body), body);
    for way in 0..8u8 {
        let (remove, usage, set) = (way & 1 > 0, way & 2 > 0, way & 4 > 0);
        let mut edits = scan.edit();
        let mut wanted: BTreeMap<&str, String> = reference
            .iter()
            .map(|(key, value)| (key.as_str(), value.get().to_owned()))
            .collect();
        if remove {
            edits.remove("nvext");
            wanted.remove("nvext");
        }
        if usage {
            edits.ask_usage(false);
            wanted.remove("stream_options");
        }
        if set {
            edits.set("max_tokens", "7");
            wanted.insert("max_tokens", "7".into());
        }
        let out = edits.apply(&body);
        let text = String::from_utf8_lossy(&out);
        let got = serde_json::from_slice::<Fields>(&out);
        assert!(got.is_ok(), "an edit broke the body: {text}");
        let mut got: BTreeMap<String, String> = got
            .unwrap_or_default()
            .into_iter()
            .map(|(key, value)| (key, value.get().to_owned()))
            .collect();
        if usage {
            options(reference, got.remove("stream_options").as_deref());
        }
        let got: BTreeMap<&str, String> = got
            .iter()
            .map(|(key, value)| (key.as_str(), value.clone()))
            .collect();
        assert_eq!(got, wanted, "way {way}: {text}");
    }
}

/// Usage is asked for, and the client's other stream options stay.
fn options(reference: &Fields, got: Option<&str>) {
    let had = reference.get("stream_options").map(|value| value.get());
    let parse = |text: &str| serde_json::from_str::<Fields>(text).ok();
    let mut wanted = match had.filter(|had| *had != "null") {
        None => Fields::default(),
        Some(had) => match parse(had) {
            Some(had) => had,
            None => return assert_eq!(got, Some(had)),
        },
    };
    let mut got = got.and_then(parse).unwrap_or_default();
    let asked = got.remove("include_usage");
    assert_eq!(asked.as_deref().map(RawValue::get), Some("true"));
    wanted.remove("include_usage");
    let text = |fields: &Fields| format!("{fields:?}");
    assert_eq!(text(&got), text(&wanted));
}

/// What is asked of a second engine is a body too.
fn resume(scan: &Scan<'_>, bytes: &[u8]) {
    let body = Bytes::copy_from_slice(bytes);
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        if obstacle(scan, endpoint).is_some() {
            continue;
        }
        let mut progress = Progress::default();
        progress.add_chunk(br#"{"id":"x","choices":[{"index":0,"delta":{"content":"said"},"text":"said","finish_reason":null}]}"#);
        let tokens = |_: &str| Some(vec![1, 2]);
        if let Some(next) = continued(scan, &body, endpoint, &progress, tokens) {
            let next = Scan::parse(&next).map(|next| next.model().map(|m| m.into_owned()));
            let model = scan.model().map(|model| model.into_owned());
            assert_eq!(next.ok(), Some(model));
        }
    }
    if let Some(next) = next_turn(scan, "said") {
        assert!(Scan::parse(&next).is_ok());
    }
}
