//! Workers that come and go, and the end of it all, while requests run.

use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_upstream::parse_worker;

use crate::client::Client;
use crate::engine::{ANSWER, DONE, Engine, FIRST, Step, chunk, first_event};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, in_time, until};

/// Clients that ask at once.
const CLIENTS: usize = 8;
/// How often each asks.
const TIMES: usize = 40;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_come_and_go_under_load() {
    let rig = Rig::of(2).await;
    let (clients, address) = (Tasks::new(), rig.address());
    let running: Vec<_> = (0..CLIENTS)
        .map(|_| {
            clients.spawn(async move {
                let mut client = Client::connect(address).await;
                for _ in 0..TIMES {
                    client.post(CHAT, "", ASK).await;
                    let answer = client.answer().await;
                    assert_eq!((answer.status, answer.text()), (200, ANSWER));
                }
            })
        })
        .collect();
    until("load", || rig.stage.seen().len() > CLIENTS).await;
    let third = Engine::start(&rig.stage).await;
    let gone = rig.engines[0].address.port();
    assert!(rig.fleet.watch(parse_worker(&third.url()).unwrap()));
    assert!(
        !rig.fleet.watch(parse_worker(&third.url()).unwrap()),
        "once is enough"
    );
    rig.joined(3).await;
    let first = parse_worker(&rig.engines[0].url()).unwrap().id;
    assert!(rig.fleet.forget(first));
    assert!(!rig.fleet.forget(first));
    rig.joined(2).await;
    for client in running {
        in_time("client ends", client).await.unwrap().unwrap();
    }
    rig.only_others_serve(gone).await;
    assert_eq!(rig.fleet.workers().len(), 2);
    rig.at_rest().await;
}

#[tokio::test]
async fn a_worker_that_is_let_go_finishes_what_it_has() {
    let rig = Rig::of(1).await;
    let rest = [chunk(DONE.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    rig.stage
        .play(vec![first_event(), Step::Gate, Step::Write(rest)]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(client.read_until("\n\n").await);
    let worker = parse_worker(&rig.engines[0].url()).unwrap().id;
    assert!(rig.fleet.forget(worker));
    until("it is draining", || rig.is_draining(worker)).await;
    assert_eq!(rig.post(CHAT, ASK).await.status, 503);
    assert_eq!(rig.booked_requests(), 1, "what runs stays booked");
    rig.stage.gate.add_permits(1);
    assert_eq!(
        in_time("end", client.answer()).await.text(),
        [FIRST, DONE].concat()
    );
    rig.joined(0).await;
    until("it is forgotten", || rig.app.members().list().is_empty()).await;
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn what_runs_is_finished_before_the_door_closes() {
    let rig = Rig::of(2).await;
    let rest = [chunk(DONE.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        rig.stage
            .play(vec![first_event(), Step::Gate, Step::Write(rest.clone())]);
        let mut client = rig.client().await;
        client.post(CHAT, "", ASK_STREAM).await;
        assert!(client.read_until("\n\n").await);
        clients.push(client);
    }
    let (address, app, stage) = (rig.address(), Arc::clone(&rig.app), Arc::clone(&rig.stage));
    let closer = Tasks::new();
    let closing = closer.spawn(rig.server.shut_down(Duration::from_secs(20)));
    until("draining", || app.is_draining()).await;
    let mut late = Client::connect(address).await;
    late.post(CHAT, "connection: close\r\n", ASK).await;
    assert_eq!(late.answer().await.status, 503);
    assert_eq!(stage.seen().len(), CLIENTS);
    stage.gate.add_permits(CLIENTS);
    for mut client in clients {
        let answer = in_time("stream ends", client.answer()).await;
        assert_eq!(
            (answer.whole, answer.text()),
            (true, &*[FIRST, DONE].concat())
        );
    }
    drop(late);
    assert_eq!(
        in_time("closed", closing).await.unwrap(),
        Some(0),
        "nothing was cut"
    );
    assert!(app.tasks().is_empty());
}

#[tokio::test]
async fn the_timeout_ends_and_the_rest_is_cut() {
    let rig = Rig::of(1).await;
    rig.stage.play(vec![first_event(), Step::Hang]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(client.read_until("\n\n").await);
    let (app, stage) = (Arc::clone(&rig.app), Arc::clone(&rig.stage));
    let cut = in_time("closed", rig.server.shut_down(Duration::from_millis(20))).await;
    assert_eq!(cut, 1);
    assert!(!client.answer().await.whole);
    in_time("the engine is left", stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    assert!(app.tasks().is_empty());
}

/// A worker that is named and has not answered may bring any model: not ready, not unknown.
#[tokio::test]
async fn a_model_that_may_still_come_is_not_ready() {
    let rig = Rig::of(0).await;
    let gone = Engine::start(&rig.stage).await;
    let url = gone.url();
    drop(gone);
    assert_eq!(rig.post(CHAT, ASK).await.status, 404, "nobody is named");
    assert!(rig.fleet.watch(parse_worker(&url).unwrap()));
    let get = async |path: &str| {
        let mut client = rig.client().await;
        client
            .send(&format!("GET {path} HTTP/1.1\r\nhost: door\r\n\r\n"))
            .await;
        client.answer().await
    };
    for (path, body) in [(CHAT, ASK), (CHAT, ASK_STREAM), ("/v1/embeddings", ASK)] {
        let answer = rig.post(path, body).await;
        assert_eq!(answer.status, 503, "{path}");
        assert!(answer.text().contains("not ready"), "{}", answer.text());
    }
    let health = get("/health").await;
    assert_eq!(health.status, 503);
    let health = health.json();
    assert_eq!(health["status"], "not_ready");
    assert_eq!(health["waiting_for"], serde_json::json!([url]));
    let models = get("/v1/models").await;
    assert_eq!(
        (models.status, &models.json()["data"]),
        (200, &serde_json::json!([]))
    );
    // Another comes: it is ready, and says whom it waits for.
    let here = Engine::start(&rig.stage).await;
    assert!(rig.fleet.watch(parse_worker(&here.url()).unwrap()));
    rig.joined(1).await;
    until("it is reported", || rig.app.members().awaited().len() == 1).await;
    let health = get("/health").await;
    assert_eq!(
        (health.status, &health.json()["status"]),
        (200, &"healthy".into())
    );
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    let other = ASK.replace("\"m\"", "\"other\"");
    assert_eq!(
        rig.post(CHAT, &other).await.status,
        503,
        "it may still come"
    );
    let lost = parse_worker(&url).unwrap().id;
    assert!(rig.fleet.forget(lost));
    assert_eq!(rig.post(CHAT, &other).await.status, 404);
}
