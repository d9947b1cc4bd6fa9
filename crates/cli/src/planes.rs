//! Discovery and request planes of a frontend, from its options.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{DiscoveryBackend, Origin, RequestPlane as PlaneName, Settings, keys};
use kvasir_discovery::{
    EtcdOptions, EtcdOptionsError, EtcdStore, FileStore, MemStore, Namespaces, Store,
};
use kvasir_frontend::{DiscoveryOptions, EventPlaneSetup, Fleet};
use kvasir_tasks::Tasks;
use kvasir_transport::http_rpc::HttpClient;
use kvasir_transport::nats::{NatsClient, NatsLink, NatsOptions};
use kvasir_transport::tcp::{TcpClient, TcpOptions, client_tls};
use kvasir_transport::{EndpointClient, RequestPlane, ResponseOptions, ResponseServer, TokenPlane};
use kvasir_types::{PlaneEndpoint, WorkerId};

use crate::cluster;
use crate::wiring::{BadConfig, Failure};

/// The folder of `file` discovery in the temporary directory, where `--file-kv` names none.
const FILE_KV: &str = "dynamo_store_kv";

/// A NATS server that is away for less is not spoken of.
const NATS_PATIENCE: Duration = Duration::from_secs(1);

/// A store, and the option that says where it is.
pub(crate) type NamedStore = (Arc<dyn Store>, &'static str);

/// Where workers are looked for; none if all are named.
pub(crate) fn store(settings: &Settings, tasks: &Tasks) -> Result<Option<NamedStore>, Failure> {
    let store: NamedStore = match settings.get(keys::DISCOVERY_BACKEND) {
        DiscoveryBackend::File => (
            Arc::new(FileStore::new(file_kv(settings), tasks)),
            "--file-kv",
        ),
        DiscoveryBackend::Mem => (Arc::new(MemStore::new()), "--discovery-backend"),
        DiscoveryBackend::Etcd => {
            let store = EtcdStore::new(etcd_options(settings), tasks);
            let bad = |error: EtcdOptionsError| match &error {
                EtcdOptionsError::BadEndpoint(_) => format!("--etcd-endpoints: {error}"),
                EtcdOptionsError::BadFile { .. } => format!("--etcd-auth-*: {error}"),
            };
            let store = store.map_err(|error| BadConfig(bad(error)))?;
            (Arc::new(store), "--etcd-endpoints")
        }
        DiscoveryBackend::Kubernetes => {
            let store = cluster::store(settings, tasks)?;
            (Arc::new(store), "--kubeconfig or --kube-namespace")
        }
        DiscoveryBackend::Static => return Ok(None),
    };
    Ok(Some(store))
}

fn etcd_options(settings: &Settings) -> EtcdOptions {
    let user = settings.get(keys::ETCD_AUTH_USERNAME);
    let password = settings.get(keys::ETCD_AUTH_PASSWORD).unwrap_or_default();
    let certificate = settings.get(keys::ETCD_AUTH_CLIENT_CERT);
    EtcdOptions {
        endpoints: settings.get(keys::ETCD_ENDPOINTS),
        user: user.map(|user| (user, password)),
        authority: settings.get(keys::ETCD_AUTH_CA),
        identity: certificate.zip(settings.get(keys::ETCD_AUTH_CLIENT_KEY)),
        lease_ttl: settings.get(keys::ETCD_LEASE_TTL),
    }
}

fn file_kv(settings: &Settings) -> PathBuf {
    let named = settings.get(keys::FILE_KV);
    named.unwrap_or_else(|| std::env::temp_dir().join(FILE_KV))
}

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

/// By the name of a request plane: who calls endpoints there.
pub(crate) type Clients = BTreeMap<&'static str, Arc<dyn EndpointClient>>;

/// The request planes, and the connection to NATS that some of them use.
pub(crate) async fn clients(
    settings: &Settings,
    tasks: &Tasks,
) -> Result<(Clients, NatsLink), Failure> {
    let options = response_options(settings);
    let bind = options.bind;
    let home = ResponseServer::start(options, tasks).await.map_err(|error| {
        format!("answers of workers cannot be taken at {bind}: {error}; set --tcp-rpc-host and --tcp-rpc-port")
    })?;
    let (link, options) = (nats_link(settings, tasks)?, tcp_options(settings)?);
    if settings.get(keys::REQUEST_PLANE) == PlaneName::Nats {
        link.connect();
    }
    let http = HttpClient::new(home.clone(), &options, tasks);
    let nats = NatsClient::new(link.clone(), home.clone(), &options, tasks);
    let tcp = TcpClient::new(home, options, tasks);
    let clients = Clients::from([
        ("http", Arc::new(http) as _),
        ("nats", Arc::new(nats) as _),
        ("tcp", Arc::new(tcp) as _),
    ]);
    Ok((clients, link))
}

/// The connection to NATS, which is made when somebody needs it. The log says when it is lost and found.
pub(crate) fn nats_link(settings: &Settings, tasks: &Tasks) -> Result<NatsLink, Failure> {
    let servers = settings.get(keys::NATS_SERVER);
    let servers = servers.split(',').map(|server| server.trim().to_owned());
    let options = NatsOptions {
        servers: servers.filter(|server| !server.is_empty()).collect(),
        tls_ca: settings.get(keys::NATS_TLS_CA_CERT_PATH),
        tls_insecure: settings.get(keys::NATS_TLS_INSECURE),
        ..NatsOptions::default()
    };
    let link = NatsLink::new(&options, tasks)
        .map_err(|error| BadConfig(format!("--nats-server: {error}")))?;
    tasks.background().spawn(say_changes(link.clone()));
    Ok(link)
}

/// Says once when the NATS server is not reached, and once when it is.
async fn say_changes(link: NatsLink) {
    link.wanted().await;
    let (mut state, mut was_lost) = (link.watch(), false);
    loop {
        let reached = state.wait_for(|state| state.reached.is_ok());
        let reached = tokio::time::timeout(NATS_PATIENCE, reached);
        match reached.await.map(|state| state.is_ok()) {
            Ok(true) => {
                tracing::info!(servers = link.servers(), "connected to NATS");
                was_lost = false;
                let lost = state.wait_for(|state| state.reached.is_err());
                if lost.await.is_err() {
                    return;
                }
            }
            Ok(false) => return,
            Err(_) if was_lost => {}
            Err(_) => {
                tracing::warn!(
                    servers = link.servers(),
                    "the NATS server is not reached: requests to workers on NATS wait, and their events are missing; see --nats-server"
                );
                was_lost = true;
            }
        }
    }
}

/// Where workers bring their answers.
fn response_options(settings: &Settings) -> ResponseOptions {
    let host = settings.get(keys::TCP_RPC_HOST);
    // A name is what workers are told; only an address of this machine can be listened on.
    let address = host.as_deref().and_then(|host| host.parse::<IpAddr>().ok());
    let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    ResponseOptions {
        bind: SocketAddr::new(address, settings.get(keys::TCP_RPC_PORT)),
        advertise: host.filter(|_| address.is_unspecified()),
        ..ResponseOptions::default()
    }
}

fn tcp_options(settings: &Settings) -> Result<TcpOptions, Failure> {
    let bytes = settings.get(keys::TCP_MAX_MESSAGE_SIZE);
    let tls = match settings.get(keys::TCP_TLS_CA_CERT_PATH) {
        None => None,
        Some(path) => {
            let shown = path.display();
            let bad = |error: &dyn std::fmt::Display| {
                BadConfig(format!("--tcp-tls-ca-cert-path {shown}: {error}"))
            };
            let pem = std::fs::read(&path).map_err(|error| bad(&error))?;
            Some(client_tls(&pem).map_err(|error| bad(&error))?)
        }
    };
    Ok(TcpOptions {
        connect_timeout: settings.get(keys::TCP_CONNECT_TIMEOUT),
        ack_timeout: settings.get(keys::TCP_REQUEST_TIMEOUT),
        message_bytes_max: usize::try_from(bytes).unwrap_or(usize::MAX),
        queue_max: settings.get(keys::TCP_CHANNEL_BUFFER) as usize,
        pool_size: settings.get(keys::TCP_POOL_SIZE) as usize,
        tls,
        ..TcpOptions::default()
    })
}

/// Whose workers count.
pub(crate) fn namespaces(settings: &Settings) -> Namespaces {
    match (
        settings.get(keys::NAMESPACE_PREFIX),
        settings.get(keys::NAMESPACE),
    ) {
        (Some(prefix), _) => Namespaces::Prefix(prefix),
        (None, Some(name)) => Namespaces::One(name),
        (None, None) => Namespaces::All,
    }
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
