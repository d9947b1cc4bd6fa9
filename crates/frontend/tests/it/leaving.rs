//! Whether balancers and orchestrators can tell that requests are better sent elsewhere: no workers, and the end.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvasir_tasks::Tasks;
use kvasir_upstream::parse_worker;
use tokio::net::TcpStream;

use crate::client::Answer;
use crate::engine::{ANSWER, Step};
use crate::rig::{ASK, CHAT, Rig, in_time, until};

async fn get(rig: &Rig, path: &str) -> Answer {
    let mut client = rig.client().await;
    client
        .send(&format!("GET {path} HTTP/1.1\r\nhost: door\r\n\r\n"))
        .await;
    in_time(path, client.answer()).await
}

/// Status of the health page, and the stage that it names.
async fn health(rig: &Rig) -> (u16, serde_json::Value) {
    let answer = get(rig, "/health").await;
    (answer.status, answer.json()["stage"].clone())
}

#[tokio::test]
async fn without_workers_it_is_not_healthy() {
    let rig = Rig::of(0).await;
    assert_eq!(
        health(&rig).await,
        (503, "no_workers".into()),
        "nobody is named"
    );
    assert_eq!(get(&rig, "/live").await.status, 200);
    let engine = crate::engine::Engine::start(&rig.stage).await;
    let address = parse_worker(&engine.url()).unwrap();
    assert!(rig.fleet.watch(address.clone()));
    rig.joined(1).await;
    assert_eq!(health(&rig).await, (200, serde_json::Value::Null));
    assert_eq!(get(&rig, "/health").await.json()["status"], "healthy");
    // It served once and is gone: nobody waits for it, and nothing can be asked.
    assert!(rig.fleet.forget(address.id));
    rig.joined(0).await;
    let refused = rig.post(CHAT, ASK).await.status;
    assert!([404, 503].contains(&refused), "{refused}");
    assert_eq!(health(&rig).await, (503, "no_workers".into()));
    assert_eq!(get(&rig, "/live").await.status, 200);
}

#[tokio::test]
async fn who_leaves_says_so_and_serves_on_until_it_drains() {
    let rig = Rig::of(1).await;
    let mut kept = rig.client().await;
    kept.post(CHAT, "", ASK).await;
    let answer = kept.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (200, None));
    rig.app.start_leaving();
    assert_eq!(health(&rig).await, (503, "draining".into()));
    assert_eq!(get(&rig, "/live").await.status, 200);
    assert_eq!(get(&rig, "/v1/models").await.status, 200);
    assert_eq!(
        rig.post(CHAT, ASK).await.text(),
        ANSWER,
        "on a new connection"
    );
    // A kept one serves once more and says that it ends.
    kept.post(CHAT, "", ASK).await;
    let answer = in_time("answer", kept.answer()).await;
    assert_eq!(
        (answer.text(), answer.header("connection")),
        (ANSWER, Some("close"))
    );
    assert!(in_time("closed", kept.closed()).await);
    rig.app.start_draining();
    let refused = rig.post(CHAT, ASK).await;
    assert_eq!(refused.status, 503);
    assert!(refused.text().contains("not ready"), "{}", refused.text());
    assert_eq!(health(&rig).await, (503, "draining".into()));
    assert_eq!(get(&rig, "/live").await.status, 200, "the process lives");
    rig.at_rest().await;
}

/// Connections of HTTP/2 are told to go when it leaves; what runs on them ends in its own time.
#[tokio::test]
async fn http2_clients_are_told_to_go() {
    let rig = Rig::of(1).await;
    let socket = TcpStream::connect(rig.address()).await.unwrap();
    let executor = TokioExecutor::new();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(executor, TokioIo::new(socket))
            .await
            .unwrap();
    let driver = Tasks::new();
    driver.spawn(connection);
    rig.stage.play(vec![Step::Gate, crate::engine::ok()]);
    let request = http::Request::post(format!("http://door{CHAT}"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from_static(ASK.as_bytes())))
        .unwrap();
    let asked = driver.spawn(sender.send_request(request));
    until("it is under way", || rig.app.in_flight().count() == 1).await;
    rig.app.start_leaving();
    rig.stage.gate.add_permits(1);
    let answer = in_time("answer", asked).await.unwrap().unwrap().unwrap();
    assert_eq!(answer.status(), 200);
    drop(answer);
    until("the connection is over", || sender.is_closed()).await;
    driver.stop();
    rig.at_rest().await;
    assert_eq!(rig.server.shut_down(Duration::from_secs(5)).await, 0);
}
