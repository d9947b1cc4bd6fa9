//! The OpenAI door.
//!
//! Answers one question: how does an HTTP request become an answer from the right worker? Listeners, the
//! pipeline from body to stream, the router's host, the intake of cache events. What a body means is known by
//! `openai`, what a prompt is in tokens by `text`, which worker is right by `router`.
//!
//! Invariants: nothing booked outlives its request; no request waits for a cache event; a client that leaves
//! ends its work at the worker; while draining nothing new begins and nothing that runs is cut before its time.

mod admin;
mod app;
mod counted;
mod dispatch;
mod events;
mod fleet;
mod host;
mod http;
mod models;
mod observe;
mod openai;
mod pace;
mod picture;
mod place;
mod proxy;
mod request;
mod tokens;
mod warm;

pub use crate::http::cores::Cores;
pub use crate::http::in_flight::{InFlight, Ticket};
pub use crate::http::keys::ApiKeys;
pub use crate::http::limits::Limits;
pub use crate::http::reply::{ByteSource, Cut, Reply, ReplyBody};
pub use crate::http::routes::Paths;
pub use crate::http::server::{Door, HttpServer, Service};
pub use crate::http::tls::ServerTls;
pub use app::{App, AppOptions};
pub use events::EventPool;
pub use fleet::members::{Change, Joined, Member, Members, MembersError, Origin, State};
pub use fleet::{Fleet, MakeModel, NewModel, WorkersFile, WorkersFileError};
pub use host::{Booking, RouterHost};
pub use models::tokenize::TokenSources;
pub use models::{Backend, Models, ServedModel};
pub use observe::meter::ModelMeters;
pub use request::migrate::MigrationOptions;
pub use warm::{Keeper, Saved, Warm, WarmError, probe as probe_snapshot};

/// The HTTP server of an [`App`].
pub type Server = HttpServer<App>;
