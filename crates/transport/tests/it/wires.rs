//! The request planes, as tests see them: what is promised of one is promised of all.

use std::sync::Arc;

use kvasir_tasks::Tasks;
#[cfg(feature = "http")]
use kvasir_transport::http_rpc::{HttpClient, HttpServer};
#[cfg(feature = "nats")]
use kvasir_transport::nats::{NatsClient, NatsServer};
use kvasir_transport::tcp::{EndpointServer, ServerOptions, TcpClient, TcpOptions};
use kvasir_transport::{EndpointClient, EndpointHandler, ResponseServer, ServedEndpoint};
use kvasir_types::{Codec, PlaneEndpoint};

#[cfg(feature = "nats")]
use crate::nats_process::NatsProcess;
use crate::rpc::{PATH, loopback};

pub(crate) const SUBJECT: &str = "dynamo_backend.generate-1f";

/// A request plane.
pub(crate) enum Wire {
    Tcp,
    #[cfg(feature = "http")]
    Http,
    #[cfg(feature = "nats")]
    Nats(NatsProcess),
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Wire {
    /// Those that can be had here.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::Tcp];
        #[cfg(feature = "http")]
        all.push(Self::Http);
        #[cfg(feature = "nats")]
        all.extend(NatsProcess::start().map(Self::Nats));
        all
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            #[cfg(feature = "http")]
            Self::Http => "http",
            #[cfg(feature = "nats")]
            Self::Nats(_) => "nats",
        }
    }

    pub(crate) fn endpoint(&self, address: &str, codec: Codec) -> PlaneEndpoint {
        PlaneEndpoint {
            plane: self.name().into(),
            address: address.into(),
            codec,
        }
    }

    /// Calls endpoints on this plane.
    pub(crate) fn client(
        &self,
        home: ResponseServer,
        options: TcpOptions,
        tasks: &Tasks,
    ) -> Arc<dyn EndpointClient> {
        match self {
            Self::Tcp => Arc::new(TcpClient::new(home, options, tasks)),
            #[cfg(feature = "http")]
            Self::Http => Arc::new(HttpClient::new(home, &options, tasks)),
            #[cfg(feature = "nats")]
            Self::Nats(process) => {
                Arc::new(NatsClient::new(process.link(tasks), home, &options, tasks))
            }
        }
    }

    /// Serves one endpoint on this plane, and says where.
    pub(crate) async fn serve(
        &self,
        capacity: usize,
        handler: Arc<dyn EndpointHandler>,
        tasks: &Tasks,
    ) -> (ServedEndpoint, String) {
        let mut options = ServerOptions::new(loopback());
        options.capacity = capacity;
        match self {
            Self::Tcp => {
                let server = EndpointServer::bind(options, tasks).await.unwrap();
                let address = format!("{}/{PATH}", server.local_addr());
                (server.serve(PATH, handler), address)
            }
            #[cfg(feature = "http")]
            Self::Http => {
                let server = HttpServer::bind(options, tasks).await.unwrap();
                let address = format!("http://{}/v1/rpc/{PATH}", server.local_addr());
                (server.serve(PATH, handler), address)
            }
            #[cfg(feature = "nats")]
            Self::Nats(process) => {
                let server = NatsServer::new(process.link(tasks), capacity, tasks);
                let served = server.serve(SUBJECT, handler).await.unwrap();
                (served, SUBJECT.to_owned())
            }
        }
    }
}
