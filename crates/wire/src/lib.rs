//! KV-event bytes, each engine's dialect, to and from the nouns.
//!
//! Answers one question: what did this engine just say about its cache? vLLM and SGLang batches
//! ([`engine`]), the messages of their sockets ([`frame`]), Dynamo's router events and event-plane envelope
//! ([`native`]), TensorRT-LLM's JSON ([`trtllm`]), what a Mooncake store holds ([`mooncake`]); and the vocabulary in which sources hand messages over ([`SourceEvent`]).
//!
//! Invariants: no input panics or allocates more than a small multiple of its own size; unknown fields are
//! read past, unknown kinds are counted, a malformed message is refused as a whole and alone.
//!
//! Elsewhere: sockets (`kvasir-transport`); which events count and what they change, order, loss and recovery
//! (`kvasir-kv-events`).

pub mod engine;
pub mod frame;
pub mod mooncake;
pub mod native;
mod source;
pub mod trtllm;

pub use source::{SourceEvent, SourceFault};
