//! A model of an inference engine.
//!
//! Answers one question: given these requests, what would one rank of a vLLM-like engine do, step by
//! step: which requests are in the batch, which blocks are reused, stored and evicted, which tokens come out, and how
//! long does the step take? Nothing is computed on a GPU; everything around it is.
//!
//! Invariants: a block is either free or referenced, and never both; its references equal the sequences
//! that list it; a block's hash is in the table exactly while the block has it; every admitted request
//! ends, by its own end or by a cancel, and then holds nothing. The same inputs give the same outputs.
//!
//! Elsewhere: real time and sockets (`kvasir-mocker`), virtual time and many engines (`kvasir-sim`), step
//! times (`kvasir-profile`). What differs from the real engines: docs/decisions/0040.

mod cache;
mod config;
mod engine;
mod pool;
mod report;
mod request;
mod schedule;
mod sequence;

pub use config::{ConfigError, EngineConfig, SchedulingPolicy};
pub use engine::Engine;
pub use kvasir_options::{EngineFamily, PreemptionMode};
pub use report::{CacheEvent, Counters, Load, Output, RequestStart, Step};
pub use request::{AdmitError, EngineRequest, OutputTokens, Prompt};
