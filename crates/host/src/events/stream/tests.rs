//! A stream from a source within the process.

use std::time::Duration;

use bytes::Bytes;
use kvasir_hash::{Scope, local_hashes};
use kvasir_index::{Index, Matches};
use kvasir_kv_events::{EventFormat, RecoveryCause, StreamOptions};
use kvasir_transport::{MemoryPublisher, memory_source};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerId, WorkerRank};
use kvasir_wire::engine::{Dialect, Event, Stored, encode_batch};
use kvasir_wire::frame::Frame;
use kvasir_wire::native::RouterEvent;

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
fn start(tasks: &Tasks) -> (MemoryPublisher, EventStream, Arc<Index>) {
    let index = Arc::new(Index::new());
    let (engine, source) = memory_source();
    let start = tokio::time::Instant::now();
    let now = move || Time::ZERO + start.elapsed();
    let rank = WorkerRank::new(1, 0);
    let sequencer = Sequencer::new(EventFormat::EngineBatches { rank }, StreamOptions::new(4));
    let known = Arc::clone(&index);
    let stream = EventStream::spawn(tasks, source, sequencer, known, Arc::new(now), Arc::new(()));
    (engine, stream, index)
}

/// A gap is filled by asking; a silent replay is asked again by the clock; dropping forgets the rank.
#[tokio::test(start_paused = true)]
async fn a_stream_is_followed_mended_and_forgotten() {
    let tasks = Tasks::new();
    let (mut engine, mut stream, index) = start(&tasks);

    engine.events.send(SourceEvent::Connected).await.unwrap();
    let request = engine.requests.recv().await.unwrap();
    assert_eq!(request.from, Some(0));
    let attempt = request.attempt;
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
    stream
        .until(|s| s.status.recovering == Some(RecoveryCause::Gap))
        .await;
    assert!(holds(&index, 10) && !holds(&index, 30));

    // The first question goes unanswered; the machine asks again by itself.
    assert_eq!(engine.requests.recv().await.unwrap().from, Some(0));
    assert_eq!(engine.requests.recv().await.unwrap().from, None, "given up");
    let attempt = engine.requests.recv().await.unwrap().attempt;
    for frame in [frame(0, 10), frame(1, 20), frame(2, 30)] {
        let event = SourceEvent::Replayed { attempt, frame };
        engine.events.send(event).await.unwrap();
    }
    engine
        .events
        .send(SourceEvent::ReplayEnded { attempt })
        .await
        .unwrap();
    stream.until(|s| s.status.recovering.is_none()).await;
    assert!(holds(&index, 20) && holds(&index, 30));
    assert!(stream.snapshot().status.exact);

    stream.stop().await.unwrap();
    assert!(!holds(&index, 10));
    assert_eq!(tasks.shut_down(Duration::from_secs(1)).await, 0);
}

/// Events that come during a pause are applied after it; the checkpoint is what the cache holds.
#[tokio::test(start_paused = true)]
async fn a_paused_stream_goes_on_afterwards() {
    let tasks = Tasks::new();
    let (mut engine, mut stream, index) = start(&tasks);
    let handle = stream.handle();
    let (checkpoint, pause) = handle.pause().await.unwrap();
    assert_eq!(checkpoint, None, "nothing came yet");
    engine.events.send(SourceEvent::Connected).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!stream.snapshot().status.connected, "it stands still too");
    drop(pause);
    let attempt = engine.requests.recv().await.unwrap().attempt;
    let events = [
        SourceEvent::ReplayEnded { attempt },
        SourceEvent::Live(frame(0, 10)),
    ];
    for event in events {
        engine.events.send(event).await.unwrap();
    }
    stream.until(|s| s.status.cursor.is_some()).await;
    let (checkpoint, pause) = handle.pause().await.unwrap();
    assert_eq!(checkpoint.unwrap().cursor.sequence, 0);
    engine
        .events
        .send(SourceEvent::Live(frame(1, 20)))
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(holds(&index, 10) && !holds(&index, 20));
    drop(pause);
    let applied = |s: &StreamState| s.status.cursor.is_some_and(|c| c.sequence == 1);
    stream.until(applied).await;
    assert!(holds(&index, 20));
    // Who asks and does not wait for the answer stops nothing.
    let hasty = tokio::time::timeout(Duration::ZERO, handle.pause()).await;
    assert!(hasty.is_err());
    let last = SourceEvent::Live(frame(2, 30));
    engine.events.send(last).await.unwrap();
    let applied = |s: &StreamState| s.status.cursor.is_some_and(|c| c.sequence == 2);
    stream.until(applied).await;
    assert!(holds(&index, 30));
    // A paused one can still be ended.
    let paused = handle.pause().await.unwrap();
    stream.stop().await.unwrap();
    assert!(!holds(&index, 10));
    drop(paused);
    assert!(handle.pause().await.is_none());
    assert_eq!(tasks.shut_down(Duration::from_secs(1)).await, 0);
}

/// More than a turn's worth of events is applied to the last; a worker's events end with its removal.
#[tokio::test(start_paused = true)]
async fn router_events_of_several_workers_run_over_one_stream() {
    let tasks = Tasks::new();
    let index = Arc::new(Index::new());
    let (publisher, source) = memory_source();
    let format = EventFormat::RouterEvents(kvasir_kv_events::Encoding::MessagePack);
    let sequencer = Sequencer::new(format, StreamOptions::unanswered(4));
    let (cache, now) = (Arc::clone(&index), Arc::new(|| Time::ZERO));
    let mut stream = EventStream::spawn(&tasks, source, sequencer, cache, now, Arc::new(()));
    let handle = stream.handle();
    handle.add_worker(WorkerId(1)).await;
    handle.add_worker(WorkerId(2)).await;
    let count = 3 * EVENTS_PER_TURN as u64;
    for id in 1..=count {
        let events = [1, 2].map(|worker| stored(WorkerRank::new(worker, 0), id));
        let events = SourceEvent::Events(events.to_vec());
        publisher.events.send(events).await.unwrap();
    }
    stream.until(|s| s.status.counts.events == 2 * count).await;
    let depths = || [1, 2].map(|worker| depth(&index, WorkerRank::new(worker, 0)));
    assert_eq!(depths(), [count as u32, count as u32]);
    handle.remove_worker(WorkerId(2)).await;
    assert_eq!(depths(), [count as u32, 0]);
    let late = SourceEvent::Events(vec![stored(WorkerRank::new(2, 0), count + 1)]);
    publisher.events.send(late).await.unwrap();
    stream.until(|s| s.status.counts.skipped == 1).await;
    assert_eq!(depths(), [count as u32, 0]);
    stream.stop().await.unwrap();
    assert_eq!(depths(), [0, 0]);
}

fn stored(rank: WorkerRank, id: u64) -> RouterEvent {
    let block = StoredBlock {
        engine: EngineHash(id),
        local: LocalHash(id),
    };
    RouterEvent {
        rank,
        id,
        residency: None,
        position: None,
        event: KvEvent::Stored {
            tier: Tier::Device,
            parent: (id > 1).then(|| EngineHash(id - 1)),
            blocks: vec![block],
        },
    }
}

fn depth(index: &Index, rank: WorkerRank) -> u32 {
    let locals: Vec<LocalHash> = (1..=10_000).map(LocalHash).collect();
    let mut matches = Matches::new();
    index.find(&locals, &mut matches);
    matches.get(rank).map_or(0, |m| m.device)
}
