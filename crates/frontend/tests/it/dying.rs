//! Engines that die while their servers live, and requests that kill engines.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kvasir_frontend::{AppOptions, MigrationOptions};
use kvasir_router::RouterMode;

use crate::engine::{ANSWER, DONE, FIRST, LAST, Step, chunk, first_event, ok, stream};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

/// What vLLM's server says when its EngineCore is gone.
const DEAD: &[u8] = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\nx-engine: dead\r\ncontent-length: 26\r\n\r\n{\"error\":{\"message\":\"no\"}}";
const NO_ROUTE: &[u8] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
const WELL: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
const FAILED: &str = "data: {\"error\": {\"message\": \"EngineCore encountered an issue.\", \"type\": \"InternalServerError\", \"param\": null, \"code\": 500}}\n\n";

/// A fleet that looks at its workers once, unless something happens.
async fn lazy(engines: usize, setup: Setup) -> Rig {
    let every = Duration::from_secs(3600);
    Rig::with_fleet(engines, setup, |fleet| fleet.asking_every(every)).await
}

fn asked_of(rig: &Rig, engine: usize) -> usize {
    let port = rig.engines[engine].address.port();
    let seen = rig.stage.seen();
    seen.iter().filter(|seen| seen.port == port).count()
}

/// Its server answers every request at once, with an error, and says on `/health` that it is well.
fn kill(rig: &Rig, engine: usize) {
    let port = rig.engines[engine].address.port();
    rig.stage.always.lock().unwrap().insert(port, DEAD);
    rig.stage.tokens.lock().unwrap().insert(port, DEAD);
    rig.stage.health.lock().unwrap().insert(port, WELL);
}

/// It looks idle, so that every request would go there; two do, and no client notices.
#[tokio::test]
async fn a_dead_engine_behind_a_server_that_lives_is_no_black_hole() {
    let rig = lazy(2, Setup::in_mode(RouterMode::LeastLoaded)).await;
    kill(&rig, 0);
    for _ in 0..30 {
        rig.stage.play(vec![Step::Gate, ok()]);
    }
    let mut clients = Vec::new();
    for _ in 0..30 {
        let mut client = rig.client().await;
        client.post(CHAT, "connection: close\r\n", ASK).await;
        clients.push(client);
        until("it is with an engine that lives", || {
            asked_of(&rig, 1) == clients.len()
        })
        .await;
    }
    assert!(rig.is_ejected(0));
    assert_eq!(asked_of(&rig, 0), 2, "two errors in a row are enough");
    rig.stage.gate.add_permits(30);
    for mut client in clients {
        let answer = in_time("answer", client.answer()).await;
        assert_eq!((answer.status, answer.text()), (200, ANSWER));
    }
    // It says that it is well, and generates nothing: it stays away.
    until("it is asked for a token", || {
        rig.stage.asked_token.load(Ordering::SeqCst) >= 3
    })
    .await;
    assert!(rig.is_ejected(0));
    let port = rig.engines[0].address.port();
    rig.stage.always.lock().unwrap().clear();
    rig.stage.tokens.lock().unwrap().remove(&port);
    until("a token brings it back", || !rig.is_ejected(0)).await;
    for _ in 0..4 {
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    assert!(asked_of(&rig, 0) > 2, "it serves");
    rig.at_rest().await;
}

/// One error is enough if it comes faster than any answer did.
#[tokio::test]
async fn an_error_that_is_faster_than_any_answer_ejects_at_once() {
    let rig = lazy(2, Setup::in_mode(RouterMode::RoundRobin)).await;
    let slow = || vec![Step::Pause(Duration::from_millis(300)), ok()];
    for _ in 0..2 {
        rig.stage.play(slow());
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    kill(&rig, 0);
    for _ in 0..2 {
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    assert!(rig.is_ejected(0));
    assert_eq!(asked_of(&rig, 0), 2, "one answer, one error");
    rig.at_rest().await;
}

/// The request's fault: the second engine's own words pass, and a third is not asked.
#[tokio::test]
async fn an_error_that_two_engines_give_is_the_answer() {
    let rig = lazy(4, Setup::usual()).await;
    for engine in 0..4 {
        kill(&rig, engine);
    }
    rig.stage.tokens.lock().unwrap().clear();
    for ask in [ASK, ASK_STREAM] {
        let before = rig.stage.seen().len();
        let answer = rig.post(CHAT, ask).await;
        assert_eq!(answer.status, 500);
        assert_eq!(answer.header("x-engine"), Some("dead"));
        assert_eq!(answer.text(), "{\"error\":{\"message\":\"no\"}}");
        assert_eq!(rig.stage.seen().len() - before, 2);
    }
    // Both generate when they are asked: whoever was ejected is back.
    until("all are back", || {
        (0..4).all(|engine| !rig.is_ejected(engine))
    })
    .await;
    rig.at_rest().await;
}

/// What may have been run and must not be run twice is not sent again: the engine's words pass.
#[tokio::test]
async fn an_error_on_a_route_with_effects_passes_at_once() {
    let rig = lazy(2, Setup::usual()).await;
    rig.stage.play(vec![Step::Write(DEAD.to_vec())]);
    let answer = rig.post("/v1/batches", r#"{"model":"m"}"#).await;
    assert_eq!((answer.status, rig.stage.seen().len()), (500, 1));
    rig.at_rest().await;
}

/// An engine that says 200 and then an error in place of the first event has not begun to answer.
#[tokio::test]
async fn an_error_in_place_of_the_first_event_goes_elsewhere() {
    for limit in [0, 2] {
        let migration = MigrationOptions {
            limit,
            ..MigrationOptions::default()
        };
        let setup = Setup::options(AppOptions {
            migration,
            ..AppOptions::default()
        });
        let rig = lazy(3, setup).await;
        let failed = || vec![stream(&[FAILED.as_bytes(), DONE.as_bytes()])];
        rig.stage.play(failed());
        let events = [FIRST, LAST, DONE];
        rig.stage.play(vec![stream(&events.map(str::as_bytes))]);
        let answer = rig.post(CHAT, ASK_STREAM).await;
        assert_eq!(answer.text(), events.concat(), "limit {limit}");
        assert_eq!(rig.stage.seen().len(), 2);
        // Two engines say so: the words are the answer.
        rig.stage.play(failed());
        rig.stage.play(failed());
        let answer = rig.post(CHAT, ASK_STREAM).await;
        assert_eq!(
            (answer.status, answer.text()),
            (200, &*[FAILED, DONE].concat())
        );
        assert_eq!(rig.stage.seen().len(), 4);
        rig.at_rest().await;
    }
}

/// A comment is no answer: when an engine that sent no more than one dies, another is asked for all of it.
#[tokio::test]
async fn a_stream_of_nothing_but_a_comment_is_answered_by_another() {
    let migration = MigrationOptions {
        limit: 2,
        ..MigrationOptions::default()
    };
    let setup = Setup::options(AppOptions {
        migration,
        ..AppOptions::default()
    });
    let rig = lazy(2, setup).await;
    let head = crate::engine::STREAM_HEAD.as_bytes();
    let comment = [head, &chunk(b": alive\n\n")].concat();
    rig.stage.play(vec![Step::Write(comment), Step::Reset]);
    let events = [FIRST, LAST, DONE];
    rig.stage.play(vec![stream(&events.map(str::as_bytes))]);
    let answer = rig.post(CHAT, ASK_STREAM).await;
    let text = answer.text();
    let said = text.strip_prefix(": alive\n\n").unwrap_or(text);
    assert_eq!(said, events.concat());
    assert_eq!(rig.stage.seen().len(), 2);
    rig.at_rest().await;
}

/// Streams that end with an error speak against their engine as statuses do.
#[tokio::test]
async fn an_engine_that_ends_its_streams_with_errors_is_ejected() {
    let rig = lazy(2, Setup::usual()).await;
    let Step::Write(failed) = stream(&[FIRST, FAILED, DONE].map(str::as_bytes)) else {
        panic!("a stream is one write");
    };
    let port = rig.engines[0].address.port();
    rig.stage.always.lock().unwrap().insert(port, failed.leak());
    rig.stage.tokens.lock().unwrap().insert(port, DEAD);
    let mut failures = 0;
    for _ in 0..8 {
        let answer = rig.post(CHAT, ASK_STREAM).await;
        failures += usize::from(answer.text().contains("EngineCore"));
    }
    assert!(rig.is_ejected(0));
    assert_eq!(failures, 2, "two in a row, though it began both");
    let page = rig.page().await;
    assert!(page.contains("status=\"error\""), "it is counted as failed");
    rig.at_rest().await;
}

/// An engine that has no route that generates is back after a while.
#[tokio::test]
async fn an_engine_that_cannot_be_asked_for_a_token_comes_back_by_time() {
    let rig = lazy(2, Setup::usual()).await;
    let port = rig.engines[0].address.port();
    rig.stage.tokens.lock().unwrap().insert(port, NO_ROUTE);
    rig.stage.always.lock().unwrap().insert(port, DEAD);
    in_time("it is ejected", async {
        while !rig.is_ejected(0) {
            assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
        }
    })
    .await;
    until("both routes are tried", || {
        rig.stage.asked_token.load(Ordering::SeqCst) == 2
    })
    .await;
    rig.stage.always.lock().unwrap().clear();
    until("its time is over", || !rig.is_ejected(0)).await;
    rig.at_rest().await;
}

/// One request that kills whoever runs it takes two of eight engines, however often it may be tried.
#[tokio::test]
async fn a_request_that_kills_engines_takes_two_of_them_at_most() {
    let begun = || vec![first_event(), Step::Reset];
    let half = || {
        vec![
            Step::Write([crate::engine::STREAM_HEAD.as_bytes(), &chunk(b"data: {")].concat()),
            Step::Close,
        ]
    };
    let ways = [("reset", Step::Reset), ("closed", Step::Close)];
    let options = || AppOptions {
        retry_limit: 1000,
        migration: MigrationOptions {
            limit: 1000,
            ..MigrationOptions::default()
        },
        ..AppOptions::default()
    };
    for ask in [ASK, ASK_STREAM] {
        for (what, death) in &ways {
            let rig = lazy(8, Setup::options(options())).await;
            for _ in 0..8 {
                rig.stage.play(vec![death.clone()]);
            }
            let answer = rig.post(CHAT, ask).await;
            assert_eq!(answer.status, 502, "{what}");
            assert_eq!(rig.stage.seen().len(), 2, "{what}");
            rig.at_rest().await;
        }
    }
    for (what, deaths) in [
        ("mid-stream, then at once", [begun(), half()]),
        ("mid-stream, twice", [begun(), begun()]),
    ] {
        let rig = lazy(8, Setup::options(options())).await;
        for death in deaths {
            rig.stage.play(death);
        }
        let answer = in_time(what, rig.post(CHAT, ASK_STREAM)).await;
        assert!(
            answer.text().contains("\"error\"") && answer.text().ends_with(DONE),
            "{what}"
        );
        assert_eq!(rig.stage.seen().len(), 2, "{what}: {}", answer.text());
        rig.at_rest().await;
    }
}
