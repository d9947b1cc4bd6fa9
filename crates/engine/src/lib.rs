//! A model of an inference engine.
//!
//! Answers one question: given these requests, what would one rank of a vLLM-like engine do, step by
//! step: who is in the batch, which blocks are reused, stored and evicted, which tokens come out, and how
//! long does the step take? Nothing is computed on a GPU; everything around it is.
//!
//! Invariants: a block is either free or referenced, and never both; its references equal the sequences
//! that list it; a block's name is in the table exactly while the block holds it; every admitted request
//! ends, by its own end or by a cancel, and then holds nothing. The same inputs give the same outputs.
//!
//! Elsewhere: real time and sockets (`kvasir-mocker`), virtual time and many engines (`kvasir-sim`), step
//! times (`kvasir-profile`). What differs from the real engines: docs/decisions/0040.

mod admission;
mod cache;
mod config;
mod engine;
mod pool;
mod report;
mod schedule;
mod sequence;

pub use admission::{Admission, AdmitError, Answer, Prompt};
pub use config::{ConfigError, EngineConfig, Flavor, Order, Preemption};
pub use engine::Engine;
pub use report::{CacheEvent, Counters, Load, Output, Started, Step};
