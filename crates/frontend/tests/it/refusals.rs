//! Requests that reach no worker: each has an answer with words, an id and a count.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kvasir_frontend::{ApiKeys, AppOptions, Limits};
use kvasir_tasks::Tasks;
use tokio::net::TcpStream;

use crate::engine::Step;
use crate::rig::{ASK, CHAT, Rig, Setup, in_time, until};

/// Fields of a head that are taken, by HTTP/1.1 and HTTP/2 alike.
const FIELDS_MAX: usize = 100;

fn fields(count: usize) -> String {
    (0..count).map(|n| format!("x-{n}: 1\r\n")).collect()
}

/// A value of the metrics page, of the series that begins so.
async fn series(rig: &Rig, begins: &str) -> f64 {
    let page = rig.page().await;
    let line = page.lines().find(|line| line.starts_with(begins));
    let value = line.and_then(|line| line.rsplit(' ').next());
    value.map_or(0.0, |value| value.parse().unwrap())
}

#[tokio::test]
async fn a_request_too_many_leaves_its_trace() {
    let limits = Limits {
        requests_max: 1,
        ..Limits::default()
    };
    let rig = Rig::with(1, Setup::limits(limits)).await;
    rig.stage.play(vec![Step::Gate, crate::engine::ok()]);
    let mut first = rig.client().await;
    first.post(CHAT, "", ASK).await;
    until("it is under way", || rig.app.in_flight().count() == 1).await;
    let refused = rig.post(CHAT, ASK).await;
    assert_eq!(refused.status, 503);
    assert!(refused.header("x-request-id").is_some(), "{}", refused.head);
    let mut named = rig.client().await;
    named.post(CHAT, "x-request-id: mine\r\n", ASK).await;
    let refused = named.answer().await;
    assert_eq!(refused.header("x-request-id"), Some("mine"));
    let labels = r#"{endpoint="chat_completions",model="unknown"}"#;
    let rejected = format!("dynamo_frontend_model_rejection_total{labels}");
    assert_eq!(series(&rig, &rejected).await, 2.0);
    let refused = r#"dynamo_frontend_requests_total{endpoint="chat_completions",error_type="overload",model="unknown""#;
    assert_eq!(series(&rig, refused).await, 2.0);
    assert_eq!(rig.metric("dynamo_tasks_rejected_total").await, 2.0);
    rig.stage.gate.add_permits(1);
    assert_eq!(first.answer().await.status, 200);
    assert_eq!(rig.metric("dynamo_tasks_issued_total").await, 3.0);
    drop((first, named));
    rig.at_rest().await;
}

#[tokio::test]
async fn refusals_say_why_and_are_counted() {
    let options = AppOptions {
        keys: ApiKeys::parse("secret").unwrap(),
        admin_token: ApiKeys::one("token"),
        ..AppOptions::default()
    };
    let rig = Rig::with(1, Setup::options(options)).await;
    let mut client = rig.client().await;
    let key = "authorization: Bearer wrong\r\n";
    let empty = "content-length: 0\r\n";
    for (line, fields, status, says) in [
        ("POST /v1/chat/completions", empty, 401, "A key is needed"),
        (
            "POST /v1/chat/completions",
            key,
            401,
            "The key is not valid",
        ),
        ("GET /workers", empty, 401, "token is needed"),
        ("GET /workers", key, 401, "The token is not valid"),
        (
            "DELETE /v1/chat/completions",
            empty,
            405,
            "this path has POST",
        ),
        ("POST /v1/nothing", empty, 404, "Route not found"),
    ] {
        let head = format!("{line} HTTP/1.1\r\nhost: door\r\n{fields}\r\n");
        client.send(head).await;
        let answer = in_time(line, client.answer()).await;
        assert_eq!(answer.status, status, "{line}");
        let body = answer.json();
        assert!(body["message"].as_str().unwrap().contains(says), "{body}");
        assert_eq!(body["code"], status);
        assert!(answer.header("x-request-id").is_some(), "{line}");
        assert_eq!(answer.header("allow"), (status == 405).then_some("POST"));
    }
    let refused = "dynamo_frontend_requests_total{endpoint=";
    let chat = r#""chat_completions",error_type="validation",model="unknown""#;
    assert_eq!(series(&rig, &[refused, chat].concat()).await, 2.0);
    let other = r#""unknown",error_type="validation",model="unknown""#;
    assert_eq!(series(&rig, &[refused, other].concat()).await, 3.0);
    let lost = r#""unknown",error_type="not_found",model="unknown""#;
    assert_eq!(series(&rig, &[refused, lost].concat()).await, 1.0);
    drop(client);
    rig.at_rest().await;
}

#[tokio::test]
async fn a_head_is_bounded_alike_in_both_versions() {
    let limits = Limits {
        header_bytes_max: 8192,
        ..Limits::default()
    };
    let rig = Rig::with(1, Setup::limits(limits)).await;
    let long = format!("x-long: {}\r\n", "x".repeat(9000));
    // The host is a field, too.
    for (fields, status) in [
        (fields(FIELDS_MAX - 1), 200),
        (fields(FIELDS_MAX), 431),
        (long.clone(), 431),
    ] {
        let mut client = rig.client().await;
        let head = format!("GET /live HTTP/1.1\r\nhost: door\r\n{fields}\r\n");
        client.try_send(head).await;
        assert_eq!(in_time("answer", client.answer()).await.status, status);
    }
    until_counted(&rig, 2.0).await;
    let socket = TcpStream::connect(rig.address()).await.unwrap();
    let executor = TokioExecutor::new();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(executor, TokioIo::new(socket))
            .await
            .unwrap();
    let driver = Tasks::new();
    driver.spawn(connection);
    for (fields, status) in [
        (fields(FIELDS_MAX), 200),
        (fields(FIELDS_MAX + 1), 431),
        (long, 431),
    ] {
        let mut request = http::Request::get("http://door/live");
        for (name, value) in fields.lines().filter_map(|line| line.split_once(": ")) {
            request = request.header(name, value);
        }
        let request = request.body(Full::<Bytes>::default()).unwrap();
        let answer = in_time("answer", sender.send_request(request))
            .await
            .unwrap();
        assert_eq!(answer.status(), status);
        assert_eq!(answer.headers().contains_key("x-request-id"), status == 431);
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        assert!(!body.is_empty());
    }
    until_counted(&rig, 4.0).await;
    let counted = r#"dynamo_frontend_requests_total{endpoint="unknown",error_type="validation""#;
    assert_eq!(series(&rig, counted).await, 4.0);
    drop(sender);
    driver.stop();
    rig.at_rest().await;
}

/// What the library refuses by itself is counted when its connection has ended.
async fn until_counted(rig: &Rig, limits: f64) {
    let counted = async {
        while series(rig, r#"kvasir_limit_reached_total{limit="header_bytes"}"#).await < limits {
            tokio::task::yield_now().await;
        }
    };
    in_time("it is counted", counted).await;
}

#[tokio::test]
async fn a_pin_that_leads_nowhere_is_named() {
    let rig = Rig::of(1).await;
    let mut client = rig.client().await;
    client
        .post(CHAT, "x-dynamo-worker-instance-id: 4242\r\n", ASK)
        .await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 400);
    let message = answer.json()["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("Invalid request: worker "), "{message}");
    assert!(message.contains("4242"), "{message}");
    drop(client);
    rig.at_rest().await;
}
