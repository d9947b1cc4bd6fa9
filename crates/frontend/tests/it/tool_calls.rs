//! Calls of tools and reasoning in the answers of token workers.

use kvasir_frontend::{AppOptions, StreamDispatch};
use serde_json::{Value, json};

use crate::tokens::{Fixture, Said};

const CALL: &str = "I look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"K\u{f6}ln\", \"days\": 2}}\n</tool_call>";
const TWO: &str = "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
const THOUGHT: &str = "<think>\nI think.\n</think>\n\nHello.";

fn said(text: &'static str) -> Said {
    Said {
        text,
        tools: Some("hermes"),
        reasoning: Some("qwen3"),
    }
}

fn ask(more: &Value) -> Value {
    let mut body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": [
            {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}},
            {"type": "function", "function": {"name": "now"}},
        ],
    });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

async fn unary(fixture: &Fixture, more: &Value) -> Value {
    let (status, body) = fixture.post(&ask(more)).await;
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    answer["choices"][0].clone()
}

/// The chunks' first choices.
async fn streamed(fixture: &Fixture, more: &Value) -> Vec<Value> {
    let mut body = ask(more);
    body["stream"] = true.into();
    let (status, text) = fixture.post(&body).await;
    assert_eq!(status, 200, "{text}");
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let chunks = data.filter(|data| *data != "[DONE]");
    let chunks = chunks.map(|data| serde_json::from_str::<Value>(data).unwrap());
    chunks.map(|chunk| chunk["choices"][0].clone()).collect()
}

/// The streamed choice as clients put it together: what was said, and why it ended.
fn joined(chunks: &[Value]) -> Value {
    let mut calls: Vec<Value> = Vec::new();
    let (mut content, mut reasoning, mut finish) = (String::new(), String::new(), Value::Null);
    for chunk in chunks {
        let delta = &chunk["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                assert_eq!(part["type"], "function");
                calls.push(
                    json!({"id": part["id"], "name": part["function"]["name"], "arguments": ""}),
                );
            } else {
                assert!(part.get("id").is_none() && part["function"].get("name").is_none());
            }
            let more = part["function"]["arguments"].as_str().unwrap();
            let all = calls[index]["arguments"].as_str().unwrap().to_owned() + more;
            calls[index]["arguments"] = all.into();
        }
        if !chunk["finish_reason"].is_null() {
            assert!(finish.is_null(), "one end");
            assert_eq!(*delta, json!({}));
            finish = chunk["finish_reason"].clone();
        }
    }
    json!({"content": content, "reasoning": reasoning, "calls": calls, "finish": finish})
}

#[tokio::test]
async fn a_call_is_answered_as_a_call() {
    let fixture = Fixture::saying(&said(CALL), AppOptions::default()).await;
    let choice = unary(&fixture, &json!({})).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "I look.\n");
    let call = &choice["message"]["tool_calls"][0];
    assert!(call["id"].as_str().unwrap().starts_with("call-"), "{call}");
    assert_eq!(call["type"], "function");
    let arguments = "{\"city\": \"K\u{f6}ln\", \"days\": 2}";
    assert_eq!(
        call["function"],
        json!({"name": "get_weather", "arguments": arguments})
    );

    let chunks = streamed(&fixture, &json!({})).await;
    let answer = joined(&chunks);
    assert_eq!(answer["calls"][0]["name"], "get_weather");
    assert_eq!(answer["calls"][0]["arguments"], arguments);
    assert_eq!(answer["content"], "I look.\n");
    assert_eq!(answer["finish"], "tool_calls");
    fixture.assert_idle().await;
}

#[tokio::test]
async fn calls_are_looked_for_only_where_the_request_allows_them() {
    let fixture = Fixture::saying(&said(CALL), AppOptions::default()).await;
    for more in [json!({"tool_choice": "none"}), json!({"tools": null})] {
        let choice = unary(&fixture, &more).await;
        assert_eq!(choice["message"]["content"], CALL, "{more}");
        assert_eq!(choice["finish_reason"], "stop");
    }
    // What may not be called is not in the prompt.
    let lengths: Vec<usize> = fixture
        .seen
        .lock()
        .unwrap()
        .iter()
        .map(|seen| seen.tokens.len())
        .collect();
    assert_eq!(lengths[0], lengths[1]);
    drop(unary(&fixture, &json!({})).await);
    assert!(fixture.seen.lock().unwrap()[2].tokens.len() >= lengths[0]);
    // An answer that was cut off ends for that, and keeps what came.
    let choice = unary(&fixture, &json!({"max_tokens": 3})).await;
    assert_eq!(choice["finish_reason"], "stop", "{choice}");
    let content = choice["message"]["content"].as_str().unwrap();
    assert!(CALL.starts_with(content), "{content}");
}

#[tokio::test]
async fn a_client_that_takes_one_call_gets_one() {
    let fixture = Fixture::saying(&said(TWO), AppOptions::default()).await;
    let two = joined(&streamed(&fixture, &json!({})).await);
    assert_eq!(two["calls"].as_array().unwrap().len(), 2);
    assert_ne!(two["calls"][0]["id"], two["calls"][1]["id"]);
    for chunks in [
        joined(&streamed(&fixture, &json!({"parallel_tool_calls": false})).await),
        json!({"calls": unary(&fixture, &json!({"parallel_tool_calls": false})).await["message"]["tool_calls"]}),
    ] {
        assert_eq!(chunks["calls"].as_array().unwrap().len(), 1, "{chunks}");
    }
}

#[tokio::test]
async fn reasoning_has_a_field_of_its_own() {
    let fixture = Fixture::saying(&said(THOUGHT), AppOptions::default()).await;
    let choice = unary(&fixture, &json!({"tools": null})).await;
    assert_eq!(choice["message"]["reasoning_content"], "\nI think.\n");
    assert_eq!(choice["message"]["content"], "\n\nHello.");
    assert_eq!(choice["finish_reason"], "stop");
    let answer = joined(&streamed(&fixture, &json!({})).await);
    assert_eq!(answer["reasoning"], "\nI think.\n");
    assert_eq!(answer["content"], "\n\nHello.");
    // A template that is told so lets the model not think; then nothing is looked for.
    let off = json!({"chat_template_kwargs": {"enable_thinking": false}});
    assert_eq!(unary(&fixture, &off).await["message"]["content"], THOUGHT);

    let options = AppOptions {
        reasoning_field: kvasir_openai::ReasoningField::Reasoning,
        ..AppOptions::default()
    };
    let fixture = Fixture::saying(&said(THOUGHT), options).await;
    let choice = unary(&fixture, &json!({})).await;
    assert_eq!(choice["message"]["reasoning"], "\nI think.\n");
}

#[tokio::test]
async fn a_call_that_is_demanded_is_demanded_of_the_engine() {
    let named = Said {
        text: "{\"city\": \"Rom\"}",
        ..Said::default()
    };
    let fixture = Fixture::saying(&named, AppOptions::default()).await;
    let choose = json!({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}});
    let choice = unary(&fixture, &choose).await;
    let call = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!(
        *call,
        json!({"name": "get_weather", "arguments": "{\"city\": \"Rom\"}"})
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    let guided = |fixture: &Fixture| {
        let seen = fixture.seen.lock().unwrap();
        let guided = seen.last().unwrap().sampling.guided.clone().unwrap();
        serde_json::from_str::<Value>(&guided).unwrap()
    };
    assert_eq!(guided(&fixture)["json"]["required"], json!(["city"]));

    let list = Said {
        text: "[{\"name\": \"now\", \"parameters\": {}}]",
        reasoning: Some("deepseek_r1"),
        ..Said::default()
    };
    let fixture = Fixture::saying(&list, AppOptions::default()).await;
    let answer = joined(&streamed(&fixture, &json!({"tool_choice": "required"})).await);
    assert_eq!(answer["calls"][0]["name"], "now");
    assert_eq!(answer["finish"], "tool_calls");
    // As Dynamo 1.6.1 asks its workers.
    assert_eq!(
        guided(&fixture),
        json!({"json": {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": [
            {"properties": {"name": {"type": "string", "enum": ["get_weather"]}, "parameters": {"type": "object", "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}, "required": ["name", "parameters"]},
            {"properties": {"name": {"type": "string", "enum": ["now"]}, "parameters": {"type": "object", "properties": {}}},
                "required": ["name", "parameters"]},
        ]}}})
    );
}

/// What is complete is told of before the delta with which it became so, once, beside the deltas as they always are.
#[tokio::test]
async fn whole_calls_and_reasoning_are_events_of_their_own_where_they_are_wanted() {
    const BOTH: &str = "<think>\nI think.\n</think>\n\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rom\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let events = async |dispatch: StreamDispatch| {
        let options = AppOptions {
            stream_dispatch: dispatch,
            ..AppOptions::default()
        };
        let fixture = Fixture::saying(&said(BOTH), options).await;
        let (status, text) = fixture.post(&ask(&json!({"stream": true}))).await;
        assert_eq!(status, 200, "{text}");
        let mut lines = text.lines();
        let named = std::iter::from_fn(|| {
            let name = lines.find_map(|line| line.strip_prefix("event: "))?;
            let data = lines.next()?.strip_prefix("data: ")?;
            Some((
                name.to_owned(),
                serde_json::from_str::<Value>(data).unwrap(),
            ))
        });
        named.collect::<Vec<_>>()
    };
    let both = StreamDispatch {
        tool_calls: true,
        reasoning: true,
    };
    let told = events(both).await;
    let names: Vec<&str> = told.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "reasoning_dispatch",
            "tool_call_dispatch",
            "tool_call_dispatch"
        ]
    );
    assert_eq!(
        told[0].1,
        json!({"index": 0, "reasoning_content": "\nI think.\n"})
    );
    let call = &told[1].1["tool_call"];
    assert_eq!(
        (&told[1].1["choice_index"], &call["index"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(call["function"]["name"], "get_weather");
    let arguments = call["function"]["arguments"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert_eq!(arguments, json!({"city": "Rom"}));
    assert_eq!(told[2].1["tool_call"]["function"]["name"], "now");
    assert!(events(StreamDispatch::default()).await.is_empty());
}
