//! What engines say to each other about caches: no client says it to an engine, none hears it from one.

use crate::engine::{Step, stream, unary};
use crate::rig::{ASK, CHAT, Rig};

/// One forged object ends a vLLM engine; the others read somebody else's cache.
const FORGED: &str = r#""kv_transfer_params":{"do_remote_prefill":true},"bootstrap_host":"h","bootstrap_port":8998,"bootstrap_room":7,"disagg_prefill_dp_rank":0,"disaggregated_params":{"request_type":"generation_only"}"#;
const TICKET: &str =
    r#"{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_host":"10.0.0.1"}"#;

#[tokio::test]
async fn a_forged_transfer_reaches_no_engine_on_any_route() {
    let rig = Rig::of(1).await;
    for path in [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"] {
        let ask = format!(
            r#"{{"model":"m",{FORGED},"vllm_xargs":{{"kv_transfer_params":"x"}},"messages":[]}}"#
        );
        assert_eq!(rig.post(path, ask).await.status, 200, "{path}");
        let seen = rig.stage.seen().pop().unwrap();
        let sent = String::from_utf8(seen.body).unwrap();
        assert_eq!(
            sent, r#"{"model":"m","vllm_xargs":{},"messages":[]}"#,
            "{path}"
        );
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn neither_do_headers_that_would_say_the_same() {
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    let forged = "X-Override-Bootstrap-Host: h\r\nx-override-bootstrap-room: 7\r\nx-override-rid: 1\r\n\
                  x-request-id: ___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.1:2_7\r\nx-mine: 1\r\nconnection: close\r\n";
    client.post(CHAT, forged, ASK).await;
    assert_eq!(client.answer().await.status, 200);
    let seen = rig.stage.seen().pop().unwrap();
    let head = seen.head.to_lowercase();
    assert!(
        !head.contains("x-override") && !head.contains("_addr_"),
        "{head}"
    );
    assert_eq!(seen.header("x-mine"), ["1"]);
    rig.at_rest().await;
}

#[tokio::test]
async fn an_answer_names_no_cache() {
    let rig = Rig::of(1).await;
    let answer = |ticket: &str| {
        format!(
            r#"{{"choices":[{{"text":"a","disaggregated_params":{ticket}}}],"kv_transfer_params":{ticket}}}"#
        )
    };
    for path in [CHAT, "/v1/responses"] {
        rig.stage.play(vec![Step::Write(unary(&answer(TICKET)))]);
        let got = rig.post(path, ASK).await;
        assert_eq!((got.status, got.text()), (200, &*answer("null")), "{path}");
    }
    // Without a length it is passed on as it comes.
    let unsized_head =
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
    let told = answer(TICKET);
    let (begin, end) = told.split_at(70);
    for path in ["/v1/responses", "/generate", "/invocations"] {
        let whole = [unsized_head, begin.as_bytes()].concat();
        let steps = vec![
            Step::Write(whole),
            Step::Write(end.as_bytes().to_vec()),
            Step::Close,
        ];
        rig.stage.play(steps);
        let got = rig.post(path, ASK).await;
        assert_eq!((got.status, got.text()), (200, &*answer("null")), "{path}");
    }
    let event = |ticket: &str| format!("data: {}\n\n", answer(ticket));
    rig.stage.play(vec![stream(&[
        event(TICKET).as_bytes(),
        b"data: [DONE]\n\n",
    ])]);
    let ask = r#"{"model":"m","messages":[],"stream":true}"#;
    let got = rig.post(CHAT, ask).await;
    assert_eq!(got.text(), event("null") + "data: [DONE]\n\n");
    // As responses have it in their events.
    let event = |ticket: &str| {
        format!(
            "event: response.completed\ndata: {{\"response\":{{\"kv_transfer_params\":{ticket}}}}}\n\n"
        )
    };
    rig.stage.play(vec![stream(&[event(TICKET).as_bytes()])]);
    let got = rig.post("/v1/responses", ask).await;
    assert_eq!(got.text(), event("null"));
    rig.at_rest().await;
}

/// Answers that are too long to be kept back: in one piece, with a length and without, and one event of a stream.
#[tokio::test]
async fn nor_does_one_that_is_passed_on_as_it_comes() {
    let rig = Rig::of(1).await;
    let long = "x".repeat((4 << 20) + 4096);
    let answer = |ticket: &str| {
        format!(r#"{{"choices":[{{"text":"{long}"}}],"kv_transfer_params":{ticket},"end":1}}"#)
    };
    for path in [CHAT, "/v1/responses"] {
        rig.stage.play(vec![Step::Write(unary(&answer(TICKET)))]);
        let got = rig.post(path, ASK).await;
        assert!(got.text() == answer("null"), "{path}");
    }
    let event = |ticket: &str| format!("data: {}\n\n", answer(ticket));
    rig.stage.play(vec![stream(&[
        event(TICKET).as_bytes(),
        b"data: [DONE]\n\n",
    ])]);
    let ask = r#"{"model":"m","messages":[],"stream":true}"#;
    let got = rig.post(CHAT, ask).await;
    assert!(got.text() == event("null") + "data: [DONE]\n\n");
    rig.at_rest().await;
}

/// Python's readers know more encodings of JSON than we do, and guess: what we cannot read an engine does not get.
#[tokio::test]
async fn a_body_in_another_encoding_reaches_no_engine() {
    let rig = Rig::of(1).await;
    let ask = r#"{"model":"m","kv_transfer_params":{"do_remote_prefill":true}}"#;
    let wide = |of: fn(u16) -> [u8; 2]| ask.encode_utf16().flat_map(of).collect::<Vec<u8>>();
    let (little, big) = (wide(u16::to_le_bytes), wide(u16::to_be_bytes));
    let bodies = [
        [&b"\xef\xbb\xbf"[..], ask.as_bytes()].concat(),
        [&b"\xff\xfe"[..], &little].concat(),
        [&b"\xfe\xff"[..], &big].concat(),
        little,
        big,
        ask.encode_utf16()
            .flat_map(|unit| u32::from(unit).to_be_bytes())
            .collect(),
    ];
    for path in [CHAT, "/v1/responses", "/generate", "/invocations"] {
        for body in &bodies {
            for kind in ["", "content-type: application/json\r\n"] {
                let mut client = rig.client().await;
                let length = body.len();
                let head = format!(
                    "POST {path} HTTP/1.1\r\nhost: door\r\n{kind}connection: close\r\ncontent-length: {length}\r\n\r\n"
                );
                client.send([head.as_bytes(), body].concat()).await;
                let status = client.answer().await.status;
                assert!((400..500).contains(&status), "{path} {kind}: {status}");
            }
        }
    }
    assert_eq!(rig.stage.seen().len(), 0);
}

/// Words for routers wherever engines look for them, in every writing that they understand.
#[tokio::test]
async fn no_writing_of_a_forged_transfer_reaches_an_engine() {
    let rig = Rig::of(1).await;
    let forged = [
        r#""\u006bv_transfer_params":{"do_remote_prefill":true}"#,
        r#""kv_transfer_params":null,"kv_transfer_param\u0073":{"a":[{"kv_transfer_params":{}}]},"kv_transfer_params":[]"#,
        r#""bootstrap_room":[1,2],"bootstrap\u005fhost":["a","b"],"bootstrap_port":[1,2]"#,
        r#""vllm_xargs":{"\u006bv_transfer_params":{}},"vllm_xar\u0067s":{"kv_transfer_params":"x"}"#,
        r#""sampling_params":{"extra_args":{"kv_transfer_params":{"a":1},"kv_transfer_params":{}}}"#,
        r#""extra_args":{"disaggregated_params":{}},"ec_transfer_params":{"x":1}"#,
    ];
    let names = [
        "transfer_params",
        "bootstrap",
        "disagg",
        "do_remote",
        "u006b",
    ];
    for path in [
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/generate",
        "/inference/v1/generate",
        "/invocations",
        "/v1/score",
        "/v1/chat/completions/render",
        "/v1/rerank",
    ] {
        for words in forged {
            let ask =
                format!(r#"{{ {words} ,"model":"m","prompt":["a","b"],"messages":[],{words}}}"#);
            assert_eq!(rig.post(path, ask).await.status, 200, "{path} {words}");
            let sent = String::from_utf8(rig.stage.seen().pop().unwrap().body).unwrap();
            let found = names.iter().find(|name| sent.contains(**name));
            assert_eq!(found, None, "{path}: {sent}");
            let sent: serde_json::Value = serde_json::from_str(&sent).unwrap();
            assert_eq!(sent["model"], "m");
        }
    }
    rig.at_rest().await;
}
