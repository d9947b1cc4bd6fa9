//! Routes that only engines know: where they are, who may use them, and what never reaches an engine.

use std::time::Duration;

use kvasir_frontend::{ApiKeys, AppOptions, Limits, Paths};

use crate::engine::{Step, stream, unary};
use crate::rig::{CHAT, Rig, Setup};

fn moved() -> Setup {
    Setup::options(AppOptions {
        paths: Paths {
            embeddings: "/emb".into(),
            responses: "/answers".into(),
            messages: Some("/anthropic".into()),
            ..Paths::default()
        },
        ..AppOptions::default()
    })
}

#[tokio::test]
async fn a_moved_route_is_where_engines_have_it() {
    let rig = Rig::with(1, moved()).await;
    for (ours, theirs) in [
        ("/emb?x=1", "/v1/embeddings?x=1"),
        ("/answers", "/v1/responses"),
        ("/answers/input_tokens", "/v1/responses/input_tokens"),
        ("/anthropic", "/v1/messages"),
        (
            "/anthropic/count_tokens?beta=true",
            "/v1/messages/count_tokens?beta=true",
        ),
    ] {
        rig.stage.play(vec![Step::Write(unary("{}"))]);
        assert_eq!(
            rig.post(ours, r#"{"model":"m","nvext":{}}"#).await.text(),
            "{}"
        );
        let seen = rig.stage.seen().pop().unwrap();
        assert!(
            seen.head.starts_with(&format!("POST {theirs} ")),
            "{}",
            seen.head
        );
        assert_eq!(seen.body, br#"{"model":"m"}"#);
        let usual = theirs.split('?').next().unwrap();
        assert_eq!(rig.post(usual, r#"{"model":"m"}"#).await.status, 404);
    }
    let labelled = r#"endpoint="anthropic_messages""#;
    assert!(rig.page().await.contains(labelled));
    rig.at_rest().await;
}

#[tokio::test]
async fn anthropics_api_is_there_where_it_is_wanted_and_speaks_as_such() {
    let rig = Rig::of(1).await;
    let answer = rig.post("/v1/messages", r#"{"model":"m"}"#).await;
    assert_eq!(
        (answer.status, answer.text()),
        (
            404,
            r#"{"message":"Route not found: POST /v1/messages","type":"Not Found","code":404}"#
        )
    );
    let rig = Rig::with(1, moved()).await;
    let refused = rig.post("/anthropic", r#"{"model":"other"}"#).await;
    assert_eq!(
        (refused.status, refused.text()),
        (
            404,
            r#"{"type":"error","error":{"type":"not_found_error","message":"Model not found"}}"#
        )
    );
    rig.at_rest().await;
    let mut setup = moved();
    setup.options.keys = ApiKeys::parse("client").unwrap();
    let rig = Rig::with(1, setup).await;
    for (key, message) in [
        ("", "A key is needed"),
        ("x-api-key: other\r\n", "not valid"),
    ] {
        let mut client = rig.client().await;
        client.post("/anthropic", key, r#"{"model":"m"}"#).await;
        let refused = client.answer().await;
        assert_eq!(refused.status, 401);
        let (form, text) = (r#"{"type":"error","error":{"type":"#, refused.text());
        assert!(text.starts_with(form) && text.contains(message), "{text}");
    }
    rig.at_rest().await;
}

/// What we cannot read, nobody could take our extension out of.
#[tokio::test]
async fn an_object_that_we_cannot_read_reaches_no_engine() {
    let rig = Rig::of(1).await;
    let many: String = (0..1030).map(|n| format!("\"f{n}\":{n},")).collect();
    let odd = [
        format!("{{{many}\"model\":\"m\",\"nvext\":{{}}}}").into_bytes(),
        b"{\"x\":NaN,\"nvext\":{}}".to_vec(),
        b"\xef\xbb\xbf{\"nvext\":{}}".to_vec(),
        "{\"nvext\":{}}"
            .encode_utf16()
            .flat_map(u16::to_le_bytes)
            .collect(),
    ];
    for body in odd {
        let answer = rig.post("/v1/embeddings", &body).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
    }
    assert!(rig.stage.seen().is_empty(), "an engine saw it");
    let mut client = rig.client().await;
    let unsaid = "POST /rerank HTTP/1.1\r\nhost: door\r\ncontent-length: 2\r\n\r\n{,";
    client.send(unsaid).await;
    assert_eq!(
        client.answer().await.status,
        400,
        "some engines take it for JSON"
    );
    drop(client);
    assert!(rig.stage.seen().is_empty(), "an engine saw it");
    for body in ["[1,2]", "\"text\"", "7"] {
        assert_eq!(rig.post("/v1/embeddings", body).await.status, 200, "{body}");
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn an_error_in_the_first_event_sets_the_status_where_that_is_wanted() {
    const ERROR: &str =
        r#"{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}"#;
    let event = format!("data: {ERROR}\n\n");
    let ask = r#"{"model":"m","messages":[],"stream":true}"#;
    let play = |rig: &Rig| {
        rig.stage
            .play(vec![stream(&[event.as_bytes(), b"data: [DONE]\n\n"])]);
    };
    let rig = Rig::of(1).await;
    play(&rig);
    let answer = rig.post(CHAT, ask).await;
    assert_eq!(
        (answer.status, answer.text()),
        (200, &*format!("{event}data: [DONE]\n\n"))
    );
    rig.at_rest().await;
    for keep_alive in [None, Some(Duration::from_millis(1))] {
        let rig = Rig::with(
            1,
            Setup::options(AppOptions {
                error_peek: Some(Duration::from_secs(10)),
                limits: Limits {
                    keep_alive,
                    ..Limits::default()
                },
                ..AppOptions::default()
            }),
        )
        .await;
        play(&rig);
        let answer = rig.post(CHAT, ask).await;
        assert_eq!((answer.status, answer.text()), (400, ERROR));
        assert_eq!(answer.header("content-type"), Some("application/json"));
        rig.at_rest().await;
    }
}

/// The engine that breaks off may have run it: what it would keep is not made twice.
#[tokio::test]
async fn what_an_engine_may_have_kept_is_not_run_again() {
    let store = |store: &str| format!(r#"{{"model":"m"{store}}}"#);
    let answers_twice = r#","store":false"#;
    for (path, body, again) in [
        ("/v1/videos", store(""), false),
        ("/v1/files", store(""), false),
        ("/v1/responses", store(""), false),
        ("/v1/responses", store(r#","store":true"#), false),
        ("/v1/responses", store(answers_twice), true),
        ("/v1/embeddings", store(""), true),
        ("/inference/v1/generate", store(""), true),
    ] {
        let rig = Rig::of(2).await;
        rig.stage.play(vec![Step::Reset]);
        rig.stage.play(vec![Step::Write(unary("{}"))]);
        let answer = rig.post(path, &body).await;
        let expected = if again { (200, 2) } else { (502, 1) };
        assert_eq!(
            (answer.status, rig.stage.seen().len()),
            expected,
            "{path} {body}"
        );
        rig.at_rest().await;
    }
}

/// A worker that refuses, or cannot be reached, has not begun: another takes it.
#[tokio::test]
async fn what_no_engine_has_begun_goes_elsewhere() {
    const BUSY: &[u8] = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n";
    const BETWEEN: &[u8] = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n";
    let mut rig = Rig::of(2).await;
    rig.stage.play(vec![Step::Write(BUSY.to_vec())]);
    assert_eq!(rig.post("/v1/videos", r#"{"model":"m"}"#).await.status, 200);
    assert_eq!(rig.stage.seen().len(), 2);
    // Who stands between does not know how far it came.
    rig.stage.play(vec![Step::Write(BETWEEN.to_vec())]);
    assert_eq!(rig.post("/v1/videos", r#"{"model":"m"}"#).await.status, 502);
    assert_eq!(rig.stage.seen().len(), 3);
    // It goes out on a connection of its own: one that was kept may close under it.
    for _ in 0..4 {
        assert_eq!(rig.post("/v1/videos", r#"{"model":"m"}"#).await.status, 200);
    }
    drop(rig.engines.pop());
    for _ in 0..4 {
        assert_eq!(rig.post("/v1/videos", r#"{"model":"m"}"#).await.status, 200);
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn what_one_engine_keeps_is_found_there() {
    let rig = Rig::of(3).await;
    let get = async |method: &str, path: &str| {
        let mut client = rig.client().await;
        let head = format!("{method} {path} HTTP/1.1\r\nhost: door\r\nconnection: close\r\n\r\n");
        client.send(head).await;
        client.answer().await
    };
    let port = rig.engines[2].address.port();
    let kept = [
        ("/v1/responses/resp_1", "one"),
        ("/v1/responses/resp_1?stream=true", "two"),
        ("/v1/files/file-1/content", "three"),
    ];
    for (path, content) in kept {
        rig.stage.kept.lock().unwrap().insert((port, path), content);
        let answer = get("GET", path).await;
        assert_eq!((answer.status, answer.text()), (200, content));
        assert!(answer.header("x-request-id").is_some());
    }
    assert_eq!(get("GET", "/v1/responses/other").await.status, 404);
    for path in [
        "/v1/responses/..",
        "/v1/responses/a%20b",
        "/v1/files/a/../b",
    ] {
        assert_eq!(get("GET", path).await.status, 404, "{path}");
    }
    // A change is asked of all: the one that knows the id answers.
    const NOT_FOUND: &[u8] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
    for engine in &rig.engines[..2] {
        let port = engine.address.port();
        rig.stage.always.lock().unwrap().insert(port, NOT_FOUND);
    }
    rig.stage.play(vec![Step::Write(unary("{}"))]);
    let cancelled = rig.post("/v1/responses/resp_1/cancel", "").await;
    assert_eq!((cancelled.status, cancelled.text()), (200, "{}"));
    rig.at_rest().await;
}

/// All workers are asked at once, for a change too: one that is silent delays nobody, and one that fails is not the answer while
/// another has it.
#[tokio::test]
async fn what_one_engine_keeps_is_asked_of_all_at_once() {
    let rig = Rig::of(4).await;
    let ports: Vec<u16> = rig.engines.iter().map(|e| e.address.port()).collect();
    // Two are silent, whichever come first in order.
    for port in [ports[0], ports[1]] {
        rig.stage.freeze(port);
    }
    let path = "/v1/files/file-1";
    rig.stage
        .kept
        .lock()
        .unwrap()
        .insert((ports[3], path), "here");
    let began = tokio::time::Instant::now();
    let get = async || {
        let mut client = rig.client().await;
        let head = format!("GET {path} HTTP/1.1\r\nhost: door\r\nconnection: close\r\n\r\n");
        client.send(head).await;
        client.answer().await
    };
    for _ in 0..3 {
        assert_eq!(get().await.text(), "here");
    }
    const NOT_FOUND: &[u8] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
    rig.stage.always.lock().unwrap().insert(ports[2], NOT_FOUND);
    for _ in 0..2 {
        rig.stage.play(vec![Step::Write(unary("{}"))]);
        let mut client = rig.client().await;
        let head = format!("DELETE {path} HTTP/1.1\r\nhost: door\r\nconnection: close\r\n\r\n");
        client.send(head).await;
        assert_eq!(client.answer().await.text(), "{}");
        rig.stage.play(vec![Step::Write(unary("{}"))]);
        let cancelled = rig.post("/v1/responses/resp_1/cancel", "").await;
        assert_eq!(cancelled.text(), "{}");
    }
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "{:?}",
        began.elapsed()
    );
    // Nobody who can be asked has it, and not all could be.
    rig.stage.kept.lock().unwrap().clear();
    assert_eq!(get().await.status, 503);
    rig.stage.thaw();
    rig.at_rest().await;
}

/// Whoever is refused before a worker is chosen is counted, and has its line.
#[tokio::test]
async fn refusals_are_counted() {
    let rig = Rig::of(1).await;
    assert_eq!(
        rig.post("/v1/embeddings", r#"{"model":"x"}"#).await.status,
        404
    );
    assert_eq!(rig.post("/v1/embeddings", r#"{"model":"#).await.status, 400);
    rig.app.start_draining();
    assert_eq!(
        rig.post("/v1/embeddings", r#"{"model":"m"}"#).await.status,
        503
    );
    let page = rig.page().await;
    for kind in ["not_found", "validation", "unavailable"] {
        let counted = |line: &&str| {
            line.starts_with("dynamo_frontend_requests_total{")
                && line.contains(r#"endpoint="embeddings""#)
                && line.contains(&format!(r#"error_type="{kind}""#))
        };
        let line = page.lines().find(counted);
        assert!(
            line.is_some_and(|line| line.ends_with(" 1")),
            "{kind}: {page}"
        );
    }
    rig.at_rest().await;
}
