//! MessagePack: a reader that never copies, a writer, and a tree of values that JSON shares.
//!
//! Answers one question: which values do these bytes hold? What the values mean is said by the crates that read
//! dialects: engines' and routers' events (`kvasir-wire`), requests and answers (`kvasir-protocol`).
//!
//! Invariants: no input panics; a length that the sender claims is never trusted for an allocation; trees are
//! bounded in depth by [`DEPTH_MAX`]. Why not a crate from outside: docs/decisions/0060.

mod error;
mod reader;
#[cfg(test)]
mod tests;
mod value;
mod writer;

pub use error::DecodeError;
pub use reader::{DEPTH_MAX, Int, Kind, Reader};
pub use value::Value;
pub use writer::Writer;
