//! The event plane: what workers and routers tell whoever listens, over ZeroMQ or NATS.
//!
//! Answers one question: how does a message of a topic get from its publisher to everybody who found its channel? On ZeroMQ each
//! publisher has a socket of its own, whose address is in discovery ([`ZmqSource`](crate::zmq::ZmqSource) with
//! [`ZmqFraming::EventPlane`](crate::zmq::ZmqFraming) listens, [`PlanePublisher`] publishes); on NATS all
//! publishers of a scope share a subject, and one subscription serves all who listen to some of them (`NatsEvents`).
//!
//! What always holds: a message that comes twice is told once; nobody who publishes waits for who listens; a listener that
//! is too slow misses messages, and their numbers show it.
//!
//! Elsewhere: what a payload means (`kvasir-wire`), who publishes where (discovery).

#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "zmq")]
mod publisher;
mod reader;

#[cfg(feature = "nats")]
pub use nats::{NatsEvents, NatsSource};
#[cfg(feature = "zmq")]
pub use publisher::{PlanePublisher, PlanePublisherOptions};
pub use reader::PlaneReader;

use std::fmt;

/// Where a channel is listened to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChannelAddress {
    /// A PUB socket: `tcp://host:port`.
    Zmq(String),
    /// A subject, the topic at its end.
    Nats(String),
}

impl fmt::Display for ChannelAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zmq(endpoint) => f.write_str(endpoint),
            Self::Nats(subject) => write!(f, "nats {subject}"),
        }
    }
}
