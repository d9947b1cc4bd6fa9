//! The OpenAI door.
//!
//! Answers one question: how does an HTTP request become an answer from the right worker? Listeners, the
//! pipeline from body to stream, the router's host, the intake of cache events. What a body means is known by
//! `openai`, what a prompt is in tokens by `text`, which worker is right by `router`.
//!
//! Invariants: nothing booked outlives its request; no request waits for a cache event; a client that leaves
//! ends its work at the worker; while draining nothing new begins and nothing that runs is cut before its time.

mod admin;
mod ahead;
mod answer;
mod app;
mod ask;
mod body;
mod canary;
mod cores;
mod counted;
mod dump;
mod events;
mod fleet;
mod framing;
mod generate;
mod heads;
mod host;
mod ids;
mod in_flight;
mod job;
mod keys;
mod lane;
mod limits;
mod members;
mod meter;
mod migrate;
mod models;
mod openapi;
mod outcomes;
mod pace;
mod picture;
mod place;
mod prompt;
mod proxy;
mod query;
mod refusal;
mod relay;
mod reply;
mod routes;
mod server;
mod settling;
mod spans;
mod text_counts;
mod tls;
mod tokens;
mod told;
mod via;
mod warm;
mod watch;

pub use app::{App, AppOptions, Door};
pub use cores::Cores;
pub use events::EventPool;
pub use fleet::{Fleet, MakeModel, NewModel, WorkersFile, WorkersFileError};
pub use host::{Booking, RouterHost};
pub use in_flight::{InFlight, Ticket};
pub use keys::ApiKeys;
pub use limits::Limits;
pub use members::{Change, Joined, Member, Members, MembersError, Origin, State};
pub use meter::ModelMeters;
pub use migrate::MigrationOptions;
pub use models::{Backend, Models, ServedModel};
pub use reply::{ByteSource, Cut, Reply, ReplyBody};
pub use routes::Paths;
pub use server::Server;
pub use tls::ServerTls;
pub use tokens::TokenSources;
pub use warm::{Keeper, Saved, Warm, WarmError, probe as probe_snapshot};
