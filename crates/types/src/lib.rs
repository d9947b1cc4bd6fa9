//! The nouns of the system.
//!
//! Answers one question: what do the other crates talk about? Identifiers, hashes, cache events, time,
//! workers, the request as a worker receives it and the ways in which a worker fails it. No format, no algorithm,
//! no I/O lives here.

mod event;
mod failure;
mod id;
mod request;
mod rng;
mod time;
mod worker;

pub use event::{KvEvent, StoredBlock, Tier};
pub use failure::{AttemptError, FailureCause, Fault, Retry};
pub use id::{DpRank, EngineHash, LocalHash, RequestId, SequenceHash, Token, WorkerId, WorkerRank};
pub use request::{
    AgentSession, BootstrapAddress, BootstrapRoom, FinishReason, Likelihood, PrefillResult,
    RequestContext, Sampling, TokenItem, TokenRequest,
};
pub use rng::Rng;
pub use time::Time;
pub use worker::{
    ApiKey, Capacity, Codec, Device, EventFeed, HttpEndpoint, ModelCard, PlaneEndpoint, Role,
    TransferRule, Transport, TransportKind, WorkerRecord, topology_taint,
};
