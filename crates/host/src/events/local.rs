//! Events of workers in this process: a queue instead of a socket.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_kv_events::{Encoding, EventFormat, Notice, Sequencer, StreamOptions};
use kvasir_tasks::RuntimeThreads;
use kvasir_telemetry::{IntCounter, Metrics};
use kvasir_transport::{EventPublisher, MemorySource, SourceFault, worker_events};
use kvasir_types::{KvEvent, WorkerId, WorkerRank};

use super::{EventStream, StreamObserver, Subscriptions};

/// Where a worker in this process puts the events of one rank. Never waits: what finds no room is dropped and
/// counted, and the rank is emptied before its next event is applied.
#[derive(Debug)]
pub struct LocalEvents {
    rank: WorkerRank,
    publisher: EventPublisher,
    dropped: IntCounter,
    /// The last message found no room; said once until one does.
    full: AtomicBool,
}

impl LocalEvents {
    pub(super) fn new(rank: WorkerRank, router: &str, metrics: &Metrics) -> (Self, MemorySource) {
        let (publisher, source) = worker_events(rank);
        let dropped = &metrics.kv_events_dropped_total;
        let events = Self {
            rank,
            publisher,
            dropped: dropped.with_label_values(&[router]),
            full: AtomicBool::new(false),
        };
        (events, source)
    }

    /// Adds one event to the message of this step.
    pub fn push(&self, event: KvEvent) {
        let dropped = self.publisher.push(event);
        if dropped > 0 {
            self.note(dropped);
        }
    }

    /// Sends the message of this step, if it has events.
    pub fn flush(&self) {
        let dropped = self.publisher.flush();
        self.note(dropped);
    }

    fn note(&self, dropped: usize) {
        let full = dropped > 0;
        if full {
            self.dropped.inc_by(dropped as u64);
        }
        if self.full.swap(full, Ordering::Relaxed) != full && full {
            tracing::warn!(rank = %self.rank, "event queue full; events are dropped");
        }
    }
}

/// A sequencer for the events of one rank in this process, and who reads what it reports.
pub(super) fn sequencer(rank: WorkerRank, block_size: u32) -> (Sequencer, Arc<dyn StreamObserver>) {
    let format = EventFormat::RouterEvents(Encoding::MessagePack);
    let mut sequencer = Sequencer::new(format, StreamOptions::unanswered(block_size));
    sequencer.add_worker(rank.worker);
    (sequencer, Arc::new(LocalObserver { rank }))
}

/// Logs what the stream of a rank in this process reports.
struct LocalObserver {
    rank: WorkerRank,
}

impl StreamObserver for LocalObserver {
    fn notice(&self, notice: &Notice) {
        let rank = self.rank;
        match notice {
            Notice::Cleared { .. } => tracing::debug!(%rank, "cache events: {notice}"),
            _ => tracing::warn!(%rank, "cache events: {notice}"),
        }
    }

    fn link(&self, _: Option<&SourceFault>) {}
}

/// The streams of one router's workers in this process.
#[derive(Debug, Default)]
pub(crate) struct LocalStreams {
    streams: Mutex<Subscriptions<WorkerRank, ()>>,
}

impl LocalStreams {
    pub(super) fn open(
        &self,
        rank: WorkerRank,
        threads: Option<&RuntimeThreads>,
        start: impl FnOnce() -> EventStream,
    ) {
        self.lock().open(rank, (), threads, || Some(start()));
    }

    /// Ends the streams of a worker; each forgets its rank.
    pub(crate) fn leave(&self, worker: WorkerId) {
        self.lock().close(|rank, ()| rank.worker == worker);
    }

    /// Waits until streams that were ended have forgotten their ranks.
    pub(crate) async fn settle(&self) {
        let closing = self.lock().take_closing();
        for ended in closing {
            let _ = ended.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Subscriptions<WorkerRank, ()>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvasir_index::Matches;
    use kvasir_transport::MEMORY_QUEUE_MAX;
    use kvasir_types::{EngineHash, LocalHash, StoredBlock, Tier};

    use super::*;
    use crate::router_host::RouterHost;
    use crate::testing;

    const RANK: WorkerRank = WorkerRank {
        worker: WorkerId(1),
        rank: kvasir_types::DpRank(0),
    };

    fn stored(number: u64) -> KvEvent {
        KvEvent::Stored {
            tier: Tier::Device,
            parent: (number > 1).then(|| EngineHash(number - 1)),
            blocks: vec![StoredBlock {
                engine: EngineHash(number),
                local: LocalHash(number),
            }],
        }
    }

    fn depth(host: &RouterHost) -> u32 {
        let locals: Vec<LocalHash> = (1..=5000).map(LocalHash).collect();
        let mut matches = Matches::new();
        host.index().find(&locals, &mut matches);
        matches.get(RANK).map_or(0, |m| m.device)
    }

    async fn until(host: &RouterHost, expected: u32) {
        let there = async {
            while depth(host) != expected {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), there).await;
        assert!(waited.is_ok(), "{} blocks, not {expected}", depth(host));
    }

    /// A worker's events reach the index from another thread, and go with it.
    #[tokio::test]
    async fn events_of_a_worker_in_this_process_reach_the_index_and_leave_with_it() {
        let host = testing::host(&testing::context());
        let threads = RuntimeThreads::start("events", 2, |_| {}).unwrap();
        let events = host.subscribe_local(RANK, Some(&threads)).await;
        (1..=3).for_each(|number| events.push(stored(number)));
        events.flush();
        until(&host, 3).await;
        host.leave(RANK.worker);
        host.local_streams().settle().await;
        assert_eq!(depth(&host), 0);
        // What it still says is not heard; one that comes back under its name begins anew.
        events.push(stored(1));
        events.flush();
        let events = host.subscribe_local(RANK, Some(&threads)).await;
        assert_eq!(depth(&host), 0);
        events.push(stored(1));
        events.flush();
        until(&host, 1).await;
    }

    /// At the limit events are dropped and counted, nobody waits, and the rank is emptied before the next one.
    #[tokio::test]
    async fn a_full_queue_drops_counts_and_empties_the_rank() {
        let host = testing::host(&testing::context());
        // On this very thread, which does not let it run: the queue fills up.
        let events = host.subscribe_local(RANK, None).await;
        for number in 1..=MEMORY_QUEUE_MAX as u64 {
            events.push(stored(number));
            events.flush();
        }
        let dropped = &host.context().metrics.kv_events_dropped_total;
        let dropped = dropped.with_label_values(&[&**host.name()]);
        assert_eq!(dropped.get(), 1, "the connection took one place");
        until(&host, MEMORY_QUEUE_MAX as u32 - 1).await;
        events.push(stored(1));
        events.flush();
        until(&host, 1).await;
    }
}
