//! ZeroMQ, as engines speak it: ZMTP 3 over TCP without security, four kinds of socket.
//!
//! Answers one question: how do an engine's event messages get here, and a mock engine's to whoever
//! listens? SUB and DEALER as a client ([`ZmqSource`]), PUB and ROUTER as a server ([`ZmqPublisher`],
//! [`ZmqReplayServer`]).
//!
//! Invariants: connections made and lost are told in order with the messages; a length that a peer claims
//! is never allocated before its bytes came; queues are bounded in messages and bytes; a peer that stops
//! answering is noticed. Why not a crate: docs/decisions/0061.

mod codec;
mod connection;
mod endpoint;
mod publisher;
mod replay_server;
mod source;

pub use codec::ZmtpError;
pub use connection::ZmqLimits;
pub use endpoint::{Endpoint, EndpointError};
pub use publisher::ZmqPublisher;
pub use replay_server::{ReplayStore, ZmqReplayServer};
pub use source::{ZmqFraming, ZmqSource, ZmqSourceOptions};
