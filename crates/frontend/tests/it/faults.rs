//! Workers that die: what the client sees, what is left behind.

use std::time::Duration;

use kvasir_frontend::Limits;
use kvasir_router::RouterConfig;

use crate::engine::{
    ANSWER, DONE, Engine, FIRST, LAST, STREAM_HEAD, Step, chunk, first_event, ok, stream, unary,
};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

fn write(bytes: impl AsRef<[u8]>) -> Step {
    Step::Write(bytes.as_ref().to_vec())
}

/// Deaths before an answer has begun.
fn early_deaths() -> Vec<(&'static str, Vec<Step>)> {
    let half = STREAM_HEAD.len() / 2;
    let begun = [STREAM_HEAD.as_bytes(), &chunk(&FIRST.as_bytes()[..20])].concat();
    let until_close = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    vec![
        ("closed", vec![Step::Close]),
        ("reset", vec![Step::Reset]),
        (
            "half a head",
            vec![write(&STREAM_HEAD[..half]), Step::Close],
        ),
        ("no HTTP", vec![write("hello?\r\n\r\n"), Step::Close]),
        ("a head alone", vec![write(STREAM_HEAD), Step::Close]),
        ("half an event", vec![write(begun), Step::Close]),
        ("no event at all", vec![stream(&[])]),
        (
            "until close, nothing",
            vec![write(until_close), Step::Close],
        ),
        (
            "busy",
            vec![write("HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")],
        ),
    ]
}

#[tokio::test]
async fn a_stream_that_has_not_begun_goes_to_another_worker_unseen() {
    for (what, death) in early_deaths() {
        let rig = Rig::of(2).await;
        rig.stage.play(death);
        rig.stage.play(vec![stream(&[
            FIRST.as_bytes(),
            LAST.as_bytes(),
            DONE.as_bytes(),
        ])]);
        let answer = rig.post(CHAT, ASK_STREAM).await;
        assert_eq!((answer.status, answer.whole), (200, true), "{what}");
        assert_eq!(answer.text(), [FIRST, LAST, DONE].concat(), "{what}");
        let seen = rig.stage.seen();
        assert_eq!(seen.len(), 2, "{what}");
        assert_ne!(seen[0].port, seen[1].port, "{what}");
        assert_eq!(seen[0].body, seen[1].body, "{what}");
        rig.at_rest().await;
    }
}

#[tokio::test]
async fn an_answer_in_one_piece_goes_to_another_worker_until_it_is_complete() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n";
    let deaths = [
        ("closed", vec![Step::Close]),
        ("a head alone", vec![write(head), Step::Close]),
        (
            "half a body",
            vec![write(head), write("{\"choices\":"), Step::Reset],
        ),
    ];
    for (what, death) in deaths {
        let rig = Rig::of(2).await;
        rig.stage.play(death);
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!((answer.status, answer.text()), (200, ANSWER), "{what}");
        assert_eq!(rig.stage.seen().len(), 2, "{what}");
        assert_eq!(
            rig.metric("dynamo_frontend_model_migration_total").await,
            1.0,
            "{what}"
        );
        rig.at_rest().await;
    }
}

#[tokio::test]
async fn a_dead_worker_is_passed_over_and_comes_back() {
    let setup = Setup {
        router: RouterConfig {
            runtime_inhibited_duration_secs: 0.2,
            ..Setup::usual().router
        },
        ..Setup::usual()
    };
    let mut rig = Rig::with(2, setup).await;
    let gone = rig.engines.pop().unwrap().address;
    for _ in 0..6 {
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    assert!(rig.stage.seen().iter().all(|seen| seen.port != gone.port()));
    rig.engines.push(Engine::restart(gone, &rig.stage).await);
    in_time("it serves again", async {
        while rig.stage.seen().iter().all(|seen| seen.port != gone.port()) {
            assert_eq!(rig.post(CHAT, ASK).await.status, 200);
        }
    })
    .await;
    rig.at_rest().await;
}

#[tokio::test]
async fn when_nobody_answers_the_client_is_told() {
    let rig = Rig::of(2).await;
    for _ in 0..3 {
        rig.stage.play(vec![Step::Close]);
    }
    let answer = rig.post(CHAT, ASK_STREAM).await;
    assert_eq!(answer.status, 502);
    assert!(
        answer.text().contains("Two workers failed"),
        "{}",
        answer.text()
    );
    assert_eq!(answer.header("retry-after"), None, "it may be the request");
    assert_eq!(rig.stage.seen().len(), 2);
    rig.at_rest().await;
}

#[tokio::test]
async fn an_engines_own_refusal_passes_unchanged() {
    let body = r#"{"object":"error","message":"max_tokens is too large","code":400}"#;
    let refusal = format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-engine: a\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let rig = Rig::of(2).await;
    for ask in [ASK, ASK_STREAM] {
        rig.stage.play(vec![write(&refusal)]);
        let answer = rig.post(CHAT, ask).await;
        assert_eq!((answer.status, answer.text()), (400, body));
        assert_eq!(answer.header("x-engine"), Some("a"));
    }
    assert_eq!(rig.stage.seen().len(), 2, "it is not asked again");
    rig.at_rest().await;
}

/// Others are asked after a 5xx; the last such answer is the client's when nobody is left, with every byte, and it is not counted as
/// a rejection of ours. 503 says nothing about the request, others may: two engines that answer so are enough.
#[tokio::test]
async fn the_last_engines_refusal_passes_when_nobody_else_is_left() {
    for (engines, status, answers) in [
        (1, 503, 1),
        (2, 502, 2),
        (1, 504, 1),
        (5, 503, 3),
        (1, 500, 1),
        (5, 500, 2),
        (5, 502, 2),
    ] {
        let rig = Rig::of(engines).await;
        for n in 1..=answers {
            let body = format!("{{\"detail\":\"of {n}\"}}");
            let length = body.len();
            rig.stage.play(vec![write(format!(
                "HTTP/1.1 {status} Own Words\r\nx-engine: {n}\r\nretry-after: 7\r\ncontent-length: {length}\r\n\r\n{body}"
            ))]);
        }
        let answer = rig.post(CHAT, ASK_STREAM).await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.text(), format!("{{\"detail\":\"of {answers}\"}}"));
        assert_eq!(answer.header("retry-after"), Some("7"));
        assert_eq!(rig.stage.seen().len(), answers);
        assert_eq!(rig.metric("dynamo_tasks_rejected_total").await, 0.0);
        rig.at_rest().await;
    }
    // One that cannot be reached says nothing: what another said before it is the answer.
    let rig = Rig::of(2).await;
    let refusal = "HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull";
    rig.stage.play(vec![write(refusal)]);
    for _ in 0..6 {
        rig.stage.play(vec![Step::Close]);
    }
    assert_eq!(rig.post(CHAT, ASK).await.text(), "full");
    rig.at_rest().await;
}

/// An answer on a route of the engine's own that says how long it is reaches the client whole or not at all.
#[tokio::test]
async fn an_answer_that_breaks_off_half_way_is_had_from_another() {
    let rig = Rig::of(2).await;
    let whole = unary("{\"data\":[1,2,3]}");
    for cut in [whole.len() - 1, whole.len() - 10, 20] {
        for ending in [Step::Close, Step::Reset] {
            rig.stage.play(vec![write(&whole[..cut]), ending]);
            rig.stage.play(vec![write(&whole)]);
            let answer = rig.post("/v1/embeddings", ASK).await;
            assert_eq!((answer.status, answer.whole), (200, true), "{cut}");
            assert_eq!(answer.text(), "{\"data\":[1,2,3]}");
        }
    }
    rig.at_rest().await;
}

/// A length that an engine says twice alike is one length; a coding that nobody asked for is no answer.
#[tokio::test]
async fn answers_with_odd_heads_reach_the_client_in_order() {
    let rig = Rig::of(2).await;
    let long = "x".repeat(5 << 20);
    for (path, body) in [
        (CHAT, ANSWER),
        ("/v1/embeddings", ANSWER),
        ("/v1/embeddings", &long),
    ] {
        let length = body.len();
        rig.stage.play(vec![write(format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}, {length}\r\n\r\n{body}"
        ))]);
        let answer = rig.post(path, ASK).await;
        assert_eq!((answer.status, answer.whole), (200, true), "{path}");
        assert!(answer.text() == body, "{path}");
        let coded =
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n";
        rig.stage.play(vec![write(coded)]);
        assert_eq!(rig.post(path, ASK).await.text(), ANSWER, "from another");
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_error_and_done() {
    let endings = [Step::Close, Step::Reset];
    for ending in endings {
        let rig = Rig::of(2).await;
        rig.stage.play(vec![
            first_event(),
            Step::Gate,
            write(chunk(b"data: {\"id\"")),
            ending,
        ]);
        let mut client = rig.client().await;
        client.post(CHAT, "", ASK_STREAM).await;
        assert!(client.read_until("\"h\u{e9}\"").await);
        rig.stage.gate.add_permits(1);
        let answer = in_time("end", client.answer()).await;
        assert!(answer.whole, "the stream itself is complete");
        let rest = answer.text().strip_prefix(FIRST).unwrap();
        assert!(rest.starts_with("data: {\"error\":{\"message\":"), "{rest}");
        assert!(rest.ends_with(DONE), "{rest}");
        assert_eq!(rig.stage.seen().len(), 1, "it is not asked again");
        drop(client);
        rig.at_rest().await;
    }
}

#[tokio::test]
async fn a_long_answer_that_breaks_off_is_cut_and_not_short() {
    let rig = Rig::of(1).await;
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        8 << 20
    );
    rig.stage
        .play(vec![write(head), write(vec![b' '; 5 << 20]), Step::Close]);
    let answer = rig.post(CHAT, ASK).await;
    assert_eq!(answer.status, 200);
    assert!(!answer.whole, "a short answer must not look complete");
    rig.at_rest().await;
}

#[tokio::test]
async fn a_connection_closed_while_idle_says_nothing_about_its_worker() {
    let rig = Rig::of(1).await;
    for _ in 0..3 {
        // The answer is complete, and the connection goes as soon as the next request is on its way.
        rig.stage.play(vec![ok()]);
        rig.stage.play(vec![Step::Close]);
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    assert_eq!(rig.stage.seen().len(), 9);
    assert_eq!(
        rig.metric("dynamo_frontend_model_migration_total").await,
        0.0
    );
    rig.at_rest().await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_work_at_once() {
    let hangs = [
        ("before the head", vec![Step::Hang]),
        (
            "before the first event",
            vec![write(STREAM_HEAD), Step::Hang],
        ),
        ("in the stream", vec![first_event(), Step::Hang]),
    ];
    for (what, script) in hangs {
        let rig = Rig::of(1).await;
        rig.stage.play(script);
        let mut client = rig.client().await;
        client.post(CHAT, "", ASK_STREAM).await;
        if what == "in the stream" {
            assert!(client.read_until("\n\n").await);
        } else {
            until("engine has it", || !rig.stage.seen().is_empty()).await;
        }
        drop(client);
        in_time(what, rig.stage.hung_up.acquire())
            .await
            .unwrap()
            .forget();
        rig.at_rest().await;
        assert_eq!(
            rig.metric("dynamo_frontend_model_cancellation_total").await,
            1.0,
            "{what}"
        );
    }
}

#[tokio::test]
async fn an_engine_that_never_begins_is_given_up() {
    let rig = Rig::with(
        2,
        Setup::limits(Limits {
            first_byte: Duration::from_millis(50),
            ..Limits::default()
        }),
    )
    .await;
    rig.stage.play(vec![Step::Hang]);
    let answer = rig.post(CHAT, ASK).await;
    assert_eq!((answer.status, answer.text()), (200, ANSWER));
    in_time("the first is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    for _ in 0..3 {
        rig.stage.play(vec![write(STREAM_HEAD), Step::Hang]);
    }
    let answer = rig.post(CHAT, ASK_STREAM).await;
    assert_eq!(answer.status, 504, "{}", answer.text());
    rig.at_rest().await;
}

#[tokio::test]
async fn a_stream_that_falls_silent_is_given_up() {
    let rig = Rig::with(
        1,
        Setup::limits(Limits {
            stream_silence: Some(Duration::from_millis(50)),
            ..Limits::default()
        }),
    )
    .await;
    rig.stage.play(vec![first_event(), Step::Hang]);
    let answer = rig.post(CHAT, ASK_STREAM).await;
    assert!(answer.whole);
    assert!(answer.text().starts_with(FIRST) && answer.text().ends_with(DONE));
    assert!(answer.text().contains("\"error\""));
    in_time("the engine is left", rig.stage.hung_up.acquire())
        .await
        .unwrap()
        .forget();
    rig.at_rest().await;
}

#[tokio::test]
async fn a_silent_engines_client_hears_signs_of_life() {
    let setup = || {
        Setup::limits(Limits {
            keep_alive: Some(Duration::from_millis(10)),
            ..Limits::default()
        })
    };
    // Before the first event: even then another worker takes over.
    let rig = Rig::with(2, setup()).await;
    rig.stage.play(vec![Step::Gate, Step::Close]);
    rig.stage.play(vec![
        first_event(),
        Step::Gate,
        Step::Write(chunk(DONE.as_bytes())),
        write("0\r\n\r\n"),
    ]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(client.read_until(": keep-alive\n\n").await);
    rig.stage.gate.add_permits(1);
    assert!(client.read_until("\"h\u{e9}\"").await);
    rig.stage.gate.add_permits(1);
    let answer = in_time("end", client.answer()).await;
    let text = answer.text().replace(": keep-alive\n\n", "");
    assert_eq!(text, [FIRST, DONE].concat());
    drop(client);
    rig.at_rest().await;
    // An engine's refusal travels in the stream.
    let rig = Rig::with(1, setup()).await;
    rig.stage.play(vec![
        Step::Gate,
        write("HTTP/1.1 400 Bad\r\ncontent-length: 13\r\n\r\n{\"error\":\"x\"}"),
    ]);
    let mut client = rig.client().await;
    client.post(CHAT, "", ASK_STREAM).await;
    assert!(client.read_until(": keep-alive\n\n").await);
    rig.stage.gate.add_permits(1);
    let answer = in_time("end", client.answer()).await;
    assert!(
        answer
            .text()
            .ends_with("data: {\"error\":\"x\"}\n\ndata: [DONE]\n\n")
    );
    drop(client);
    rig.at_rest().await;
}
