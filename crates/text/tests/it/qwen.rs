//! Token parity with real servers, over the prompts that they recorded.

use kvasir_text::ChatInput;
use serde_json::Value;

use crate::qwen;

fn testdata(path: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata");
    std::fs::read_to_string(format!("{root}/{path}")).unwrap()
}

fn tokens_of(body: &Value) -> Option<Vec<u32>> {
    let model = qwen()?;
    if let Some(prompt) = body.get("prompt") {
        return Some(match prompt {
            Value::String(text) => model.encode_prompt(text).unwrap(),
            ids => serde_json::from_value(ids.clone()).ok()?,
        });
    }
    let messages = body.get("messages")?.to_string();
    let tools = body.get("tools").map(Value::to_string);
    let input = ChatInput {
        messages: &messages,
        tools: tools.as_deref(),
        add_generation_prompt: true,
        ..ChatInput::default()
    };
    let text = model.render(&input).unwrap();
    Some(model.encode_chat(&text).unwrap())
}

/// Every recorded vLLM request that says which tokens its prompt had.
#[test]
fn prompts_have_the_tokens_that_vllm_saw() {
    if qwen().is_none() {
        return;
    }
    let folders = [
        "int-sha256",
        "bytes-sha256_cbor",
        "int-sha256-aligned",
        "int-sha256-duplicates",
        "int-sha256-hybrid-swa",
    ];
    let (mut requests, mut ids) = (0, 0);
    for folder in folders {
        for line in testdata(&format!("vllm-kv-events/{folder}/requests.jsonl")).lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let Ok(want) = serde_json::from_value::<Vec<u32>>(row["prompt_token_ids"].clone())
            else {
                continue;
            };
            let Some(got) = tokens_of(&row["body"]) else {
                continue;
            };
            assert_eq!(got, want, "{folder}: {}", row["note"]);
            requests += 1;
            ids += want.len();
        }
    }
    eprintln!("parity: {requests} requests, {ids} tokens");
    assert!(requests > 80 && ids > 10_000, "{requests} {ids}");
}

/// Prompt lengths and token ids in the recorded HTTP answers of vLLM and of Dynamo.
#[test]
fn answers_count_the_prompt_as_we_do() {
    if qwen().is_none() {
        return;
    }
    let mut compared = 0;
    for file in ["vllm-http", "dynamo-http"] {
        for line in testdata(&format!("{file}/cases.jsonl")).lines() {
            let case: Value = serde_json::from_str(line).unwrap();
            let body: Value =
                serde_json::from_str(case["body"].as_str().unwrap()).unwrap_or_default();
            let answer: Value =
                serde_json::from_str(case["answer"].as_str().unwrap()).unwrap_or_default();
            let replaced = ["kv_transfer_params", "nvext"].iter().any(|key| {
                body[*key].get("token_data").is_some()
                    || body[*key].get("prompt_token_ids").is_some()
            });
            let Some(count) = answer["usage"]["prompt_tokens"].as_u64() else {
                continue;
            };
            if replaced || body["prompt"].is_array() {
                continue;
            }
            let Some(ids) = tokens_of(&body) else {
                continue;
            };
            assert_eq!(ids.len() as u64, count, "{file}: {}", case["name"]);
            if let Some(want) = answer["prompt_token_ids"].as_array() {
                let want: Vec<u32> = want.iter().map(|v| v.as_u64().unwrap() as u32).collect();
                assert_eq!(ids, want, "{file}: {}", case["name"]);
            }
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared}");
}
