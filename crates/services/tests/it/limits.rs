//! Bounds, and what is no request at all.

use std::time::Duration;

use kvasir_services::{Api, Indexer, SelectOptions, Selector, SlotTracker, Verb};

use crate::rig::{context, recorded, send, setup};

/// Garbage is refused, by every route of every service.
#[tokio::test]
async fn no_body_breaks_a_service() {
    let bodies = [
        "",
        "{",
        "null",
        "[]",
        "7",
        r#"{"model_name":"","routing_group":""}"#,
        r#"{"model_name":"m","token_ids":[1,"a"]}"#,
        r#"{"model_name":"m","token_ids":[4294967296]}"#,
        r#"{"model_name":"m","request_id":"r","worker_id":18446744073709551615,"sequence_hashes":[99999999999999999999]}"#,
        r#"{"worker_id":1,"model_name":"m","block_size":4294967295,"dp_size":4294967295,"dp_start":4294967295}"#,
        r#"{"worker_id":1,"model_name":"m","endpoint":"x","block_size":16,"data_parallel_size":4294967295,"kv_events_endpoint":"nonsense"}"#,
        r#"{"instance_id":1,"endpoint":"nonsense://","model_name":"m","block_size":16}"#,
        "\u{0}\u{ff}",
    ];
    let paths = [
        "/query",
        "/query_by_hash",
        "/register",
        "/unregister",
        "/register_peer",
        "/deregister_peer",
        "/add",
        "/free",
        "/prefill_complete",
        "/potential_loads",
        "/select",
        "/select_and_reserve",
        "/reservations",
        "/workers",
        "/reservations/%00/output_block",
        "/overlap_scores",
        "/replica_sync/register_peer",
        "/",
        "//",
        "/workers/x",
    ];
    async fn all(api: &impl Api, bodies: &[&str], paths: &[&str]) {
        for path in paths {
            for body in bodies {
                for verb in [Verb::Get, Verb::Post, Verb::Patch, Verb::Delete] {
                    let (status, text) = send(api, verb, path, body).await;
                    assert!(
                        (200..=503).contains(&status) && status != 500,
                        "{path} {body}: {status} {text}"
                    );
                }
            }
        }
    }
    all(&Indexer::new(setup(), context(), None), &bodies, &paths).await;
    all(&SlotTracker::new(setup(), context()), &bodies, &paths).await;
    all(
        &Selector::new(setup(), SelectOptions::default(), context(), None),
        &bodies,
        &paths,
    )
    .await;
}

#[tokio::test]
async fn names_have_a_bound() {
    let tracker = SlotTracker::new(setup(), context());
    let register =
        |model: &str| format!(r#"{{"worker_id":1,"model_name":"{model}","block_size":16}}"#);
    let (status, _) = send(
        &tracker,
        Verb::Post,
        "/register",
        &register(&"m".repeat(256)),
    )
    .await;
    assert_eq!(status, 201);
    let (status, _) = send(
        &tracker,
        Verb::Post,
        "/register",
        &register(&"m".repeat(257)),
    )
    .await;
    assert_eq!(status, 400);
    send(&tracker, Verb::Post, "/register", &register("m")).await;
    let add = |name: &str| {
        format!(
            r#"{{"model_name":"m","request_id":"{name}","worker_id":1,"dp_rank":0,"sequence_hashes":[1]}}"#
        )
    };
    assert_eq!(
        send(&tracker, Verb::Post, "/add", &add(&"r".repeat(256)))
            .await
            .0,
        201
    );
    assert_eq!(
        send(&tracker, Verb::Post, "/add", &add(&"r".repeat(257)))
            .await
            .0,
        400
    );
}

/// At its bound a service says so, and who is known stays known.
#[tokio::test]
async fn groups_workers_and_peers_have_bounds() {
    let tracker = SlotTracker::new(setup(), context());
    let register = async |worker: usize, model: usize| {
        let body = format!(r#"{{"worker_id":{worker},"model_name":"m{model}","block_size":16}}"#);
        send(&tracker, Verb::Post, "/register", &body).await
    };
    for model in 0..1024 {
        assert_eq!(register(0, model).await.0, 201, "model {model}");
    }
    let (status, text) = register(0, 1024).await;
    assert_eq!(
        (status, text.contains("1024 groups already")),
        (409, true),
        "{text}"
    );
    // The first one is there already.
    for worker in 1..4096 {
        assert_eq!(register(worker, 0).await.0, 201, "worker {worker}");
    }
    let (status, text) = register(4096, 0).await;
    assert_eq!(
        (status, text.contains("4096 workers already")),
        (409, true),
        "{text}"
    );
    let indexer = Indexer::new(setup(), context(), None);
    let meet = async |peer: usize| {
        let body = format!(r#"{{"url":"http://peer-{peer}:8090"}}"#);
        send(&indexer, Verb::Post, "/register_peer", &body).await
    };
    for peer in 0..256 {
        let (status, text) = meet(peer).await;
        assert!(status < 300, "{status} {text}");
    }
    assert_eq!(meet(256).await.0, 409);
    assert!(meet(7).await.0 < 300, "it is known");
}

/// A selection can be booked while it is among the last ones, and not after its time.
#[tokio::test]
async fn selections_are_few_and_do_not_last() {
    let options = SelectOptions {
        entries_max: 2,
        ..SelectOptions::default()
    };
    let mut quiet = setup();
    quiet.config.router_kv_events = false;
    let selector = Selector::new(quiet.clone(), options, context(), None);
    let worker = recorded("select", "worker").body;
    send(&selector, Verb::Post, "/workers", &worker).await;
    let ask = recorded("select", "and_reserve").body;
    for name in ["a", "b", "c"] {
        let named = ask.replace("\"s2\"", &format!("\"{name}\""));
        assert_eq!(send(&selector, Verb::Post, "/select", &named).await.0, 200);
    }
    let reserve = |name: &str| format!(r#"{{"selection_id":"{name}","model_name":"m"}}"#);
    for (name, expected) in [("a", 404), ("b", 201), ("c", 201), ("c", 404)] {
        let (status, text) = send(&selector, Verb::Post, "/reservations", &reserve(name)).await;
        assert_eq!(status, expected, "{name}: {text}");
    }
    let at_once = SelectOptions {
        ttl: Duration::ZERO,
        ..options
    };
    let selector = Selector::new(quiet, at_once, context(), None);
    send(&selector, Verb::Post, "/workers", &worker).await;
    send(&selector, Verb::Post, "/select", &ask).await;
    assert_eq!(
        send(&selector, Verb::Post, "/reservations", &reserve("s2"))
            .await
            .0,
        404
    );
}
