//! A mock engine behind HTTP that answers as a vLLM server does, with faults on command.
//!
//! The routes and shapes are those of vLLM 0.32; beside them stands `/mock/…`, where faults are set and
//! taken back, the process is "restarted", and its load is seen.

mod answer;
mod ask;
mod body;
mod choice;
mod control;
mod error;
mod fault;
mod generate;
mod metrics;
mod received;
mod routes;
mod server;
mod side_channel;
mod transfer;
mod words;

pub use fault::{Faults, HttpFault, HttpFaultError, HttpFaultKind};
pub use server::{MockAdapter, MockServer, MockServerOptions};
pub use side_channel::SideChannel;
pub use transfer::HttpPart;
pub use words::answers_in_words;
