//! Where a worker's requests come in: one listener for all endpoints of a process.

use std::sync::Arc;

use kvasir_discovery::{EndpointName, RequestTransport};
use kvasir_transport::tcp::EndpointServer;
use kvasir_transport::{EndpointHandler, ServedEndpoint};

/// Takes requests for the endpoints of one process. Clones are one.
#[derive(Clone)]
pub enum RequestServer {
    /// Over TCP.
    Tcp {
        /// The listener.
        server: EndpointServer,
        /// The host by which frontends reach it.
        host: String,
    },
}

impl RequestServer {
    /// How a frontend reaches an endpoint of a worker here.
    #[must_use]
    pub fn transport(&self, worker: u64, endpoint: &EndpointName) -> RequestTransport {
        match self {
            Self::Tcp { server, host } => {
                let port = server.local_addr().port();
                let host = match host.contains(':') && !host.starts_with('[') {
                    true => format!("[{host}]"),
                    false => host.clone(),
                };
                RequestTransport::Tcp(format!("{host}:{port}/{worker:x}/{endpoint}"))
            }
        }
    }

    /// Hands the calls of an endpoint to `handler`, until what it returns is dropped.
    #[must_use]
    pub fn serve(
        &self,
        worker: u64,
        endpoint: &EndpointName,
        handler: Arc<dyn EndpointHandler>,
    ) -> ServedEndpoint {
        match self {
            Self::Tcp { server, .. } => server.serve(&format!("{worker:x}/{endpoint}"), handler),
        }
    }

    /// Calls under way, of all endpoints.
    #[must_use]
    pub fn active(&self) -> usize {
        match self {
            Self::Tcp { server, .. } => server.dispatcher().active(),
        }
    }
}
