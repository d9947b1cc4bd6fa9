//! The index of this process for other routers (`--serve-indexer`): announced on the component of each endpoint whose workers it routes to.
//!
//! What always holds: it is announced until it is, however long the store is away; it is taken back when its tasks drain.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{PlaneCodec, Settings, keys};
use kvasir_discovery::{EndpointName, Lease, Store};
use kvasir_host::{HostContext, IndexEndpoints};
use kvasir_planes::event_carrier;
use kvasir_transport::ServedEndpoint;
use kvasir_transport::nats::NatsLink;
use kvasir_types::Codec;
use kvasir_worker::{EndpointMember, EventCarrier, JoinError, RequestServer};
use tokio::sync::watch;

/// Between two tries to announce an endpoint.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);

/// Where questions come in, and how that is found.
pub struct IndexServer {
    index: IndexEndpoints,
    store: Arc<dyn Store>,
    server: RequestServer,
    codec: Codec,
    carrier: EventCarrier,
    context: HostContext,
}

/// In which form this process takes requests.
#[must_use]
pub fn codec(settings: &Settings) -> Codec {
    match settings.get(keys::REQUEST_PLANE_CODEC) {
        PlaneCodec::Json => Codec::Json,
        PlaneCodec::Msgpack => Codec::MessagePack,
    }
}

impl IndexServer {
    /// Answers at `server`, which others reach at `host`.
    #[must_use]
    pub fn new(
        settings: &Settings,
        index: IndexEndpoints,
        store: Arc<dyn Store>,
        server: RequestServer,
        (host, link): (&str, &NatsLink),
        context: &HostContext,
    ) -> Self {
        // Nothing is published.
        let nowhere = EndpointName::new("", "", "");
        Self {
            index,
            store,
            server,
            codec: codec(settings),
            carrier: event_carrier(settings, &nowhere, host, link, &context.tasks),
            context: context.clone(),
        }
    }

    /// Serves the index on the components of these endpoints, from now on; takes it back when the process drains.
    pub fn start(self, endpoints: watch::Receiver<BTreeSet<EndpointName>>) {
        let tasks = self.context.tasks.clone();
        let drained = tasks.clone();
        tasks.spawn(async move {
            let (mut lease, mut served) = (None, Vec::new());
            tokio::select! {
                biased;
                () = drained.draining() => {}
                () = self.follow(endpoints, &mut lease, &mut served) => {}
            }
            if let Some(lease) = lease
                && let Err(error) = lease.revoke().await
            {
                tracing::warn!(%error, "the index stays announced until it expires");
            }
        });
    }

    async fn follow(
        &self,
        mut endpoints: watch::Receiver<BTreeSet<EndpointName>>,
        lease: &mut Option<Arc<dyn Lease>>,
        served: &mut Vec<ServedEndpoint>,
    ) {
        let mut known = BTreeSet::new();
        loop {
            let wanted: BTreeSet<EndpointName> = endpoints.borrow_and_update().clone();
            for of in wanted {
                let component = (of.namespace, of.component);
                if known.insert(component.clone()) {
                    self.insist(&component, lease, served).await;
                }
            }
            if endpoints.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Announces the index on a component; tries until that is done.
    async fn insist(
        &self,
        component: &(String, String),
        lease: &mut Option<Arc<dyn Lease>>,
        served: &mut Vec<ServedEndpoint>,
    ) {
        let mut was_said = false;
        while let Err(error) = self.announce(component, lease, served).await {
            if !std::mem::replace(&mut was_said, true) {
                tracing::error!(%error, "the index cannot be announced to other routers; it is tried until it can");
            }
            tokio::time::sleep(ANNOUNCE_EVERY).await;
        }
    }

    async fn announce(
        &self,
        (namespace, component): &(String, String),
        lease: &mut Option<Arc<dyn Lease>>,
        served: &mut Vec<ServedEndpoint>,
    ) -> Result<(), JoinError> {
        let lease = match lease {
            Some(lease) => lease,
            None => lease.insert(self.store.lease().await?),
        };
        for (name, handler) in self.index.endpoints() {
            let member = EndpointMember {
                lease: Arc::clone(lease),
                endpoint: EndpointName::new(namespace, component, name),
                server: self.server.clone(),
                carrier: self.carrier.clone(),
                device: None,
                codec: self.codec,
                clock: self.context.clock,
                tasks: self.context.tasks.clone(),
            };
            served.push(member.serve(handler).await?);
            tracing::info!(endpoint = %member.endpoint, id = member.id().0, "serving");
        }
        Ok(())
    }
}
