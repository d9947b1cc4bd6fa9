//! Discovery and request planes of a frontend, from its options.

use std::net::SocketAddr;
use std::sync::Arc;

use kvasir_config::{DiscoveryBackend, Origin, Settings, keys};
use kvasir_discovery::{EndpointName, Store};
use kvasir_embed::{IndexServer, Sharing, replica_carrier};
use kvasir_frontend::{App, DiscoveryOptions, EventPlaneSetup, Fleet};
use kvasir_host::{EventLogOptions, IndexEndpoints, PeerOptions, PeerSecret, PeerStore};
pub(crate) use kvasir_planes::{Clients, clients, namespaces, nats_link, store};
use kvasir_planes::{answers_address, clients_of, listen_at, response_server};
use kvasir_setup::is_linked;
use kvasir_tasks::Tasks;
use kvasir_transport::{RequestPlane, TokenPlane, local_address};
use kvasir_types::{PlaneEndpoint, WorkerId};

use crate::sockets::InnerSockets;
use crate::upgrade::Handed;
use crate::wiring::{BadConfig, Failure};

/// The same fleet, with the request planes on which discovered workers are.
pub(crate) async fn with_planes(
    fleet: Fleet,
    settings: &Settings,
    tasks: &Tasks,
    handed: &Handed,
    inner: &mut InnerSockets,
) -> Result<Fleet, Failure> {
    let sessions = settings
        .get(keys::ROUTER_SESSION_AFFINITY_TTL_SECS)
        .is_some();
    if settings.get(keys::DISCOVERY_BACKEND) == DiscoveryBackend::Static {
        return Ok(match is_linked(settings) {
            true => fleet.with_replicas(None, sessions),
            false => fleet,
        });
    }
    let shared = inner.answers.take();
    let shared = shared.filter(|(asked, _)| *asked == answers_address(settings));
    let (port, shared) = (
        settings.get(keys::TCP_RPC_PORT),
        shared.map(|(_, home)| home),
    );
    let home = response_server(settings, port, shared, tasks).await?;
    let _ = handed.home.set(home.clone());
    let (clients, link) = clients_of(settings, home, tasks)?;
    let carrier = settings
        .get(keys::ROUTER_REPLICA_SYNC)
        .then(|| replica_carrier(settings, &link, tasks));
    let fleet = match carrier.is_some() || is_linked(settings) {
        true => fleet.with_replicas(carrier, sessions),
        false => fleet,
    };
    let mut fleet = fleet.with_event_plane(EventPlaneSetup {
        clients: clients.clone(),
        nats: link,
        log: event_log(settings, tasks)?,
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

/// How cache events are read that are kept in JetStream, if the options ask for it.
pub(crate) fn event_log(
    settings: &Settings,
    tasks: &Tasks,
) -> Result<Option<EventLogOptions>, Failure> {
    let Some(reading) = Sharing::of(settings).log else {
        return Ok(None);
    };
    let coordination = store(settings, tasks)?.and_then(|(store, _)| store.coordination());
    let max_age = settings.get(keys::NATS_STREAM_MAX_AGE);
    Ok(Some(kvasir_embed::event_log(
        reading,
        max_age,
        coordination,
    )))
}

/// Where linked replicas write their addresses if no namespace is named.
const PEER_NAMESPACE: &str = "dynamo";
/// Shortest secret of linked replicas.
const SECRET_MIN: usize = 16;

/// The links to other replicas, if there are to be any.
pub(crate) fn peer_options(
    settings: &Settings,
    tasks: &Tasks,
    inner: &mut InnerSockets,
) -> Result<Option<PeerOptions>, Failure> {
    if !is_linked(settings) {
        return Ok(None);
    }
    let Some(path) = settings.get(keys::ROUTER_PEER_SECRET_FILE) else {
        let text = "--router-peers and --router-peer-listen need --router-peer-secret-file";
        return Err(BadConfig(text.to_owned()).into());
    };
    let bad = |error: &dyn std::fmt::Display| {
        BadConfig(format!(
            "--router-peer-secret-file {}: {error}",
            path.display()
        ))
    };
    let secret = std::fs::read_to_string(&path).map_err(|error| bad(&error))?;
    if secret.trim().len() < SECRET_MIN {
        return Err(bad(&format!("it has fewer than {SECRET_MIN} characters")).into());
    }
    let listen = peer_address(settings)?;
    let opened = inner.peers.take();
    let opened = opened.filter(|(asked, _)| Some(*asked) == listen);
    let peers = settings.get(keys::ROUTER_PEERS).unwrap_or_default();
    let peers = peers.split(',').map(|peer| peer.trim().to_owned());
    Ok(Some(PeerOptions {
        secret: PeerSecret::new(&secret),
        listen,
        opened: opened.map(|(_, listener)| listener),
        peers: peers.filter(|peer| !peer.is_empty()).collect(),
        store: peer_store(settings, tasks)?,
    }))
}

/// Where this process listens for other replicas.
pub(crate) fn peer_address(settings: &Settings) -> Result<Option<SocketAddr>, Failure> {
    let listen = settings.get(keys::ROUTER_PEER_LISTEN);
    let listen = listen.map(|address| {
        let bad = |error| BadConfig(format!("--router-peer-listen {address}: {error}"));
        address.parse::<SocketAddr>().map_err(bad)
    });
    Ok(listen.transpose()?)
}

/// Where replicas that listen find each other: a folder or etcd. On Kubernetes a headless service has their addresses.
fn peer_store(settings: &Settings, tasks: &Tasks) -> Result<Option<PeerStore>, Failure> {
    let backend = settings.get(keys::DISCOVERY_BACKEND);
    let is_shared = matches!(backend, DiscoveryBackend::File | DiscoveryBackend::Etcd);
    if !is_shared || !settings.is_set(keys::ROUTER_PEER_LISTEN) {
        return Ok(None);
    }
    let found = store(settings, tasks)?;
    Ok(found.map(|(store, _)| {
        let namespace = settings.get(keys::NAMESPACE);
        let namespace = namespace.unwrap_or_else(|| PEER_NAMESPACE.to_owned());
        let host = settings.get(keys::TCP_RPC_HOST);
        PeerStore {
            store,
            endpoint: EndpointName::new(&namespace, "kvasir-frontend", "peer"),
            host: host.unwrap_or_else(|| local_address().to_string()),
        }
    }))
}

/// Lets a fleet follow the store that the options name; that store.
pub(crate) fn discover(
    fleet: &Fleet,
    settings: &Settings,
    tasks: &Tasks,
) -> Result<Option<Arc<dyn Store>>, Failure> {
    let Some((store, flag)) = store(settings, tasks)? else {
        return Ok(None);
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
    fleet.discover(Arc::clone(&store), options);
    Ok(Some(store))
}

/// Answers other routers that ask for the index of this one (`--serve-indexer`).
pub(crate) async fn serve_index(
    fleet: &Fleet,
    app: &App,
    store: Arc<dyn Store>,
    settings: &Settings,
) -> Result<(), Failure> {
    if !settings.get(keys::SERVE_INDEXER) {
        return Ok(());
    }
    let (context, models) = (app.context(), Arc::clone(app.models()));
    let find = move |model: &str| models.get(model).map(|model| Arc::clone(&model.host));
    let records = !settings.get(keys::ROUTER_KV_EVENTS);
    let index = IndexEndpoints::new(context, records, find);
    let host = settings.get(keys::TCP_RPC_HOST);
    let host = host.unwrap_or_else(|| local_address().to_string());
    let link = nats_link(settings, &context.tasks)?;
    // The port that is named is for answers of workers.
    let server = listen_at(settings, (&host, 0), &link, &context.tasks).await?;
    let server = IndexServer::new(settings, index, store, server, (&host, &link), context);
    server.start(fleet.endpoints());
    Ok(())
}
