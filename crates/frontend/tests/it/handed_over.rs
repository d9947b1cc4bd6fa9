//! Routes that only engines know, where one engine server computes prompts for another; and servers that cannot.

use std::sync::atomic::Ordering;

use kvasir_frontend::AppOptions;
use kvasir_router::RouterMode;
use serde_json::{Value, json};

use crate::engine::{ANSWER, Engine, Step, ok, unary};
use crate::pairs::{FAILS, Pair, params, sglang};
use crate::rig::{ASK, CHAT, Setup, in_time, until};

const RESPONSES: &str = "/v1/responses";
const RESPONSE: &str = r#"{"id":"resp_1","object":"response","output":[],"usage":{"input_tokens":7,"output_tokens":2},"kv_transfer_params":null}"#;
const ASK_RESPONSE: &str = r#"{"model":"m","input":"hi","max_output_tokens":9,"store":false}"#;

#[tokio::test]
async fn a_response_is_computed_by_two_engines() {
    let pair = Pair::new().await;
    pair.computes();
    pair.rig.stage.play(vec![Step::Write(unary(RESPONSE))]);
    assert_eq!(
        pair.rig.post(RESPONSES, ASK_RESPONSE).await.text(),
        RESPONSE
    );
    let mut asked: Value = serde_json::from_str(ASK_RESPONSE).unwrap();
    let mut prefill = asked.clone();
    asked["kv_transfer_params"] = params();
    prefill["max_output_tokens"] = json!(1);
    prefill["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    assert_eq!(pair.sent(), [(true, prefill), (false, asked)]);
    pair.at_rest().await;
}

#[tokio::test]
async fn messages_are_computed_by_two_engines() {
    let mut options = AppOptions::default();
    options.paths.messages = Some("/v1/messages".into());
    let pair = Pair::of(1, 1, options).await;
    pair.computes();
    let ask = r#"{"model":"m","messages":[],"max_tokens":9,"stop_sequences":["x"]}"#;
    assert_eq!(pair.rig.post("/v1/messages", ask).await.text(), ANSWER);
    let [(true, prefill), (false, decode)] = &pair.sent()[..] else {
        panic!("{:?}", pair.sent());
    };
    assert_eq!(prefill["max_tokens"], json!(1));
    assert!(prefill.get("stop_sequences").is_none());
    assert_eq!(
        (&decode["max_tokens"], &decode["kv_transfer_params"]),
        (&json!(9), &params())
    );
    pair.at_rest().await;
}

/// A response that is stored is not asked for twice once an engine may have made it.
#[tokio::test]
async fn a_stored_response_is_not_made_twice() {
    for (stored, asked, status) in [(true, 2, 502), (false, 3, 200)] {
        let pair = Pair::new().await;
        pair.computes();
        pair.rig.stage.play(vec![Step::Write(FAILS.to_vec())]);
        let ask = match stored {
            true => ASK_RESPONSE.replace(r#","store":false"#, ""),
            false => ASK_RESPONSE.to_owned(),
        };
        assert_eq!(pair.rig.post(RESPONSES, &ask).await.status, status);
        assert_eq!(pair.sent().len(), asked);
        pair.at_rest().await;
    }
}

#[tokio::test]
async fn a_response_that_goes_on_from_another_goes_to_one_engine() {
    let pair = Pair::new().await;
    pair.rig.stage.play(vec![ok()]);
    let ask = r#"{"model":"m","input":"hi","previous_response_id":"resp_0"}"#;
    assert_eq!(pair.rig.post(RESPONSES, ask).await.text(), ANSWER);
    assert_eq!(pair.sent(), [(false, serde_json::from_str(ask).unwrap())]);
}

/// What the router would have to say for such a connector it does not: the server gets no prompts.
#[tokio::test]
async fn a_server_with_a_connector_that_we_do_not_speak_for_gets_no_prompts() {
    let mut pair = Pair::of(1, 0, AppOptions::default()).await;
    let engine = Engine::start(&pair.rig.stage).await;
    let info = r#"{"vllm_config":{"kv_transfer_config":{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}}}"#;
    let key = (engine.address.port(), "/server_info?config_format=json");
    pair.rig.stage.kept.lock().unwrap().insert(key, info);
    pair.watch(&engine, ",role=prefill");
    let usual = Engine::start(&pair.rig.stage).await;
    pair.watch(&usual, ",role=prefill");
    until("the other has joined", || {
        pair.pools().iter().any(|pool| !pool.specs().is_empty())
    })
    .await;
    pair.prefill.extend([engine, usual]);
    for _ in 0..3 {
        pair.computes();
        assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    let port = pair.prefill[0].address.port();
    assert!(pair.rig.stage.seen().iter().all(|seen| seen.port != port));
}

/// Requests go to it by load, without a meeting, and all of them when nobody computes prompts for others.
#[tokio::test]
async fn an_aggregated_sglang_server_stands_beside_a_pair() {
    let mut pair = sglang(1).await;
    let whole = Engine::start(&pair.rig.stage).await;
    let port = whole.address.port();
    pair.watch(&whole, "");
    pair.rig.joined(2).await;
    pair.rig.engines.push(whole);
    pair.rig.rest_now();
    let is_whole = |seen: &crate::engine::Seen| {
        let is_met = serde_json::from_slice::<Value>(&seen.body).unwrap();
        assert_eq!(is_met.get("bootstrap_room").is_none(), seen.port == port);
        seen.port == port
    };
    for _ in 0..4 {
        assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    let asked = pair.rig.stage.seen();
    let at_whole = asked.iter().filter(|seen| is_whole(seen)).count();
    assert_eq!(asked.len(), at_whole + 2 * (4 - at_whole));
    pair.at_rest().await;
    pair.prefill.clear();
    let before = pair.rig.stage.seen().len();
    for _ in 0..4 {
        assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    let asked = pair.rig.stage.seen();
    assert!(asked[before..].iter().filter(|seen| is_whole(seen)).count() >= 4);
    pair.at_rest().await;
}

/// Those who compute prompts are full: no engine is asked for the tokens of another one.
#[tokio::test]
async fn a_full_prefill_pool_refuses_before_a_prompt_is_read() {
    let pair = Pair::with_setup(1, 1, Setup::in_mode(RouterMode::Kv)).await;
    let stage = &pair.rig.stage;
    stage.tokenizes.store(true, Ordering::SeqCst);
    let threshold = r#"{"model":"m","active_prefill_tokens_threshold":1}"#;
    assert_eq!(
        pair.rig.post("/busy_threshold", threshold).await.status,
        200
    );
    let tokens: Vec<u32> = (0..64).collect();
    let tokens = json!({"count": 64, "max_model_len": 4096, "tokens": tokens});
    stage.play(vec![Step::Write(unary(&tokens.to_string()))]);
    stage.play(vec![Step::Gate, Step::Write(Pair::computed())]);
    let mut first = pair.rig.client().await;
    first.post(CHAT, "connection: close\r\n", ASK).await;
    until("the first is computed", || stage.seen().len() == 2).await;
    let refused = pair.rig.post(CHAT, ASK).await;
    assert_eq!(
        (refused.status, stage.seen().len()),
        (503, 2),
        "{}",
        refused.text()
    );
    stage.gate.add_permits(1);
    assert_eq!(in_time("answer", first.answer()).await.text(), ANSWER);
    pair.at_rest().await;
}
