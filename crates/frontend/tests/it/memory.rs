//! What the door holds in memory has bounds: bodies on their way in, and dumps on their way out.

use kvasir_frontend::{AppOptions, Limits};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};

use crate::client::Client;
use crate::engine::{ANSWER, Step};
use crate::rig::{ASK, CHAT, Rig, Setup, in_time, until};

const KIB: usize = 1 << 10;

/// A legal chat of about so many bytes.
fn chat(bytes: usize) -> String {
    let text = "x".repeat(bytes);
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#)
}

fn two_mib() -> Setup {
    Setup::options(AppOptions {
        body_limit_mb: 1,
        limits: Limits {
            body_bytes_max: 2 << 20,
            ..Limits::default()
        },
        ..AppOptions::default()
    })
}

/// An upload of `declared` bytes of which `sent` have come.
async fn unfinished(rig: &Rig, declared: usize, sent: usize) -> Client {
    let mut client = rig.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\ncontent-length: {declared}\r\n\r\n"
    );
    client.send(head).await;
    client.send(vec![b' '; sent]).await;
    client
}

async fn body_bytes(rig: &Rig) -> f64 {
    rig.metric("kvasir_http_body_bytes").await
}

async fn bodies_take(rig: &Rig, bytes: usize) {
    let taken = async {
        while body_bytes(rig).await < bytes as f64 {
            tokio::task::yield_now().await;
        }
    };
    in_time("bodies take their room", taken).await;
}

async fn bodies_are_given_back(rig: &Rig) {
    let back = async {
        while body_bytes(rig).await > 0.0 {
            tokio::task::yield_now().await;
        }
    };
    in_time("bodies give their room back", back).await;
}

#[tokio::test]
async fn bodies_in_flight_stay_within_their_budget() {
    let rig = Rig::with(1, two_mib()).await;
    let first = unfinished(&rig, 900 * KIB, 899 * KIB).await;
    let second = unfinished(&rig, 900 * KIB, 899 * KIB).await;
    bodies_take(&rig, 1800 * KIB).await;
    // What says its length is refused before it is read, what does not where the room ends.
    let refused = rig.post(CHAT, chat(800 * KIB)).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(refused.header("connection"), Some("close"));
    assert!(refused.text().contains("--http-body-budget-mb"));
    let mut chunked = rig.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    chunked.send(head).await;
    for _ in 0..60 {
        let piece = [&b"4000\r\n"[..], &[b' '; 16 * KIB], b"\r\n"].concat();
        chunked.try_send(piece).await;
    }
    assert_eq!(in_time("answer", chunked.answer()).await.status, 503);
    // Small ones are served all the same.
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER);
    assert_eq!(rig.post(CHAT, chat(60 * KIB)).await.text(), ANSWER);
    let page = rig.page().await;
    assert!(page.contains(r#"kvasir_limit_reached_total{limit="body_budget"} 2"#));
    assert!(body_bytes(&rig).await <= f64::from(2 << 20));
    // Whoever leaves gives back what it took.
    drop((first, second, chunked));
    bodies_are_given_back(&rig).await;
    assert_eq!(rig.post(CHAT, chat(1000 * KIB)).await.text(), ANSWER);
    rig.at_rest().await;
    bodies_are_given_back(&rig).await;
}

/// Small bodies are taken while long ones fill the budget, but not any number of them.
#[tokio::test]
async fn many_small_bodies_are_as_much_as_a_few_long_ones() {
    let rig = Rig::with(1, two_mib()).await;
    let refusals = async || rig.metric("kvasir_limit_reached_total").await;
    let mut clients = Vec::new();
    // Four mebibytes are theirs, and the two of all bodies: a hundred fit.
    for _ in 0..120 {
        let mut client = unfinished(&rig, 63 * KIB, 0).await;
        client.try_send(vec![b' '; 60 * KIB]).await;
        clients.push(client);
    }
    let some = async {
        while refusals().await < 1.0 {
            tokio::task::yield_now().await;
        }
    };
    in_time("no more are taken", some).await;
    bodies_take(&rig, 5 << 20).await;
    assert!(body_bytes(&rig).await <= f64::from(6 << 20));
    assert_eq!(rig.post(CHAT, ASK).await.text(), ANSWER, "a small one is");
    drop(clients);
    bodies_are_given_back(&rig).await;
    assert_eq!(rig.post(CHAT, chat(60 * KIB)).await.text(), ANSWER);
    bodies_are_given_back(&rig).await;
}

/// Every end that a request can come to gives its bytes back once: a sum that is off by one body would show.
#[tokio::test]
async fn bytes_of_a_body_come_back_however_its_request_ends() {
    let rig = Rig::with(2, two_mib()).await;
    let large = chat(500 * KIB);
    let stream = large.replacen('{', r#"{"stream":true,"#, 1);
    for round in 0..5 {
        assert_eq!(rig.post(CHAT, &large).await.status, 200);
        assert_eq!(
            rig.post(CHAT, &large.replace("\"m\"", "\"n\""))
                .await
                .status,
            404
        );
        assert_eq!(rig.post(CHAT, &large[1..]).await.status, 400);
        // The engine dies, and the next one answers.
        rig.stage.play(vec![Step::Close]);
        assert_eq!(rig.post(CHAT, &large).await.status, 200);
        // The client leaves while the engine works on it; this one's body is copied for the engine.
        rig.stage.play(vec![Step::Hang]);
        let mut client = rig.client().await;
        client.post(CHAT, "", &stream).await;
        bodies_take(&rig, 500 * KIB).await;
        until("the engine has it", || {
            let seen = rig.stage.seen();
            let copies = seen.iter().filter(|seen| seen.body.len() > stream.len());
            copies.count() > round
        })
        .await;
        drop(client);
        in_time("the engine is left", rig.stage.hung_up.acquire())
            .await
            .unwrap()
            .forget();
        // It leaves while it sends.
        let client = unfinished(&rig, 900 * KIB, 500 * KIB).await;
        bodies_take(&rig, 500 * KIB).await;
        drop(client);
        bodies_are_given_back(&rig).await;
    }
    rig.at_rest().await;
}

/// The connection to the engine is kept; what was sent on it is not.
#[tokio::test]
async fn a_kept_connection_holds_no_body() {
    let rig = Rig::with(1, two_mib()).await;
    assert_eq!(rig.post(CHAT, chat(900 * KIB)).await.text(), ANSWER);
    assert!(rig.stage.open() > 0);
    bodies_are_given_back(&rig).await;
}

/// Two hundred sequences of 1,000 blocks: some 20 MB of JSON.
fn fill(rig: &Rig) -> usize {
    let rank = WorkerRank::new(rig.model().specs()[0].id.0, 0);
    for sequence in 0..200 {
        let block = |n: u64| StoredBlock {
            engine: EngineHash(sequence << 32 | n | 1 << 60),
            local: LocalHash(sequence << 32 | n),
        };
        let event = KvEvent::Stored {
            tier: Tier::Device,
            parent: None,
            blocks: (0..1000).map(block).collect(),
        };
        rig.model().host.index().apply(rank, &event).unwrap();
    }
    200_000
}

const DUMP: &str = "GET /dump HTTP/1.1\r\nhost: door\r\n\r\n";

#[tokio::test]
async fn a_dump_is_written_while_it_is_read_and_there_is_one_at_a_time() {
    let rig = Rig::with(1, Setup::in_mode(kvasir_router::RouterMode::Kv)).await;
    let mut client = rig.client().await;
    // Whoever has read one may ask for the next at once.
    for _ in 0..100 {
        client.send(DUMP).await;
        let empty = in_time("an empty dump", client.answer()).await;
        assert_eq!(empty.json()["m:default"]["events"], serde_json::json!([]));
    }
    let blocks = fill(&rig);
    // This one does not read: the next is told to wait, until it leaves.
    let mut slow = rig.client().await;
    slow.send(DUMP).await;
    assert!(in_time("the head", slow.read_until("\r\n\r\n")).await);
    client.send(DUMP).await;
    let refused = in_time("a refusal", client.answer()).await;
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (503, Some("1"))
    );
    drop(slow);
    let whole = in_time("its turn", async {
        loop {
            client.send(DUMP).await;
            let answer = client.answer().await;
            if answer.status == 200 {
                return answer;
            }
        }
    });
    let whole = whole.await;
    assert!(
        whole.whole && whole.body.len() > 10 << 20,
        "{}",
        whole.body.len()
    );
    let events = whole.json()["m:default"]["events"]
        .as_array()
        .unwrap()
        .clone();
    let stored = |event: &serde_json::Value| {
        event["event"]["data"]["stored"]["blocks"]
            .as_array()
            .map_or(0, Vec::len)
    };
    assert_eq!(events.iter().map(stored).sum::<usize>(), blocks);
    let ids: Vec<u64> = events
        .iter()
        .filter_map(|event| event["event"]["event_id"].as_u64())
        .collect();
    assert!(ids.iter().copied().eq(1..=events.len() as u64));
}
