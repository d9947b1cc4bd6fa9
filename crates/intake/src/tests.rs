//! A stream from a source within the process.

use std::time::Duration;

use bytes::Bytes;
use kvasir_hash::{Scope, local_hashes};
use kvasir_index::{Index, Matches};
use kvasir_ingest::{Cause, IngestOptions};
use kvasir_transport::{MemoryPublisher, memory_source};
use kvasir_types::{DpRank, EngineHash, WorkerId, WorkerRank};
use kvasir_wire::engine::{Dialect, Event, Stored, encode_batch};
use kvasir_wire::frame::Frame;

use super::*;

fn frame(sequence: u64, first: u32) -> Frame<Bytes> {
    let tokens: Vec<u32> = (first..first + 4).collect();
    let hashes = [EngineHash(u64::from(first))];
    let stored = Event::Stored(Stored {
        hashes: &hashes,
        tokens: &tokens,
        block_size: 4,
        ..Stored::default()
    });
    let (mut payload, at) = (Vec::new(), sequence as f64);
    encode_batch(
        Dialect::Vllm24,
        at,
        [stored].into_iter(),
        Some(0),
        &mut payload,
    );
    let payload = payload.into();
    Frame { sequence, payload }
}

fn holds(index: &Index, first: u32) -> bool {
    let tokens: Vec<u32> = (first..first + 4).collect();
    let mut matches = Matches::new();
    index.find(&local_hashes(&tokens, 4, &Scope::default()), &mut matches);
    matches.get(WorkerRank::new(1, 0)).is_some()
}

/// A stream that begins now: who tells it, the task that follows it, and what that knows.
fn stream(tasks: &Tasks) -> (MemoryPublisher, Intake, Arc<Index>) {
    let index = Arc::new(Index::new());
    let (engine, source) = memory_source();
    let start = tokio::time::Instant::now();
    let now = move || Time::ZERO + start.elapsed();
    let ingest = Ingest::new(WorkerId(1), DpRank(0), IngestOptions::new(4));
    let known = Arc::clone(&index);
    let intake = Intake::spawn(tasks, source, ingest, known, Arc::new(now), Arc::new(()));
    (engine, intake, index)
}

/// A gap is filled by asking; a silent replay is asked again by the clock; dropping forgets the rank.
#[tokio::test(start_paused = true)]
async fn a_stream_is_followed_mended_and_forgotten() {
    let tasks = Tasks::new();
    let (mut engine, mut intake, index) = stream(&tasks);

    engine.events.send(SourceEvent::Connected).await.unwrap();
    let ask = engine.asks.recv().await.unwrap();
    assert_eq!(ask.from, Some(0));
    let attempt = ask.attempt;
    engine
        .events
        .send(SourceEvent::ReplayEnded { attempt })
        .await
        .unwrap();
    engine
        .events
        .send(SourceEvent::Live(frame(0, 10)))
        .await
        .unwrap();
    engine
        .events
        .send(SourceEvent::Live(frame(2, 30)))
        .await
        .unwrap();
    intake
        .until(|s| s.status.recovering == Some(Cause::Gap))
        .await;
    assert!(holds(&index, 10) && !holds(&index, 30));

    // The first question goes unanswered; the machine asks again by itself.
    assert_eq!(engine.asks.recv().await.unwrap().from, Some(0));
    assert_eq!(engine.asks.recv().await.unwrap().from, None, "given up");
    let attempt = engine.asks.recv().await.unwrap().attempt;
    for frame in [frame(0, 10), frame(1, 20), frame(2, 30)] {
        let event = SourceEvent::Replayed { attempt, frame };
        engine.events.send(event).await.unwrap();
    }
    engine
        .events
        .send(SourceEvent::ReplayEnded { attempt })
        .await
        .unwrap();
    intake.until(|s| s.status.recovering.is_none()).await;
    assert!(holds(&index, 20) && holds(&index, 30));
    assert!(intake.snapshot().status.exact);

    intake.stop().await.unwrap();
    assert!(!holds(&index, 10));
    assert_eq!(tasks.shut_down(Duration::from_secs(1)).await, 0);
}

/// What is told while a stream stands still is applied afterwards; what it says of itself is what its cache holds.
#[tokio::test(start_paused = true)]
async fn a_stream_that_is_held_goes_on_afterwards() {
    let tasks = Tasks::new();
    let (mut engine, mut intake, index) = stream(&tasks);
    let handle = intake.handle();
    let (kept, pause) = handle.hold().await.unwrap();
    assert_eq!(kept, None, "nothing came yet");
    engine.events.send(SourceEvent::Connected).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!intake.snapshot().status.connected, "it stands still too");
    drop(pause);
    let attempt = engine.asks.recv().await.unwrap().attempt;
    let events = [
        SourceEvent::ReplayEnded { attempt },
        SourceEvent::Live(frame(0, 10)),
    ];
    for event in events {
        engine.events.send(event).await.unwrap();
    }
    intake.until(|s| s.status.cursor.is_some()).await;
    let (kept, pause) = handle.hold().await.unwrap();
    assert_eq!(kept.unwrap().cursor.sequence, 0);
    engine
        .events
        .send(SourceEvent::Live(frame(1, 20)))
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(holds(&index, 10) && !holds(&index, 20));
    drop(pause);
    let applied = |s: &Snapshot| s.status.cursor.is_some_and(|c| c.sequence == 1);
    intake.until(applied).await;
    assert!(holds(&index, 20));
    // Who asks and does not wait for the answer stops nothing.
    let hasty = tokio::time::timeout(Duration::ZERO, handle.hold()).await;
    assert!(hasty.is_err());
    let last = SourceEvent::Live(frame(2, 30));
    engine.events.send(last).await.unwrap();
    let applied = |s: &Snapshot| s.status.cursor.is_some_and(|c| c.sequence == 2);
    intake.until(applied).await;
    assert!(holds(&index, 30));
    // One that is held can still be ended.
    let held = handle.hold().await.unwrap();
    intake.stop().await.unwrap();
    assert!(!holds(&index, 10));
    drop(held);
    assert!(handle.hold().await.is_none());
    assert_eq!(tasks.shut_down(Duration::from_secs(1)).await, 0);
}
