//! What a source of events says, whatever carries it.
//!
//! Answers one question: what happened at the other end? The one vocabulary between whoever reads sockets
//! (`kvasir-transport`) and whoever puts events in order (`kvasir-kv-events`).

use bytes::Bytes;
use kvasir_msgpack::DecodeError;

use crate::frame::Frame;
use crate::native::{RecoveryReply, RouterEvent};

/// What happened at a source, in the order in which it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// The subscription stands (again).
    Connected,
    /// The subscription is gone, or could not be made; it is tried again.
    Disconnected(SourceFault),
    /// A live message.
    Live(Frame<Bytes>),
    /// Events of workers in this process, which need no bytes.
    Events(Vec<RouterEvent>),
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
    /// A worker's own index answered the question with this number.
    Answered {
        /// As the question was numbered.
        attempt: u64,
        /// What it said.
        reply: RecoveryReply,
    },
    /// The replay broke off, or the question found no answer.
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
    /// This machine has no descriptor, port or memory left for a connection. It says nothing about the engine.
    #[error("this machine cannot open a connection: {0}")]
    Local(String),
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
