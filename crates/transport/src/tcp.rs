//! Requests over TCP: one connection to each worker's address, on which requests follow each other.

mod client;
mod connection;
mod server;
mod tls;

pub use client::{TcpClient, TcpOptions};
pub use server::{EndpointServer, ServerOptions};
pub use tls::{PlaneTlsError, client_tls, server_tls};
