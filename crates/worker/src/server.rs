//! Where a worker's requests come in: one listener for all endpoints of a process.

use std::io;
use std::sync::Arc;

use kvasir_discovery::{EndpointName, RequestTransport};
use kvasir_transport::http_rpc::{HttpServer, RPC_ROOT};
use kvasir_transport::nats::NatsServer;
use kvasir_transport::tcp::EndpointServer;
use kvasir_transport::{CallObserver, Dispatcher, EndpointHandler, ServedEndpoint};

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
    /// Over HTTP.
    Http {
        /// The listener.
        server: HttpServer,
        /// The host by which frontends reach it.
        host: String,
    },
    /// Over NATS.
    Nats(NatsServer),
}

impl RequestServer {
    /// How a frontend reaches an endpoint of a worker here.
    #[must_use]
    pub fn transport(&self, worker: u64, endpoint: &EndpointName) -> RequestTransport {
        match self {
            Self::Tcp { server, host } => {
                let (host, port) = (in_url(host), server.local_addr().port());
                let path = path(worker, endpoint);
                RequestTransport::Tcp(format!("{host}:{port}/{path}"))
            }
            Self::Http { server, host } => {
                let (host, port) = (in_url(host), server.local_addr().port());
                let path = path(worker, endpoint);
                RequestTransport::Http(format!("http://{host}:{port}{RPC_ROOT}{path}"))
            }
            Self::Nats(_) => RequestTransport::NatsTcp(subject(worker, endpoint)),
        }
    }

    /// Hands the calls of an endpoint to `handler`, until what it returns is dropped. Over NATS it waits for the server.
    pub async fn serve(
        &self,
        worker: u64,
        endpoint: &EndpointName,
        handler: Arc<dyn EndpointHandler>,
    ) -> io::Result<ServedEndpoint> {
        match self {
            Self::Tcp { server, .. } => Ok(server.serve(&path(worker, endpoint), handler)),
            Self::Http { server, .. } => Ok(server.serve(&path(worker, endpoint), handler)),
            Self::Nats(server) => server.serve(&subject(worker, endpoint), handler).await,
        }
    }

    /// Calls under way, of all endpoints.
    #[must_use]
    pub fn active(&self) -> usize {
        self.dispatcher().active()
    }

    /// From now on `observer` is told of calls; the first one stays.
    pub fn observe(&self, observer: Arc<dyn CallObserver>) {
        self.dispatcher().observe(observer);
    }

    const fn dispatcher(&self) -> &Dispatcher {
        match self {
            Self::Tcp { server, .. } => server.dispatcher(),
            Self::Http { server, .. } => server.dispatcher(),
            Self::Nats(server) => server.dispatcher(),
        }
    }
}

fn path(worker: u64, endpoint: &EndpointName) -> String {
    format!("{worker:x}/{endpoint}")
}

/// A host as it stands before a port.
#[must_use]
pub fn in_url(host: &str) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]"),
        false => host.to_owned(),
    }
}

/// `{namespace}_{component}.{endpoint}-{worker}`, as Dynamo's workers have it.
fn subject(worker: u64, endpoint: &EndpointName) -> String {
    let part = |name: &str| name.replace(|c: char| c.is_whitespace() || ".*>".contains(c), "_");
    format!(
        "{}_{}.{}-{worker:x}",
        part(&endpoint.namespace),
        part(&endpoint.component),
        part(&endpoint.endpoint)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_has_the_parts_that_dynamo_gives_it() {
        let endpoint = EndpointName::new("dynamo", "backend", "generate");
        assert_eq!(
            subject(0x52156b15ad6774b, &endpoint),
            "dynamo_backend.generate-52156b15ad6774b"
        );
        let odd = EndpointName::new("a.b c", "x*", ">");
        assert_eq!(subject(1, &odd), "a_b_c_x_._-1");
        assert_eq!((in_url("::1"), in_url("h")), ("[::1]".into(), "h".into()));
    }
}
