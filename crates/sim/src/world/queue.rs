//! What will happen, by time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use kvasir_engine::{CacheEvent, EngineRequest};
use kvasir_router::PeerEvent;
use kvasir_types::{Time, WorkerRank};

/// Something that will happen.
#[derive(Debug)]
pub(super) enum Event {
    /// A request comes, or comes again.
    Arrive(u32),
    /// A prompt that another worker has computed is where it is answered.
    Transferred {
        target: WorkerRank,
        admission: Box<EngineRequest>,
    },
    /// An engine's step is over.
    StepEnd { host: usize, life: u32 },
    /// Cache events reach a router.
    Deliver {
        replica: usize,
        host: usize,
        life: u32,
        events: Arc<Vec<CacheEvent>>,
    },
    /// Another replica's news reach a router.
    Peer {
        replica: usize,
        event: Box<PeerEvent>,
    },
    /// A router asked to be woken.
    Tick(usize),
    /// Something befalls a worker.
    Change(usize),
    /// Loads are written down.
    Sample,
}

#[derive(Debug)]
struct ScheduledEvent {
    at: Time,
    order: u64,
    event: Event,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Events by time, then by the order in which they were planned.
#[derive(Debug, Default)]
pub(super) struct Queue {
    heap: BinaryHeap<Reverse<ScheduledEvent>>,
    planned: u64,
}

impl Queue {
    pub(super) fn push(&mut self, at: Time, event: Event) {
        let order = self.planned;
        self.planned += 1;
        self.heap.push(Reverse(ScheduledEvent { at, order, event }));
    }

    pub(super) fn pop(&mut self) -> Option<(Time, Event)> {
        self.heap.pop().map(|Reverse(next)| (next.at, next.event))
    }
}
