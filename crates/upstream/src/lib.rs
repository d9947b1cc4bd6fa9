//! How an engine server is reached over HTTP, and what it says of itself.
//!
//! [`parse_worker`] reads what an operator says of a worker, [`Facts`] what the worker's own pages say, [`event_sources`] where its cache
//! events are. [`Pool`] keeps connections to one worker: a connection goes back when its answer was read to its end, and is closed
//! otherwise, so that the engine sees that nobody waits. [`Client`] asks one question of whoever is at an address.

mod address;
mod body;
mod client;
mod error;
mod facts;
mod framing;
mod head;
mod home;
mod line;
mod pool;
mod probe;
mod sources;
mod tls;
mod wire;

pub use address::{
    AddressError, default_api_key, parse_api_key, parse_remote_worker, parse_url, parse_worker,
    set_api_key, set_field, worker_at, worker_id,
};
pub use body::UpstreamBody;
pub use client::{Bounds, Client, refusal};
pub use error::UpstreamError;
pub use facts::{EngineKind, EventSource, Facts, RankLoad, ServerInfo, read_load, read_loads};
pub use head::Ask;
pub use home::settle;
pub use pool::{Pool, Upstreams};
pub use probe::page_text;
pub use sources::event_sources;
pub use tls::{TlsError, TlsFile, WorkerTls, certificates, provider};
pub use wire::Wire;
