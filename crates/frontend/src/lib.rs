//! The OpenAI door.
//!
//! Answers one question: how does an HTTP request become an answer from the right worker? Listeners, the
//! pipeline from body to stream, the engines behind HTTP. What a body means is known by `openai`, what a prompt is in
//! tokens by `text`, which worker is right by `router`, which runs in a `host`.
//!
//! Invariants: nothing booked outlives its request; no request waits for a cache event; a client that leaves
//! ends its work at the worker; while draining nothing new begins and nothing that runs is cut before its time.

mod admin;
mod app;
mod attempts;
mod dispatch;
mod fleet;
mod http;
mod models;
mod observe;
mod openai;
mod proxy;
mod reader;
mod request;
mod tokens;

pub use crate::http::in_flight::{InFlight, Ticket};
pub use crate::http::keys::{ApiKeys, KeysError};
pub use crate::http::limits::Limits;
pub use crate::http::reply::{ByteSource, Cut, Reply, ReplyBody};
pub use crate::http::routes::Paths;
pub use crate::http::server::{Door, HttpServer, Service, http_threads};
pub use crate::http::shortage::Shortage;
pub use crate::http::tls::ServerTls;
pub use crate::http::whole::{WholeApi, WholeService};
pub use admin::read_worker;
pub use app::{App, AppOptions, StreamDispatch, UpgradeAsk, UpgradeOutcome};
pub use fleet::members::{
    Change, Changes, JoinOutcome, Member, MemberState, Members, MembersError, SnapshotRefused,
    SourceName, SourceState, WorkerSource,
};
pub use fleet::{
    ConnectPlane, DiscoveryOptions, EventPlaneSetup, Fleet, FleetContext, HttpPool, HttpPoolError,
    Peers, WorkersFile, WorkersFileError,
};
pub use models::links::WorkerLink;
pub use models::tokenize::TokenSources;
pub use models::{Models, ServedModel};
pub use observe::meter::ModelMeters;
pub use reader::{ReadRequest, RequestReader};
pub use request::migrate::MigrationOptions;

/// The HTTP server of an [`App`].
pub type Server = HttpServer<App>;
