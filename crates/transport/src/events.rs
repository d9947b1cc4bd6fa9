//! Where an engine's events come from: one trait, one module per way of travelling.
//!
//! Invariants: what a source tells is told in the order in which it happened, connections made and lost
//! included; a source that nobody reads stops reading, and costs its sender nothing; a source that is
//! dropped closes its connections.

use std::future::poll_fn;
use std::task::{Context, Poll};

use bytes::Bytes;
use kvasir_wire::DecodeError;
use kvasir_wire::frame::Frame;
use tokio::sync::mpsc;

/// What a source tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// The subscription stands (again).
    Connected,
    /// The subscription is gone, or could not be made; it is tried again.
    Disconnected(SourceFault),
    /// A live message.
    Live(Frame<Bytes>),
    /// A live message that is no event message.
    Refused(DecodeError),
    /// A message of the replay with this number.
    Replayed {
        /// As the request was numbered.
        attempt: u64,
        /// The message.
        frame: Frame<Bytes>,
    },
    /// The replay is complete.
    ReplayEnded {
        /// As the request was numbered.
        attempt: u64,
    },
    /// The replay broke off.
    ReplayFailed {
        /// As the request was numbered.
        attempt: u64,
        /// Why.
        fault: SourceFault,
    },
}

/// Why a connection is not there. Tells an operator what to look at.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceFault {
    /// Nobody listens there, the name is unknown, or the way is blocked.
    #[error("cannot connect: {0}")]
    Unreachable(String),
    /// Somebody listens, but is no such socket.
    #[error("the peer is not what was expected: {0}")]
    Protocol(String),
    /// It was there and went away.
    #[error("the peer closed the connection: {0}")]
    Closed(String),
    /// It is silent and answers no heartbeat.
    #[error("the peer does not answer")]
    Silent,
    /// This engine has no replay socket that we know of.
    #[error("no replay socket is known")]
    NoReplay,
}

/// One engine's event stream.
pub trait EventSource: Send {
    /// What happened next. Never ends: a lost connection is made again.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<SourceEvent>;

    /// Asks for all messages from `from` on. Ends an earlier replay.
    fn replay(&mut self, attempt: u64, from: u64);

    /// Ends the replay with this number.
    fn cancel_replay(&mut self, attempt: u64);
}

/// What happened next at `source`. Dropping the future loses nothing.
pub async fn next_event<S: EventSource + ?Sized>(source: &mut S) -> SourceEvent {
    poll_fn(|cx| source.poll_next(cx)).await
}

/// Messages between the ends of an in-memory source.
const MEMORY_QUEUE: usize = 1024;

/// A source within the process: for mock engines and tests.
#[derive(Debug)]
pub struct MemorySource {
    events: mpsc::Receiver<SourceEvent>,
    asks: mpsc::UnboundedSender<ReplayAsk>,
    gone: bool,
}

/// The engine's end of a [`MemorySource`].
#[derive(Debug)]
pub struct MemoryPublisher {
    /// Where to say what happens.
    pub events: mpsc::Sender<SourceEvent>,
    /// What the other end asks for.
    pub asks: mpsc::UnboundedReceiver<ReplayAsk>,
}

/// A question for the replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayAsk {
    /// Goes with every answer.
    pub attempt: u64,
    /// First sequence number wanted; `None` to end the attempt.
    pub from: Option<u64>,
}

/// Both ends of a source within the process.
#[must_use]
pub fn memory_source() -> (MemoryPublisher, MemorySource) {
    let (event_sender, event_receiver) = mpsc::channel(MEMORY_QUEUE);
    let (ask_sender, ask_receiver) = mpsc::unbounded_channel();
    let publisher = MemoryPublisher {
        events: event_sender,
        asks: ask_receiver,
    };
    let source = MemorySource {
        events: event_receiver,
        asks: ask_sender,
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
        let _ = self.asks.send(ReplayAsk { attempt, from });
    }

    fn cancel_replay(&mut self, attempt: u64) {
        let from = None;
        let _ = self.asks.send(ReplayAsk { attempt, from });
    }
}
