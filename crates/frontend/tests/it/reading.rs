//! What prompts become tokens by, when engines are asked, refuse, or are too slow.

use std::sync::atomic::Ordering;

use kvasir_router::{Mode, RouterConfig};

use crate::engine::{Step, unary};
use crate::rig::{CHAT, Rig, Setup, in_time};

const ASK: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi there"}]}"#;

async fn kv_rig() -> Rig {
    let setup = Setup {
        router: RouterConfig {
            router_mode: Mode::Kv,
            ..RouterConfig::default()
        },
        ..Setup::usual()
    };
    let rig = Rig::with(1, setup).await;
    rig.stage.tokenizes.store(true, Ordering::SeqCst);
    rig
}

fn paths(rig: &Rig) -> Vec<String> {
    let seen = rig.stage.seen();
    let path = |head: &str| head.split(' ').nth(1).unwrap().to_owned();
    seen.iter().map(|seen| path(&seen.head)).collect()
}

fn read_by(rig: &Rig, source: &str) -> u64 {
    let prompts = &rig.app.metrics().prompts_read_total;
    prompts.with_label_values(&["m", source]).get()
}

fn refuse(status: &str) -> Vec<Step> {
    let text = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
    vec![Step::Write(text.into_bytes())]
}

#[tokio::test]
async fn the_engine_is_asked_once_for_the_tokens_of_a_prompt() {
    let rig = kv_rig().await;
    rig.stage
        .play(vec![Step::Write(unary(r#"{"count":3,"tokens":[5,6,7]}"#))]);
    for _ in 0..3 {
        assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    }
    assert_eq!(paths(&rig), ["/tokenize", CHAT, CHAT, CHAT]);
    let question = r#"{"model":"m","messages":[{"role":"user","content":"hi there"}]}"#;
    assert_eq!(rig.stage.seen()[0].body, question.as_bytes());
    assert_eq!((read_by(&rig, "tokenize"), read_by(&rig, "bytes")), (3, 0));
    assert_eq!(rig.workers().await[0]["tokens_from"], "tokenize");
    rig.at_rest().await;
}

/// An engine without the route is left alone, and a request never fails for it.
#[tokio::test]
async fn without_the_route_bytes_stand_in() {
    let rig = kv_rig().await;
    rig.stage.play(refuse("404 Not Found"));
    for _ in 0..3 {
        assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    }
    assert_eq!(paths(&rig), ["/tokenize", CHAT, CHAT, CHAT]);
    assert_eq!(read_by(&rig, "bytes"), 3);
    assert_eq!(rig.workers().await[0]["tokens_from"], "bytes");
    // A chat that is not understood says nothing about completions.
    rig.stage
        .play(vec![Step::Write(unary(r#"{"tokens":[5,6,7]}"#))]);
    let ask = r#"{"model":"m","prompt":"hi"}"#;
    assert_eq!(rig.post("/v1/completions", ask).await.status, 200);
    assert_eq!(paths(&rig)[4..], ["/tokenize", "/v1/completions"]);
    assert_eq!(read_by(&rig, "tokenize"), 1);
    rig.at_rest().await;
}

#[tokio::test]
async fn an_engine_that_does_not_say_holds_nothing_up() {
    let rig = kv_rig().await;
    for _ in 0..3 {
        rig.stage.play(vec![Step::Hang]);
        rig.stage.play(vec![crate::engine::ok()]);
    }
    for _ in 0..5 {
        let answer = in_time("an answer in spite of it", rig.post(CHAT, ASK)).await;
        assert_eq!(answer.status, 200);
    }
    let asked = paths(&rig)
        .iter()
        .filter(|path| *path == "/tokenize")
        .count();
    assert_eq!(asked, 3, "after three failures it is left alone");
    assert_eq!(read_by(&rig, "bytes"), 5);
    rig.at_rest().await;
}

/// Ids from the client need nobody; modes that do not look at prompts ask for nothing.
#[tokio::test]
async fn nobody_is_asked_for_what_is_known_or_not_needed() {
    let rig = kv_rig().await;
    let ids = r#"{"model":"m","prompt":[1,2,3]}"#;
    assert_eq!(rig.post("/v1/completions", ids).await.status, 200);
    let data = r#"{"model":"m","messages":[],"nvext":{"token_data":[1,2]}}"#;
    assert_eq!(rig.post(CHAT, data).await.status, 200);
    assert_eq!(paths(&rig), ["/v1/completions", CHAT]);
    assert_eq!(read_by(&rig, "client"), 2);
    rig.at_rest().await;
    let rig = Rig::of(1).await;
    assert_eq!(rig.post(CHAT, ASK).await.status, 200);
    assert_eq!(paths(&rig), [CHAT]);
    rig.at_rest().await;
}
