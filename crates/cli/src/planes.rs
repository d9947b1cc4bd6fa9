//! Discovery and request planes of a frontend, from its options.

use std::sync::Arc;

use kvasir_config::{DiscoveryBackend, Origin, Settings, keys};
use kvasir_frontend::{DiscoveryOptions, EventPlaneSetup, Fleet};
pub(crate) use kvasir_planes::{Clients, clients, namespaces, nats_link, store};
use kvasir_tasks::Tasks;
use kvasir_transport::{RequestPlane, TokenPlane};
use kvasir_types::{PlaneEndpoint, WorkerId};

use crate::wiring::Failure;

/// The same fleet, with the request planes on which discovered workers are.
pub(crate) async fn with_planes(
    fleet: Fleet,
    settings: &Settings,
    tasks: &Tasks,
) -> Result<Fleet, Failure> {
    if settings.get(keys::DISCOVERY_BACKEND) == DiscoveryBackend::Static {
        return Ok(fleet);
    }
    let (clients, link) = clients(settings, tasks).await?;
    let mut fleet = fleet.with_event_plane(EventPlaneSetup {
        clients: clients.clone(),
        nats: link,
    });
    for (name, client) in clients {
        let connect = move |_: WorkerId, endpoint: &PlaneEndpoint| {
            let plane = TokenPlane::new(Arc::clone(&client), endpoint.clone());
            Ok(Arc::new(plane) as Arc<dyn RequestPlane>)
        };
        fleet = fleet.with_plane(name, Arc::new(connect));
    }
    Ok(fleet)
}

/// Lets a fleet follow the store that the options name.
pub(crate) fn discover(fleet: &Fleet, settings: &Settings, tasks: &Tasks) -> Result<(), Failure> {
    let Some((store, flag)) = store(settings, tasks)? else {
        return Ok(());
    };
    let namespaces = namespaces(settings);
    tracing::info!(
        backend = store.backend(),
        address = store.address(),
        ?namespaces,
        "workers are discovered"
    );
    let heard = namespaces.clone();
    let is_set = |origin: &Origin| *origin != Origin::Default;
    let options = DiscoveryOptions {
        namespaces,
        min_initial_workers: settings.get(keys::ROUTER_MIN_INITIAL_WORKERS),
        flag,
        is_asked: is_set(settings.origin(keys::DISCOVERY_BACKEND))
            || is_set(settings.origin(keys::ETCD_ENDPOINTS)),
        ..DiscoveryOptions::default()
    };
    fleet.follow_events(&store, move |namespace| heard.holds(namespace));
    fleet.discover(store, options);
    Ok(())
}
