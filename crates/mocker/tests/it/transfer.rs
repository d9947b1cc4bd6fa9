//! Prompts that one mock server keeps and another fetches, and what wrong words about them lead to, as recorded of real vLLM servers.
#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use serde_json::{Value, json};

use crate::client::{Served, serve_part};

const PROMPT: &str = "Number seven: when does the ferry leave, who keeps the light, and is there bread on Sundays too? When does it leave?";

fn ask(params: &Value) -> String {
    json!({"model": "tiny-qwen", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": true,
        "kv_transfer_params": params})
    .to_string()
}

fn keeps() -> Value {
    json!({"do_remote_decode": true, "do_remote_prefill": false})
}

async fn kept_share(server: &Served) -> f64 {
    let page = server.ask("GET", "/metrics", "").await.unwrap().body;
    let line = page
        .lines()
        .find(|line| line.starts_with("vllm:kv_cache_usage_perc{"));
    line.unwrap().rsplit_once(' ').unwrap().1.parse().unwrap()
}

fn json_of(body: &str) -> Value {
    serde_json::from_str(body).unwrap()
}

#[tokio::test]
async fn a_prompt_is_kept_until_it_is_fetched_and_the_answer_is_the_same() {
    let (prefill, decode) = (serve_part("e1").await, serve_part("e2").await);
    let one_token = ask(&keeps()).replace("\"max_tokens\":4", "\"max_tokens\":1");
    let computed = json_of(&prefill.post("/v1/completions", &one_token).await.body);
    let params = &computed["kv_transfer_params"];
    assert_eq!(params["remote_engine_id"], "e1");
    assert!(
        params["remote_block_ids"][0]
            .as_array()
            .is_some_and(|ids| !ids.is_empty())
    );
    assert!(kept_share(&prefill).await > 0.0);
    let answer = json_of(&decode.post("/v1/completions", &ask(params)).await.body);
    assert_eq!(kept_share(&prefill).await, 0.0);
    assert!(answer["kv_transfer_params"].is_null());
    let alone = json_of(
        &decode
            .post("/v1/completions", &ask(&Value::Null))
            .await
            .body,
    );
    assert_eq!(answer["choices"][0]["text"], alone["choices"][0]["text"]);
    let first = computed["choices"][0]["text"].as_str().unwrap();
    assert!(
        answer["choices"][0]["text"]
            .as_str()
            .unwrap()
            .starts_with(first)
    );
}

#[tokio::test]
async fn a_stream_keeps_the_prompt_and_does_not_say_where() {
    let prefill = serve_part("e1").await;
    let ask = ask(&keeps()).replacen('{', "{\"stream\":true,", 1);
    let got = prefill.post("/v1/completions", &ask).await;
    assert!(!got.body.contains("kv_transfer_params") && got.body.contains("[DONE]"));
    assert!(kept_share(&prefill).await > 0.0);
}

#[tokio::test]
async fn wrong_words_do_as_recorded() {
    let (prefill, decode) = (serve_part("e1").await, serve_part("e2").await);
    let computed = json_of(&prefill.post("/v1/completions", &ask(&keeps())).await.body);
    let right = &computed["kv_transfer_params"];
    let with = |field: &str, value: Value| {
        let mut params = right.clone();
        params[field] = value;
        ask(&params)
    };
    let post = async |body: String| {
        let got = decode.post("/v1/completions", &body).await;
        (got.status, got.body)
    };
    let (status, body) = post(ask(&json!("abc"))).await;
    assert_eq!(status, 400);
    assert!(
        body.contains("Input should be a valid dictionary"),
        "{body}"
    );
    for ignored in [
        json!({"x": 1}),
        json!({"do_remote_prefill": false, "do_remote_decode": false}),
    ] {
        assert_eq!(post(ask(&ignored)).await.0, 200);
    }
    let (status, body) = post(with("remote_engine_id", json!("other"))).await;
    assert_eq!(
        (status, &json_of(&body)["error"]["message"]),
        (500, &json!("Internal server error"))
    );
    assert_eq!(post(with("remote_request_id", json!("nope"))).await.0, 200);
    assert!(
        kept_share(&prefill).await > 0.0,
        "nobody knows whose notice that was"
    );
    assert_eq!(post(ask(right)).await.0, 200);
    assert_eq!(kept_share(&prefill).await, 0.0);
    assert_eq!(post(ask(right)).await.0, 200, "twice: nothing is checked");
}

/// Objects that end a vLLM engine: an error, and then nobody is there.
#[tokio::test]
async fn some_words_end_the_engine() {
    for params in [
        json!({"do_remote_prefill": true}),
        json!({"do_remote_prefill": true, "remote_block_ids": [[]], "remote_engine_id": "e1"}),
    ] {
        let decode = serve_part("e2").await;
        let got = decode.post("/v1/completions", &ask(&params)).await;
        assert_eq!(got.status, 500);
        assert!(
            got.body.contains("EngineCore encountered an issue"),
            "{}",
            got.body
        );
        decode.until_gone().await;
    }
}

#[tokio::test]
async fn what_vllm_refuses_of_one_token_is_refused() {
    let prefill = serve_part("e1").await;
    for (field, words) in [
        (
            "\"stream_options\":{\"include_usage\":true}",
            "Stream options can only be defined",
        ),
        (
            "\"min_tokens\":9",
            "min_tokens must be less than or equal to max_tokens=4",
        ),
    ] {
        let ask = ask(&keeps()).replacen('{', &format!("{{{field},"), 1);
        let got = prefill.post("/v1/completions", &ask).await;
        assert_eq!(got.status, 400);
        assert!(got.body.contains(words), "{}", got.body);
    }
}
