//! How do bytes of a connection become a request, and a reply bytes again?
//!
//! Listeners, TLS, limits, the table of routes, bodies and replies. Nothing here knows what a completion or a
//! worker is.

pub(crate) mod body;
pub(crate) mod body_budget;
pub(crate) mod context;
pub(crate) mod debounce;
pub(crate) mod event_loop_lag;
pub(crate) mod framing;
pub(crate) mod heads;
pub(crate) mod ids;
pub(crate) mod in_flight;
pub(crate) mod keys;
pub(crate) mod limits;
pub(crate) mod long_work;
pub(crate) mod reply;
pub(crate) mod routes;
pub(crate) mod server;
pub(crate) mod shortage;
pub(crate) mod tls;
pub(crate) mod via;
pub(crate) mod whole;
