//! JetStream: messages that a NATS server keeps, who has read how far, and objects that it stores.
//!
//! Answers one question: how is a stream made, written, read, shortened and taken away, and how is a large value kept beside it? Requests of
//! JetStream's own JSON interface over the connection that the process has anyway ([`NatsLink`]); decision 0211 says why no other client.
//!
//! What always holds: a message counts as written when the server has said so; a consumer yields each message in the stream's order and never one
//! that was seen before; an object changes in one step, and only if nobody else changed it meanwhile.
//!
//! Elsewhere: what a message means, who purges what and when (`kvasir-host`).

mod api;
mod consumer;
mod error;
mod object_store;
mod publisher;

pub use api::{ConsumerState, JetStream, StreamState};
pub use consumer::{LogMessage, PullConsumer, Pulled};
pub use error::JetStreamError;
pub use object_store::{ObjectHead, ObjectStore};
pub use publisher::{LogPublisher, LogPublisherOptions};

#[cfg(doc)]
use crate::nats::NatsLink;
