//! Event sockets over real loopback connections.

#![cfg(feature = "zmq")]
#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a helper that fails is a failed test"
)]

mod event_plane;
#[cfg(feature = "nats")]
mod jetstream;
mod libzmq;
#[cfg(feature = "nats")]
mod nats_events;
#[cfg(feature = "nats")]
mod nats_process;
#[cfg(feature = "nats")]
mod nats_requests;
mod zmq;

#[cfg(feature = "tcp")]
mod dynamo;
#[cfg(feature = "tcp")]
mod faults;
#[cfg(feature = "http")]
mod http_rpc;
#[cfg(feature = "tcp")]
mod rpc;
#[cfg(feature = "tcp")]
mod shared_port;
#[cfg(feature = "tcp")]
mod wires;
