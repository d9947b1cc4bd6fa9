//! What prompts become tokens by, when engines are asked, refuse, or are too slow.

use std::sync::atomic::Ordering;

use kvasir_router::{RouterConfig, RouterMode};

use crate::engine::{Step, unary};
use crate::rig::{CHAT, Rig, Setup, in_time};

const ASK: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi there"}]}"#;

async fn kv_rig() -> Rig {
    kv_rig_of(1).await
}

async fn kv_rig_of(engines: usize) -> Rig {
    let setup = Setup {
        router: RouterConfig {
            router_mode: RouterMode::Kv,
            ..RouterConfig::default()
        },
        ..Setup::usual()
    };
    let rig = Rig::with(engines, setup).await;
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

/// One engine that dies on the question is no reason to do without tokens while another can tell them.
#[tokio::test]
async fn another_engine_is_asked_when_one_fails() {
    let rig = kv_rig_of(2).await;
    let tokens = || vec![Step::Write(unary(r#"{"tokens":[5,6,7]}"#))];
    for n in 0..4 {
        if n == 0 {
            rig.stage.play(vec![Step::Reset]);
        }
        rig.stage.play(tokens());
        rig.stage.play(vec![crate::engine::ok()]);
        let ask = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi {n}"}}]}}"#);
        assert_eq!(rig.post(CHAT, ask).await.status, 200);
    }
    assert_eq!((read_by(&rig, "tokenize"), read_by(&rig, "bytes")), (4, 0));
    let seen = rig.stage.seen();
    let asked: Vec<u16> = seen
        .iter()
        .filter(|seen| seen.head.starts_with("POST /tokenize "))
        .map(|seen| seen.port)
        .collect();
    assert_ne!(asked[0], asked[1]);
    assert!(
        asked[2..].iter().all(|port| *port != asked[0]),
        "the one that failed comes last"
    );
    rig.at_rest().await;
}

/// Who is ejected is not asked for tokens either.
#[tokio::test]
async fn engines_that_are_ejected_are_not_asked() {
    let rig = kv_rig_of(2).await;
    let sick = kvasir_upstream::parse_worker(&rig.engines[0].url()).unwrap();
    let unwell = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";
    let port = rig.engines[0].address.port();
    rig.stage.health.lock().unwrap().insert(port, unwell);
    let probe = kvasir_router::Probe {
        worker: sick.id,
        asked: kvasir_types::Time::ZERO,
        healthy: false,
    };
    rig.model().host.tell(kvasir_router::Input::Probed(probe));
    for n in 0..4 {
        rig.stage
            .play(vec![Step::Write(unary(r#"{"tokens":[5,6,7]}"#))]);
        rig.stage.play(vec![crate::engine::ok()]);
        let ask = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"ho {n}"}}]}}"#);
        assert_eq!(rig.post(CHAT, ask).await.status, 200);
    }
    let well = rig.engines[1].address.port();
    assert!(rig.stage.seen().iter().all(|seen| seen.port == well));
    assert_eq!(read_by(&rig, "tokenize"), 4);
}

/// What is refused because its workers are busy is refused at once: they are not asked for its tokens first.
#[tokio::test]
async fn a_busy_engine_is_not_asked_for_the_tokens_of_what_it_will_not_get() {
    let setup = Setup {
        router: RouterConfig {
            router_mode: RouterMode::Kv,
            active_prefill_tokens_threshold: Some(1),
            ..RouterConfig::default()
        },
        ..Setup::usual()
    };
    let rig = Rig::with(1, setup).await;
    rig.stage.tokenizes.store(true, Ordering::SeqCst);
    rig.stage
        .play(vec![Step::Write(unary(r#"{"tokens":[5,6,7,8]}"#))]);
    rig.stage.play(vec![Step::Gate, crate::engine::ok()]);
    // A stream: nobody guesses when its prompt is computed.
    let mut first = rig.client().await;
    let stream = ASK.replace("{\"model\"", "{\"stream\":true,\"model\"");
    first.post(CHAT, "", stream).await;
    crate::rig::until("the first is booked", || rig.booked_prefill() > 1).await;
    let asked = |rig: &Rig| {
        let paths = paths(rig);
        paths.iter().filter(|path| *path == "/tokenize").count()
    };
    assert_eq!(asked(&rig), 1);
    for n in 0..20 {
        let ask = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"no {n}"}}]}}"#);
        assert_eq!(rig.post(CHAT, ask).await.status, 503);
    }
    assert_eq!(asked(&rig), 1, "only for the one that went there");
    rig.stage.gate.add_permits(1);
    assert_eq!(in_time("the first", first.answer()).await.status, 200);
    drop(first);
    rig.at_rest().await;
}
