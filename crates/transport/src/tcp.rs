//! Requests over TCP: one connection to each worker's address, on which requests follow each other.

mod client;
mod connection;
mod server;
mod tls;

#[cfg(any(feature = "http", feature = "nats"))]
pub(crate) use client::two_part;
pub use client::{TcpClient, TcpOptions};
pub use server::{EndpointServer, ServerOptions};
#[cfg(feature = "nats")]
pub(crate) use tls::any_certificate;
pub use tls::{PlaneTlsError, client_tls, server_tls};
pub use tokio_rustls::{TlsAcceptor, TlsConnector};
