//! The operators' page and its stream: who gets them, and what a viewer is told.

use std::net::SocketAddr;

use kvasir_frontend::{ApiKeys, AppOptions};
use serde_json::{Value, json};

use crate::client::{Answer, Client};
use crate::rig::{ASK, CHAT, Rig, Setup, in_time};

async fn get(address: SocketAddr, path: &str, headers: &str) -> Answer {
    let mut client = Client::connect(address).await;
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: door\r\n{headers}connection: close\r\n\r\n");
    client.send(request).await;
    in_time(path, client.answer()).await
}

/// A stream, after its head.
async fn watch(address: SocketAddr, headers: &str) -> Client {
    let mut client = Client::connect(address).await;
    let path = "/dashboard/stream";
    client
        .send(format!(
            "GET {path} HTTP/1.1\r\nhost: door\r\n{headers}\r\n"
        ))
        .await;
    let head = in_time("the head", client.take_until("\r\n\r\n")).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    client
}

/// The next event: its name, its id and what it says.
async fn event(client: &mut Client) -> (String, String, Value) {
    in_time("an event", client.take_until("event: ")).await;
    let text = in_time("an event", client.take_until("\n\n")).await;
    let mut lines = text.lines();
    let name = lines.next().unwrap().to_owned();
    let id = lines
        .next()
        .unwrap()
        .strip_prefix("id: ")
        .unwrap()
        .to_owned();
    let data = lines.next().unwrap().strip_prefix("data: ").unwrap();
    (name, id, serde_json::from_str(data).unwrap())
}

#[tokio::test]
async fn the_page_is_open_and_the_stream_needs_the_token() {
    let mut rig = Rig::with(
        1,
        Setup::options(AppOptions {
            admin_apart: true,
            admin_token: ApiKeys::one("root"),
            ..AppOptions::default()
        }),
    )
    .await;
    let free = "127.0.0.1:0".parse().unwrap();
    rig.server.start_admin(free).await.unwrap();
    let (data, admin) = (rig.address(), rig.server.admin_address().unwrap());
    for path in ["/dashboard", "/dashboard/main.js", "/dashboard/base.css"] {
        let page = get(admin, path, "").await;
        assert_eq!(page.status, 200, "{path}");
        let policy = page.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'; "));
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(get(data, path, "").await.status, 404, "{path}");
    }
    assert_eq!(get(admin, "/dashboard/nothing.js", "").await.status, 404);
    for path in ["/dashboard/stream", "/settings", "/sessions"] {
        assert_eq!(get(admin, path, "").await.status, 401, "{path}");
        assert_eq!(get(data, path, "").await.status, 404, "{path}");
    }
    let token = "authorization: Bearer root\r\n";
    let (name, _, told) = event(&mut watch(admin, token).await).await;
    assert_eq!((name.as_str(), &told["can_act"]), ("hello", &json!(true)));
    assert_eq!(get(admin, "/settings", token).await.json(), json!({}));
}

#[tokio::test]
async fn a_browser_is_sent_to_the_page_and_a_program_is_told_of_it() {
    let rig = Rig::of(1).await;
    let browser = get(rig.address(), "/", "accept: text/html,*/*\r\n").await;
    assert_eq!(
        (browser.status, browser.header("location")),
        (303, Some("/dashboard"))
    );
    let program = get(rig.address(), "/", "accept: */*\r\n").await;
    assert_eq!(program.json()["dashboard"], "/dashboard");
    let off = Setup::options(AppOptions {
        admin_enabled: false,
        ..AppOptions::default()
    });
    let rig = Rig::with(1, off).await;
    let browser = get(rig.address(), "/", "accept: text/html\r\n").await;
    assert_eq!(
        (browser.status, &browser.json()["dashboard"]),
        (200, &Value::Null)
    );
    assert_eq!(get(rig.address(), "/dashboard", "").await.status, 404);
}

#[tokio::test]
async fn a_viewer_is_told_everything_and_then_what_changed() {
    let rig = Rig::of(2).await;
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    let mut viewer = watch(rig.address(), "").await;
    let (name, id, told) = event(&mut viewer).await;
    assert_eq!(name, "hello");
    assert_eq!(told["fleet"].as_array().unwrap().len(), 2);
    assert_eq!(told["models"][0]["name"], "m");
    let decision = &told["decisions"][0];
    assert_eq!(
        (&decision["model"], &decision["outcome"]["status"]),
        (&json!("m"), &json!(200))
    );
    assert_eq!(told["traffic"][""]["totals"]["succeeded"], 1);
    // One more request: it comes with one of the next events, and its end with that one or a later one.
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    let (mut decided, mut ended, mut last) = (None, None, id);
    while ended.is_none() {
        let (name, id, told) = event(&mut viewer).await;
        assert_eq!(name, "tick");
        assert!(
            told.get("models").is_none(),
            "they have not changed: {told}"
        );
        if let Some(row) = told["decisions"].get(0) {
            assert!(decided.replace(row["id"].clone()).is_none(), "told once");
        }
        if let Some(row) = told["ended"].get(0) {
            assert_eq!(
                (Some(&row["id"]), &row["outcome"]["status"]),
                (decided.as_ref(), &json!(200))
            );
            ended = Some(row.clone());
        }
        last = id;
    }
    // Of a busy second the newest are told and the others counted.
    for _ in 0..60 {
        assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    }
    let mut counted = 0;
    while counted < 60 {
        let (_, id, told) = event(&mut viewer).await;
        let listed = told["decisions"].as_array().unwrap().len() as u64;
        assert!(listed <= 40, "{listed}");
        counted += listed + told["skipped"].as_u64().unwrap();
        last = id;
    }
    assert_eq!(counted, 60);
    // Who comes back is told what it has missed; who was never here, or in another process, everything.
    drop(viewer);
    let mut other = watch(rig.address(), "").await;
    assert_eq!(event(&mut other).await.0, "hello");
    assert_eq!(event(&mut other).await.0, "tick");
    let mut back = watch(rig.address(), &format!("last-event-id: {last}\r\n")).await;
    let (name, id, _) = event(&mut back).await;
    let number = |id: &str| id.split_once('-').unwrap().1.parse::<u64>().unwrap();
    assert_eq!((name.as_str(), number(&id)), ("tick", number(&last) + 1));
    for strange in ["0-1", "x", "-", &format!("{last}000")] {
        let mut viewer = watch(rig.address(), &format!("last-event-id: {strange}\r\n")).await;
        assert_eq!(event(&mut viewer).await.0, "hello", "{strange}");
    }
}

#[tokio::test]
async fn streams_end_when_the_server_does() {
    let rig = Rig::of(1).await;
    let mut viewer = watch(rig.address(), "").await;
    assert_eq!(event(&mut viewer).await.0, "hello");
    let ends = rig.server.shut_down(std::time::Duration::from_secs(10));
    assert_eq!(in_time("the end", ends).await, 0, "a viewer is no request");
    let rest = in_time("the end of the stream", viewer.take_until("\r\n0\r\n\r\n")).await;
    assert!(rest.ends_with("0\r\n\r\n"), "whole: {rest:?}");
}

#[tokio::test]
async fn decisions_are_found_by_model_worker_and_outcome() {
    let rig = Rig::of(2).await;
    for _ in 0..4 {
        assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    }
    let found = async |query: &str| {
        let answer = get(rig.address(), &format!("/decisions{query}"), "").await;
        assert_eq!(answer.status, 200, "{query}");
        answer.json()["decisions"].as_array().unwrap().clone()
    };
    let all = found("").await;
    assert_eq!(all.len(), 4);
    let winner = all[0]["winner_name"].as_str().unwrap();
    let worker = winner.split_once('/').unwrap().0;
    assert_eq!(
        found(&format!("?worker={worker}")).await.len(),
        2,
        "in turn"
    );
    assert_eq!(found("?model=m&outcome=ok&limit=3").await.len(), 3);
    assert!(found("?outcome=failed").await.is_empty() && found("?model=x").await.is_empty());
    assert_eq!(
        get(rig.address(), "/decisions?nonsense=1", "").await.status,
        400
    );
}

#[tokio::test]
async fn other_weights_are_tried_on_what_was_decided() {
    let rig = Rig::with(2, Setup::in_mode(kvasir_router::RouterMode::Kv)).await;
    for _ in 0..3 {
        assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    }
    let decisions = get(rig.address(), "/decisions?limit=1", "").await.json();
    let decision = &decisions["decisions"][0];
    let names = decision["candidate_names"].as_array().unwrap();
    assert_eq!(
        (names.len(), names.contains(&decision["winner_name"])),
        (2, true)
    );
    let same = rig.post("/what_if", r#"{"last":10}"#).await.json();
    assert_eq!(
        (&same["considered"], &same["moved"], &same["moves"]),
        (&json!(3), &json!(0), &json!([]))
    );
    let shares = same["ranks"].as_array().unwrap();
    let before: i64 = shares
        .iter()
        .map(|rank| rank["before"].as_i64().unwrap())
        .sum();
    assert_eq!(before, 3);
    let other = rig.post("/what_if", r#"{"model":"nobody"}"#).await.json();
    assert_eq!(other["considered"], 0);
    let wrong = rig
        .post("/what_if", r#"{"weights":{"prefill_load_scale":-1}}"#)
        .await;
    assert_eq!(wrong.status, 400);
    let sessions = get(rig.address(), "/sessions", "").await.json();
    assert_eq!(sessions, json!({"total": 0, "sessions": []}));
}
