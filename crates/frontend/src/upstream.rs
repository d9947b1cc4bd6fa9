//! OpenAI workers: unmodified engine servers reached over HTTP.
//!
//! Answers one question: how does a request reach the engine at this address, and how do its bytes come back?
//! Connections are kept and shared, bounded per worker. What the bytes mean is known elsewhere.
//!
//! Invariants: a connection serves one request at a time; it goes back to the pool only when an answer was read
//! to its end, and is closed otherwise, so that the engine sees that nobody waits.

mod address;
mod facts;
mod file;
mod fleet;
mod line;
mod listen;
mod pool;
mod wire;

pub use address::{AddressError, WorkerAddress, WorkerKey};
pub use facts::{EngineModel, EventSource, Facts};
pub use file::{WorkersFile, WorkersFileError};
pub use fleet::{Fleet, MakeModel, NewModel};
pub(crate) use line::{UpstreamBody, UpstreamError};
pub use listen::sources as event_sources;
pub(crate) use pool::Pool;
pub use pool::Upstreams;
pub use wire::Wire;
