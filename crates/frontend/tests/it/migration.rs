//! Answers that break off and go on elsewhere: the client sees one answer, and everything is counted and freed.

use kvasir_frontend::{AppOptions, MigrationOptions};
use std::time::Duration;

use kvasir_router::RouterMode;
use serde_json::{Value, json};

use crate::engine::{STREAM_HEAD, Step, chunk, stream};
use crate::rig::{CHAT, Rig, Setup, in_time};
use crate::tokens::{Act, Fixture, ask};

fn moving(limit: u32, max_seq_len: Option<u32>) -> AppOptions {
    AppOptions {
        migration: MigrationOptions {
            limit,
            max_seq_len,
            ..MigrationOptions::default()
        },
        ..AppOptions::default()
    }
}

/// The text, the finish reasons and the usage of a stream.
pub(crate) fn told(body: &str) -> (String, Vec<String>, Option<Value>) {
    let (mut text, mut finish, mut usage) = (String::new(), Vec::new(), None);
    for data in body.split("data: ").skip(1) {
        let data = data.split("\n\n").next().unwrap();
        let Ok(chunk) = serde_json::from_str::<Value>(data) else {
            continue;
        };
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            text += choice["delta"]["content"].as_str().unwrap_or_default();
            text += choice["text"].as_str().unwrap_or_default();
            finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
        if !chunk["usage"].is_null() {
            usage = Some(chunk["usage"].clone());
        }
    }
    (text, finish, usage)
}

fn counted(fixture: &Fixture, kind: &str) -> u64 {
    let metrics = fixture.app.metrics();
    metrics
        .model_migration_total
        .with_label_values(&["m", kind])
        .get()
}

fn moves(fixture: &Fixture, outcome: &str) -> u64 {
    let labels = ["m", "ongoing_request", outcome];
    let metrics = fixture.app.metrics();
    let durations = &metrics.model_migration_duration_seconds;
    durations.with_label_values(&labels).get_sample_count()
}

fn refused(fixture: &Fixture, why: &str) -> u64 {
    let refused = &fixture.app.metrics().migration_refused_total;
    refused.with_label_values(&["m", why]).get()
}

async fn unbroken(max_tokens: u32) -> String {
    unbroken_of(7, max_tokens).await
}

async fn unbroken_of(tokens: u32, max_tokens: u32) -> String {
    let fixture = Fixture::with(
        &[Act::Answer(tokens)],
        RouterMode::RoundRobin,
        moving(0, None),
    )
    .await;
    let mut body = ask(true);
    body["max_tokens"] = max_tokens.into();
    told(&fixture.post(&body).await.1).0
}

#[tokio::test]
async fn a_token_workers_answer_goes_on_where_it_broke_off() {
    let whole = unbroken_of(22, 50).await;
    for stream in [true, false] {
        let acts = [Act::DieAfter(3), Act::DieAfter(17), Act::Answer(22)];
        let fixture = Fixture::scripted(&acts, moving(2, None)).await;
        let mut body = ask(stream);
        body["max_tokens"] = 50.into();
        body["min_tokens"] = 4.into();
        body["seed"] = 3.into();
        if stream {
            body["stream_options"] = serde_json::json!({"include_usage": true});
        }
        let (status, answer) = fixture.post(&body).await;
        assert_eq!(status, 200, "{answer}");
        let usage = if stream {
            let (text, finish, usage) = told(&answer);
            assert_eq!(text, whole);
            assert_eq!(finish, ["stop"]);
            assert_eq!(answer.matches("\"role\"").count(), 1, "{answer}");
            assert!(!answer.contains("\"error\""), "{answer}");
            usage.unwrap_or_else(|| panic!("{answer}"))
        } else {
            let json = answer.split_once('{').map(|(_, rest)| format!("{{{rest}"));
            let json: Value = serde_json::from_str(&json.unwrap()).unwrap();
            assert_eq!(json["choices"][0]["message"]["content"], *whole);
            json["usage"].clone()
        };
        let seen = fixture.seen.lock().unwrap().clone();
        assert_eq!(usage["completion_tokens"], 22);
        assert_eq!(usage["prompt_tokens"], seen[0].tokens.len());
        let limits = |at: usize| {
            let sampling = &seen[at].sampling;
            (
                seen[at].tokens.len() - seen[0].tokens.len(),
                sampling.max_tokens,
                sampling.min_tokens,
            )
        };
        assert_eq!(
            [limits(0), limits(1), limits(2)],
            [(0, 50, 4), (3, 47, 1), (20, 30, 0)]
        );
        assert!(seen.iter().all(|other| other.id == seen[0].id));
        assert!(seen[2].tokens.starts_with(&seen[1].tokens));
        assert_eq!(fixture.asked(), [1, 1, 1]);
        assert_eq!(
            (
                counted(&fixture, "ongoing_request"),
                moves(&fixture, "success")
            ),
            (2, 2)
        );
        fixture.assert_idle().await;
    }
}

#[tokio::test]
async fn past_its_limit_an_answer_ends_with_the_error() {
    // The second dies soon after it took over: it may be the request. Later it is not, and the limit counts.
    for (limit, tokens, why) in [(1, 17, "limit"), (9, 2, "failed_twice")] {
        let acts = [Act::DieAfter(3), Act::DieAfter(tokens), Act::Answer(22)];
        let fixture = Fixture::scripted(&acts, moving(limit, None)).await;
        let mut body = ask(true);
        body["max_tokens"] = 50.into();
        let (_, answer) = fixture.post(&body).await;
        assert!(answer.contains("data: {\"error\":{"), "{answer}");
        assert!(answer.contains("data: [DONE]\n\n"), "{answer}");
        assert_eq!(fixture.asked().iter().sum::<usize>(), 2);
        assert_eq!(refused(&fixture, why), 1, "{why}");
        fixture.assert_idle().await;
    }
}

/// A worker that is full counts against the limit too, and is not asked again.
#[tokio::test]
async fn failures_on_the_way_count_and_nobody_is_asked_twice() {
    let acts = [Act::DieAfter(3), Act::Full, Act::Full, Act::Answer(7)];
    let fixture = Fixture::scripted(&acts, moving(3, None)).await;
    let (_, answer) = fixture.post(&ask(true)).await;
    assert_eq!(told(&answer).0, unbroken(50).await);
    assert_eq!(fixture.asked(), [1, 1, 1, 1]);
    assert_eq!(
        (
            counted(&fixture, "ongoing_request"),
            moves(&fixture, "success")
        ),
        (3, 1)
    );
    fixture.assert_idle().await;

    let fixture = Fixture::scripted(&acts, moving(2, None)).await;
    let (_, answer) = fixture.post(&ask(true)).await;
    assert!(answer.contains("\"error\""), "{answer}");
    assert_eq!(fixture.asked().iter().sum::<usize>(), 3);
    assert_eq!(moves(&fixture, "failure"), 1);
    fixture.assert_idle().await;
}

#[tokio::test]
async fn what_cannot_move_is_told_so() {
    let acts = [Act::DieAfter(3), Act::Answer(7)];
    let cases = [
        ("n", Value::from(2), "choices"),
        (
            "guided_json",
            serde_json::json!({"type": "object"}),
            "guided",
        ),
        (
            "nvext",
            serde_json::json!({"backend_instance_id": 1}),
            "pinned",
        ),
    ];
    for (field, value, why) in cases {
        let fixture = Fixture::scripted(&acts, moving(3, None)).await;
        let mut body = ask(true);
        body[field] = value;
        let (_, answer) = fixture.post(&body).await;
        assert!(answer.contains("data: {\"error\":{"), "{why}: {answer}");
        assert_eq!(refused(&fixture, why), 1, "{why}");
        assert_eq!(counted(&fixture, "ongoing_request"), 0, "{why}");
        fixture.assert_idle().await;
    }
}

/// Prompt and answer may be as long as the limit, and no longer.
#[tokio::test]
async fn a_sequence_past_the_limit_stays() {
    let probe = Fixture::with(&[Act::Answer(1)], RouterMode::RoundRobin, moving(0, None)).await;
    probe.post(&ask(true)).await;
    let prompt = probe.seen.lock().unwrap()[0].tokens.len() as u32;
    for (longest, moves_on) in [(prompt + 3, true), (prompt + 2, false)] {
        let acts = [Act::DieAfter(3), Act::Answer(7)];
        let options = moving(3, Some(longest));
        let fixture = Fixture::scripted(&acts, options).await;
        let (_, answer) = fixture.post(&ask(true)).await;
        assert_eq!(!answer.contains("\"error\""), moves_on, "{answer}");
        let exceeded = &fixture
            .app
            .metrics()
            .model_migration_max_seq_len_exceeded_total;
        if !moves_on {
            assert_eq!(exceeded.with_label_values(&["m"]).get(), 1);
        }
        assert_eq!(refused(&fixture, "max_seq_len"), u64::from(!moves_on));
        fixture.assert_idle().await;
    }
}

/// A worker that died between its last token and its last word has said everything.
#[tokio::test]
async fn nothing_is_asked_for_when_everything_has_come() {
    let acts = [Act::DieAfter(3), Act::Answer(7)];
    let fixture = Fixture::scripted(&acts, moving(1, None)).await;
    let mut body = ask(true);
    body["max_tokens"] = 3.into();
    let (_, answer) = fixture.post(&body).await;
    assert_eq!(told(&answer).1, ["length"], "{answer}");
    assert_eq!(fixture.asked().iter().sum::<usize>(), 1);
    fixture.assert_idle().await;
}

/// A worker that falls silent is left for another one.
#[tokio::test]
async fn a_silent_token_worker_is_left() {
    let mut options = moving(1, None);
    options.limits.stream_silence = Some(Duration::from_millis(30));
    let acts = [Act::Stall, Act::Answer(7)];
    let fixture = Fixture::scripted(&acts, options).await;
    let (_, answer) = fixture.post(&ask(true)).await;
    assert_eq!(told(&answer).0, unbroken(50).await);
    assert_eq!(counted(&fixture, "ongoing_request"), 1);
    fixture.assert_idle().await;
}

const ASK: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":9,"temperature":0}"#;
const DONE: &str = "data: [DONE]\n\n";

/// A chunk of a chat as vLLM writes it; `tokens` of the answer have come.
fn part(id: &str, delta: &Value, finish: Option<&str>, prompt: u32, tokens: u32) -> String {
    let usage = json!({
        "prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens,
    });
    let chunk = json!({
        "id": id, "object": "chat.completion.chunk", "created": 5, "model": "m", "usage": usage,
        "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}],
    });
    format!("data: {chunk}\n\n")
}

fn role(id: &str, prompt: u32) -> String {
    part(
        id,
        &json!({"role": "assistant", "content": ""}),
        None,
        prompt,
        0,
    )
}

fn said(id: &str, text: &str, prompt: u32, tokens: u32) -> String {
    part(id, &json!({"content": text}), None, prompt, tokens)
}

/// The end of an answer: a last word, its usage, `[DONE]`.
fn end(id: &str, prompt: u32, tokens: u32) -> String {
    let usage = json!({
        "id": id, "object": "chat.completion.chunk", "created": 6, "model": "m", "choices": [],
        "usage": {
            "prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    });
    let last = part(id, &json!({"content": "."}), Some("stop"), prompt, tokens);
    format!("{last}data: {usage}\n\n{DONE}")
}

/// A stream that sends these bytes and breaks off.
fn broken(bytes: &str) -> Vec<Step> {
    let mut all = STREAM_HEAD.as_bytes().to_vec();
    all.extend(chunk(bytes.as_bytes()));
    vec![Step::Write(all), Step::Close]
}

async fn rig(engines: usize, limit: u32, max_seq_len: Option<u32>) -> Rig {
    let setup = Setup::options(moving(limit, max_seq_len));
    Rig::with(engines, setup).await
}

/// A first part of an answer: three tokens to a prompt of seven.
fn begun() -> String {
    role("chatcmpl-1", 7)
        + &said("chatcmpl-1", "one two", 7, 2)
        + &said("chatcmpl-1", " three", 7, 3)
}

/// The rest of it, as another engine gives it.
fn rest() -> String {
    role("chatcmpl-2", 12) + &said("chatcmpl-2", " four", 12, 1) + &end("chatcmpl-2", 12, 2)
}

#[tokio::test]
async fn an_engines_answer_goes_on_where_it_broke_off() {
    for usage in [false, true] {
        let rig = rig(2, 1, None).await;
        let mut ask: Value = serde_json::from_str(ASK).unwrap();
        if usage {
            ask["stream_options"] = json!({"include_usage": true});
        }
        let half = &said("chatcmpl-1", " nine", 7, 4)[..40];
        rig.stage.play(broken(&(begun() + half)));
        rig.stage.play(vec![stream(&[rest().as_bytes()])]);
        let answer = rig.post(CHAT, ask.to_string()).await;
        assert!(answer.whole);
        let (text, finish, told_usage) = told(answer.text());
        assert_eq!(text, "one two three four.");
        assert_eq!(finish, ["stop"]);
        assert_eq!(answer.text().matches("\"role\"").count(), 1);
        assert!(answer.text().ends_with(DONE));
        assert!(!answer.text().contains("chatcmpl-2") && !answer.text().contains("\"created\":6"));
        let totals = json!({
            "prompt_tokens": 7, "total_tokens": 12, "completion_tokens": 5,
            // The second engine found what it was sent again; the first did not say what it had.
            "prompt_tokens_details": null,
        });
        assert_eq!(told_usage, usage.then_some(totals), "{}", answer.text());
        assert_eq!(
            answer.text().matches("\"usage\"").count(),
            usize::from(usage)
        );

        let seen = rig.stage.seen();
        assert_ne!(seen[0].port, seen[1].port);
        let bodies: Vec<Value> = seen
            .iter()
            .map(|seen| serde_json::from_slice(&seen.body).unwrap())
            .collect();
        assert_eq!(bodies[0]["stream_options"]["continuous_usage_stats"], true);
        let so_far = json!({"role": "assistant", "content": "one two three"});
        assert_eq!(bodies[1]["messages"][1], so_far);
        assert_eq!(bodies[1]["continue_final_message"], true);
        assert_eq!(bodies[1]["add_generation_prompt"], false);
        assert_eq!(bodies[1]["max_tokens"], 6);
        let metric = "dynamo_frontend_model_migration_total";
        assert_eq!(rig.metric(metric).await, 1.0);
        let outputs = rig
            .metric("dynamo_frontend_output_sequence_tokens_sum")
            .await;
        assert_eq!(outputs, 5.0, "tokens of both parts are counted once");
        rig.at_rest().await;
    }
}

/// However the engine breaks off: closed, reset, silent, or with its own words.
#[tokio::test]
async fn every_way_of_breaking_off_is_continued() {
    let failed =
        r#"data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}"#;
    let words = format!("{}{failed}\n\n{DONE}", begun());
    let mut reset = broken(&begun());
    reset[1] = Step::Reset;
    let mut hang = broken(&begun());
    hang[1] = Step::Hang;
    let ways = [
        ("reset", reset),
        ("silent", hang),
        ("in its own words", vec![stream(&[words.as_bytes()])]),
        ("ended without [DONE]", vec![stream(&[begun().as_bytes()])]),
    ];
    for (what, way) in ways {
        let mut options = moving(1, None);
        options.limits.stream_silence = Some(Duration::from_millis(50));
        let setup = Setup::options(options);
        let rig = Rig::with(2, setup).await;
        rig.stage.play(way);
        rig.stage.play(vec![stream(&[rest().as_bytes()])]);
        let answer = in_time(what, rig.post(CHAT, ASK)).await;
        assert_eq!(told(answer.text()).0, "one two three four.", "{what}");
        assert!(
            !answer.text().contains("error"),
            "{what}: {}",
            answer.text()
        );
        rig.at_rest().await;
    }
}

#[tokio::test]
async fn what_engines_cannot_continue_ends_with_an_error() {
    let tool = part(
        "chatcmpl-1",
        &json!({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
        None,
        7,
        4,
    );
    let cases = [
        ("n", json!(2), begun(), "choices"),
        ("logprobs", json!(true), begun(), "logprobs"),
        ("x", json!(1), begun() + &tool, "tool_call"),
        (
            "nvext",
            json!({"backend_instance_id": 0}),
            begun(),
            "pinned",
        ),
    ];
    for (field, value, stream, why) in cases {
        let rig = rig(2, 2, None).await;
        let mut ask: Value = serde_json::from_str(ASK).unwrap();
        ask[field] = value;
        if why == "pinned" {
            let worker = rig.model().specs()[0].id;
            ask[field]["backend_instance_id"] = worker.0.into();
        }
        rig.stage.play(broken(&stream));
        let answer = rig.post(CHAT, ask.to_string()).await;
        assert!(
            answer.text().contains("data: {\"error\":{"),
            "{why}: {}",
            answer.text()
        );
        assert!(answer.text().ends_with(DONE), "{why}");
        assert_eq!(rig.stage.seen().len(), 1, "{why}");
        let refused = &rig.app.metrics().migration_refused_total;
        assert_eq!(refused.with_label_values(&["m", why]).get(), 1, "{why}");
        rig.at_rest().await;
    }
}

/// Engines that refuse or fail before the first word of the rest are passed over, up to the limit.
#[tokio::test]
async fn the_rest_is_asked_of_as_many_as_the_limit_says() {
    let refuse = |status: &str| {
        Step::Write(format!("HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\n{{}}").into_bytes())
    };
    for (limit, goes_on) in [(3, true), (2, false)] {
        let rig = rig(4, limit, None).await;
        rig.stage.play(broken(&begun()));
        rig.stage.play(vec![refuse("503 Full")]);
        rig.stage.play(vec![refuse("503 Busy")]);
        rig.stage.play(vec![stream(&[rest().as_bytes()])]);
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!(
            !answer.text().contains("\"error\""),
            goes_on,
            "{}",
            answer.text()
        );
        assert!(answer.text().ends_with(DONE));
        let mut ports: Vec<u16> = rig.stage.seen().iter().map(|seen| seen.port).collect();
        assert_eq!(ports.len(), limit as usize + 1);
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), limit as usize + 1, "nobody is asked twice");
        rig.at_rest().await;
    }
    // A refusal that others would repeat is not repeated.
    let rig = rig(4, 3, None).await;
    rig.stage.play(broken(&begun()));
    rig.stage.play(vec![refuse("400 Bad Request")]);
    let answer = rig.post(CHAT, ASK).await;
    assert!(answer.text().contains("\"error\"") && answer.text().ends_with(DONE));
    assert_eq!(rig.stage.seen().len(), 2);
    rig.at_rest().await;
}

/// An answer can break off again where it goes on; what is asked for then holds both parts.
#[tokio::test]
async fn an_answer_goes_on_twice() {
    let rig = rig(3, 2, None).await;
    rig.stage.play(broken(&begun()));
    let second = role("chatcmpl-2", 12) + &said("chatcmpl-2", " four", 12, 16);
    rig.stage.play(broken(&second));
    let third = role("chatcmpl-3", 13) + &end("chatcmpl-3", 13, 1);
    rig.stage.play(vec![stream(&[third.as_bytes()])]);
    let mut ask: Value = serde_json::from_str(ASK).unwrap();
    ask["stream_options"] = json!({"include_usage": true});
    ask["max_tokens"] = 50.into();
    let answer = rig.post(CHAT, ask.to_string()).await;
    let (text, finish, usage) = told(answer.text());
    assert_eq!((text.as_str(), finish.len()), ("one two three four.", 1));
    assert_eq!(usage.unwrap()["completion_tokens"], 20);
    let last: Value = serde_json::from_slice(&rig.stage.seen()[2].body).unwrap();
    assert_eq!(last["messages"][1]["content"], "one two three four");
    assert_eq!(last["max_tokens"], 31);
    rig.at_rest().await;
}

/// White space alone is nothing to go on from: the next engine begins anew, and the client gets white space once.
#[tokio::test]
async fn an_answer_of_white_space_begins_anew() {
    let failed = r#"data: {"error":{"message":"EngineCore died","code":500}}"#;
    for ending in ["", &format!("{failed}\n\n{DONE}")] {
        let rig = rig(2, 1, None).await;
        let blank = role("chatcmpl-1", 7) + &said("chatcmpl-1", "\n\n", 7, 2) + ending;
        rig.stage.play(broken(&blank));
        let whole = role("chatcmpl-2", 7)
            + &said("chatcmpl-2", "\n", 7, 1)
            + &said("chatcmpl-2", " one\n", 7, 2)
            + &end("chatcmpl-2", 7, 3);
        rig.stage.play(vec![stream(&[whole.as_bytes()])]);
        let mut ask: Value = serde_json::from_str(ASK).unwrap();
        ask["stream_options"] = json!({"include_usage": true});
        let answer = rig.post(CHAT, ask.to_string()).await;
        let (text, finish, usage) = told(answer.text());
        assert_eq!(
            (text.as_str(), finish.len()),
            ("\n\none\n.", 1),
            "{}",
            answer.text()
        );
        assert_eq!(usage.unwrap()["completion_tokens"], 3);
        let bodies: Vec<Value> = rig
            .stage
            .seen()
            .iter()
            .map(|seen| serde_json::from_slice(&seen.body).unwrap())
            .collect();
        assert_eq!(bodies[0], bodies[1], "it is asked as at first");
        rig.at_rest().await;
    }
}

/// Text and finish reason came, the end of the stream did not: nothing is asked for again.
#[tokio::test]
async fn an_answer_that_lacks_only_its_end_is_ended() {
    let complete = begun() + &part("chatcmpl-1", &json!({"content": "."}), Some("stop"), 7, 4);
    let full = begun() + &said("chatcmpl-1", " and six more", 7, 9);
    for (stream, finish, tokens) in [(complete, "stop", 4), (full, "length", 9)] {
        let rig = rig(2, 1, None).await;
        let mut ask: Value = serde_json::from_str(ASK).unwrap();
        ask["stream_options"] = json!({"include_usage": true});
        rig.stage.play(broken(&stream));
        let answer = rig.post(CHAT, ask.to_string()).await;
        let (_, reasons, usage) = told(answer.text());
        assert_eq!(reasons, [finish], "{}", answer.text());
        assert_eq!(usage.unwrap()["completion_tokens"], tokens);
        assert!(answer.text().ends_with(DONE));
        assert_eq!(rig.stage.seen().len(), 1);
        rig.at_rest().await;
    }
}

/// All was said; that the connection then broke changes nothing.
#[tokio::test]
async fn an_answer_that_is_complete_stays_complete() {
    for limit in [0, 1] {
        let rig = rig(2, limit, None).await;
        let whole = begun() + &end("chatcmpl-1", 7, 4);
        rig.stage.play(broken(&whole));
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!(answer.text().matches(DONE).count(), 1, "{}", answer.text());
        assert!(!answer.text().contains("\"error\""), "{}", answer.text());
        assert_eq!(rig.stage.seen().len(), 1);
        rig.at_rest().await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_its_answer_moves_frees_everything() {
    let rig = rig(2, 1, None).await;
    rig.stage.play(broken(&begun()));
    rig.stage.play(vec![Step::Hang]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK).await;
    assert!(client.read_until("three").await);
    crate::rig::until("the second is asked", || rig.stage.seen().len() == 2).await;
    drop(client);
    in_time("the second is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    rig.at_rest().await;
    let durations = &rig.app.metrics().model_migration_duration_seconds;
    let labels = ["m", "ongoing_request", "cancelled"];
    assert_eq!(durations.with_label_values(&labels).get_sample_count(), 1);
}

#[tokio::test]
async fn completions_go_on_with_a_longer_prompt() {
    let rig = rig(2, 1, None).await;
    let chunk = |text: &str, finish: Option<&str>| {
        let json = json!({
            "id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m",
            "choices": [{"index": 0, "text": text, "logprobs": null, "finish_reason": finish}],
        });
        format!("data: {json}\n\n")
    };
    rig.stage.play(broken(&chunk(" one", None)));
    let rest = chunk(" two", Some("length")) + DONE;
    rig.stage.play(vec![stream(&[rest.as_bytes()])]);
    let ask = r#"{"model":"m","prompt":"zero","stream":true}"#;
    let answer = rig.post("/v1/completions", ask).await;
    assert_eq!(told(answer.text()).0, " one two");
    let body: Value = serde_json::from_slice(&rig.stage.seen()[1].body).unwrap();
    assert_eq!(
        (&body["prompt"], &body["max_tokens"]),
        (&json!("zero one"), &json!(15))
    );
    rig.at_rest().await;
}

/// The limit on length counts what the engine counts.
#[tokio::test]
async fn a_long_sequence_of_an_engine_stays() {
    for (longest, goes_on) in [(10, true), (9, false)] {
        let rig = rig(2, 1, Some(longest)).await;
        rig.stage.play(broken(&begun()));
        rig.stage.play(vec![stream(&[rest().as_bytes()])]);
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!(
            !answer.text().contains("\"error\""),
            goes_on,
            "{}",
            answer.text()
        );
        rig.at_rest().await;
    }
}

/// Without the option nothing is asked of engines that they were not asked before.
#[tokio::test]
async fn without_a_limit_bodies_are_as_before() {
    let rig = rig(1, 0, None).await;
    rig.stage.play(vec![stream(&[rest().as_bytes()])]);
    rig.post(CHAT, ASK).await;
    let body = String::from_utf8(rig.stage.seen()[0].body.clone()).unwrap();
    assert!(!body.contains("continuous_usage_stats"), "{body}");
    rig.at_rest().await;
}
