//! The nouns of the system.
//!
//! Answers one question: what do the other crates talk about? Identifiers, hashes, cache events, time,
//! workers and the request as a worker receives it. No format, no algorithm, no I/O lives here.

mod event;
mod id;
mod request;
mod rng;
mod time;
mod worker;

pub use event::{KvEvent, StoredBlock, Tier};
pub use id::{DpRank, EngineHash, LocalHash, RequestId, SequenceHash, Token, WorkerId, WorkerRank};
pub use request::{FinishReason, Likelihood, Sampling, TokenItem, TokenRequest};
pub use rng::Rng;
pub use time::Time;
pub use worker::{
    ApiKey, Capacity, Device, EventFeed, HttpEndpoint, ModelCard, PlaneEndpoint, Role, Transport,
    TransportKind, WorkerRecord,
};
