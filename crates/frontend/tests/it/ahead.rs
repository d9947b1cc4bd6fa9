//! `speculative_prefill`: what is asked after a turn, of whom, and when it is not.

use serde_json::{Value, json};

use crate::engine::{Step, stream, unary};
use crate::rig::{CHAT, Rig, until};
use crate::tokens::{Act, Fixture, ask};

const ASK: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":9,"tools":[],"nvext":{"agent_hints":{"speculative_prefill":true}}}"#;

fn ended(metrics: &kvasir_telemetry::Metrics, how: &str) -> u64 {
    let ends = &metrics.speculative_prefills_total;
    ends.with_label_values(&["m", how]).get()
}

#[tokio::test]
async fn after_a_turn_the_same_engine_computes_the_next_beginning() {
    let said = r#"{"choices":[{"index":0,"delta":{"content":"one"}}]}"#;
    let last = r#"{"choices":[{"index":0,"delta":{"content":" two"},"finish_reason":"stop"}]}"#;
    let events = format!("data: {said}\n\ndata: {last}\n\ndata: [DONE]\n\n");
    let whole = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"one two"}}]}"#;
    for streamed in [true, false] {
        let rig = Rig::of(3).await;
        let mut ask: Value = serde_json::from_str(ASK).unwrap();
        ask["stream"] = streamed.into();
        rig.stage.play(vec![match streamed {
            true => stream(&[events.as_bytes()]),
            false => Step::Write(unary(whole)),
        }]);
        assert_eq!(rig.post(CHAT, ask.to_string()).await.status, 200);
        until("the next turn is computed", || {
            ended(rig.app.metrics(), "done") == 1
        })
        .await;
        let seen = rig.stage.seen();
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[0].port, seen[1].port, "where the turn's cache is");
        let body: Value = serde_json::from_slice(&seen[1].body).unwrap();
        assert_eq!(
            body,
            json!({
                "model": "m", "tools": [], "max_tokens": 1, "temperature": 0, "stream": false,
                "add_generation_prompt": false,
                "messages": [
                    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "one two"},
                ],
            })
        );
        rig.at_rest().await;
        // Only the client's request is one for the client's metrics.
        assert_eq!(rig.metric("dynamo_frontend_requests_total").await, 1.0);
    }
}

/// Answers that are not text alone, and turns that broke off, have no next beginning that we know.
#[tokio::test]
async fn what_cannot_be_predicted_is_not_asked() {
    let call = r#"{"choices":[{"index":0,"message":{"content":null,"tool_calls":[{"id":"1"}]}}]}"#;
    for answer in [call, r#"{"choices":[]}"#, "{}"] {
        let rig = Rig::of(1).await;
        rig.stage.play(vec![Step::Write(unary(answer))]);
        assert_eq!(rig.post(CHAT, ASK).await.status, 200);
        rig.at_rest().await;
        assert_eq!(rig.stage.seen().len(), 1, "{answer}");
    }
}

/// While the engine has other things to do, it is given up, and its place in the ledger with it.
#[tokio::test]
async fn other_work_comes_first() {
    let rig = Rig::of(1).await;
    rig.stage.play(vec![Step::Write(unary(
        r#"{"choices":[{"index":0,"message":{"content":"one"}}]}"#,
    ))]);
    rig.stage.play(vec![Step::Hang]);
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    until("it is under way", || rig.stage.seen().len() == 2).await;
    // One is enough.
    rig.stage.play(vec![Step::Gate, crate::engine::ok()]);
    let mut other = rig.client().await;
    let close = "connection: close\r\n";
    other.post(CHAT, close, crate::rig::ASK).await;
    until("it is given up", || {
        ended(rig.app.metrics(), "cancelled") == 1
    })
    .await;
    crate::rig::in_time("the engine sees it", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    // And none is begun while that lasts.
    rig.stage.play(vec![Step::Write(unary(
        r#"{"choices":[{"index":0,"message":{"content":"one"}}]}"#,
    ))]);
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    until("it is not begun", || {
        ended(rig.app.metrics(), "dropped") == 1
    })
    .await;
    rig.stage.gate.add_permits(1);
    assert_eq!(other.answer().await.status, 200);
    rig.at_rest().await;
}

/// Where the turn says a priority, the prefill comes last in its engine's order; it is a request of its own.
#[tokio::test]
async fn it_comes_last_and_has_a_name_of_its_own() {
    let whole = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"one"}}]}"#;
    let vllm = "vllm:num_requests_running{engine=\"0\"} 0\n";
    let sglang = "sglang:num_running_reqs 0\n";
    let of_client = r#""priority":7,"#;
    let hint = r#""priority":7"#;
    for (engine, raw, hinted, last) in [
        (vllm, "", "", None),
        (vllm, of_client, "", Some(i32::MAX)),
        (vllm, "", hint, Some(i32::MAX)),
        (sglang, "", hint, Some(i32::MIN)),
    ] {
        let tell = |stage: &crate::engine::Stage| {
            *stage.metrics.lock().unwrap() = Some(engine.to_owned());
        };
        let rig = Rig::of_stage(1, crate::rig::Setup::usual(), tell).await;
        let hinted = if hinted.is_empty() {
            String::new()
        } else {
            format!(",{hinted}")
        };
        let body = format!(
            r#"{{"model":"m",{raw}"messages":[{{"role":"user","content":"hi"}}],"nvext":{{"agent_hints":{{"speculative_prefill":true{hinted}}}}}}}"#
        );
        rig.stage.play(vec![Step::Write(unary(whole))]);
        let mut client = rig.client().await;
        client
            .post(CHAT, "connection: close\r\nx-request-id: turn\r\n", &body)
            .await;
        assert_eq!(client.answer().await.status, 200);
        until("it is computed", || ended(rig.app.metrics(), "done") == 1).await;
        let seen = rig.stage.seen();
        let sent: Value = serde_json::from_slice(&seen[1].body).unwrap();
        assert_eq!(
            sent["priority"].as_i64(),
            last.map(i64::from),
            "{engine}{body}"
        );
        assert_eq!(seen[0].header("x-request-id"), ["turn"]);
        let own = seen[1].header("x-request-id");
        assert!(own.len() == 1 && own != ["turn"], "{own:?}");
        rig.at_rest().await;
    }
}

#[tokio::test]
async fn a_token_worker_computes_the_next_beginning() {
    for streamed in [true, false] {
        let options = Default::default();
        let fixture = Fixture::scripted(&[Act::Answer(4), Act::Answer(1)], options).await;
        let mut body = ask(streamed);
        body["nvext"] = json!({"agent_hints": {"speculative_prefill": true}});
        assert_eq!(fixture.post(&body).await.0, 200);
        until("the next turn is computed", || {
            ended(fixture.app.metrics(), "done") == 1
        })
        .await;
        let seen = fixture.seen.lock().unwrap().clone();
        assert_eq!((seen.len(), seen[1].sampling.max_tokens), (2, 1));
        let text = fixture.model.text().unwrap();
        let next = text.tokenizer().decode(&seen[1].tokens, false).unwrap();
        assert!(
            next.contains("count, please") && next.contains("one two three four"),
            "{next}"
        );
        let mut asked = fixture.asked();
        asked.sort_unstable();
        assert_eq!(asked, [0, 2], "the same worker has both");
        fixture.assert_idle().await;
    }
}
