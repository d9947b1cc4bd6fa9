//! What a client of an engine behind HTTP is told beside its answer, and what its engine is asked for that.

use serde_json::{Value, json};

use crate::engine::{ANSWER, Stage, Step, stream, unary};
use crate::rig::{CHAT, Rig, Setup};

/// An answer of an engine that was asked for tokens, and of one that was not.
const WITH: &str = r#"{"id":"1","choices":[{"index":0,"text":"ab","finish_reason":"stop","stop_reason":151643,"token_ids":[5, 6],"prompt_token_ids":[7]}],"usage":{"prompt_tokens":1,"completion_tokens":2},"kv_transfer_params":null}"#;
const WITHOUT: &str = r#"{"id":"1","choices":[{"index":0,"text":"ab","finish_reason":"stop","stop_reason":151643,"token_ids":null,"prompt_token_ids":null}],"usage":{"prompt_tokens":1,"completion_tokens":2},"kv_transfer_params":null"#;

fn vllm(stage: &Stage) {
    *stage.metrics.lock().unwrap() = Some("vllm:num_requests_running 0\n".into());
}

fn sent(rig: &Rig) -> String {
    String::from_utf8(rig.stage.seen().pop().unwrap().body).unwrap()
}

#[tokio::test]
async fn the_tokens_of_an_answer_are_asked_for_and_hidden_again() {
    let rig = Rig::of_stage(1, Setup::usual(), vllm).await;
    rig.stage.play(vec![Step::Write(unary(WITH))]);
    let ask = r#"{"model":"m","prompt":[7],"nvext":{"extra_fields":["completion_token_ids","stop_reason"]}}"#;
    let answer = rig.post("/v1/completions", ask).await;
    assert_eq!(
        sent(&rig),
        r#"{"return_token_ids":true,"model":"m","prompt":[7]}"#
    );
    let expected = r#","nvext":{"completion_token_ids":[5,6],"stop_reason":151643}}"#;
    assert_eq!(answer.text(), format!("{WITHOUT}{expected}"));
    // A client that asks the engine itself keeps what the engine says.
    rig.stage.play(vec![Step::Write(unary(WITH))]);
    let ask = r#"{"model":"m","return_token_ids":true,"nvext":{"extra_fields":["completion_token_ids"]}}"#;
    let answer = rig.post("/v1/completions", ask).await.json();
    assert_eq!(sent(&rig), r#"{"model":"m","return_token_ids":true}"#);
    assert_eq!(answer["choices"][0]["token_ids"], json!([5, 6]));
    assert_eq!(answer["nvext"], json!({"completion_token_ids":[5,6]}));
    // Nobody asked: nothing is added, nothing is changed.
    rig.stage.play(vec![Step::Write(unary(WITH))]);
    let answer = rig.post("/v1/completions", r#"{"model":"m"}"#).await;
    assert_eq!(
        (sent(&rig).as_str(), answer.text()),
        (r#"{"model":"m"}"#, WITH)
    );
    rig.at_rest().await;
}

#[tokio::test]
async fn an_engine_of_unknown_kind_is_not_asked_for_tokens() {
    let rig = Rig::of(1).await;
    let ask = r#"{"model":"m","messages":[],"nvext":{"extra_fields":["completion_token_ids"]}}"#;
    assert_eq!(rig.post(CHAT, ask).await.text(), ANSWER);
    assert_eq!(sent(&rig), r#"{"model":"m","messages":[]}"#);
    rig.at_rest().await;
}

#[tokio::test]
async fn tokens_come_with_the_chunks_that_they_make() {
    let rig = Rig::of_stage(1, Setup::usual(), vllm).await;
    let events: [&[u8]; 5] = [
        b"data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}],\"prompt_token_ids\":[7,8]}\n\n",
        b"data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null,\"token_ids\":[5]}]}\n\n",
        b"data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"},\"finish_reason\": \"stop\",\"stop_reason\":\"b\",\"token_ids\":[6, 7]}]}\n\n",
        b"data: {\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":1}}}\n\n",
        b"data: [DONE]\n\n",
    ];
    rig.stage.play(vec![stream(&events)]);
    let ask = r#"{"model":"m","messages":[],"stream":true,"nvext":{"annotations":["llm_metrics","request_id"],"extra_fields":["completion_token_ids","stop_reason","timing"]}}"#;
    let answer = rig.post(CHAT, ask).await;
    let text = answer.text().to_owned();
    let parts: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(parts.len(), 6, "{text}");
    let id = answer.header("x-request-id").unwrap();
    assert_eq!(parts[0], format!("event: request_id\n: \"{id}\""));
    let data = |at: usize| -> Value {
        serde_json::from_str(parts[at].strip_prefix("data: ").unwrap()).unwrap()
    };
    assert_eq!(data(1)["prompt_token_ids"], Value::Null);
    assert!(data(1).get("nvext").is_none());
    assert_eq!(data(2)["nvext"], json!({"completion_token_ids":[5]}));
    assert_eq!(data(2)["choices"][0]["token_ids"], Value::Null);
    let last = data(3)["nvext"].clone();
    assert_eq!(last["completion_token_ids"], json!([6, 7]));
    assert_eq!(last["stop_reason"], "b");
    assert_eq!(last["timing"]["router_queue_depth"], 0);
    assert!(last["timing"]["ttft_ms"].as_f64().unwrap() > 0.0, "{last}");
    let metrics =
        r#"{\"input_tokens\":2,\"output_tokens\":3,\"chunk_tokens\":0,\"cached_tokens\":1}"#;
    assert_eq!(parts[4], format!("event: llm_metrics\n: \"{metrics}\""));
    assert_eq!(parts[5], "data: [DONE]", "usage was our wish");
    rig.at_rest().await;
}
