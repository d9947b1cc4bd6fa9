//! How endpoints of other processes are called, by the options.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvasir_config::{RequestPlane as PlaneName, Settings, keys};
use kvasir_tasks::Tasks;
use kvasir_transport::http_rpc::HttpClient;
use kvasir_transport::nats::{NatsClient, NatsLink, NatsOptions};
use kvasir_transport::tcp::{TcpClient, TcpOptions, client_tls};
use kvasir_transport::{EndpointClient, ResponseOptions, ResponseServer, SharedHome};

use crate::SetupError;

/// A NATS server that is away for less is not spoken of.
const NATS_PATIENCE: Duration = Duration::from_secs(1);

/// By the name of a request plane: who calls endpoints there.
pub type Clients = BTreeMap<&'static str, Arc<dyn EndpointClient>>;

/// The request planes, and the connection to NATS that some of them use.
pub async fn clients(
    settings: &Settings,
    tasks: &Tasks,
) -> Result<(Clients, NatsLink), SetupError> {
    clients_at(settings, settings.get(keys::TCP_RPC_PORT), tasks).await
}

/// The same; workers bring their answers to this port. For a process that takes requests at the port of the options.
pub async fn clients_at(
    settings: &Settings,
    port: u16,
    tasks: &Tasks,
) -> Result<(Clients, NatsLink), SetupError> {
    let home = response_server(settings, port, None, tasks).await?;
    clients_of(settings, home, tasks)
}

/// Where workers bring their answers, by the options.
#[must_use]
pub fn answers_address(settings: &Settings) -> SocketAddr {
    response_options(settings, settings.get(keys::TCP_RPC_PORT)).bind
}

/// Takes the answers of workers, at a port that a process shares which this one replaces, if there is one.
pub async fn response_server(
    settings: &Settings,
    port: u16,
    shared: Option<SharedHome>,
    tasks: &Tasks,
) -> Result<ResponseServer, SetupError> {
    let options = response_options(settings, port);
    let bind = options.bind;
    let started = match shared {
        Some(shared) => ResponseServer::start_at(options, shared, tasks),
        None => ResponseServer::start(options, tasks).await,
    };
    started.map_err(|error| {
        SetupError::System(format!(
            "answers of workers cannot be taken at {bind}: {error}; set --tcp-rpc-host and --tcp-rpc-port"
        ))
    })
}

/// The request planes; workers bring their answers to `home`.
pub fn clients_of(
    settings: &Settings,
    home: ResponseServer,
    tasks: &Tasks,
) -> Result<(Clients, NatsLink), SetupError> {
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
pub fn nats_link(settings: &Settings, tasks: &Tasks) -> Result<NatsLink, SetupError> {
    let servers = settings.get(keys::NATS_SERVER);
    let servers = servers.split(',').map(|server| server.trim().to_owned());
    let options = NatsOptions {
        servers: servers.filter(|server| !server.is_empty()).collect(),
        tls_ca: settings.get(keys::NATS_TLS_CA_CERT_PATH),
        tls_insecure: settings.get(keys::NATS_TLS_INSECURE),
        ..NatsOptions::default()
    };
    let link = NatsLink::new(&options, tasks)
        .map_err(|error| SetupError::Option(format!("--nats-server: {error}")))?;
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
fn response_options(settings: &Settings, port: u16) -> ResponseOptions {
    let host = settings.get(keys::TCP_RPC_HOST);
    // A name is what workers are told; only an address of this machine can be listened on.
    let address = host.as_deref().and_then(|host| host.parse::<IpAddr>().ok());
    let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    ResponseOptions {
        bind: SocketAddr::new(address, port),
        advertise: host.filter(|_| address.is_unspecified()),
        ..ResponseOptions::default()
    }
}

fn tcp_options(settings: &Settings) -> Result<TcpOptions, SetupError> {
    let bytes = settings.get(keys::TCP_MAX_MESSAGE_SIZE);
    let tls = match settings.get(keys::TCP_TLS_CA_CERT_PATH) {
        None => None,
        Some(path) => {
            let shown = path.display();
            let bad = |error: &dyn std::fmt::Display| {
                SetupError::Option(format!("--tcp-tls-ca-cert-path {shown}: {error}"))
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
