//! Body by body beside the recordings. What differs is named here, and in the guide.

use kvasir_services::{Indexer, SelectOptions, Selector, SlotTracker, Verb};
use serde_json::Value;

use crate::rig::{EventSocket, alike, context, recorded, replay, same, send, setup, until};

fn tokens_of(body: &str) -> Vec<u32> {
    let body: Value = serde_json::from_str(body).unwrap();
    let tokens = body["token_ids"].as_array().unwrap();
    tokens
        .iter()
        .map(|token| token.as_u64().unwrap() as u32)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_indexer_answers_as_recorded() {
    let context = context();
    let socket = EventSocket::bind(&context.tasks).await;
    let indexer = Indexer::new(setup(), context, None);
    for case in [
        "workers_empty",
        "peers",
        "register",
        "register_again",
        "register_conflict",
        "register_bad",
    ] {
        same(&indexer, "indexer", case).await;
    }
    same(&indexer, "indexer", "unregister").await;
    same(&indexer, "indexer", "unregister_missing").await;
    // The recorded engine was at port 5799; ours is where there was room.
    let at = |text: &str| text.replace("tcp://127.0.0.1:5799", &socket.address);
    let register = recorded("indexer", "register");
    let (status, _) = send(&indexer, Verb::Post, "/register", &at(&register.body)).await;
    assert_eq!(status, 201);
    let workers = until(&indexer, Verb::Get, "/workers", "", r#""status":"active""#).await;
    assert_eq!(workers, at(&recorded("indexer", "workers").response));
    let query = recorded("indexer", "query");
    let tokens = tokens_of(&query.body);
    socket.store(0, &tokens[..48], &[11, 12, 13]).await;
    until(&indexer, Verb::Post, "/query", &query.body, r#""gpu":48"#).await;
    for case in [
        "query",
        "query_unknown",
        "query_by_hash",
        "query_by_hash_salt",
        "register_peer",
        "deregister_peer_missing",
        "health",
        "404",
    ] {
        same(&indexer, "indexer", case).await;
    }
    // Difference: hashes without a sign are taken, too.
    let (_, status, text) = replay(&indexer, "indexer", "query_by_hash_u64").await;
    assert_eq!((status, text), (200, query.response));
    // Difference: event ids count from 1, and no residency is said. What it holds is the same.
    let (exchange, status, text) = replay(&indexer, "indexer", "dump").await;
    let blocks = |text: &str| {
        let page: Value = serde_json::from_str(text).unwrap();
        let events = page["m:default"]["events"].as_array().unwrap().clone();
        let device = events
            .into_iter()
            .find(|event| event["storage_tier"] == "device");
        (
            page["m:default"]["block_size"].clone(),
            device.unwrap()["event"]["data"].clone(),
        )
    };
    assert_eq!((status, blocks(&text)), (200, blocks(&exchange.response)));
    let (status, text) = send(&indexer, Verb::Get, "/workers?model_name=other", "").await;
    assert_eq!((status, text.as_str()), (200, "[]"));
    same(&indexer, "indexer", "unregister").await;
    let (status, text) = send(&indexer, Verb::Get, "/dump", "").await;
    assert_eq!((status, text.as_str()), (200, "{}"));
}

#[tokio::test]
async fn the_slot_tracker_answers_as_recorded() {
    let tracker = SlotTracker::new(setup(), context());
    for case in [
        "register",
        "workers",
        "add",
        "add_dup",
        "add_unknown_worker",
        "loads",
        "potential",
        "prefill_complete",
        "prefill_unknown",
        "loads_after_prefill",
        "free",
        "free_unknown",
        "loads_after_free",
        "peers",
        "health",
    ] {
        same(&tracker, "slots", case).await;
    }
    let (status, _) = send(
        &tracker,
        Verb::Post,
        "/free",
        r#"{"model_name":"zz","request_id":"r"}"#,
    )
    .await;
    assert_eq!(status, 404, "nobody tracks that model");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_selection_service_answers_as_recorded() {
    let selector = Selector::new(setup(), SelectOptions::default(), context(), None);
    for case in ["ready_empty", "none", "worker", "worker_incomplete"] {
        same(&selector, "select", case).await;
    }
    alike(&selector, "select", "workers").await;
    for case in [
        "select",
        "reserve_from_cache",
        "reserve_again",
        "and_reserve",
        "loads",
        "potential",
        "overlap",
        "prefill_complete",
        "output_block",
        "free",
        "free_missing",
        "pinned_bad",
        "unknown_model",
        "ready",
        "health",
        "delete_worker",
    ] {
        same(&selector, "select", case).await;
    }
    let (_, text) = send(&selector, Verb::Delete, "/reservations/s1", "").await;
    assert_eq!(
        text, r#"{"status":"ok"}"#,
        "its worker is gone, its name is not"
    );
}

/// A prompt whose first blocks lie with one of two workers goes there, until that one has too much to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn selections_follow_the_cache_and_the_load() {
    let context = context();
    let (first, second) = (
        EventSocket::bind(&context.tasks).await,
        EventSocket::bind(&context.tasks).await,
    );
    let selector = Selector::new(setup(), SelectOptions::default(), context, None);
    for (id, socket) in [(1, &first), (2, &second)] {
        let worker = format!(
            r#"{{"worker_id":{id},"model_name":"m","endpoint":"http://w{id}","block_size":16,"kv_events_endpoint":"{}"}}"#,
            socket.address
        );
        let (status, text) = send(&selector, Verb::Post, "/workers", &worker).await;
        assert_eq!(status, 201, "{text}");
    }
    let ask = recorded("select", "and_reserve").body;
    let tokens = tokens_of(&ask);
    second.store(0, &tokens[..80], &[1, 2, 3, 4, 5]).await;
    until(
        &selector,
        Verb::Post,
        "/overlap_scores",
        &ask,
        r#""device_blocks":5"#,
    )
    .await;
    let mut chosen = Vec::new();
    for at in 0..12 {
        let named = ask.replace("\"s2\"", &format!("\"r{at}\""));
        let (status, text) = send(&selector, Verb::Post, "/select_and_reserve", &named).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(status, 200, "{text}");
        chosen.push(answer["worker_id"].as_u64().unwrap());
        if at == 0 {
            assert_eq!(answer["overlap"]["gpu"], 80);
            assert_eq!(answer["effective_prefill_tokens"], 16);
        }
    }
    assert_eq!(chosen[0], 2, "{chosen:?}");
    assert!(chosen.contains(&1), "not all of them: {chosen:?}");
    for at in 0..12 {
        let (status, _) = send(&selector, Verb::Delete, &format!("/reservations/r{at}"), "").await;
        assert_eq!(status, 200);
    }
    let (_, loads) = send(&selector, Verb::Get, "/loads", "").await;
    assert_eq!(
        loads.matches(r#""active_requests":0"#).count(),
        2,
        "{loads}"
    );
}

/// Images are part of the names of the blocks that they stand in, however a prompt names them.
#[tokio::test]
async fn images_are_part_of_a_prompt() {
    let selector = Selector::new(setup(), SelectOptions::default(), context(), None);
    let worker = recorded("select", "worker").body;
    assert_eq!(
        send(&selector, Verb::Post, "/workers", &worker).await.0,
        201
    );
    let tokens: Vec<u32> = (0..32).collect();
    let names = async |more: &str| {
        let body = format!(r#"{{"model_name":"m"{more}}}"#);
        let (status, text) = send(&selector, Verb::Post, "/select_and_reserve", &body).await;
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        let names = answer["sequence_hashes"].as_array().unwrap().clone();
        (names, answer["isl_tokens"].clone())
    };
    let media = r#"[null,{"mm_objects":[{"mm_hash":77,"offsets":[[2,5]]}]}]"#;
    let plain = names(&format!(r#","token_ids":{tokens:?}"#)).await;
    let image = names(&format!(
        r#","token_ids":{tokens:?},"block_mm_infos":{media}"#
    ))
    .await;
    let routed = names(&format!(
        r#","token_ids":[1],"mm_routing_info":{{"routing_token_ids":{tokens:?},"block_mm_infos":{media}}}"#
    ))
    .await;
    assert_eq!(image, routed);
    assert_eq!((image.0.len(), &image.1), (2, &Value::from(32)));
    assert_eq!(plain.0[0], image.0[0], "no image stands in it");
    assert_ne!(plain.0[1], image.0[1]);
    let bad = format!(r#"{{"model_name":"m","token_ids":{tokens:?},"block_mm_infos":[7]}}"#);
    assert_eq!(send(&selector, Verb::Post, "/select", &bad).await.0, 422);
}
