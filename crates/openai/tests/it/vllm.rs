//! Against a real vLLM: its bodies scan, its streams parse at every cut, its usage is found.

use bytes::Bytes;
use kvasir_openai::{EventParser, Prompt, Scan, find_usage, without_usage};

use crate::{case, cases};

#[test]
fn every_body_it_was_sent_scans_and_passes_unchanged() {
    let mut scanned = 0;
    for case in cases("vllm-http") {
        let Ok(scan) = Scan::parse(case.body.as_bytes()) else {
            assert!(
                case.body.is_empty() || case.name == "error_bad_json",
                "{}",
                case.name
            );
            continue;
        };
        let body = Bytes::copy_from_slice(case.body.as_bytes());
        assert_eq!(scan.edit().apply(&body), body);
        scanned += 1;
    }
    assert!(scanned > 25, "{scanned}");
}

#[test]
fn prompts_are_found_in_all_their_forms() {
    let prompts = |name: &str| {
        let body = case("vllm-http", name).body;
        Scan::parse(body.as_bytes()).unwrap().prompts().unwrap()
    };
    assert_eq!(
        prompts("completions_text"),
        [Prompt::Text("Once upon a time".into())]
    );
    assert_eq!(prompts("completions_prompt_batch_text").len(), 2);
    let tokens = Prompt::Tokens(vec![12522, 5193, 264, 882]);
    assert_eq!(
        prompts("completions_token_ids"),
        std::slice::from_ref(&tokens)
    );
    assert_eq!(
        prompts("completions_token_ids_batch"),
        [tokens, Prompt::Tokens(vec![9707, 11, 1879])]
    );
}

#[test]
fn usage_is_found_in_whole_answers() {
    let cached = |name: &str| find_usage(case("vllm-http", name).answer.as_bytes()).unwrap();
    assert_eq!(cached("chat_cached_tokens_1").usage.cached_tokens, Some(0));
    let second = cached("chat_cached_tokens_2");
    assert_eq!(second.usage.cached_tokens, Some(32));
    assert_eq!(second.usage.prompt_tokens, 59);
    assert!(!second.only_usage);
}

/// A stream with usage on every chunk, cut at every byte: the same events, and one that is usage alone.
#[test]
fn streams_parse_at_every_cut() {
    let text = case("vllm-http", "chat_stream_usage").answer;
    let bytes = Bytes::from(text.into_bytes());
    let mut counts = None;
    for cut in 0..=bytes.len() {
        let mut parser = EventParser::new(1 << 16);
        let (mut events, mut usage, mut alone, mut done) = (0, 0, 0, 0);
        for piece in [bytes.slice(..cut), bytes.slice(cut..)] {
            parser.push(piece);
            while let Some(event) = parser.next_event().unwrap() {
                events += 1;
                let found = event.data().and_then(|d| find_usage(&d));
                usage += usize::from(found.is_some());
                alone += usize::from(found.is_some_and(|f| f.only_usage));
                done += usize::from(event.is_done());
            }
        }
        let now = (events, usage, alone, done);
        assert_eq!(*counts.get_or_insert(now), now, "cut at {cut}");
    }
    let (events, usage, alone, done) = counts.unwrap();
    assert_eq!((alone, done), (1, 1));
    assert_eq!(usage, events - 1);
}

/// Usage on every chunk, taken out again: the chunks are those of a stream that was not asked for it.
#[test]
fn usage_can_be_taken_out() {
    let mut parser = EventParser::new(1 << 16);
    parser.push(Bytes::from(case("vllm-http", "chat_stream_usage").answer));
    let mut taken = 0;
    while let Some(event) = parser.next_event().unwrap() {
        let found = event.data().and_then(|d| find_usage(&d));
        let without = without_usage(&event);
        assert_eq!(without.is_some(), found.is_some());
        let Some(without) = without else {
            continue;
        };
        let data = |raw: &Bytes| -> serde_json::Value {
            let event = kvasir_openai::Event { raw: raw.clone() };
            serde_json::from_slice(&event.data().unwrap()).unwrap()
        };
        let mut want = data(&event.raw);
        want.as_object_mut().unwrap().remove("usage");
        assert_eq!(data(&without), want);
        taken += 1;
    }
    assert!(taken > 5, "{taken}");
}
