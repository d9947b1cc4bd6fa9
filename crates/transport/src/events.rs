//! Where KV events come from: one trait, one module per way of travelling.
//!
//! Invariants: a source says what happened in the order in which it happened, connections made and lost
//! included; a source that nobody reads stops reading, and costs its sender nothing; a source that is
//! dropped closes its connections.

use std::future::poll_fn;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::native::{RecoveryRequest, RouterEvent};
use kvasir_wire::{SourceEvent, SourceFault};
use tokio::sync::mpsc;

/// One stream of events, of one worker or of several.
pub trait EventSource: Send {
    /// What happened next. Never ends: a lost connection is made again.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent>;

    /// Asks for all messages from `from` on. Ends an earlier replay.
    fn replay(&mut self, attempt: u64, from: u64);

    /// Ends the replay or the question with this number.
    fn cancel_replay(&mut self, attempt: u64);

    /// Asks the worker's own index. A source that cannot says so in its answer.
    fn query(&mut self, _attempt: u64, _request: RecoveryRequest) {}
}

impl<S: EventSource + ?Sized> EventSource for Box<S> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent> {
        (**self).poll_next(cx)
    }

    fn replay(&mut self, attempt: u64, from: u64) {
        (**self).replay(attempt, from);
    }

    fn cancel_replay(&mut self, attempt: u64) {
        (**self).cancel_replay(attempt);
    }

    fn query(&mut self, attempt: u64, request: RecoveryRequest) {
        (**self).query(attempt, request);
    }
}

/// What happened next at `source`. Dropping the future loses nothing.
pub async fn next_event<S: EventSource + ?Sized>(source: &mut S) -> SourceEvent {
    poll_fn(|cx| source.poll_next(cx)).await
}

/// Messages that wait in a source within the process; the next one is dropped, and its number shows it.
pub const MEMORY_QUEUE_MAX: usize = 1024;
/// Replay requests that wait; one that is lost is repeated when its deadline has passed.
const REQUESTS_MAX: usize = 16;
/// Events of one message of a worker in this process.
const MESSAGE_EVENTS_MAX: usize = 1024;

/// A source within the process: for workers in it, and for tests.
#[derive(Debug)]
pub struct MemorySource {
    events: mpsc::Receiver<SourceEvent>,
    requests: mpsc::Sender<ReplayRequest>,
    gone: bool,
}

/// The engine's end of a [`MemorySource`], as tests use it.
#[derive(Debug)]
pub struct MemoryPublisher {
    /// Where to say what happens.
    pub events: mpsc::Sender<SourceEvent>,
    /// What the other end asks for.
    pub requests: mpsc::Receiver<ReplayRequest>,
}

/// A question for the replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayRequest {
    /// Goes with every answer.
    pub attempt: u64,
    /// First sequence number wanted; `None` to end the attempt.
    pub from: Option<u64>,
}

/// Both ends of a source within the process.
#[must_use]
pub fn memory_source() -> (MemoryPublisher, MemorySource) {
    let (event_sender, event_receiver) = mpsc::channel(MEMORY_QUEUE_MAX);
    let (request_sender, request_receiver) = mpsc::channel(REQUESTS_MAX);
    let publisher = MemoryPublisher {
        events: event_sender,
        requests: request_receiver,
    };
    let source = MemorySource {
        events: event_receiver,
        requests: request_sender,
        gone: false,
    };
    (publisher, source)
}

impl EventSource for MemorySource {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent> {
        match self.events.poll_recv(cx) {
            Poll::Ready(Some(event)) => Poll::Ready(event),
            Poll::Ready(None) if !self.gone => {
                self.gone = true;
                let fault = SourceFault::Closed("the engine left".to_owned());
                Poll::Ready(SourceEvent::Disconnected(fault))
            }
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    fn replay(&mut self, attempt: u64, from: u64) {
        let from = Some(from);
        let _ = self.requests.try_send(ReplayRequest { attempt, from });
    }

    fn cancel_replay(&mut self, attempt: u64) {
        let from = None;
        let _ = self.requests.try_send(ReplayRequest { attempt, from });
    }
}

/// Where a worker in this process puts the events of one rank. Numbers them from 1 and never waits.
///
/// A message that finds no room is dropped; its numbers are used up, so whoever reads notices the gap.
#[derive(Debug)]
pub struct EventPublisher {
    rank: WorkerRank,
    sender: mpsc::Sender<SourceEvent>,
    message: Mutex<NextMessage>,
}

/// The message that is being filled.
#[derive(Debug, Default)]
struct NextMessage {
    last_id: u64,
    events: Vec<RouterEvent>,
}

/// Both ends of the events of one rank in this process.
#[must_use]
pub fn worker_events(rank: WorkerRank) -> (EventPublisher, MemorySource) {
    let (publisher, source) = memory_source();
    let publisher = EventPublisher {
        rank,
        sender: publisher.events,
        message: Mutex::default(),
    };
    // The channel is new: there is room.
    let _ = publisher.sender.try_send(SourceEvent::Connected);
    (publisher, source)
}

impl EventPublisher {
    /// Adds one event to the message. Returns how many events were dropped to make room: none, or all of the
    /// message that this one did not fit in.
    pub fn push(&self, event: KvEvent) -> usize {
        let mut message = self.lock();
        message.last_id += 1;
        let event = RouterEvent {
            rank: self.rank,
            id: message.last_id,
            residency: None,
            position: None,
            event,
        };
        message.events.push(event);
        match message.events.len() >= MESSAGE_EVENTS_MAX {
            true => self.send(&mut message),
            false => 0,
        }
    }

    /// Sends the message, if it has events. Returns how many events were dropped for want of room.
    pub fn flush(&self) -> usize {
        self.send(&mut self.lock())
    }

    fn send(&self, message: &mut NextMessage) -> usize {
        let events = std::mem::take(&mut message.events);
        if events.is_empty() {
            return 0;
        }
        let count = events.len();
        match self.sender.try_send(SourceEvent::Events(events)) {
            Err(mpsc::error::TrySendError::Full(_)) => count,
            // Nobody listens any more: nobody misses anything.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => 0,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, NextMessage> {
        self.message.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: WorkerRank = WorkerRank {
        worker: kvasir_types::WorkerId(7),
        rank: kvasir_types::DpRank(1),
    };
    const CLEARED: KvEvent = KvEvent::Cleared { tier: None };

    async fn ids(source: &mut MemorySource) -> Vec<u64> {
        match next_event(source).await {
            SourceEvent::Events(events) => {
                assert!(events.iter().all(|event| event.rank == RANK));
                events.iter().map(|event| event.id).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn the_events_of_a_step_travel_together_and_are_numbered() {
        let (publisher, mut source) = worker_events(RANK);
        assert_eq!(next_event(&mut source).await, SourceEvent::Connected);
        assert_eq!(publisher.flush(), 0, "nothing happened, nothing is sent");
        assert_eq!((publisher.push(CLEARED), publisher.push(CLEARED)), (0, 0));
        assert_eq!(publisher.flush(), 0);
        publisher.push(CLEARED);
        publisher.flush();
        assert_eq!(ids(&mut source).await, [1, 2]);
        assert_eq!(ids(&mut source).await, [3]);
    }

    /// At the limit the newest message is dropped, and the number of the next one shows it.
    #[tokio::test]
    async fn a_full_queue_drops_and_the_numbers_show_it() {
        let (publisher, mut source) = worker_events(RANK);
        let room = MEMORY_QUEUE_MAX - 1;
        for _ in 0..room {
            publisher.push(CLEARED);
            assert_eq!(publisher.flush(), 0);
        }
        publisher.push(CLEARED);
        publisher.push(CLEARED);
        assert_eq!(publisher.flush(), 2);
        next_event(&mut source).await;
        publisher.push(CLEARED);
        assert_eq!(publisher.flush(), 0);
        let mut last = Vec::new();
        for _ in 0..=room {
            last = ids(&mut source).await;
        }
        assert_eq!(last, [room as u64 + 3]);
    }

    /// A message is bounded, too: what a step has more goes into another one.
    #[tokio::test]
    async fn a_long_step_is_sent_in_parts() {
        let (publisher, mut source) = worker_events(RANK);
        next_event(&mut source).await;
        for _ in 0..=MESSAGE_EVENTS_MAX {
            assert_eq!(publisher.push(CLEARED), 0);
        }
        publisher.flush();
        assert_eq!(ids(&mut source).await.len(), MESSAGE_EVENTS_MAX);
        assert_eq!(ids(&mut source).await.len(), 1);
        drop(source);
        publisher.push(CLEARED);
        assert_eq!(publisher.flush(), 0);
    }

    #[tokio::test]
    async fn requests_past_the_limit_are_dropped() {
        let (mut publisher, mut source) = memory_source();
        for attempt in 0..2 * REQUESTS_MAX as u64 {
            source.replay(attempt, 0);
        }
        let mut waiting = 0;
        while publisher.requests.try_recv().is_ok() {
            waiting += 1;
        }
        assert_eq!(waiting, REQUESTS_MAX);
    }
}
