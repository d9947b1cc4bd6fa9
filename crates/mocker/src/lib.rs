//! The engine model in real time.
//!
//! Answers one question: how does a mock engine look from outside? As a token worker on the request plane
//! ([`TokenWorker`] in this process, [`PlaneEngine`] in a fleet), and as a vLLM server with faults on command
//! ([`MockServer`]); cache events and load reports are handed to an [`Observer`].
//!
//! Invariants: every request that reaches a worker is answered exactly once, by its tokens and a finish
//! reason, by an error, or (a killed worker) by a disconnection; a client that leaves frees its place
//! with the next step; every queue has a limit.
//!
//! Elsewhere: what an engine does in a step (`kvasir-engine`), which worker gets a request (the router).

mod events;
mod http;
mod plane;
mod rank;
mod worker;

pub use events::{EventOptions, EventSockets, Fault, FaultError};
pub use http::{
    Faults, HttpFault, HttpFaultError, HttpFaultKind, HttpPart, MockAdapter, MockServer,
    MockServerOptions, SideChannel, answers_in_words,
};
pub use plane::{CacheFaults, MeetingPoint, Part, PlaneEngine, PlaneReporter, PrefillPart};
pub use rank::{Observer, Status};
pub use worker::{AnswerFn, TokenWorker, Worker, WorkerOptions, seeded_answer};
