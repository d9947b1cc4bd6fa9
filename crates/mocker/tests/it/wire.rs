//! What a fault does to the bytes on a mock engine's event sockets, one test for each; a plain subscriber
//! at the other end, which mends nothing.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvasir_engine::CacheEvent;
use kvasir_mocker::{EventOptions, EventSockets, Fault, Observer};
use kvasir_tasks::Tasks;
use kvasir_transport::zmq::{Endpoint, ZmqSource, ZmqSourceOptions};
use kvasir_transport::{EventSource, SourceEvent, next_event};
use kvasir_types::{
    DpRank, EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerId, WorkerRank,
};
use kvasir_wire::engine::{Batch, Dialect, Event};
use kvasir_wire::frame::Frame;

const BLOCK: u32 = 4;
const RANK: WorkerRank = WorkerRank {
    worker: WorkerId(1),
    rank: DpRank(0),
};

/// Sockets, and one who listens.
struct Wire {
    sockets: EventSockets,
    source: ZmqSource,
    replays: u64,
}

impl Wire {
    async fn new(dialect: Dialect) -> Self {
        let tasks = Tasks::new();
        let free = || Endpoint::new("127.0.0.1", 0);
        let mut options = EventOptions::new(free(), Some(free()), BLOCK, Arc::new(|| 1.5));
        options.dialect = dialect;
        let sockets = EventSockets::bind(&tasks, &options).await.unwrap();
        let (events, replay) = sockets.addresses(0).unwrap();
        let at = |port| Endpoint::new("127.0.0.1", port);
        let options = ZmqSourceOptions::new(at(events.port()), replay.map(|r| at(r.port())));
        let mut wire = Self {
            sockets,
            source: ZmqSource::start(&tasks, options),
            replays: 0,
        };
        wire.subscribed().await;
        wire
    }

    /// Waits until the subscription stands at both ends.
    async fn subscribed(&mut self) {
        while self.event().await != SourceEvent::Connected {}
        while self.sockets.subscribers(0) == 0 {
            tokio::task::yield_now().await;
        }
    }

    /// A step of the engine that stores the block `name`.
    fn stores(&self, name: u64) {
        let blocks = vec![StoredBlock {
            engine: EngineHash(name),
            local: LocalHash(name),
        }];
        let (tier, parent) = (Tier::Device, None);
        let stored = KvEvent::Stored {
            tier,
            parent,
            blocks,
        };
        self.step(stored, vec![name as u32; BLOCK as usize]);
    }

    fn step(&self, event: KvEvent, tokens: Vec<u32>) {
        let request = None;
        let event = CacheEvent {
            event,
            tokens,
            request,
        };
        self.sockets.cache_event(RANK, 0, &event);
        self.sockets.step_ended(RANK);
    }

    async fn event(&mut self) -> SourceEvent {
        let next = next_event(&mut self.source);
        let waited = tokio::time::timeout(Duration::from_secs(20), next).await;
        waited.unwrap()
    }

    /// The next live batches, each as `sequence:events`.
    async fn live(&mut self, count: usize) -> String {
        let mut told = Vec::new();
        while told.len() < count {
            match self.event().await {
                SourceEvent::Live(frame) => told.push(shown(&frame)),
                other => panic!("{other:?} after {told:?}"),
            }
        }
        told.join(" ")
    }

    /// What the replay has from `from` on.
    async fn replay(&mut self, from: u64) -> String {
        self.replays += 1;
        self.source.replay(self.replays, from);
        let mut told = Vec::new();
        loop {
            match self.event().await {
                SourceEvent::Replayed { frame, .. } => told.push(shown(&frame)),
                SourceEvent::ReplayEnded { .. } => return told.join(" "),
                other => panic!("{other:?} after {told:?}"),
            }
        }
    }
}

fn shown(frame: &Frame<Bytes>) -> String {
    let mut batch = Batch::new();
    batch.decode(&frame.payload).unwrap();
    let event = |event: Event<'_>| match event {
        Event::Stored(stored) => format!("+{}/{}", stored.hashes[0].0, stored.block_size),
        Event::Removed(removed) => format!("-{}", removed.hashes[0].0),
        Event::Cleared => "clear".to_owned(),
        other => panic!("{other:?}"),
    };
    let events: Vec<String> = batch.events().map(event).collect();
    format!("{}:{}", frame.sequence, events.join(","))
}

async fn wire() -> Wire {
    Wire::new(Dialect::Vllm24).await
}

#[tokio::test]
async fn without_faults_batches_come_in_order_and_stay_for_replay() {
    let mut wire = wire().await;
    for name in 10..13 {
        wire.stores(name);
    }
    let removed = KvEvent::Removed {
        tier: Tier::Device,
        blocks: vec![EngineHash(10), EngineHash(11)],
    };
    wire.step(removed, Vec::new());
    assert_eq!(wire.live(4).await, "0:+10/4 1:+11/4 2:+12/4 3:-10,-11");
    assert_eq!(wire.replay(2).await, "2:+12/4 3:-10,-11");
}

#[tokio::test]
async fn the_wire_of_each_release() {
    const TIME_AND_COUNT: usize = 1 + 9 + 1;
    for dialect in Dialect::ALL {
        let mut wire = Wire::new(dialect).await;
        wire.stores(10);
        let SourceEvent::Live(frame) = wire.event().await else {
            panic!("no batch")
        };
        let first = frame.payload[TIME_AND_COUNT];
        let map = matches!(first, 0x80..=0x8f | 0xde);
        let array = matches!(first, 0x90..=0x9f | 0xdc);
        let newer = [Dialect::Vllm24, Dialect::Vllm24Bytes, Dialect::SglangMap].contains(&dialect);
        assert_eq!((map, array), (newer, !newer), "{dialect:?}");
        assert_eq!(shown(&frame), "0:+10/4", "{dialect:?}");
    }
}

#[tokio::test]
async fn drop_leaves_a_gap_that_replay_fills() {
    let mut wire = wire().await;
    wire.sockets.inject(Fault::Drop(2));
    (0..4).for_each(|name| wire.stores(name));
    assert_eq!(wire.live(2).await, "2:+2/4 3:+3/4");
    assert_eq!(wire.replay(0).await, "0:+0/4 1:+1/4 2:+2/4 3:+3/4");
}

#[tokio::test]
async fn duplicate_sends_one_batch_twice() {
    let mut wire = wire().await;
    wire.sockets.inject(Fault::Duplicate);
    (0..2).for_each(|name| wire.stores(name));
    assert_eq!(wire.live(3).await, "0:+0/4 0:+0/4 1:+1/4");
}

#[tokio::test]
async fn reorder_swaps_two_batches() {
    let mut wire = wire().await;
    wire.sockets.inject(Fault::Reorder);
    (0..3).for_each(|name| wire.stores(name));
    assert_eq!(wire.live(3).await, "1:+1/4 0:+0/4 2:+2/4");
}

#[tokio::test]
async fn delay_lets_the_next_batch_overtake() {
    let mut wire = wire().await;
    let delay = Fault::Delay(1, Duration::from_millis(50));
    wire.sockets.inject(delay);
    (0..2).for_each(|name| wire.stores(name));
    assert_eq!(wire.live(2).await, "1:+1/4 0:+0/4");
}

/// The second delay ends after the first, so a late word of the old numbering would have come by then.
#[tokio::test]
async fn what_was_delayed_is_lost_when_numbering_begins_again() {
    let mut wire = wire().await;
    let delay = Fault::Delay(1, Duration::from_millis(50));
    wire.sockets.inject(delay);
    wire.stores(0);
    wire.sockets.inject(Fault::RestartSequence);
    wire.sockets.inject(delay);
    (1..3).for_each(|name| wire.stores(name));
    assert_eq!(wire.live(2).await, "1:+2/4 0:+1/4");
    assert_eq!(wire.replay(0).await, "0:+1/4 1:+2/4");
}

#[tokio::test]
async fn mute_tells_nothing_and_keeps_nothing() {
    let mut wire = wire().await;
    wire.sockets.inject(Fault::Mute);
    (0..3).for_each(|name| wire.stores(name));
    assert_eq!(wire.replay(0).await, "");
    wire.sockets.inject(Fault::Unmute);
    wire.stores(3);
    assert_eq!(wire.live(1).await, "0:+3/4");
}

#[tokio::test]
async fn restart_sequence_begins_at_0_on_the_same_connection() {
    let mut wire = wire().await;
    (0..2).for_each(|name| wire.stores(name));
    wire.sockets.inject(Fault::RestartSequence);
    wire.stores(2);
    assert_eq!(wire.live(3).await, "0:+0/4 1:+1/4 0:+2/4");
    assert_eq!(wire.replay(0).await, "0:+2/4");
}

#[tokio::test]
async fn restart_empty_cuts_readers_off_and_begins_at_0() {
    let mut wire = wire().await;
    (0..2).for_each(|name| wire.stores(name));
    assert_eq!(wire.live(2).await, "0:+0/4 1:+1/4");
    wire.sockets.inject(Fault::RestartEmpty);
    let SourceEvent::Disconnected(_) = wire.event().await else {
        panic!("still connected")
    };
    wire.subscribed().await;
    assert_eq!(wire.replay(0).await, "");
    wire.stores(2);
    assert_eq!(wire.live(1).await, "0:+2/4");
}

#[tokio::test]
async fn silent_clear_hides_one_clear() {
    let mut wire = wire().await;
    wire.stores(0);
    wire.sockets.inject(Fault::SilentClear);
    let clear = || KvEvent::Cleared { tier: None };
    wire.step(clear(), Vec::new());
    wire.stores(1);
    wire.step(clear(), Vec::new());
    assert_eq!(wire.live(3).await, "0:+0/4 1:+1/4 2:clear");
}

#[tokio::test]
async fn forget_replay_no_longer_reaches_back() {
    let mut wire = wire().await;
    (0..4).for_each(|name| wire.stores(name));
    wire.sockets.inject(Fault::ForgetReplay(1));
    assert_eq!(wire.live(4).await, "0:+0/4 1:+1/4 2:+2/4 3:+3/4");
    assert_eq!(wire.replay(0).await, "3:+3/4");
}

#[tokio::test]
async fn block_size_claims_another_until_it_is_taken_back() {
    let mut wire = wire().await;
    wire.sockets.inject(Fault::BlockSize(2));
    wire.stores(0);
    wire.sockets.inject(Fault::BlockSize(0));
    wire.stores(1);
    assert_eq!(wire.live(2).await, "0:+0/2 1:+1/4");
}

/// Every fault has a name, and nothing else has.
#[test]
fn faults_by_name() {
    let delay = |ms| Fault::Delay(1, Duration::from_millis(ms));
    for (text, fault) in [
        ("drop=3", Fault::Drop(3)),
        ("duplicate", Fault::Duplicate),
        ("reorder", Fault::Reorder),
        ("delay=20", delay(20)),
        ("mute", Fault::Mute),
        ("unmute", Fault::Unmute),
        ("restart-sequence", Fault::RestartSequence),
        ("restart-empty", Fault::RestartEmpty),
        ("silent-clear", Fault::SilentClear),
        ("forget-replay=5", Fault::ForgetReplay(5)),
        ("block-size=8", Fault::BlockSize(8)),
    ] {
        assert_eq!(text.parse(), Ok(fault));
    }
    for text in ["", "drop", "drop=x", "duplicate=1", "mute=0", "explode"] {
        assert!(text.parse::<Fault>().is_err(), "{text}");
    }
}
