//! Routes that only engines know: where they are, who may use them, and what never reaches an engine.

use std::time::Duration;

use kvasir_frontend::{AppOptions, Limits, Paths};

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
