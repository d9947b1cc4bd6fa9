//! One service begins with the index of another.

use bytes::Bytes;
use kvasir_host::LoadedSnapshot;
use kvasir_services::{AnswerBody, Api, Ask, Indexer, SelectOptions, Selector, Verb};
use kvasir_types::Token;

use crate::rig::{EventSocket, context, send, setup, until};

async fn snapshot(api: &impl Api) -> LoadedSnapshot {
    let ask = Ask {
        verb: Verb::Get,
        path: "/snapshot".to_owned(),
        query: None,
        body: Bytes::new(),
    };
    let answer = api.answer(ask).await;
    let AnswerBody::Bytes(bytes) = answer.body else {
        panic!("{answer:?}")
    };
    LoadedSnapshot::from_bytes(bytes.into()).unwrap()
}

fn tokens(first: Token) -> Vec<Token> {
    (first..first + 48).collect()
}

fn query(first: Token) -> String {
    format!(r#"{{"model_name":"m","token_ids":{:?}}}"#, tokens(first))
}

fn register(id: u64, socket: &EventSocket) -> String {
    format!(
        r#"{{"instance_id":{id},"endpoint":"{}","model_name":"m","block_size":16}}"#,
        socket.address
    )
}

/// It knows what the other knew once an engine is registered again, hears what comes then, and forgets what it missed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_indexer_that_starts_goes_on_where_another_stood() {
    let context = context();
    let (heard, missed) = (
        EventSocket::bind(&context.tasks).await,
        EventSocket::bind(&context.tasks).await,
    );
    let first = Indexer::new(setup(), context.clone(), None);
    for (id, socket) in [(1, &heard), (2, &missed)] {
        let (status, text) = send(&first, Verb::Post, "/register", &register(id, socket)).await;
        assert_eq!(status, 201, "{text}");
        socket.store(0, &tokens(100), &[1, 2, 3]).await;
        let known = format!(r#""{id}":{{"longest_matched":48"#);
        until(&first, Verb::Post, "/query", &query(100), &known).await;
    }
    let second = Indexer::new(setup(), context.clone(), None).with_snapshot(snapshot(&first).await);
    // Nobody is told of an engine that is not registered here.
    let (status, _) = send(&second, Verb::Post, "/query", &query(100)).await;
    assert_eq!(status, 404);
    // The second engine tells something that only the first service hears.
    missed.store(1, &tokens(300), &[4, 5, 6]).await;
    until(&first, Verb::Post, "/query", &query(300), r#""gpu":48"#).await;
    for (id, socket) in [(1, &heard), (2, &missed)] {
        let (status, text) = send(&second, Verb::Post, "/register", &register(id, socket)).await;
        assert_eq!(status, 201, "{text}");
    }
    let (_, text) = send(&second, Verb::Post, "/query", &query(100)).await;
    assert_eq!(text.matches(r#""gpu":48"#).count(), 2, "{text}");
    until(&second, Verb::Get, "/workers", "", r#""status":"active""#).await;
    while [&heard, &missed]
        .iter()
        .any(|socket| socket.listeners() < 2)
    {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    heard.store(1, &tokens(500), &[7, 8, 9]).await;
    missed.store(2, &tokens(500), &[7, 8, 9]).await;
    let both = r#""2":{"0":48}"#;
    until(&second, Verb::Post, "/query", &query(500), both).await;
    until(
        &second,
        Verb::Post,
        "/query",
        &query(500),
        r#""1":{"0":48}"#,
    )
    .await;
    // Of the one whose message was missed nothing older is known; of the other all is.
    let (_, text) = send(&second, Verb::Post, "/query", &query(100)).await;
    assert!(text.contains(r#""1":{"0":48}"#), "{text}");
    assert!(!text.contains(r#""2":{"0":48}"#), "{text}");
    // An engine that is registered anew after its group is gone begins with nothing.
    for id in [1, 2] {
        let body = format!(r#"{{"instance_id":{id},"model_name":"m"}}"#);
        assert_eq!(send(&second, Verb::Post, "/unregister", &body).await.0, 200);
    }
    send(&second, Verb::Post, "/register", &register(1, &heard)).await;
    let (_, text) = send(&second, Verb::Post, "/query", &query(100)).await;
    assert!(!text.contains("48"), "{text}");
}

/// What an indexer knows is what a selection service goes by.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_selection_service_goes_on_where_an_indexer_stood() {
    let context = context();
    let socket = EventSocket::bind(&context.tasks).await;
    let indexer = Indexer::new(setup(), context.clone(), None);
    send(&indexer, Verb::Post, "/register", &register(1, &socket)).await;
    socket.store(0, &tokens(100), &[1, 2, 3]).await;
    until(&indexer, Verb::Post, "/query", &query(100), r#""gpu":48"#).await;
    let select = Selector::new(setup(), SelectOptions::default(), context.clone(), None)
        .with_snapshot(snapshot(&indexer).await);
    let worker = format!(
        r#"{{"worker_id":1,"model_name":"m","endpoint":"http://w","block_size":16,"kv_events_endpoint":"{}"}}"#,
        socket.address
    );
    let (status, text) = send(&select, Verb::Post, "/workers", &worker).await;
    assert_eq!(status, 201, "{text}");
    let (_, text) = send(&select, Verb::Post, "/overlap_scores", &query(100)).await;
    assert!(text.contains(r#""device_blocks":3"#), "{text}");
    let pages = [
        send(&indexer, Verb::Get, "/dump", "").await,
        send(&select, Verb::Get, "/dump", "").await,
    ];
    assert_eq!(pages[0], pages[1]);
    assert!(pages[0].1.contains("block_hash"), "{pages:?}");
}
