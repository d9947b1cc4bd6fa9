//! Bodies and chunks of engines: what is resumed, what is not, and what the client gets.

use bytes::Bytes;
use expect_test::{Expect, expect};

use super::*;
use crate::sse::Event;
use crate::usage::Usage;

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"#;

fn chat(more: &str) -> Option<&'static str> {
    let body = format!("{CHAT}{more}\"x\":1}}");
    obstacle(&Scan::parse(body.as_bytes()).unwrap(), Endpoint::Chat)
}

fn completion(more: &str) -> Option<&'static str> {
    let body = format!("{{\"prompt\":\"a b\",{more}\"x\":1}}");
    obstacle(
        &Scan::parse(body.as_bytes()).unwrap(),
        Endpoint::Completions,
    )
}

#[test]
fn what_cannot_go_on_is_named() {
    for fine in [
        "",
        r#""n":1,"#,
        r#""temperature":0.7,"#,
        r#""seed":1,"temperature":0,"#,
        r#""seed":1,"temperature":0.0,"#,
        r#""stop":["x"],"#,
        r#""logprobs":false,"#,
        r#""response_format":{"type":"text"},"#,
        r#""tools":[{"type":"function"}],"tool_choice":"auto","#,
        r#""max_tokens":5,"min_tokens":2,"#,
    ] {
        assert_eq!(chat(fine), None, "{fine}");
    }
    for (body, why) in [
        (r#""n":2,"#, "choices"),
        (r#""use_beam_search":true,"#, "choices"),
        (r#""logprobs":true,"#, "logprobs"),
        (r#""return_token_ids":true,"#, "logprobs"),
        (r#""seed":1,"#, "seed"),
        (r#""guided_json":{},"#, "guided"),
        (r#""structured_outputs":{"regex":"a"},"#, "guided"),
        (r#""response_format":{"type":"json_object"},"#, "guided"),
        (r#""tool_choice":"required","#, "guided"),
        (r#""tool_choice":{"type":"function"},"#, "guided"),
        (r#""stop":"x","include_stop_str_in_output":true,"#, "stop"),
        (r#""kv_transfer_params":{"a":1},"#, "kv_transfer"),
        (
            r#""continue_final_message":true,"messages":[{"role":"user"}],"#,
            "prompt",
        ),
        (r#""messages":[],"#, "prompt"),
    ] {
        assert_eq!(chat(body), Some(why), "{body}");
    }
    for (body, why) in [
        ("", None),
        (r#""logprobs":0,"#, Some("logprobs")),
        (r#""echo":true,"#, Some("echo")),
        (r#""suffix":"end","#, Some("suffix")),
        (r#""best_of":3,"#, Some("choices")),
        (r#""prompt":["a","b"],"#, Some("choices")),
        (r#""prompt":["a"],"#, None),
        (r#""prompt":[1,2],"#, None),
        (r#""prompt":7,"#, Some("prompt")),
    ] {
        assert_eq!(completion(body), why, "{body}");
    }
}

fn progress(chunks: &[&str]) -> Progress {
    let mut progress = Progress::default();
    for chunk in chunks {
        assert!(
            matches!(progress.add_chunk(chunk.as_bytes()), ChunkKind::Part(_)),
            "{chunk}"
        );
    }
    progress
}

const SAID: &[&str] = &[
    r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":9,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":7,"total_tokens":7,"completion_tokens":0}}"#,
    r#"{"id":"chatcmpl-1","object":"chat.completion.chunk","created":9,"model":"m","choices":[{"index":0,"delta":{"content":"a \"b\""},"logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}"#,
];

fn check(endpoint: Endpoint, body: &str, want: &Expect) {
    let bytes = Bytes::copy_from_slice(body.as_bytes());
    let scan = Scan::parse(&bytes).unwrap();
    let encode = |text: &str| Some(text.bytes().map(Token::from).collect());
    let out = continued(&scan, &bytes, endpoint, &progress(SAID), encode);
    want.assert_eq(&out.map_or("none".into(), |out| {
        String::from_utf8(out.to_vec()).unwrap()
    }));
}

/// With only its role or white space sent, a request is repeated unchanged; the client gets white space once.
#[test]
fn what_has_hardly_begun() {
    let body =
        Bytes::from_static(br#"{"messages":[{"role":"user","content":"hi"}],"max_tokens":9}"#);
    let scan = Scan::parse(&body).unwrap();
    let rest = |said: &[&str]| continued(&scan, &body, Endpoint::Chat, &progress(said), |_| None);
    assert_eq!(rest(&SAID[..1]).unwrap(), body);
    let blank = SAID[1].replace("a \\\"b\\\"", " ");
    assert!(blank.contains(r#""content":" ""#));
    assert_eq!(rest(&[SAID[0], &blank]).unwrap(), body);
    let mut graft = Graft::starting_over(&progress(&[SAID[0], &blank])).unwrap();
    let mut event = |text: &str, more: &str| {
        let chunk = format!(
            r#"data: {{"id":"2","choices":[{{"index":0,"delta":{{"content":"{text}"}}{more}}}]}}"#
        );
        let raw = Bytes::from(chunk + "\n\n");
        let event = graft.event(Event { raw });
        event.map(|event| String::from_utf8(event.raw.to_vec()).unwrap())
    };
    assert_eq!(event("\\n ", ""), None);
    let said = |text: &str| {
        format!(
            "data: {{\"id\":\"chatcmpl-1\",\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}},\"index\":0}}]}}\n\n"
        )
    };
    assert_eq!(event("\\n a", ""), Some(said("a")));
    assert!(
        event("\\n", "").unwrap().contains("\\n"),
        "within the answer it stays"
    );
    // The white space was all of it.
    let mut graft = Graft::starting_over(&progress(&[SAID[0], &blank])).unwrap();
    let last = r#"{"choices":[{"index":0,"delta":{"content":" "},"finish_reason":"stop"}]}"#;
    let raw = Bytes::from(format!("data: {last}\n\n"));
    let last = graft.event(Event { raw }).unwrap();
    let last = String::from_utf8(last.raw.to_vec()).unwrap();
    assert!(
        last.contains("\"content\":\"\"") && last.contains("stop"),
        "{last}"
    );
}

#[test]
fn the_rest_is_asked_for() {
    check(
        Endpoint::Chat,
        r#"{"messages":[{"role":"user","content":"hi"} ] ,"max_tokens":9,"min_tokens":2,"x":[1, 2]}"#,
        &expect![[
            r#"{"add_generation_prompt":false,"continue_final_message":true,"messages":[{"role":"user","content":"hi"} ,{"role":"assistant","content":"a \"b\""}] ,"max_tokens":6,"min_tokens":0,"x":[1, 2]}"#
        ]],
    );
    check(
        Endpoint::Chat,
        r#"{"messages":[{"role":"user","content":"hi"},{"content":"so ","role":"assistant"}],"continue_final_message":true,"add_generation_prompt":false,"max_completion_tokens":3}"#,
        &expect![[
            r#"{"messages":[{"role":"user","content":"hi"},{"content":"so a \"b\"","role":"assistant"}],"continue_final_message":true,"add_generation_prompt":false,"max_completion_tokens":0}"#
        ]],
    );
    check(
        Endpoint::Completions,
        r#"{"prompt":"one ","temperature":0.5}"#,
        &expect![[r#"{"max_tokens":13,"prompt":"one a \"b\"","temperature":0.5}"#]],
    );
    check(
        Endpoint::Completions,
        r#"{"prompt":[[5,6]],"max_tokens":40}"#,
        &expect![[r#"{"prompt":[5,6,97,32,34,98,34],"max_tokens":37}"#]],
    );
    check(
        Endpoint::Completions,
        r#"{"prompt":"one","max_tokens":2}"#,
        &expect!["none"],
    );
}

#[test]
fn what_came_is_known() {
    let seen = progress(SAID);
    assert_eq!((seen.text(), seen.tokens()), ("a \"b\"", 3));
    assert_eq!((seen.is_finished(), seen.obstacle()), (false, None));
    let chunk = |choice: &str| format!("{{\"choices\":[{{\"index\":0,{choice}}}]}}");
    // Without the engine's count a chunk with text is a token.
    let (a, end) = (
        chunk(r#""text":"a""#),
        chunk(r#""text":"","finish_reason":"stop""#),
    );
    let counted = progress(&[&a, &a, &end]);
    assert_eq!(
        (counted.text(), counted.tokens(), counted.is_finished()),
        ("aa", 2, true)
    );
    for (choice, why) in [
        (r#""delta":{"tool_calls":[{"index":0}]}"#, "tool_call"),
        (r#""delta":{"reasoning_content":"hm"}"#, "reasoning"),
        (r#""delta":{"reasoning":"hm"}"#, "reasoning"),
        (r#""text":"a","logprobs":{"tokens":[]}"#, "logprobs"),
        (r#""index":1,"text":"a""#, "choices"),
    ] {
        let chunk = format!("{{\"choices\":[{{{choice}}}]}}");
        assert_eq!(progress(&[&chunk]).obstacle(), Some(why), "{choice}");
    }
    assert_eq!(progress(&["not json"]).obstacle(), Some("unknown_chunk"));
    let see = |data: &str| Progress::default().add_chunk(data.as_bytes());
    assert_eq!(
        see(r#"{"error":{"message":"EngineCore died","code":500}}"#),
        ChunkKind::Failure
    );
    assert_eq!(
        see(r#"{"error":{"message":"too long","code":400}}"#),
        ChunkKind::Part(None)
    );
    for failure in [
        r#"{"error":{"message":"died","type":"InternalServerError","param":null,"code":500}}"#,
        r#"{"error":{"message":"died","code":"500"}}"#,
        r#"{"error":"out of memory"}"#,
        r#"{"object":"error","message":"died","code":500}"#,
    ] {
        assert_eq!(see(failure), ChunkKind::Failure, "{failure}");
    }
}

fn grafted(chunk: &str) -> String {
    let mut graft = Graft::new(&progress(SAID)).unwrap();
    let raw = Bytes::from(format!("data: {chunk}\n\n"));
    let event = graft.event(Event { raw });
    event.map_or("none".into(), |event| {
        String::from_utf8(event.raw.to_vec()).unwrap()
    })
}

#[test]
fn chunks_of_the_rest_belong_to_the_first_answer() {
    let chunk = |delta: &str, finish: &str, more: &str| {
        format!(
            r#"{{"id":"chatcmpl-2","created":11,"model":"m","choices":[{{"index":0,"delta":{delta},"finish_reason":{finish}}}]{more}}}"#
        )
    };
    let role = r#"{"role":"assistant","content":""}"#;
    assert_eq!(grafted(&chunk(role, "null", "")), "none");
    expect![[r#"
        data: {"id":"chatcmpl-1","created":9,"model":"m","choices":[{"index":0,"delta":{"content":"c"},"finish_reason":null}]}

    "#]]
    .assert_eq(&grafted(&chunk(r#"{"role":"assistant","content":"c"}"#, "null", "")));
    expect![[r#"
        data: {"id":"chatcmpl-1","created":9,"model":"m","choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12,"prompt_tokens_details":null}}

    "#]]
    .assert_eq(&grafted(&chunk(
        r#"{"content":"c"}"#,
        "\"stop\"",
        r#","usage":{"prompt_tokens":10,"completion_tokens":2,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":9}}"#,
    )));
    assert_eq!(grafted("[DONE]"), "data: [DONE]\n\n");
}

#[test]
fn an_answer_without_its_last_words_is_given_them() {
    let graft = Graft::new(&progress(SAID)).unwrap();
    let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    expect![[r#"
        data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":9,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}

        data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":9,"model":"m","choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}

    "#]]
    .assert_eq(&(text(graft.length_event(Endpoint::Chat)) + &text(graft.usage_event().unwrap())));
    assert!(Graft::new(&Progress::default()).is_none());
}

/// An engine that does not count before the end: its prompt held what came before.
#[test]
fn counts_are_put_together_from_what_is_known() {
    let chunk = r#"{"choices":[{"index":0,"text":"a"}]}"#;
    let graft = Graft::new(&progress(&[chunk, chunk])).unwrap();
    let usage = graft.usage(Usage {
        prompt_tokens: 12,
        completion_tokens: 5,
        cached_tokens: None,
    });
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (10, 7));
}
