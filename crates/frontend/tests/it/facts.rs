//! What engines tell about themselves, and what users tell about them: taken over, and acted on.

use kvasir_upstream::parse_worker;
use serde_json::Value;

use crate::engine::{Engine, Stage, Step};
use crate::rig::{CHAT, Rig, Setup, until};

const URGENT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],
    "nvext":{"agent_hints":{"priority":7}}}"#;

/// The priority that an engine with these pages gets for [`URGENT`].
async fn priority(tell: impl FnOnce(&Stage)) -> i64 {
    let rig = Rig::of_stage(1, Setup::usual(), tell).await;
    assert_eq!(rig.post(CHAT, URGENT).await.status, 200);
    let body: Value = serde_json::from_slice(&rig.stage.seen()[0].body).unwrap();
    body["priority"].as_i64().unwrap()
}

#[tokio::test]
async fn priorities_have_the_sign_that_the_engine_takes() {
    let metrics = |page: &'static str| {
        move |stage: &Stage| *stage.metrics.lock().unwrap() = Some(page.into())
    };
    let info = |page: &'static str| {
        move |stage: &Stage| {
            stage
                .pages
                .lock()
                .unwrap()
                .insert("/get_server_info", page.into());
        }
    };
    assert_eq!(priority(metrics("vllm:num_requests_running 0\n")).await, -7);
    assert_eq!(
        priority(metrics("sglang:num_running_reqs{dp_rank=\"0\"} 0\n")).await,
        7
    );
    assert_eq!(priority(info(r#"{"max_total_num_tokens":100}"#)).await, 7);
    let smaller = r#"{"max_total_num_tokens":100,"schedule_low_priority_values_first":true}"#;
    assert_eq!(priority(info(smaller)).await, -7);
}

/// Two kinds of engine under one name: each gets its own sign, also what the other has failed.
#[tokio::test]
async fn priorities_have_the_sign_of_the_worker_that_is_chosen() {
    let vllm = "vllm:num_requests_running 0\n";
    let sglang = "sglang:num_running_reqs{dp_rank=\"0\"} 0\n";
    let says = |page: &str, stage: &Stage| *stage.metrics.lock().unwrap() = Some(page.into());
    let rig = Rig::of_stage(1, Setup::usual(), |stage| says(vllm, stage)).await;
    let other = Stage::new();
    says(sglang, &other);
    let engine = Engine::start(&other).await;
    let address = parse_worker(&engine.url()).unwrap();
    assert!(rig.fleet.watch(address));
    rig.joined(2).await;
    let ask = async |times| {
        for _ in 0..times {
            assert_eq!(rig.post(CHAT, URGENT).await.status, 200);
        }
    };
    let seen = |stage: &Stage| -> Vec<_> {
        let bodies = stage.seen().into_iter().map(|seen| seen.body);
        let bodies = bodies.map(|body| serde_json::from_slice::<Value>(&body).unwrap());
        bodies.map(|body| body["priority"].as_i64()).collect()
    };
    ask(4).await;
    assert_eq!(seen(&rig.stage), [Some(-7); 2]);
    assert_eq!(seen(&other), [Some(7); 2]);
    for stage in [&rig.stage, &other] {
        stage.play(vec![Step::Reset]);
        ask(1).await;
    }
    let both = [seen(&rig.stage), seen(&other)];
    assert!(both[0].iter().all(|priority| *priority == Some(-7)));
    assert!(both[1].iter().all(|priority| *priority == Some(7)));
    assert!(both.iter().map(Vec::len).sum::<usize>() > 6, "tried twice");
}

#[tokio::test]
async fn the_settings_of_an_engine_are_found() {
    let page = r#"{"page_size":64,"dp_size":2,"chunked_prefill_size":4096,"max_prefill_tokens":16384,
        "max_total_num_tokens":6400,"version":"0.5.9"}"#;
    let rig = Rig::of_stage(1, Setup::usual(), |stage| {
        stage
            .pages
            .lock()
            .unwrap()
            .insert("/server_info", page.into());
    })
    .await;
    let row = &rig.workers().await[0];
    assert_eq!(row["block_size"], 64);
    assert_eq!(row["kv_total_blocks"], 100);
    assert_eq!(row["max_num_batched_tokens"], 4096);
    assert_eq!(row["ranks"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn requests_may_require_and_prefer_taints() {
    let mut rig = Rig::with(1, Setup::usual()).await;
    let engine = Engine::start(&rig.stage).await;
    let said = format!("{},taint=gpu=h200,taint=zone-b", engine.url());
    assert!(rig.fleet.watch(parse_worker(&said).unwrap()));
    rig.joined(2).await;
    let tainted = engine.address.port();
    rig.engines.push(engine);
    let ask = |constraints: &str| {
        format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],
            "nvext":{{"routing_constraints":{{{constraints}}}}}}}"#
        )
    };
    for _ in 0..4 {
        let answer = rig
            .post(CHAT, ask(r#""required_taints":["gpu=h200","zone-b"]"#))
            .await;
        assert_eq!(answer.status, 200);
        assert_eq!(rig.stage.seen().last().unwrap().port, tainted);
    }
    let answer = rig
        .post(CHAT, ask(r#""required_taints":["gpu=b200"]"#))
        .await;
    assert_eq!(answer.status, 503);
    // Taken back at run time, it is a worker like any other.
    let plain = parse_worker(&rig.engines[1].url()).unwrap();
    let mut client = rig.client().await;
    let body = format!(r#"{{"url":"{}","taints":["other"]}}"#, rig.engines[1].url());
    client.post("/workers", "", body).await;
    let row = client.answer().await.json();
    assert_eq!(row["told"]["taints"], serde_json::json!(["other"]));
    until("it is told", || {
        let carries = |router: &kvasir_router::Router| {
            let member = router.fleet().member(plain.id)?;
            Some(member.spec.taints.iter().any(|taint| **taint == *"other"))
        };
        rig.model().host.ask(carries) == Some(true)
    })
    .await;
    let answer = rig
        .post(CHAT, ask(r#""required_taints":["gpu=h200"]"#))
        .await;
    assert_eq!(answer.status, 503);
}

#[tokio::test]
async fn preferred_taints_draw_requests_in_kv_mode() {
    let mut setup = Setup::usual();
    setup.router.router_mode = kvasir_router::RouterMode::Kv;
    let mut rig = Rig::with(1, setup).await;
    let engine = Engine::start(&rig.stage).await;
    let said = format!("{},taint=cheap", engine.url());
    assert!(rig.fleet.watch(parse_worker(&said).unwrap()));
    rig.joined(2).await;
    let (tainted, other) = (engine.address.port(), rig.engines[0].address.port());
    rig.engines.push(engine);
    for (weight, port) in [("2.0", tainted), ("-2.0", other)] {
        for n in 0..6 {
            let ask = format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":"{weight} {n} {}"}}],
                "nvext":{{"routing_constraints":{{"preferred_taints":{{"cheap":{weight}}}}}}}}}"#,
                "some words to compute ".repeat(20)
            );
            assert_eq!(rig.post(CHAT, ask).await.status, 200);
            assert_eq!(rig.stage.seen().last().unwrap().port, port, "{weight}");
        }
    }
}
