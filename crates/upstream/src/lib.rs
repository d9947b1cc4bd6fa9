//! How an engine server is reached over HTTP, and what it says of itself.
//!
//! [`parse_worker`] reads what an operator says of a worker, [`Facts`] what the worker's own pages say, [`event_sources`] where its cache
//! events are. [`Pool`] keeps connections to one worker: a connection goes back when its answer was read to its end, and is closed
//! otherwise, so that the engine stops working on it. [`Client`] sends single requests to any address.

mod address;
mod answer;
mod body;
mod bounded_file;
mod client;
mod connection;
mod error;
mod facts;
mod framing;
mod head;
mod pool;
mod probe;
mod socket;
mod sources;
mod thread_slot;
mod tls;

pub use address::{
    AddressError, default_api_key, parse_api_key, parse_remote_worker, parse_url, parse_worker,
    set_api_key, set_field, worker_at, worker_id, worker_in_pod, worker_words,
};
pub use answer::{ReadAnswer, read_answer};
pub use body::UpstreamBody;
pub use bounded_file::{KEY_FILE_BYTES_MAX, PEM_BYTES_MAX, read_bounded, read_bounded_text};
pub use client::{Bounds, Client, error_message};
pub use error::{UpstreamError, cause_of_status};
pub use facts::{
    EngineKind, EventSource, Facts, RankLoad, ServerInfo, ServerPart, read_load, read_loads,
};
pub use head::UpstreamRequest;
pub use pool::Pool;
pub use probe::page_text;
pub use socket::Socket;
pub use sources::event_sources;
pub use thread_slot::set_thread_slot;
pub use tls::{TlsError, TlsFile, WorkerTls, certificates, provider};
