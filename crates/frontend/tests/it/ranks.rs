//! Engines with several data-parallel ranks: which one is asked, and who says so.

use std::collections::BTreeSet;

use crate::engine::Seen;
use crate::rig::{ASK, CHAT, Rig, Setup};

async fn rig(ranks: u32) -> Rig {
    let mut setup = Setup::usual();
    setup.additions = format!(",data-parallel-size={ranks}");
    Rig::with(2, setup).await
}

fn rank(seen: &Seen) -> Vec<&str> {
    seen.header("x-data-parallel-rank")
}

async fn ask(rig: &Rig, headers: &str, body: &str) -> u16 {
    let mut client = rig.client().await;
    let headers = format!("{headers}connection: close\r\n");
    client.post(CHAT, &headers, body).await;
    client.answer().await.status
}

/// Every rank is a candidate, and the chosen one is named, the first one too.
#[tokio::test]
async fn the_chosen_rank_is_sent_on() {
    let rig = rig(2).await;
    for _ in 0..8 {
        assert_eq!(ask(&rig, "", ASK).await, 200);
    }
    let seen = rig.stage.seen();
    let places: BTreeSet<_> = seen.iter().map(|s| (s.port, rank(s).join(","))).collect();
    let ranks: BTreeSet<&str> = places.iter().map(|(_, rank)| rank.as_str()).collect();
    assert_eq!(places.len(), 4, "{places:?}");
    assert_eq!(ranks, BTreeSet::from(["0", "1"]));
    rig.at_rest().await;
}

/// A rank without a worker is that rank of any worker, by header or body; the engine is told once.
#[tokio::test]
async fn a_rank_without_a_worker_is_that_rank_of_any() {
    let rig = rig(2).await;
    let by_body = r#"{"model":"m","messages":[],"nvext":{"dp_rank":0}}"#;
    for n in 0..4 {
        assert_eq!(ask(&rig, "", by_body).await, 200);
        assert_eq!(rank(&rig.stage.seen().pop().unwrap()), ["0"], "{n}");
        assert_eq!(ask(&rig, "x-data-parallel-rank: 1\r\n", ASK).await, 200);
        assert_eq!(rank(&rig.stage.seen().pop().unwrap()), ["1"], "{n}");
    }
    let ports: BTreeSet<u16> = rig.stage.seen().iter().map(|seen| seen.port).collect();
    assert_eq!(ports.len(), 2, "any worker");
    // Nobody has it.
    let asked = rig.stage.seen().len();
    assert_eq!(ask(&rig, "x-dp-rank: 2\r\n", ASK).await, 503);
    assert_eq!(rig.stage.seen().len(), asked);
    rig.at_rest().await;
}

/// An engine with one rank is told nothing of ranks that the client did not tell it itself.
#[tokio::test]
async fn one_rank_is_no_choice() {
    let rig = rig(1).await;
    assert_eq!(ask(&rig, "", ASK).await, 200);
    assert!(rank(&rig.stage.seen().pop().unwrap()).is_empty());
    rig.at_rest().await;
}
