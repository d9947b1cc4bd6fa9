//! Bodies with several prompts or answers where one engine server computes prompts for another: a pair for each answer, and one answer to all.

use std::collections::BTreeMap;

use kvasir_frontend::AppOptions;
use kvasir_router::{BypassPolicy, BypassTerms, TwoStepTerms};
use serde_json::{Value, json};

use crate::engine::{ANSWER, DONE, FIRST, LAST, Step, USAGE, chunk, first_event, ok, stream};
use crate::pairs::{ERROR, FAILS, Pair, REFUSES, params};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

const COMPLETIONS: &str = "/v1/completions";
const TWO: &str = r#"{"model":"m","prompt":["one","two"],"max_tokens":4}"#;
const TWO_STREAMED: &str = r#"{"model":"m","prompt":["one","two"],"stream":true}"#;

/// A pair whose engine for prompts always computes them.
async fn computing() -> Pair {
    let pair = Pair::new().await;
    always_computes(&pair);
    pair
}

fn always_computes(pair: &Pair) {
    let computed: &'static [u8] = Pair::computed().leak();
    let mut always = pair.rig.stage.always.lock().unwrap();
    always.insert(pair.prefill[0].address.port(), computed);
}

/// The bodies that engines got, prompts' first, by `field`.
fn legs(pair: &Pair, field: &str) -> BTreeMap<(bool, String), Value> {
    let sent = pair.sent().into_iter();
    sent.map(|(is_prefill, body)| ((!is_prefill, body[field].to_string()), body))
        .collect()
}

/// The events of a stream.
fn events(text: &str) -> Vec<Value> {
    let data = text.split("\n\n").filter_map(|e| e.strip_prefix("data: "));
    data.filter_map(|data| serde_json::from_str(data).ok())
        .collect()
}

#[tokio::test]
async fn each_prompt_of_a_body_has_a_pair_of_its_own() {
    let pair = computing().await;
    let answer = pair.rig.post(COMPLETIONS, TWO).await.json();
    let mut expected: Value = serde_json::from_str(ANSWER).unwrap();
    let mut second = expected["choices"][0].clone();
    second["index"] = json!(1);
    expected["choices"].as_array_mut().unwrap().push(second);
    expected["usage"] = json!({"prompt_tokens": 14, "completion_tokens": 4, "total_tokens": 18});
    assert_eq!(answer, expected);
    let legs = legs(&pair, "prompt");
    let prompts: Vec<&str> = legs.keys().map(|(_, prompt)| &**prompt).collect();
    assert_eq!(prompts, ["\"one\"", "\"two\"", "\"one\"", "\"two\""]);
    for ((is_decode, _), body) in &legs {
        let expected = if *is_decode { json!(4) } else { json!(1) };
        assert_eq!(body["max_tokens"], expected);
        assert_eq!(body["kv_transfer_params"] == params(), *is_decode);
    }
    // Engines that name requests must not take one for the other.
    let mut names: Vec<String> = pair
        .rig
        .stage
        .seen()
        .iter()
        .map(|seen| seen.header("x-request-id")[0].to_owned())
        .collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 2);
    pair.at_rest().await;
}

#[tokio::test]
async fn streams_of_several_prompts_are_one_stream() {
    let pair = computing().await;
    for (ask, usages) in [
        (TWO_STREAMED.to_owned(), 0),
        (
            TWO_STREAMED.replacen('{', r#"{"stream_options":{"include_usage":true},"#, 1),
            1,
        ),
    ] {
        for _ in 0..2 {
            pair.rig
                .stage
                .play(vec![stream(&[FIRST, LAST, USAGE, DONE].map(str::as_bytes))]);
        }
        let got = pair.rig.post(COMPLETIONS, &ask).await;
        assert!(
            got.text().ends_with(DONE) && got.text().matches(DONE).count() == 1,
            "{}",
            got.text()
        );
        let events = events(got.text());
        for index in [0, 1] {
            let own = events
                .iter()
                .filter(|event| event["choices"][0]["index"] == json!(index));
            let finishes: Vec<&Value> = own
                .map(|event| &event["choices"][0]["finish_reason"])
                .collect();
            assert_eq!(finishes, [&Value::Null, &json!("stop")]);
        }
        let counted: Vec<&Value> = events
            .iter()
            .filter_map(|event| event.get("usage"))
            .collect();
        let sum = json!({"prompt_tokens": 14, "completion_tokens": 4, "total_tokens": 18, "prompt_tokens_details": {"cached_tokens": 8}});
        assert_eq!(counted, vec![&sum; usages]);
    }
    pair.at_rest().await;
}

/// The second waits until the first has its prompt; vLLM counts seeds on, and a prompt once.
#[tokio::test]
async fn each_answer_to_a_prompt_has_a_pair_of_its_own() {
    let pair = computing().await;
    let ask = ASK.replacen('{', r#"{"n":2,"seed":5,"#, 1);
    let answer = pair.rig.post(CHAT, &ask).await.json();
    let indices: Vec<&Value> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| &choice["index"])
        .collect();
    assert_eq!(indices, [&json!(0), &json!(1)]);
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11})
    );
    let legs = legs(&pair, "seed");
    let seeds: Vec<&str> = legs.keys().map(|(_, seed)| &**seed).collect();
    assert_eq!(seeds, ["5", "6", "5", "6"]);
    assert!(legs.values().all(|body| body.get("n").is_none()));
    pair.at_rest().await;
}

/// What one engine says of one prompt ends all of it, as one engine would have ended it.
#[tokio::test]
async fn a_part_that_is_refused_ends_the_others() {
    let pair = computing().await;
    pair.rig
        .stage
        .play(vec![Step::Gate, Step::Write(REFUSES.to_vec())]);
    pair.rig.stage.play(vec![Step::Hang]);
    let mut client = pair.rig.client().await;
    client.post(COMPLETIONS, "connection: close\r\n", TWO).await;
    until("all are asked", || pair.sent().len() == 4).await;
    pair.rig.stage.gate.add_permits(1);
    let answer = in_time("answer", client.answer()).await;
    assert_eq!((answer.status, answer.text()), (400, "no"));
    in_time("the other is given up", pair.rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    pair.at_rest().await;
}

#[tokio::test]
async fn a_part_that_breaks_off_ends_the_stream() {
    let pair = computing().await;
    let error = chunk(ERROR.as_bytes());
    pair.rig
        .stage
        .play(vec![first_event(), Step::Gate, Step::Write(error)]);
    pair.rig.stage.play(vec![first_event(), Step::Hang]);
    let mut client = pair.rig.client().await;
    client
        .post(COMPLETIONS, "connection: close\r\n", TWO_STREAMED)
        .await;
    until("all are asked", || pair.sent().len() == 4).await;
    pair.rig.stage.gate.add_permits(1);
    let answer = in_time("answer", client.answer()).await;
    assert!(
        answer.text().ends_with(&[ERROR, DONE].concat()),
        "{}",
        answer.text()
    );
    in_time("the other is given up", pair.rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    pair.at_rest().await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_all_parts() {
    let pair = computing().await;
    for _ in 0..2 {
        pair.rig.stage.play(vec![first_event(), Step::Hang]);
    }
    let mut client = pair.rig.client().await;
    client.post(COMPLETIONS, "", TWO_STREAMED).await;
    until("all are asked", || pair.sent().len() == 4).await;
    drop(client);
    in_time("both are given up", pair.rig.stage.hung_up.acquire_many(2))
        .await
        .unwrap()
        .forget();
    pair.at_rest().await;
}

/// An engine computes a prompt itself that it is to tell of, or to draw several answers from at once.
#[tokio::test]
async fn what_needs_the_prompt_goes_to_one_engine() {
    let pair = computing().await;
    for more in [r#""echo":true"#, r#""best_of":2"#, r#""n":200"#] {
        let before = pair.sent().len();
        let ask = TWO.replacen('{', &format!("{{{more},"), 1);
        assert_eq!(pair.rig.post(COMPLETIONS, &ask).await.text(), ANSWER);
        assert_eq!(
            pair.sent()[before..],
            [(false, serde_json::from_str(&ask).unwrap())]
        );
    }
}

/// Every prompt is short enough to go past the engines for prompts.
const PAST: BypassTerms = BypassTerms {
    policy: BypassPolicy::IslBounding,
    uncached_tokens: u64::MAX,
    uncached_share: 2.0,
    prefill_busy: None,
    decode_busy: None,
};

#[tokio::test]
async fn a_short_prompt_goes_past_the_engines_for_prompts() {
    let options = AppOptions {
        bypass: Some(PAST),
        ..AppOptions::default()
    };
    let pair = Pair::of(1, 1, options).await;
    always_computes(&pair);
    assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    let asked: Value = serde_json::from_str(ASK).unwrap();
    assert_eq!(pair.sent(), [(false, asked.clone())]);
    let paths = &pair.rig.app.metrics().prefill_paths_total;
    let counted = |path: &str| paths.with_label_values(&["m", path]).get();
    assert_eq!((counted("short_prompt"), counted("answer")), (1, 0));
    // A streaming client is told, if it wants to know.
    let events = [FIRST, LAST, DONE].map(str::as_bytes);
    pair.rig.stage.play(vec![stream(&events)]);
    let wants = ASK_STREAM.replacen(
        '{',
        r#"{"nvext":{"annotations":["x-bypass-remote-prefill"]},"#,
        1,
    );
    let got = pair.rig.post(CHAT, &wants).await;
    let told = "event: x-bypass-remote-prefill\n: \"true\"\n\n";
    assert_eq!(got.text(), [told, FIRST, LAST, DONE].concat());
    // One that fails takes the usual way, and so does one that names an engine.
    let before = pair.sent().len();
    pair.rig.stage.play(vec![Step::Write(FAILS.to_vec())]);
    assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    let took: Vec<bool> = pair.sent()[before..]
        .iter()
        .map(|(is_prefill, _)| *is_prefill)
        .collect();
    assert_eq!((took, counted("answer")), (vec![false, true, false], 1));
    let worker = pair.pools()[0].specs()[0].id.0;
    let named = ASK.replacen(
        '{',
        &format!(r#"{{"nvext":{{"prefill_worker_id":{worker}}},"#),
        1,
    );
    assert_eq!(pair.rig.post(CHAT, &named).await.text(), ANSWER);
    assert_eq!(counted("answer"), 2);
    pair.at_rest().await;
}

/// A frontend with one engine that answers in each zone, and one for prompts in zone b.
async fn in_zones(prefill: &str) -> Pair {
    let mut pair = Pair {
        rig: Rig::with(0, Setup::usual()).await,
        prefill: Vec::new(),
    };
    for additions in [
        ",role=decode,topology=zone:a",
        ",role=decode,topology=zone:b",
    ] {
        let engine = crate::engine::Engine::start(&pair.rig.stage).await;
        pair.watch(&engine, additions);
        pair.rig.engines.push(engine);
    }
    pair.rig.joined(2).await;
    let engine = crate::engine::Engine::start(&pair.rig.stage).await;
    pair.watch(&engine, prefill);
    pair.prefill.push(engine);
    until("prompts have engines", || {
        pair.pools().iter().any(|pool| !pool.specs().is_empty())
    })
    .await;
    pair.rig.rest_now();
    always_computes(&pair);
    pair
}

#[tokio::test]
async fn a_prompt_stays_in_its_zone() {
    let pair = in_zones(",role=prefill,topology=zone:b,kv-transfer-domain=zone").await;
    let port = pair.rig.engines[1].address.port();
    for _ in 0..4 {
        assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
        assert_eq!(pair.rig.stage.seen().pop().unwrap().port, port);
    }
    // Nobody is left there: an engine elsewhere computes the prompt.
    pair.rig.stage.always.lock().unwrap().insert(port, FAILS);
    assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    let (_, last) = pair.sent().pop().unwrap();
    assert!(last.get("kv_transfer_params").is_none());
    assert_ne!(pair.rig.stage.seen().pop().unwrap().port, port);
}

#[tokio::test]
async fn a_prompt_prefers_its_zone() {
    let pair = in_zones(
        ",role=prefill,topology=zone:b,kv-transfer-domain=zone,kv-transfer-preferred-weight=1",
    )
    .await;
    assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    let (_, last) = pair.sent().pop().unwrap();
    assert_eq!(last["kv_transfer_params"], params());
}

#[tokio::test]
async fn an_engine_that_does_not_say_its_zone_gets_no_prompts() {
    let pair = in_zones(",role=prefill,kv-transfer-domain=zone").await;
    assert_eq!(pair.rig.post(CHAT, ASK).await.status, 503);
    assert!(pair.sent().is_empty());
    pair.at_rest().await;
}

#[tokio::test]
async fn paths_are_counted() {
    let pair = Pair::of(
        1,
        1,
        AppOptions {
            two_step: TwoStepTerms::default(),
            ..AppOptions::default()
        },
    )
    .await;
    pair.computes();
    assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    pair.rig.stage.play(vec![Step::Write(FAILS.to_vec())]);
    pair.rig.stage.play(vec![ok()]);
    assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    let paths = &pair.rig.app.metrics().prefill_paths_total;
    let counted = |path: &str| paths.with_label_values(&["m", path]).get();
    assert_eq!((counted("answer"), counted("decode_worker")), (1, 1));
}
