//! Sessions that an engine behind HTTP holds: it is told when they begin and end, and that fails no request.

use kvasir_router::RouterMode;
use serde_json::{Value, json};

use crate::engine::{ANSWER, Seen, Step};
use crate::rig::{CHAT, Rig, Setup, until};

const FAILED: &[u8] = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\nno";
const NO_ROUTE: &[u8] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";

fn ask(control: &Value) -> String {
    json!({
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "nvext": {"session_control": control},
    })
    .to_string()
}

fn path(seen: &Seen) -> &str {
    seen.head.split(' ').nth(1).unwrap()
}

fn sessions(rig: &Rig) -> usize {
    rig.model().host.ask(|router| router.sessions())
}

#[tokio::test]
async fn an_engine_opens_a_session_before_its_first_request_and_closes_it_after_the_last() {
    let rig = Rig::with(2, Setup::in_mode(RouterMode::Kv)).await;
    let open = ask(&json!({"session_id": "s", "action": "open", "timeout": 60}));
    assert_eq!(rig.post(CHAT, &open).await.text(), ANSWER);
    let seen = rig.stage.seen();
    assert_eq!((path(&seen[0]), path(&seen[1])), ("/open_session", CHAT));
    assert_eq!(seen[0].port, seen[1].port, "where the request goes");
    let told: Value = serde_json::from_slice(&seen[0].body).unwrap();
    assert_eq!(
        told,
        json!({"session_id": "s", "timeout": 90, "capacity_of_str_len": 65536})
    );
    assert_eq!(sessions(&rig), 1);

    // It is open: its requests go there, and nothing more is said.
    for control in [
        json!({"session_id": "s"}),
        json!({"session_id": "s", "action": "open"}),
    ] {
        assert_eq!(rig.post(CHAT, ask(&control)).await.text(), ANSWER);
    }
    let seen = rig.stage.seen();
    assert_eq!(seen.len(), 4);
    assert!(seen.iter().all(|other| other.port == seen[0].port));

    let close = ask(&json!({"session_id": "s", "action": "close"}));
    assert_eq!(rig.post(CHAT, &close).await.text(), ANSWER);
    until("the engine is told", || rig.stage.seen().len() == 6).await;
    let seen = rig.stage.seen();
    assert_eq!((path(&seen[4]), path(&seen[5])), (CHAT, "/close_session"));
    assert_eq!(seen[5].port, seen[4].port);
    assert_eq!(sessions(&rig), 0);
    rig.at_rest().await;
}

#[tokio::test]
async fn an_engine_that_opens_no_session_still_answers() {
    let rig = Rig::with(1, Setup::in_mode(RouterMode::Kv)).await;
    let open = ask(&json!({"session_id": "s", "action": "open"}));
    for refusal in [FAILED, NO_ROUTE] {
        rig.stage.play(vec![Step::Write(refusal.to_vec())]);
        assert_eq!(rig.post(CHAT, &open).await.text(), ANSWER);
        assert_eq!(sessions(&rig), 0, "nothing is bound");
    }
    rig.at_rest().await;
}
