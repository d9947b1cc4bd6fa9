//! The store, the request planes and the event planes that a process's options name.
//!
//! Answers one question: given the options, how does this process find others, call them, and take their calls? The frontend, the mock
//! engines, the doctor and the bindings all ask it, so that an option means the same everywhere.
//!
//! What always holds: nothing is connected before somebody needs it; what an option asks for and cannot be had is said with the
//! option's name.
//!
//! Elsewhere: which options there are (`kvasir-config`), what a record says (`kvasir-discovery`), sockets (`kvasir-transport`).

mod clients;
mod listeners;
mod stores;

pub use clients::{
    Clients, answers_address, clients, clients_at, clients_of, nats_link, response_server,
};
pub use listeners::{ENDPOINT, endpoint, event_carrier, event_log, listen, listen_at};
pub use stores::{NamedStore, kubernetes_options, namespaces, store};

use std::net::{SocketAddr, ToSocketAddrs};

/// Why a plane that the options name cannot be used. Printed with the option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// An option cannot be followed: whoever set it is to change it.
    #[error("{0}")]
    Option(String),
    /// This machine stands in the way.
    #[error("{0}")]
    System(String),
}

impl SetupError {
    /// Whether an option is to be changed.
    #[must_use]
    pub const fn is_option(&self) -> bool {
        matches!(self, Self::Option(_))
    }
}

/// The address of a host that `option` names.
pub fn resolve(option: &str, host: &str, port: u16) -> Result<SocketAddr, SetupError> {
    let found = (host, port).to_socket_addrs();
    match found.map(|mut addresses| addresses.next()) {
        Ok(Some(address)) => Ok(address),
        Ok(None) => Err(SetupError::System(format!(
            "{option} {host} has no address"
        ))),
        Err(error) => Err(SetupError::System(format!(
            "{option} {host} has no address: {error}"
        ))),
    }
}
