//! Token parity with real servers, over the prompts that they recorded.

use kvasir_openai::content_spans;
use kvasir_text::{ChatInput, Dialect, Tokenizer};
use proptest::prelude::Strategy as _;
use proptest::strategy::ValueTree as _;
use serde_json::Value;

use crate::{qwen, qwen_folder};

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
        dialect: Dialect::Vllm,
        ..ChatInput::default()
    };
    let text = model.render(&input).unwrap();
    let spans = content_spans(&messages).unwrap();
    for _ in 0..3 {
        let contents = Some(&*spans);
        let put_together = model.render(&ChatInput { contents, ..input });
        assert_eq!(put_together.as_ref(), Ok(&text), "{messages}");
    }
    let tokens = model.encode_chat(&text).unwrap();
    let contents = Some(&*spans);
    let at_once = model.encode_conversation(&ChatInput { contents, ..input });
    assert_eq!(at_once.as_ref(), Ok(&tokens), "{messages}");
    Some(tokens)
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

/// Conversations that grow and change, through the cache and (where built in) the quick library: always the
/// reference library's tokens.
#[test]
fn edited_conversations_have_the_reference_tokens() {
    let (Some(model), Some(folder)) = (qwen(), qwen_folder()) else {
        return;
    };
    let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let reference = Tokenizer::reference_only(&json).unwrap();
    let words = "[a-zA-Z]{1,9}|[0-9]{1,5}|\\PC{1,4}|<\\|im_(start|end)\\|>|[ \n]{1,3}|'s|e\u{301}";
    let piece = proptest::collection::vec(words, 200..800).prop_map(|w| w.join(" "));
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut text = String::new();
    for round in 0..12 {
        let added = piece.new_tree(&mut runner).unwrap().current();
        text.push_str(&added);
        if round % 4 == 3 {
            let middle = (0..=text.len() / 2)
                .rev()
                .find(|at| text.is_char_boundary(*at));
            text.insert_str(middle.unwrap(), "an edit in the middle ");
        }
        for special in [false, true] {
            let got = model.encode(&text, special).unwrap();
            assert_eq!(
                got,
                reference.encode(&text, special).unwrap(),
                "round {round}"
            );
        }
    }
    let stats = model.cache_stats().unwrap();
    assert!(stats.hit_bytes > stats.miss_bytes, "{stats:?}");
    let status = model.tokenizer().status();
    eprintln!("{stats:?} {status:?}");
    assert_eq!(status.differences, 0);
}
