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
use std::io;
use std::pin::Pin;
use std::time::Duration;

use async_nats::{Client, Message, Subscriber};
use bytes::Bytes;
use futures_core::Stream;
use tokio::time::timeout;

/// A message that has not come round by then is sent again.
const ROUND_TRIP_PAUSE: Duration = Duration::from_secs(1);

/// The next message of a subscription; none once it has ended.
pub(crate) async fn next_message(messages: &mut Subscriber) -> Option<Message> {
    poll_fn(|cx| Pin::new(&mut *messages).poll_next(cx)).await
}

/// Waits until the server has taken in all that was sent before: it takes one thing after the other.
pub(crate) async fn round_trip(client: &Client) -> io::Result<()> {
    let inbox = client.new_inbox();
    let mut own = client
        .subscribe(inbox.clone())
        .await
        .map_err(io::Error::other)?;
    loop {
        let sent = client.publish(inbox.clone(), Bytes::new()).await;
        sent.map_err(io::Error::other)?;
        match timeout(ROUND_TRIP_PAUSE, next_message(&mut own)).await {
            Ok(Some(_)) => return Ok(()),
            Ok(None) => return Err(io::ErrorKind::BrokenPipe.into()),
            // The server went away with it, or is not there yet.
            Err(_) => {}
        }
    }
}
