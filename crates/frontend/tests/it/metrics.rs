//! What the metrics page says: how requests ended, in which stage they are, and what only a router by cache writes.

use kvasir_frontend::{AppOptions, Limits};
use kvasir_router::RouterMode;
use kvasir_types::WorkerId;

use crate::engine::{DONE, FIRST, LAST, Step, USAGE, first_event, ok, stream};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

const MODES: [RouterMode; 3] = [RouterMode::RoundRobin, RouterMode::Random, RouterMode::Kv];

async fn tasks(rig: &Rig) -> Vec<(&'static str, f64)> {
    let mut all = Vec::new();
    for kind in [
        "issued",
        "started",
        "success",
        "cancelled",
        "failed",
        "rejected",
    ] {
        let count = rig.metric(&format!("dynamo_tasks_{kind}_total")).await;
        all.push((kind, count));
    }
    all
}

/// Every request is issued once and ends in one way; only those that a worker was found for were started.
#[tokio::test]
async fn every_task_ends_in_one_way() {
    let limits = Limits {
        requests_max: 1,
        ..Limits::default()
    };
    let options = AppOptions {
        limits,
        retry_limit: 0,
        ..AppOptions::default()
    };
    let rig = Rig::with(
        1,
        Setup {
            options,
            ..Setup::usual()
        },
    )
    .await;
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    let unknown = ASK.replace("\"m\"", "\"n\"");
    assert_eq!(rig.post(CHAT, unknown).await.status, 404);
    rig.stage.play(vec![first_event(), Step::Hang]);
    let mut leaver = rig.client().await;
    leaver.post(CHAT, "", ASK_STREAM).await;
    assert!(leaver.read_until("\n\n").await);
    assert_eq!(rig.post(CHAT, ASK).await.status, 503, "one at a time");
    drop(leaver);
    rig.at_rest().await;
    rig.stage.play(vec![Step::Close]);
    assert_eq!(rig.post(CHAT, ASK).await.status, 503);
    rig.at_rest().await;
    let expected = [
        ("issued", 5.0),
        ("started", 3.0),
        ("success", 1.0),
        ("cancelled", 1.0),
        ("failed", 2.0),
        ("rejected", 1.0),
    ];
    assert_eq!(tasks(&rig).await, expected);
}

/// Seeds: the router's series are there in every mode, and nobody writes them unless requests go by cache.
#[tokio::test]
async fn only_a_router_by_cache_writes_the_routers_series() {
    for mode in MODES {
        let rig = Rig::with(2, Setup::in_mode(mode)).await;
        assert_eq!(rig.post(CHAT, ASK).await.status, 200);
        let events = [FIRST, LAST, USAGE, DONE].map(str::as_bytes);
        rig.stage.play(vec![stream(&events)]);
        assert_eq!(rig.post(CHAT, ASK_STREAM).await.status, 200);
        rig.at_rest().await;
        let expected = if mode == RouterMode::Kv { 2.0 } else { 0.0 };
        for name in [
            "requests_started_total",
            "requests_total",
            "kv_hit_rate_count",
            "input_sequence_tokens_count",
            "output_sequence_tokens_count",
            "worker_registered",
        ] {
            let found = rig.metric(&format!("dynamo_component_router_{name}")).await;
            assert_eq!(found, expected, "{mode:?} {name}");
        }
        // An answer in one piece does not tell when its first token was there.
        let of_router = rig.metric("dynamo_component_router_time_to_first_token_seconds_count");
        assert_eq!(of_router.await, expected / 2.0, "{mode:?}");
        let of_door = rig.metric("dynamo_frontend_time_to_first_token_seconds_count");
        assert_eq!(of_door.await, 1.0, "{mode:?}");
        let page = rig.page().await;
        let series = "dynamo_component_router_requests_total{";
        assert!(page.contains(series), "{mode:?}: registered\n{page}");
    }
}

/// A request is in one stage at a time, each stage is timed once, and nothing stays behind.
#[tokio::test]
async fn stages_are_entered_and_left() {
    let rig = Rig::of(1).await;
    let inside = async |stage: &str, phase: &str| {
        let labels = format!("{{phase=\"{phase}\",stage=\"{stage}\"}}");
        let name = format!("dynamo_frontend_stage_requests{labels}");
        rig.metric(&name).await
    };
    rig.stage.play(vec![Step::Gate, ok()]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK).await;
    in_time("it is at the worker", async {
        while inside("dispatch", "aggregated").await < 1.0 {}
    })
    .await;
    assert_eq!(inside("preprocess", "").await, 0.0);
    assert_eq!(inside("route", "aggregated").await, 0.0);
    rig.stage.gate.add_permits(1);
    assert_eq!(in_time("answer", client.answer()).await.status, 200);
    drop(client);
    rig.at_rest().await;
    for stage in ["preprocess", "route", "transport_roundtrip"] {
        let name = format!("dynamo_frontend_stage_duration_seconds_count{{stage=\"{stage}\"}}");
        assert_eq!(rig.metric(&name).await, 1.0, "{stage}");
    }
    // One that leaves in the middle of a stage leaves the stage.
    rig.stage.play(vec![Step::Hang]);
    let mut leaver = rig.client().await;
    leaver.post(CHAT, "", ASK).await;
    in_time("it is at the worker", async {
        while inside("dispatch", "aggregated").await < 1.0 {}
    })
    .await;
    drop(leaver);
    rig.at_rest().await;
    assert_eq!(rig.metric("dynamo_frontend_stage_requests").await, 0.0);
}

/// An answer that ends after its worker has left brings none of the worker's series back.
#[tokio::test]
async fn a_worker_that_left_has_no_series() {
    let rig = Rig::with(1, Setup::in_mode(RouterMode::Kv)).await;
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    let series = "dynamo_frontend_worker_last_input_sequence_tokens{";
    assert!(rig.page().await.contains(series));
    rig.stage.play(vec![Step::Gate, ok()]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK).await;
    until("the engine has it", || rig.booked_requests() == 1).await;
    let model = rig.model();
    let worker = model.specs()[0].id;
    assert_ne!(worker, WorkerId(0));
    model.leave(worker);
    rig.stage.gate.add_permits(1);
    assert_eq!(in_time("answer", client.answer()).await.status, 200);
    let page = rig.page().await;
    for series in [
        "dynamo_frontend_worker_last_",
        "dynamo_frontend_worker_active_",
        "router_worker_registered{",
    ] {
        let left: Vec<&str> = page
            .lines()
            .filter(|line| !line.starts_with('#') && line.contains(series))
            .collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Failures are counted by what went wrong, answers of routes that only engines know under the route's name.
#[tokio::test]
async fn failures_and_embeddings_have_series_of_their_own() {
    let rig = Rig::of(1).await;
    assert_eq!(rig.post(CHAT, "{").await.status, 400);
    assert_eq!(
        rig.post("/v1/embeddings", r#"{"model":"m"}"#).await.status,
        200
    );
    rig.at_rest().await;
    let failures = "dynamo_frontend_failures_total";
    let wrong = r#"{class="InvalidArgument",reason="request.invalid"}"#;
    assert_eq!(rig.metric(&format!("{failures}{wrong}")).await, 1.0);
    let started = "dynamo_frontend_requests_started_total";
    let labels = r#"{endpoint="embeddings",model="m",request_type="unary"}"#;
    assert_eq!(rig.metric(&format!("{started}{labels}")).await, 1.0);
}

/// A worker whose events nobody hears is counted where the router goes by events.
#[tokio::test]
async fn workers_without_events_are_counted_where_they_matter() {
    for (mode, expected) in [(RouterMode::Kv, 2.0), (RouterMode::RoundRobin, 0.0)] {
        let rig = Rig::with(2, Setup::in_mode(mode)).await;
        let name = "dynamo_component_router_kv_event_source_mismatch_workers";
        assert_eq!(rig.metric(name).await, expected, "{mode:?}");
    }
}

/// A model that nobody serves is counted, and has no series that can only ever be zero.
#[tokio::test]
async fn an_unknown_model_leaves_counters_alone() {
    let rig = Rig::of(1).await;
    for name in ["n", "unknown", "o"] {
        let ask = ASK.replace("\"m\"", &format!("\"{name}\""));
        assert_eq!(rig.post(CHAT, ask).await.status, 404);
    }
    rig.at_rest().await;
    let page = rig.page().await;
    let mut left: Vec<&str> = page.lines().filter(|l| l.contains("\"unknown\"")).collect();
    left.sort_unstable();
    let labels = r#"endpoint="chat_completions""#;
    assert_eq!(
        left,
        [
            format!(
                r#"dynamo_frontend_requests_started_total{{{labels},model="unknown",request_type="unary"}} 3"#
            ),
            format!(
                r#"dynamo_frontend_requests_total{{{labels},error_type="not_found",model="unknown",request_type="unary",status="error"}} 3"#
            ),
        ]
    );
    assert!(!page.contains("model=\"n\""), "a client's text is no label");
}
