//! Streams and the index while the file is written.

use kvasir_ingest::{Ingest, IngestOptions};
use kvasir_intake::Intake;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};
use kvasir_transport::{MemoryPublisher, SourceEvent, Tasks, memory_source};
use kvasir_types::{DpRank, EngineHash, KvEvent, LocalHash, StoredBlock, Tier};

use super::*;
use crate::AppOptions;
use crate::picture::model;

/// Blocks of an index that takes several parts.
const BLOCKS: u64 = 20_000;

fn app() -> Arc<App> {
    let metrics = Metrics::new(&MetricOptions::default()).unwrap();
    App::new(AppOptions::default(), metrics, Clock::new(), Tasks::new())
}

/// A rank whose stream begins now.
fn rank(app: &App, model: &ServedModel) -> (MemoryPublisher, Intake, Arc<Picture>) {
    let rank = WorkerRank::new(1, 0);
    let picture = model.host.pictures().join(app, model, rank, None, None);
    let (engine, source) = memory_source();
    let ingest = Ingest::new(rank.worker, DpRank(0), IngestOptions::new(16));
    let (clock, index) = (app.clock(), Arc::clone(model.host.index()));
    let now = Arc::new(move || clock.now());
    let intake = picture.listen("tcp://engine", || {
        Intake::spawn(app.tasks(), source, ingest, index, now, Arc::new(()))
    });
    (engine, intake, picture)
}

/// Events of a stream that is not in the file are in the index all the same: it must not change while it is copied.
#[tokio::test]
async fn a_stream_that_is_not_worth_keeping_stands_still_too() {
    let app = app();
    let model = model(&app);
    let (engine, mut intake, picture) = rank(&app, &model);
    let mut still = all_still(vec![picture], Then::GoOn).await;
    let (_, still) = still.pop().unwrap();
    assert_eq!(still.kept, None, "nothing came yet");
    let pause = still.pause.expect("it stands still");
    engine.events.send(SourceEvent::Connected).await.unwrap();
    tokio::task::yield_now().await;
    assert!(!intake.snapshot().status.connected);
    drop(pause);
    intake.until(|s| s.status.connected).await;
}

fn chain(worker: u64, first: u64, blocks: u64) -> (WorkerRank, KvEvent) {
    let block = |i| StoredBlock {
        engine: EngineHash(i),
        local: LocalHash(i),
    };
    let stored = KvEvent::Stored {
        tier: Tier::Device,
        parent: None,
        blocks: (first..first + blocks).map(block).collect(),
    };
    (WorkerRank::new(worker, 0), stored)
}

/// Nobody waits for the whole of an index that is in use; at the end nobody is left who would.
#[test]
fn an_index_that_keeps_changing_is_left_for_later() {
    let index = Index::new();
    let (rank, event) = chain(1, 1, BLOCKS);
    index.apply(rank, &event).unwrap();
    let mut next = 2 * BLOCKS;
    let mut changes = || {
        next += 1;
        let (rank, event) = chain(2, next, 1);
        index.apply(rank, &event).unwrap();
    };
    let copied = copy(&index, Then::GoOn, &mut changes);
    assert_eq!(copied, Err(SnapshotError::Changed));
    assert!(next > 2 * BLOCKS, "others had their turn");
    for then in [Then::GoOn, Then::End] {
        let restored = Index::new();
        restored
            .restore(&copy(&index, then, || {}).unwrap())
            .unwrap();
        assert_eq!(restored.stats().blocks, index.stats().blocks);
    }
}
