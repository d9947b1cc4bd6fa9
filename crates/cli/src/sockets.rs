//! What this process gets from whoever started it, and tells a service manager.
//!
//! Answers: which listeners are open already? systemd opens the sockets of a `.socket` unit, keeps
//! them open over restarts, and hands them over as the descriptors from 3 on (`LISTEN_FDS`): the first is for clients, the second
//! for operators. A process that is started in another way has none. Where systemd waits to be told that a service is ready, and which
//! process it is ([`notify`]), it names a socket for that (`NOTIFY_SOCKET`). Variables of this kind are no settings; they are read here
//! and nowhere else.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixDatagram;

use kvasir_transport::SharedHome;
use listenfd::ListenFd;

use crate::wiring::{BadConfig, Failure};

/// Listeners that are open already.
#[derive(Debug, Default)]
pub(crate) struct OpenSockets {
    pub(crate) clients: Option<TcpListener>,
    pub(crate) operators: Option<TcpListener>,
}

/// Listeners that a process had which this one replaces, each with the address that was asked for; beside those for clients and operators.
#[derive(Debug, Default)]
pub(crate) struct InnerSockets {
    /// For answers of workers.
    pub(crate) answers: Option<(SocketAddr, SharedHome)>,
    /// For other replicas.
    pub(crate) peers: Option<(SocketAddr, TcpListener)>,
}

/// Takes them over; `apart` says that operators have a port of their own.
pub(crate) fn take(apart: bool) -> Result<OpenSockets, Failure> {
    let mut handed = ListenFd::from_env();
    let wanted = if apart { 2 } else { 1 };
    if handed.len() > wanted {
        let text = format!(
            "the service manager hands over {} sockets, {wanted} can be used: one for clients, with --admin-port a second one \
             for operators",
            handed.len()
        );
        return Err(BadConfig(text).into());
    }
    let mut next = |index| {
        handed.take_tcp_listener(index).map_err(|error| {
            let text = format!("socket {index} of the service manager: {error}; ListenStream= with a TCP port is needed");
            Failure::from(BadConfig(text))
        })
    };
    Ok(OpenSockets {
        clients: next(0)?,
        operators: next(1)?,
    })
}

/// Where the options say to listen, whatever sockets are used in the end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AskedAddresses {
    pub(crate) clients: Option<SocketAddr>,
    pub(crate) operators: Option<SocketAddr>,
    pub(crate) answers: Option<SocketAddr>,
    pub(crate) peers: Option<SocketAddr>,
}

/// Whether whoever started this process has set a variable for it.
#[expect(
    clippy::disallowed_methods,
    reason = "no setting: one process says it to another"
)]
pub(crate) fn is_told(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

/// Tells the service manager what has become of this process, if it wants to know.
#[expect(
    clippy::disallowed_methods,
    reason = "no setting: the service manager says it"
)]
pub(crate) fn notify(state: &str) {
    let Some(place) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let sent = UnixDatagram::unbound().and_then(|socket| match place.to_str() {
        #[cfg(target_os = "linux")]
        Some(name) if name.starts_with('@') => {
            use std::os::linux::net::SocketAddrExt;
            use std::os::unix::net::SocketAddr as UnixAddr;
            let name = name.trim_start_matches('@').as_bytes();
            socket.send_to_addr(state.as_bytes(), &UnixAddr::from_abstract_name(name)?)
        }
        _ => socket.send_to(state.as_bytes(), &place),
    });
    if let Err(error) = sent {
        tracing::warn!(%error, "the service manager is not told: {state}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_not_set_tells_nothing() {
        assert!(!is_told("KVASIR_TEST_NOBODY_SETS_THIS"));
        assert!(is_told("PATH"));
    }
}
