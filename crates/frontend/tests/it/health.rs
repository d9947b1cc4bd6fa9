//! Workers that are ejected: for how long, who is tried all the same, what brings them back.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kvasir_frontend::{AppOptions, MigrationOptions};

use crate::client::Client;
use crate::engine::{ANSWER, DONE, FIRST, LAST, Step, chunk, first_event, stream};
use crate::rig::{ASK, ASK_STREAM, CHAT, Rig, Setup, in_time, until};

const WELL: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
const UNWELL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";

/// A fleet that looks at its workers often.
async fn eager(engines: usize) -> Rig {
    let every = Duration::from_millis(20);
    Rig::with_fleet(engines, Setup::usual(), |fleet| fleet.asking_every(every)).await
}

/// A fleet that looks at its workers once, unless something happens.
async fn lazy(engines: usize) -> Rig {
    let every = Duration::from_secs(3600);
    Rig::with_fleet(engines, Setup::usual(), |fleet| fleet.asking_every(every)).await
}

#[tokio::test]
async fn one_bad_request_leaves_the_fleet_serving() {
    let rig = lazy(3).await;
    for _ in 0..2 {
        rig.stage.play(vec![Step::Reset]);
    }
    assert_eq!(
        rig.post(CHAT, ASK).await.status,
        502,
        "two tries, two deaths"
    );
    for _ in 0..10 {
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!((answer.status, answer.text()), (200, ANSWER));
    }
    rig.at_rest().await;
}

#[tokio::test]
async fn the_only_worker_is_tried_again_before_the_client_is_told() {
    let rig = lazy(1).await;
    for step in [Step::Reset, Step::Close] {
        rig.stage.play(vec![step]);
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    rig.stage.play(vec![first_event(), Step::Reset]);
    let cut = rig.post(CHAT, ASK_STREAM).await;
    assert!(
        cut.text().starts_with(FIRST) && cut.text().ends_with(DONE),
        "{}",
        cut.text()
    );
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER, "at once");
    rig.at_rest().await;
}

#[tokio::test]
async fn a_worker_that_is_well_is_back_at_once() {
    let rig = lazy(2).await;
    for engine in &rig.engines {
        rig.stage
            .health
            .lock()
            .unwrap()
            .insert(engine.address.port(), WELL);
    }
    let before = rig.stage.checked.load(Ordering::SeqCst);
    rig.stage.play(vec![Step::Reset]);
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    until("it is asked", || {
        rig.stage.checked.load(Ordering::SeqCst) > before
    })
    .await;
    until("both are back", || !rig.is_ejected(0) && !rig.is_ejected(1)).await;
    rig.at_rest().await;
}

#[tokio::test]
async fn a_worker_that_says_it_is_not_well_gets_nothing_until_it_is() {
    let rig = eager(2).await;
    let sick = rig.engines[0].address.port();
    rig.stage.health.lock().unwrap().insert(sick, UNWELL);
    until("it is ejected", || rig.is_ejected(0)).await;
    rig.only_others_serve(sick).await;
    let rows = rig.workers().await;
    let states: Vec<_> = rows
        .iter()
        .map(|row| (&row["state"], &row["down"]))
        .collect();
    assert!(
        states.contains(&(&"unhealthy".into(), &true.into())),
        "{states:?}"
    );
    assert_eq!(rows.len(), 2, "it stays a member");
    // The other one falls ill, too: somebody is tried all the same.
    let other = rig.engines[1].address.port();
    rig.stage.health.lock().unwrap().insert(other, UNWELL);
    until("so is the other", || rig.is_ejected(1)).await;
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    rig.stage.health.lock().unwrap().insert(sick, WELL);
    until("it is back", || !rig.is_ejected(0)).await;
    let before = rig.stage.seen().len();
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    assert_eq!(rig.stage.seen()[before].port, sick);
    rig.at_rest().await;
}

/// One that refuses everything looks idle: it is not asked first for ever.
#[tokio::test]
async fn a_worker_that_refuses_everything_while_others_serve_is_ejected() {
    let rig = lazy(2).await;
    let full = rig.engines[0].address.port();
    rig.stage.always.lock().unwrap().insert(full, UNWELL);
    let asked = || rig.stage.seen().iter().filter(|s| s.port == full).count();
    for _ in 0..8 {
        if rig.is_ejected(0) {
            break;
        }
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    assert_eq!((asked(), rig.is_ejected(0)), (3, true));
    rig.only_others_serve(full).await;
    // It takes requests again: its first answer after its time forgives it.
    rig.stage.always.lock().unwrap().clear();
    until("its time is over", || !rig.is_ejected(0)).await;
    for _ in 0..4 {
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    assert_eq!(asked(), 5, "each second one");
    rig.at_rest().await;
}

/// While all are full nobody is ejected, and the client hears it from an engine.
#[tokio::test]
async fn a_fleet_that_is_full_stays_whole() {
    const FULL: &[u8] = b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nfull";
    let rig = lazy(2).await;
    let ports = [0, 1].map(|engine: usize| rig.engines[engine].address.port());
    for port in ports {
        rig.stage.always.lock().unwrap().insert(port, FULL);
    }
    for _ in 0..8 {
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!((answer.status, answer.text()), (503, "full"));
        assert_eq!(answer.header("retry-after"), Some("7"));
        assert!(!rig.is_ejected(0) && !rig.is_ejected(1));
    }
    // One serves a while, so the other is ejected; then that one is full, too: both are asked as before.
    rig.stage.always.lock().unwrap().remove(&ports[1]);
    while !rig.is_ejected(0) {
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    rig.stage.always.lock().unwrap().insert(ports[1], FULL);
    let before = rig.stage.seen().len();
    for _ in 0..8 {
        let answer = rig.post(CHAT, ASK).await;
        assert_eq!((answer.status, answer.text()), (503, "full"));
        assert!(!rig.is_ejected(1), "never the last");
    }
    assert_eq!(rig.stage.seen().len() - before, 16, "each asked each");
    rig.at_rest().await;
}

/// A worker may be silent for so long, where nothing else is said.
const SILENCE_MAX: Duration = Duration::from_millis(400);

/// Two engines, the first of which has what was played before the second joined; questions are short.
async fn one_then_another(
    setup: Setup,
    scripts: Vec<Vec<Step>>,
    asks: &[&str],
) -> (Rig, Vec<Client>) {
    one_then_another_with(setup, SILENCE_MAX, scripts, asks).await
}

async fn one_then_another_with(
    setup: Setup,
    silence_max: Duration,
    scripts: Vec<Vec<Step>>,
    asks: &[&str],
) -> (Rig, Vec<Client>) {
    let mut rig = Rig::with_fleet(1, setup, |fleet| {
        let fleet = fleet.asking_every(Duration::from_millis(20));
        let fleet = fleet.waiting(Duration::from_millis(80));
        fleet.giving_up_after(silence_max)
    })
    .await;
    let mut clients = Vec::new();
    for (script, ask) in scripts.into_iter().zip(asks) {
        let begins = matches!(script.first(), Some(Step::Write(_)));
        rig.stage.play(script);
        let mut client = rig.client().await;
        client.post(CHAT, "connection: close\r\n", ask).await;
        if begins {
            assert!(client.read_until("\n\n").await);
        }
        clients.push(client);
    }
    until("the first has all", || {
        rig.stage.seen().len() == clients.len()
    })
    .await;
    rig.add_engine().await;
    (rig, clients)
}

/// A worker that is frozen, or whose host has vanished, loses what it has: what has not begun is answered by another,
/// what has ends cleanly.
#[tokio::test]
async fn a_worker_that_gives_no_sign_of_life_loses_its_requests() {
    let hang = || vec![Step::Hang];
    let begun = vec![first_event(), Step::Hang];
    let scripts = vec![hang(), hang(), begun];
    let (rig, mut clients) =
        one_then_another(Setup::usual(), scripts, &[ASK, ASK_STREAM, ASK_STREAM]).await;
    rig.stage.freeze(rig.engines[0].address.port());
    let begun = in_time("it ends", clients.pop().unwrap().answer()).await;
    assert!(
        begun.whole && begun.text().starts_with(FIRST),
        "{}",
        begun.text()
    );
    assert!(begun.text().contains("\"error\"") && begun.text().ends_with(DONE));
    for mut client in clients {
        let answer = in_time("another answers", client.answer()).await;
        assert_eq!((answer.status, answer.text()), (200, ANSWER));
    }
    rig.joined(1).await;
    until("nothing is left there", || rig.engines[0].open() <= 1).await;
    // It thaws: it serves as before.
    rig.stage.thaw();
    rig.joined(2).await;
    for _ in 0..4 {
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
    rig.at_rest().await;
}

/// The rest of an answer that may go on comes from another worker.
#[tokio::test]
async fn an_answer_goes_on_when_its_worker_freezes() {
    let setup = Setup::options(AppOptions {
        migration: MigrationOptions {
            limit: 1,
            ..MigrationOptions::default()
        },
        ..AppOptions::default()
    });
    let begun = vec![first_event(), Step::Hang];
    let (rig, mut clients) = one_then_another(setup, vec![begun], &[ASK_STREAM]).await;
    rig.stage
        .play(vec![stream(&[LAST.as_bytes(), DONE.as_bytes()])]);
    rig.stage.freeze(rig.engines[0].address.port());
    let answer = in_time("it goes on", clients.remove(0).answer()).await;
    assert_eq!(
        (answer.whole, answer.text()),
        (true, &*[FIRST, LAST, DONE].concat())
    );
    rig.at_rest().await;
}

/// Who answers that it is not well lives, and so does one whose answers still come while its server is slow to speak
/// of its health: what they have goes on.
#[tokio::test]
async fn a_worker_that_lives_ends_what_it_has() {
    let beat = || [Step::Gate, Step::Write(chunk(b": beat\n\n"))];
    let rest = || [chunk(DONE.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    for frozen in [false, true] {
        let mut script = vec![first_event()];
        script.extend((0..4000).flat_map(|_| beat()));
        script.push(Step::Write(rest()));
        // It is not to be found silent because this machine is busy.
        let silence_max = Duration::from_secs(10);
        let (rig, mut clients) =
            one_then_another_with(Setup::usual(), silence_max, vec![script], &[ASK_STREAM]).await;
        let port = rig.engines[0].address.port();
        match frozen {
            true => rig.stage.freeze(port),
            false => drop(rig.stage.health.lock().unwrap().insert(port, UNWELL)),
        }
        let mut beats = 0;
        let lasts = |rig: &Rig| match frozen {
            true => rig.model().specs().len() == 2,
            false => rig.stage.checked.load(Ordering::SeqCst) < 12,
        };
        in_time("questions fail", async {
            while lasts(&rig) {
                rig.stage.gate.add_permits(1);
                beats += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        assert!(beats < 4000);
        rig.stage.gate.add_permits(4000 - beats);
        let answer = in_time("it ends", clients.remove(0).answer()).await;
        assert!(answer.whole && answer.text().ends_with(DONE));
        assert!(!answer.text().contains("\"error\""), "frozen: {frozen}");
        rig.at_rest().await;
    }
}

/// An engine that shuts down closes its listener and goes on with its streams: connections to it are refused within microseconds, so
/// that many questions fail between two tokens. Its streams end as they would have, while it takes no more requests and leaves.
#[tokio::test]
async fn an_engine_that_drains_ends_what_it_has() {
    const BEATS: usize = 60;
    let mut script = vec![first_event()];
    let beat = || [Step::Gate, Step::Write(chunk(b": beat\n\n"))];
    script.extend((0..BEATS).flat_map(|_| beat()));
    let end = [chunk(DONE.as_bytes()), b"0\r\n\r\n".to_vec()].concat();
    script.extend([Step::Gate, Step::Write(end)]);
    let silence_max = Duration::from_secs(10);
    let (rig, mut clients) =
        one_then_another_with(Setup::usual(), silence_max, vec![script], &[ASK_STREAM]).await;
    rig.engines[0].drain();
    for _ in 0..BEATS {
        for _ in 0..3 {
            assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
        }
        rig.stage.gate.add_permits(1);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    rig.joined(1).await;
    rig.stage.gate.add_permits(1);
    let answer = in_time("it ends", clients.remove(0).answer()).await;
    assert!(answer.whole && answer.text().ends_with(DONE));
    assert!(!answer.text().contains("\"error\""), "{}", answer.text());
    assert_eq!(answer.text().matches(": beat").count(), BEATS);
    rig.at_rest().await;
}

/// One that drains and falls silent is given up as any other; so is one that an operator has removed meanwhile.
#[tokio::test]
async fn an_engine_that_drains_and_falls_silent_is_given_up() {
    for removed in [false, true] {
        let script = vec![first_event(), Step::Hang];
        let (rig, mut clients) =
            one_then_another(Setup::usual(), vec![script], &[ASK_STREAM]).await;
        if removed {
            let worker = kvasir_upstream::parse_worker(&rig.engines[0].url()).unwrap();
            assert!(rig.fleet.forget(worker.id));
            until("it is told", || rig.is_draining(worker.id)).await;
        }
        rig.engines[0].drain();
        let answer = in_time("it is given up", clients.remove(0).answer()).await;
        assert!(answer.whole && answer.text().starts_with(FIRST));
        assert!(answer.text().contains("\"error\"") && answer.text().ends_with(DONE));
        rig.joined(1).await;
        assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    }
}
