//! Prompts that one engine server computes and another answers: what each of them is sent, and what follows when one fails.

use std::sync::Arc;
use std::time::Duration;

use kvasir_frontend::{AppOptions, ServedModel};
use kvasir_router::TwoStepTerms;
use kvasir_types::{WorkerId, WorkerRank};
use kvasir_upstream::parse_worker;
use serde_json::{Value, json};

use crate::engine::{ANSWER, DONE, Engine, FIRST, LAST, Seen, Step, ok, stream, unary};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

const PARAMS: &str = r#"{"do_remote_prefill":true,"remote_block_ids":[[1]],"x":null}"#;
pub(crate) const FAILS: &[u8] = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n";
pub(crate) const REFUSES: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno";
const ROLE: &str = "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
pub(crate) const ERROR: &str =
    "data: {\"error\": {\"message\": \"Internal server error\", \"code\": 500}}\n\n";

/// Between two looks at something that will come.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A frontend with an engine that answers and one that computes prompts.
pub(crate) struct Pair {
    pub(crate) rig: Rig,
    pub(crate) prefill: Vec<Engine>,
}

impl Pair {
    pub(crate) async fn new() -> Self {
        Self::with(1, 1, TwoStepTerms::default()).await
    }

    async fn with(decode: usize, prefill: usize, two_step: TwoStepTerms) -> Self {
        let options = AppOptions {
            two_step,
            ..AppOptions::default()
        };
        Self::of(decode, prefill, options).await
    }

    pub(crate) async fn of(decode: usize, prefill: usize, options: AppOptions) -> Self {
        Self::with_setup(decode, prefill, Setup::options(options)).await
    }

    pub(crate) async fn with_setup(decode: usize, prefill: usize, mut setup: Setup) -> Self {
        setup.additions = ",role=decode".to_owned();
        let mut pair = Self {
            rig: Rig::with(decode, setup).await,
            prefill: Vec::new(),
        };
        for _ in 0..prefill {
            let engine = Engine::start(&pair.rig.stage).await;
            pair.watch(&engine, ",role=prefill");
            pair.prefill.push(engine);
        }
        until("prompts have engines", || pair.pooled() == prefill).await;
        pair.rig.rest_now();
        pair
    }

    pub(crate) fn watch(&self, engine: &Engine, additions: &str) {
        let worker = parse_worker(&[&engine.url(), additions].concat()).unwrap();
        assert!(self.rig.fleet.watch(worker));
    }

    pub(crate) fn pools(&self) -> Vec<Arc<ServedModel>> {
        self.rig.app.prefill_pools().all()
    }

    fn pooled(&self) -> usize {
        self.pools().iter().map(|pool| pool.specs().len()).sum()
    }

    /// The next prompt is computed.
    pub(crate) fn computes(&self) {
        self.rig.stage.play(vec![Step::Write(Self::computed())]);
    }

    /// What an engine says that computed one.
    pub(crate) fn computed() -> Vec<u8> {
        let answer = json!({"id": "chatcmpl-1", "choices": [{"index": 0}], "usage": {"prompt_tokens": 7,
            "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}});
        let mut answer = answer.to_string();
        answer.truncate(answer.len() - 1);
        unary(&format!("{answer},\"kv_transfer_params\":{PARAMS}}}"))
    }

    /// What engines were sent, in order: whether it was one that computes prompts, and the body.
    pub(crate) fn sent(&self) -> Vec<(bool, Value)> {
        let is_prefill = |seen: &Seen| {
            let ports = self.prefill.iter().map(|engine| engine.address.port());
            ports.into_iter().any(|port| port == seen.port)
        };
        let seen = self.rig.stage.seen();
        seen.iter()
            .map(|seen| {
                (
                    is_prefill(seen),
                    serde_json::from_slice(&seen.body).unwrap(),
                )
            })
            .collect()
    }

    pub(crate) async fn at_rest(&self) {
        self.rig.at_rest().await;
        let booked = || -> u64 {
            let of = |pool: &Arc<ServedModel>| {
                let ranks: Vec<WorkerRank> =
                    pool.specs().iter().flat_map(|s| s.rank_iter()).collect();
                pool.host.ask(|router| {
                    let loads = ranks.iter().filter_map(|rank| router.load(*rank));
                    let sum = loads.map(|load| u64::from(load.requests) + load.prefill_tokens);
                    sum.sum::<u64>()
                })
            };
            self.pools().iter().map(of).sum()
        };
        until("bookings of prompts end", || booked() == 0).await;
    }
}

pub(crate) fn params() -> Value {
    serde_json::from_str(PARAMS).unwrap()
}

#[tokio::test]
async fn one_engine_computes_the_prompt_and_another_answers() {
    let pair = Pair::new().await;
    pair.computes();
    let ask = ASK.replacen('{', r#"{"max_completion_tokens":9,"n":1,"#, 1);
    assert_eq!(pair.rig.post(CHAT, &ask).await.text(), ANSWER);
    let [(true, prefill), (false, decode)] = &pair.sent()[..] else {
        panic!("{:?}", pair.sent());
    };
    let mut expected: Value = serde_json::from_str(&ask).unwrap();
    expected["kv_transfer_params"] = params();
    assert_eq!(*decode, expected);
    for (field, value) in [
        ("max_tokens", json!(1)),
        ("max_completion_tokens", json!(1)),
    ] {
        assert_eq!(prefill[field], value);
    }
    assert_eq!(prefill["kv_transfer_params"]["do_remote_decode"], true);
    assert!(prefill.get("n").is_none());
    pair.at_rest().await;
}

#[tokio::test]
async fn a_stream_is_that_of_the_engine_that_answers() {
    let pair = Pair::new().await;
    pair.computes();
    let events = [ROLE, FIRST, LAST, DONE];
    pair.rig
        .stage
        .play(vec![stream(&events.map(str::as_bytes))]);
    let got = pair.rig.post(CHAT, ASK_STREAM).await;
    assert_eq!(got.text(), events.concat());
    let sent = pair.sent();
    assert_eq!(sent[0].1["stream"], false);
    assert_eq!(sent[1].1["stream"], true);
    pair.at_rest().await;
}

#[tokio::test]
async fn the_answer_names_both_engines() {
    let pair = Pair::new().await;
    pair.computes();
    let ask = ASK.replacen(
        '{',
        r#"{"nvext":{"extra_fields":["worker_id","timing"]},"#,
        1,
    );
    let answer = pair.rig.post(CHAT, &ask).await.json();
    let id = |engine: &Engine| parse_worker(&engine.url()).unwrap().id;
    let ids = &answer["nvext"]["worker_id"];
    let WorkerId(prefill) = id(&pair.prefill[0]);
    let WorkerId(decode) = id(&pair.rig.engines[0]);
    assert_eq!(
        (&ids["prefill_worker_id"], &ids["decode_worker_id"]),
        (&json!(prefill), &json!(decode))
    );
    assert!(
        answer["nvext"]["timing"]["prefill_time_ms"]
            .as_f64()
            .unwrap()
            >= 0.0
    );
    let listed = pair.rig.workers().await;
    let roles: Vec<&Value> = listed.iter().map(|worker| &worker["role"]).collect();
    assert!(
        roles.contains(&&json!("prefill")) && roles.contains(&&json!("decode")),
        "{roles:?}"
    );
}

/// Each engine that fails at the prompt, and what it did.
#[tokio::test]
async fn a_prompt_that_fails_is_computed_by_the_engine_that_answers() {
    for script in [
        vec![Step::Write(FAILS.to_vec())],
        vec![Step::Close],
        vec![Step::Write(REFUSES.to_vec())],
        // It has no connector.
        vec![ok()],
    ] {
        let pair = Pair::new().await;
        pair.rig.stage.play(script);
        assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
        let asked = serde_json::from_str::<Value>(ASK).unwrap();
        let sent = pair.sent();
        assert_eq!((sent.len(), sent.last()), (2, Some(&(false, asked))));
        pair.at_rest().await;
    }
}

#[tokio::test]
async fn a_dead_engine_for_prompts_costs_no_request_and_is_used_again_when_back() {
    let mut pair = Pair::new().await;
    let address = pair.prefill.pop().unwrap().address;
    for _ in 0..3 {
        assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    assert!(pair.sent().iter().all(|(is_prefill, _)| !is_prefill));
    pair.prefill
        .push(Engine::restart(address, &pair.rig.stage).await);
    in_time("it is used again", async {
        while pair.sent().iter().all(|(is_prefill, _)| !is_prefill) {
            assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    })
    .await;
    pair.at_rest().await;
}

#[tokio::test]
async fn strict_terms_return_the_failure() {
    let strict = TwoStepTerms {
        serves_alone: false,
        falls_back: false,
    };
    let pair = Pair::with(1, 1, strict).await;
    pair.rig.stage.play(vec![Step::Write(REFUSES.to_vec())]);
    assert_eq!(pair.rig.post(CHAT, ASK).await.status, 400);
    assert!(pair.sent().iter().all(|(is_prefill, _)| *is_prefill));
    pair.at_rest().await;
    let none = Pair::with(1, 0, strict).await;
    assert_eq!(none.rig.post(CHAT, ASK).await.status, 503);
}

/// vLLM says that it could not fetch the prompt with a status, or after the role.
#[tokio::test]
async fn an_engine_that_cannot_fetch_the_prompt_is_asked_to_compute_it() {
    let pair = Pair::new().await;
    let streamed = [ROLE, FIRST, LAST, DONE];
    for (ask, failure, answer) in [
        (ASK, Step::Write(FAILS.to_vec()), ANSWER.to_owned()),
        (
            ASK_STREAM,
            stream(&[ROLE, ERROR, DONE].map(str::as_bytes)),
            streamed.concat(),
        ),
    ] {
        let before = pair.sent().len();
        pair.computes();
        pair.rig.stage.play(vec![failure]);
        if ask == ASK_STREAM {
            pair.rig
                .stage
                .play(vec![stream(&streamed.map(str::as_bytes))]);
        }
        let got = pair.rig.post(CHAT, ask).await;
        assert_eq!((got.status, got.text()), (200, &*answer));
        let sent = &pair.sent()[before..];
        let asked: Vec<bool> = sent
            .iter()
            .map(|(_, body)| body.get("kv_transfer_params").is_some())
            .collect();
        assert_eq!(asked, [true, true, false]);
        pair.at_rest().await;
    }
}

/// An engine that refuses an answer may repeat what it was sent, as Python writes it.
#[tokio::test]
async fn a_refusal_that_repeats_the_transfer_is_not_passed_on() {
    let pair = Pair::new().await;
    for (told, is_kept_back) in [
        (
            r#"{"error":{"message":"'input': {'kv_transfer_params': {'remote_host': '10.0.0.1'}}"}}"#,
            true,
        ),
        (r#"{"error":{"message":"max_tokens is too large"}}"#, false),
    ] {
        pair.computes();
        let length = told.len();
        let refusal = format!(
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{told}"
        );
        pair.rig.stage.play(vec![Step::Write(refusal.into_bytes())]);
        let got = pair.rig.post(CHAT, ASK).await;
        assert_eq!((got.status, got.text() != told), (400, is_kept_back));
        assert!(
            !got.text().contains("10.0.0.1") && got.json()["error"].is_object()
                || got.json()["message"].is_string()
        );
        pair.at_rest().await;
    }
}

/// What was kept is fetched once: by the next engine if the first was not reached.
#[tokio::test]
async fn a_prompt_that_was_not_fetched_goes_to_the_next_engine() {
    let mut pair = Pair::with(2, 1, TwoStepTerms::default()).await;
    let port = pair.rig.engines.remove(0).address.port();
    for _ in 0..4 {
        pair.computes();
        assert_eq!(pair.rig.post(CHAT, ASK).await.text(), ANSWER);
        let decode = pair.sent().pop().unwrap().1;
        assert_eq!(decode["kv_transfer_params"], params());
    }
    assert!(pair.rig.stage.seen().iter().all(|seen| seen.port != port));
}

/// A client that asks for an engine that is not there: its prompt is computed, and nobody answers.
#[tokio::test]
async fn a_prompt_that_nobody_answers_is_fetched_to_free_it() {
    let pair = Pair::new().await;
    pair.computes();
    let ask = ASK.replacen('{', r#"{"stop":["x"],"nvext":{"decode_worker_id":99},"#, 1);
    assert!(pair.rig.post(CHAT, &ask).await.status >= 400);
    until("it is fetched", || pair.sent().len() == 2).await;
    let (is_prefill, release) = pair.sent().pop().unwrap();
    assert!(!is_prefill);
    assert_eq!(
        (&release["max_tokens"], &release["kv_transfer_params"]),
        (&json!(1), &params())
    );
    assert!(release.get("stop").is_none());
    pair.at_rest().await;
}

#[tokio::test]
async fn a_client_that_leaves_during_the_prompt_stops_it() {
    let pair = Pair::new().await;
    pair.rig.stage.play(vec![Step::Hang]);
    let mut client = pair.rig.client().await;
    client.post(CHAT, "", ASK).await;
    until("the prompt is asked for", || pair.sent().len() == 1).await;
    drop(client);
    in_time("the engine sees it", pair.rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    pair.at_rest().await;
    assert_eq!(pair.sent().len(), 1);
}

/// Whoever is left when the engine's answer comes: somebody fetches the prompt.
#[tokio::test]
async fn a_client_that_leaves_as_its_prompt_ends_leaves_nothing_kept() {
    let pair = Pair::new().await;
    let steps = vec![Step::Gate, Step::Write(Pair::computed())];
    pair.rig.stage.play(steps);
    let mut client = pair.rig.client().await;
    client.post(CHAT, "", ASK).await;
    until("the prompt is asked for", || pair.sent().len() == 1).await;
    pair.rig.stage.gate.add_permits(1);
    drop(client);
    until("it is fetched", || pair.sent().len() == 2).await;
    let (is_prefill, fetch) = pair.sent().pop().unwrap();
    assert!(!is_prefill);
    assert_eq!(fetch["kv_transfer_params"], params());
    pair.at_rest().await;
}

const PREFILL_INFO: &str = r#"{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":9001,"max_total_num_tokens":100}"#;
const DECODE_INFO: &str = r#"{"disaggregation_mode":"decode","max_total_num_tokens":100}"#;
const INFO: &str = "/server_info?config_format=json";

/// Servers of SGLang, which say themselves what they compute.
pub(crate) async fn sglang(prefill: usize) -> Pair {
    let mut pair = Pair {
        rig: Rig::with(0, Setup::usual()).await,
        prefill: Vec::new(),
    };
    for at in 0..=prefill {
        let engine = Engine::start(&pair.rig.stage).await;
        let info = if at == 0 { DECODE_INFO } else { PREFILL_INFO };
        let key = (engine.address.port(), INFO);
        pair.rig.stage.kept.lock().unwrap().insert(key, info);
        pair.watch(&engine, "");
        match at {
            0 => pair.rig.engines.push(engine),
            _ => pair.prefill.push(engine),
        }
    }
    pair.rig.joined(1).await;
    until("prompts have engines", || pair.pooled() == prefill).await;
    pair.rig.rest_now();
    pair
}

#[tokio::test]
async fn sglang_servers_get_the_same_meeting_at_once() {
    let pair = sglang(1).await;
    // The first is not done before the second has answered.
    pair.rig.stage.play(vec![Step::Gate, ok()]);
    pair.rig.stage.play(vec![Step::Gate, ok()]);
    let mut client = pair.rig.client().await;
    client.post(CHAT, "connection: close\r\n", ASK).await;
    until("both are asked", || pair.sent().len() == 2).await;
    pair.rig.stage.gate.add_permits(2);
    assert_eq!(in_time("answer", client.answer()).await.text(), ANSWER);
    let sent = pair.sent();
    assert_ne!(sent[0].0, sent[1].0);
    assert_eq!(sent[0].1, sent[1].1);
    let body = &sent[0].1;
    assert_eq!(
        (&body["bootstrap_host"], &body["bootstrap_port"]),
        (&json!("127.0.0.1"), &json!(9001))
    );
    assert!(body["bootstrap_room"].as_u64().unwrap() > 0);
    pair.at_rest().await;
}

/// The engine that answers waits for a prompt that does not come: it is given up, and another pair is asked.
#[tokio::test]
async fn an_sglang_pair_that_fails_is_followed_by_another() {
    let pair = sglang(2).await;
    let stage = &pair.rig.stage;
    let [bad, good] = [0, 1].map(|at| pair.prefill[at].address.port());
    stage.always.lock().unwrap().insert(bad, FAILS);
    let good_answer: &'static [u8] = unary(ANSWER).leak();
    stage.always.lock().unwrap().insert(good, good_answer);
    let asked = |port: u16| stage.seen().iter().filter(|seen| seen.port == port).count();
    let decode = pair.rig.engines[0].address.port();
    while asked(bad) == 0 {
        let before = asked(decode);
        for _ in 0..2 {
            stage.play(vec![Step::Gate, ok()]);
        }
        let mut client = pair.rig.client().await;
        client.post(CHAT, "connection: close\r\n", ASK).await;
        until("a pair has its prompt", || {
            asked(decode) - before == 1 + asked(bad) && asked(good) > 0
        })
        .await;
        stage.gate.add_permits(2);
        assert_eq!(in_time("answer", client.answer()).await.text(), ANSWER);
        stage.gate.forget_permits(usize::MAX);
    }
    let rooms = pair
        .sent()
        .into_iter()
        .map(|(_, body)| body["bootstrap_room"].as_u64().unwrap());
    let rooms: std::collections::BTreeSet<u64> = rooms.collect();
    assert_eq!(
        rooms.len(),
        asked(decode),
        "each pair has a room of its own"
    );
    pair.at_rest().await;
}

#[tokio::test]
async fn an_sglang_pair_without_prompts_fails_and_frees_the_engine_that_waits() {
    let pair = sglang(1).await;
    let port = pair.prefill[0].address.port();
    pair.rig.stage.always.lock().unwrap().insert(port, FAILS);
    for _ in 0..4 {
        pair.rig.stage.play(vec![Step::Hang]);
    }
    assert!(pair.rig.post(CHAT, ASK).await.status >= 500);
    in_time("it is freed", pair.rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    pair.at_rest().await;
}
