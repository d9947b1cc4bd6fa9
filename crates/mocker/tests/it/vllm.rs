//! The mock server beside recorded answers of a real vLLM 0.32: the same status, the same fields in the
//! same order, the same words of refusal.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::client::{Got, serve, serve_with};

/// Recorded case, path, and headers that the recording had.
const CASES: &[(&str, &str, &str)] = &[
    ("chat", "POST /v1/chat/completions", ""),
    ("chat_return_token_ids", "POST /v1/chat/completions", ""),
    ("chat_cached_tokens_2", "POST /v1/chat/completions", ""),
    ("chat_stream", "POST /v1/chat/completions", ""),
    ("chat_stream_usage", "POST /v1/chat/completions", ""),
    (
        "chat_stream_return_token_ids",
        "POST /v1/chat/completions",
        "",
    ),
    ("completions_text", "POST /v1/completions", ""),
    ("completions_text_stream", "POST /v1/completions", ""),
    ("completions_prompt_batch_text", "POST /v1/completions", ""),
    ("tokenize_prompt", "POST /tokenize", ""),
    ("tokenize_chat", "POST /tokenize", ""),
    ("reset_prefix_cache", "POST /reset_prefix_cache", ""),
    ("models", "GET /v1/models", ""),
    ("version", "GET /version", ""),
    ("load", "GET /load", ""),
    ("health", "GET /health", ""),
    ("ping", "GET /ping", ""),
    ("error_bad_json", "POST /v1/chat/completions", ""),
    ("error_bad_temperature", "POST /v1/chat/completions", ""),
    ("error_bad_token_id", "POST /v1/completions", ""),
    (
        "error_dp_rank",
        "POST /v1/chat/completions",
        "x-data-parallel-rank: 7\r\n",
    ),
    ("error_empty_body", "POST /v1/chat/completions", ""),
    (
        "error_max_tokens_too_large",
        "POST /v1/chat/completions",
        "",
    ),
    ("error_method", "GET /v1/chat/completions", ""),
    ("error_missing_messages", "POST /v1/chat/completions", ""),
    ("error_not_found", "POST /nothing", ""),
    ("error_unknown_model", "POST /v1/chat/completions", ""),
];

fn recorded(name: &str) -> Value {
    let cases = include_str!("../../../../testdata/vllm-http/cases.jsonl");
    let mut all = cases
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    all.find(|case| case["name"] == name)
        .unwrap_or_else(|| panic!("no case {name}"))
}

/// The fields of JSON text in their order: every string that a colon follows.
fn fields(json: &str) -> Vec<&str> {
    let mut fields = Vec::new();
    let mut rest = json;
    while let Some(open) = rest.find('"') {
        let after = &rest[open + 1..];
        let mut escaped = false;
        let close = after.char_indices().find(|(_, c)| {
            let ends = *c == '"' && !escaped;
            escaped = *c == '\\' && !escaped;
            ends
        });
        let Some((close, _)) = close else { break };
        if after[close + 1..].starts_with(':') {
            fields.push(&after[..close]);
        }
        rest = &after[close + 1..];
    }
    fields
}

/// The shape of an answer: of a document its fields, of a stream those of its events, repeats left out.
fn shape(body: &str) -> Vec<Vec<&str>> {
    let events = body
        .split("\n\n")
        .map(str::trim)
        .filter(|event| !event.is_empty());
    let mut shape: Vec<Vec<&str>> = events
        .map(|event| match event.strip_prefix("data: ") {
            Some("[DONE]") => vec!["[DONE]"],
            Some(json) => fields(json),
            None => fields(event),
        })
        .collect();
    shape.dedup();
    shape
}

#[tokio::test]
async fn answers_have_the_recorded_shape() {
    let served = serve(&[]).await;
    for (name, route, headers) in CASES {
        let case = recorded(name);
        let (method, path) = route.split_once(' ').unwrap_or_default();
        let headers = format!("content-type: application/json\r\n{headers}");
        let body = case["body"].as_str().unwrap_or_default();
        let got = served.ask_with(method, path, &headers, body).await;
        let Some(Got {
            status,
            body,
            complete,
        }) = got
        else {
            panic!("{name}: no answer")
        };
        assert_eq!(
            (u64::from(status), complete),
            (case["status"].as_u64().unwrap_or(0), true),
            "{name}"
        );
        let answer = case["answer"].as_str().unwrap_or_default();
        match *name {
            // Written by a library that sorts.
            "models" | "tokenize_prompt" | "tokenize_chat" => {
                let [ours, theirs] =
                    [&*body, answer].map(|text| fields(text).into_iter().collect());
                let (ours, theirs): (BTreeSet<&str>, BTreeSet<&str>) = (ours, theirs);
                assert_eq!(ours, theirs, "{name}");
            }
            _ => assert_eq!(shape(&body), shape(answer), "{name}\n{body}"),
        }
        if name.starts_with("error") || ["version", "load", "reset_prefix_cache"].contains(name) {
            assert_eq!(body, answer, "{name}");
        }
    }
}

#[tokio::test]
async fn media_types_and_long_prompts_are_refused_in_vllms_words() {
    let served = serve(&[]).await;
    let case = recorded("error_text_plain");
    let body = case["body"].as_str().unwrap_or_default();
    let plain = served
        .ask_with(
            "POST",
            "/v1/chat/completions",
            "content-type: text/plain\r\n",
            body,
        )
        .await;
    assert_eq!(
        plain.map(|got| got.body).as_deref(),
        case["answer"].as_str()
    );
    let long = format!(
        "{{\"model\":\"tiny-qwen\",\"prompt\":\"{}\"}}",
        "word ".repeat(3000)
    );
    let got = served.post("/v1/completions", &long).await;
    assert_eq!(got.status, 400);
    assert!(got.body.contains("This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens"), "{}", got.body);
}

fn json(got: &Got) -> Value {
    serde_json::from_str(&got.body).unwrap_or_else(|error| panic!("{error}: {}", got.body))
}

const CHAT: &str = "/v1/chat/completions";

/// The second time the prompt is found, whole blocks of it; the answer is the same.
#[tokio::test]
async fn usage_tells_what_was_cached() {
    let served = serve(&[]).await;
    let body = format!(
        "{{\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}],\"max_tokens\":5}}",
        "tell me more ".repeat(30)
    );
    let first = json(&served.post(CHAT, &body).await);
    let second = json(&served.post(CHAT, &body).await);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap_or(0);
    assert_eq!(
        second["usage"]["prompt_tokens_details"]["cached_tokens"],
        (prompt - 1) / 32 * 32
    );
    assert_eq!(
        first["choices"][0]["message"],
        second["choices"][0]["message"]
    );
    assert_eq!(first["usage"]["completion_tokens"], 5);
    assert_eq!(first["choices"][0]["finish_reason"], "length");
    let salted = json(
        &served
            .post(CHAT, &body.replacen('{', "{\"cache_salt\":\"x\",", 1))
            .await,
    );
    assert_eq!(salted["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

/// Joined, the pieces of a stream are the text of the whole answer.
#[tokio::test]
async fn a_stream_says_what_the_document_says() {
    let served = serve(&[]).await;
    let body = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"seed\":3,\"n\":2}";
    let whole = json(&served.post(CHAT, body).await);
    let streamed = served
        .post(
            CHAT,
            &body.replacen(
                '{',
                "{\"stream\":true,\"stream_options\":{\"include_usage\":true},",
                1,
            ),
        )
        .await;
    let mut texts = [String::new(), String::new()];
    let mut usage = Value::Null;
    for event in streamed
        .body
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: {"))
    {
        let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap_or_default();
        for choice in event["choices"].as_array().into_iter().flatten() {
            let at = choice["index"].as_u64().unwrap_or(9) as usize;
            texts[at] += choice["delta"]["content"].as_str().unwrap_or_default();
        }
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    }
    for (at, text) in texts.iter().enumerate() {
        assert_eq!(whole["choices"][at]["message"]["content"], **text);
        assert_eq!(whole["choices"][at]["finish_reason"], "stop");
    }
    assert_eq!(
        usage["completion_tokens"],
        whole["usage"]["completion_tokens"]
    );
    assert!(streamed.body.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn stop_strings_end_an_answer() {
    let served = serve(&[]).await;
    let body = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"seed\":3}";
    let whole = json(&served.post(CHAT, body).await);
    let text = whole["choices"][0]["message"]["content"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let word = text.split_whitespace().nth(3).unwrap_or_default();
    let stopped = json(
        &served
            .post(
                CHAT,
                &body.replacen('{', &format!("{{\"stop\":[\"{word}\"],"), 1),
            )
            .await,
    );
    let choice = &stopped["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["stop_reason"]),
        (&"stop".into(), &word.into())
    );
    let expected = &text[..text.find(word).unwrap_or(0)];
    assert_eq!(choice["message"]["content"], *expected);
}

/// A client that leaves frees its place, streaming or not.
#[tokio::test]
async fn a_client_that_leaves_is_cancelled() {
    let served = serve(&[]).await;
    for stream in ["true", "false"] {
        let body = format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":\"hi\"}}],\"ignore_eos\":true,\"max_tokens\":1900,\"stream\":{stream}}}"
        );
        let ask = served.post(CHAT, &body);
        let gone = tokio::time::timeout(std::time::Duration::from_millis(60), ask).await;
        assert!(gone.is_err(), "it takes 1900 ms");
    }
    let cancelled = async {
        while served
            .server
            .worker()
            .status()
            .map(|s| s.counters.cancelled)
            .sum::<u64>()
            < 2
        {
            tokio::task::yield_now().await;
        }
    };
    assert!(
        tokio::time::timeout(std::time::Duration::from_secs(20), cancelled)
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn the_metrics_page_has_vllms_names() {
    let served = serve(&[]).await;
    let body = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":4}";
    served.post(CHAT, body).await;
    let page = served
        .ask("GET", "/metrics", "")
        .await
        .map(|got| got.body)
        .unwrap_or_default();
    let real = include_str!("../../../../testdata/vllm-facts/metrics_under_load.txt");
    let name = |line: &str| line.split(['{', ' ']).next().unwrap_or_default().to_owned();
    let known: BTreeSet<String> = real
        .lines()
        .filter(|l| !l.starts_with('#'))
        .map(name)
        .collect();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        assert!(known.contains(&name(line)), "vLLM has no {line}");
    }
    let label = "engine=\"0\",model_name=\"tiny-qwen\"";
    for expected in [
        format!("vllm:generation_tokens_total{{{label}}} 4.0"),
        format!("vllm:num_requests_running{{{label}}} 0.0"),
        format!("vllm:time_to_first_token_seconds_count{{{label}}} 1"),
        format!("vllm:inter_token_latency_seconds_count{{{label}}} 3"),
        format!("vllm:request_success_total{{{label},finished_reason=\"length\"}} 1"),
    ] {
        assert!(page.contains(&expected), "{expected}\n{page}");
    }
}

#[tokio::test]
async fn tokens_become_text_and_back() {
    let served = serve(&[]).await;
    let tokens = json(
        &served
            .post(
                "/tokenize",
                "{\"prompt\":\"a quiet harbour\",\"add_special_tokens\":false}",
            )
            .await,
    );
    let count = tokens["tokens"].as_array().map_or(0, Vec::len);
    assert_eq!(tokens["count"], count);
    let back = json(
        &served
            .post(
                "/detokenize",
                &format!("{{\"tokens\":{}}}", tokens["tokens"]),
            )
            .await,
    );
    assert_eq!(back["prompt"], "a quiet harbour");
}

#[tokio::test]
async fn draining_ends_what_runs() {
    let served = serve(&[]).await;
    let body = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"ignore_eos\":true,\"max_tokens\":200}";
    let tasks = served.tasks.clone();
    let (answer, left) = tokio::join!(served.post(CHAT, body), async {
        while served
            .server
            .worker()
            .status()
            .map(|s| s.load.running)
            .sum::<u32>()
            == 0
        {
            tokio::task::yield_now().await;
        }
        let accepting = tasks.shut_down(std::time::Duration::from_secs(30));
        tokio::time::timeout(std::time::Duration::from_millis(1), accepting)
            .await
            .is_err()
    });
    assert_eq!((answer.status, left), (200, true));
}

/// As vLLM without `--enable-prompt-tokens-details`: the field is null in a document and absent in a stream.
#[tokio::test]
async fn usage_may_keep_quiet_about_the_cache() {
    let served = serve_with(&[], false).await;
    let ask = "\"model\":\"tiny-qwen\",\"prompt\":\"a b c\",\"max_tokens\":2";
    let whole = served.post("/v1/completions", &format!("{{{ask}}}")).await;
    let whole: Value = serde_json::from_str(&whole.body).unwrap();
    assert!(whole["usage"]["prompt_tokens"].as_u64() > Some(0));
    assert_eq!(
        whole["usage"].get("prompt_tokens_details"),
        Some(&Value::Null)
    );
    let stream = format!("{{{ask},\"stream\":true,\"stream_options\":{{\"include_usage\":true}}}}");
    let stream = served.post("/v1/completions", &stream).await.body;
    assert!(stream.contains("\"usage\":{\"prompt_tokens\":"), "{stream}");
    assert!(!stream.contains("prompt_tokens_details"), "{stream}");
}
