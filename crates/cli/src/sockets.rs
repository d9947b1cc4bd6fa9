//! Sockets that the service manager has opened for us.
//!
//! Answers: which listeners did this process get from whoever started it? systemd opens the sockets of a `.socket` unit, keeps
//! them open over restarts, and hands them over as the descriptors from 3 on (`LISTEN_FDS`): the first is for clients, the second
//! for operators. A process that is started in another way has none.

use std::net::TcpListener;

use listenfd::ListenFd;

use crate::wiring::{BadConfig, Failure};

/// Listeners that are open already.
#[derive(Debug, Default)]
pub(crate) struct OpenSockets {
    pub(crate) clients: Option<TcpListener>,
    pub(crate) operators: Option<TcpListener>,
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
