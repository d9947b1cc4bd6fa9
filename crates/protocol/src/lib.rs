//! Messages between a frontend and a token worker, to and from the nouns.
//!
//! Answers one question: what do the bytes on a request plane mean? The frames ([`frame`]), the messages that set an
//! answer up and take it down ([`control`]), requests ([`GenerateRequest`]) and answers ([`Item`], [`Annotated`]), in JSON
//! and in MessagePack ([`Payload`]). Everything is what Dynamo 1.6.1 sends, byte for byte.
//!
//! Invariants: no input panics or allocates more than a small multiple of its own size; a length that the sender claims is
//! checked against a limit before anything is allocated; unknown members are kept or read past, never refused.
//!
//! Elsewhere: sockets, timeouts and who is asked (`kvasir-transport`), events (`kvasir-wire`).

mod annotated;
pub mod control;
mod error;
pub mod frame;
mod item;
mod output;
mod payload;
mod read;
mod request;
mod routing;
mod token_frame;
mod tokens;
mod transfer;
mod writer;

pub use annotated::{Annotated, WorkerError, WorkerErrorKind};
pub use error::ProtocolError;
pub use item::{FINAL_NAME, Item};
pub use output::{Finish, Output, TopLogprob, Usage};
pub use payload::Payload;
pub use request::{GenerateRequest, OutputOptions, SamplingOptions, StopConditions, TOKENS_MAX};
pub use routing::RoutingHints;
pub use token_frame::TokenFrame;
pub use writer::PayloadWriter;
