//! From cache events to the index: a few threads, each rank always on the same one.
//!
//! What always holds: events of a rank are applied in the order in which they came; a source never waits;
//! when a queue is full the event is dropped and the rank's whole picture is forgotten before its next
//! event, so that the index may know less than the truth but never more.

use std::collections::HashSet;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use kvasir_index::Index;
use kvasir_kv_events::Cache as _;
use kvasir_telemetry::Metrics;
use kvasir_types::{KvEvent, WorkerId, WorkerRank};

use crate::counted::CountedIndex;

/// Events that wait on one thread.
const QUEUE_MAX: usize = 16_384;

/// What a source tells the index.
#[derive(Debug)]
enum Item {
    Event(WorkerRank, KvEvent),
    WorkerGone(WorkerId),
}

/// Where sources put their events. Clones are one pool; the threads end when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct EventPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    model: Arc<str>,
    metrics: Metrics,
    lanes: Vec<Lane>,
}

#[derive(Debug)]
struct Lane {
    queue: SyncSender<Item>,
    /// Ranks that lost an event and are to be forgotten.
    lossy: Arc<Mutex<HashSet<WorkerRank>>>,
}

impl EventPool {
    /// Starts `threads` threads (at least one) that apply events to `index`.
    pub fn start(
        model: Arc<str>,
        index: &Arc<Index>,
        metrics: &Metrics,
        threads: usize,
    ) -> std::io::Result<Self> {
        let mut lanes = Vec::new();
        for number in 0..threads.max(1) {
            let (queue, items) = sync_channel(QUEUE_MAX);
            let lossy = Arc::new(Mutex::new(HashSet::new()));
            let writer = Writer {
                cache: CountedIndex::new(index, metrics),
                lossy: Arc::clone(&lossy),
            };
            thread::Builder::new()
                .name(format!("kv-events-{number}"))
                .spawn(move || writer.run(&items))?;
            lanes.push(Lane { queue, lossy });
        }
        Ok(Self {
            shared: Arc::new(Shared {
                model,
                metrics: metrics.clone(),
                lanes,
            }),
        })
    }

    /// Hands over one event of `rank`. Never waits.
    pub fn push(&self, rank: WorkerRank, event: KvEvent) {
        let lane = self.lane(rank.worker);
        if let Err(TrySendError::Full(_)) = lane.queue.try_send(Item::Event(rank, event)) {
            let mut lossy = lane.lossy.lock().unwrap_or_else(PoisonError::into_inner);
            if lossy.insert(rank) {
                tracing::warn!(%rank, "event queue full: the rank's cache picture starts anew");
            }
            self.shared
                .metrics
                .kv_events_dropped_total
                .with_label_values(&[&*self.shared.model])
                .inc();
        }
    }

    /// Forgets a worker, after the events that it has sent.
    pub fn worker_gone(&self, worker: WorkerId) {
        let lane = self.lane(worker);
        // Waits for room: membership changes are rare, and losing one would leave a ghost.
        let _ = lane.queue.send(Item::WorkerGone(worker));
    }

    fn lane(&self, worker: WorkerId) -> &Lane {
        let lanes = &self.shared.lanes;
        &lanes[(worker.0 % lanes.len() as u64) as usize]
    }
}

struct Writer {
    cache: CountedIndex,
    lossy: Arc<Mutex<HashSet<WorkerRank>>>,
}

impl Writer {
    fn run(&self, items: &Receiver<Item>) {
        while let Ok(item) = items.recv() {
            match item {
                Item::Event(rank, event) => self.apply(rank, &event),
                Item::WorkerGone(worker) => self.cache.index().remove_worker(worker),
            }
        }
    }

    fn apply(&self, rank: WorkerRank, event: &KvEvent) {
        if self
            .lossy
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&rank)
        {
            self.cache.remove_rank(rank);
        }
        let _ = self.cache.apply(rank, event);
    }
}
