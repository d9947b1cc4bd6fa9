//! NATS core: one connection for all that a process does there, and requests over it.
//!
//! Requests ([`NatsClient`], [`NatsServer`]) and event channels ([`NatsEvents`](crate::event_plane::NatsEvents)) share one
//! [`NatsLink`]. Answers come home over TCP as on every plane.

mod client;
mod inbox;
mod link;
mod server;

pub use client::NatsClient;
pub(crate) use link::QUEUE_MESSAGES_MAX;
pub use link::{NatsLink, NatsLinkState, NatsOptions, NatsOptionsError};
pub use server::NatsServer;

use std::future::poll_fn;
use std::pin::Pin;

use async_nats::{Message, Subscriber};
use futures_core::Stream;

/// The next message of a subscription; none once it has ended.
pub(crate) async fn next_message(messages: &mut Subscriber) -> Option<Message> {
    poll_fn(|cx| Pin::new(&mut *messages).poll_next(cx)).await
}
