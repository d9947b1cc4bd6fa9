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
    let event = |ticket: &str| format!("data: {}\n\n", answer(ticket));
    rig.stage.play(vec![stream(&[
        event(TICKET).as_bytes(),
        b"data: [DONE]\n\n",
    ])]);
    let ask = r#"{"model":"m","messages":[],"stream":true}"#;
    let got = rig.post(CHAT, ask).await;
    assert_eq!(got.text(), event("null") + "data: [DONE]\n\n");
    rig.at_rest().await;
}
