//! Where a worker takes requests and publishes its events, by the options.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;

use kvasir_config::{EventPlane, RequestPlane, Settings, keys};
use kvasir_discovery::EndpointName;
use kvasir_tasks::Tasks;
use kvasir_transport::event_plane::NatsEvents;
use kvasir_transport::http_rpc::HttpServer;
use kvasir_transport::jetstream::{JetStream, LogPublisher, LogPublisherOptions};
use kvasir_transport::nats::{NatsLink, NatsServer};
use kvasir_transport::tcp::{EndpointServer, ServerOptions, TlsAcceptor, server_tls};
use kvasir_wire::native::LogNames;
use kvasir_worker::{EventCarrier, RequestServer};

use crate::{SetupError, resolve};

/// What Dynamo calls its workers, where nothing else is said.
pub const ENDPOINT: [&str; 3] = ["dynamo", "backend", "generate"];

/// `--endpoint namespace.component.endpoint`; what is not said is as Dynamo has it.
#[must_use]
pub fn endpoint(settings: &Settings) -> EndpointName {
    let [mut namespace, mut component, mut name] = ENDPOINT.map(str::to_owned);
    if let Some(given) = settings.get(keys::NAMESPACE) {
        namespace = given;
    }
    if let Some(given) = settings.get(keys::ENDPOINT) {
        let parts: Vec<&str> = given.trim_start_matches("dyn://").split('.').collect();
        if let [of, part, endpoint] = parts[..] {
            (namespace, component, name) = (of.into(), part.into(), endpoint.into());
        }
    }
    EndpointName::new(&namespace, &component, &name)
}

/// Takes requests on the plane that the options name; `host` is where others reach this process.
pub async fn listen(
    settings: &Settings,
    host: &str,
    link: &NatsLink,
    tasks: &Tasks,
) -> Result<RequestServer, SetupError> {
    let port = settings.get(keys::TCP_RPC_PORT);
    listen_at(settings, (host, port), link, tasks).await
}

/// The same at another port; for a process whose port of the options is for answers of workers.
pub async fn listen_at(
    settings: &Settings,
    (host, port): (&str, u16),
    link: &NatsLink,
    tasks: &Tasks,
) -> Result<RequestServer, SetupError> {
    let bind = match settings.get(keys::TCP_RPC_HOST) {
        Some(host) => resolve("--tcp-rpc-host", &host, port)?,
        None => ([0, 0, 0, 0], port).into(),
    };
    let mut options = ServerOptions {
        message_bytes_max: usize::try_from(settings.get(keys::TCP_MAX_MESSAGE_SIZE))
            .unwrap_or(usize::MAX),
        ..ServerOptions::new(bind)
    };
    let failed = |error: std::io::Error| {
        SetupError::System(format!(
            "cannot take requests on {bind}: {error}; see --tcp-rpc-host and --tcp-rpc-port"
        ))
    };
    let host = host.to_owned();
    Ok(match settings.get(keys::REQUEST_PLANE) {
        RequestPlane::Tcp => {
            options.tls = request_tls(settings)?;
            let server = EndpointServer::bind(options, tasks).await;
            let server = server.map_err(failed)?;
            RequestServer::Tcp { server, host }
        }
        RequestPlane::Http => {
            let server = HttpServer::bind(options, tasks).await;
            let server = server.map_err(failed)?;
            RequestServer::Http { server, host }
        }
        RequestPlane::Nats => {
            let server = NatsServer::new(link.clone(), options.capacity, tasks);
            RequestServer::Nats(server)
        }
    })
}

/// The certificate that frontends are shown over TCP, if there is one.
fn request_tls(settings: &Settings) -> Result<Option<TlsAcceptor>, SetupError> {
    // One without the other was refused when the options were read.
    let certificate = settings.get(keys::TCP_TLS_CERT_PATH);
    let Some((certificate, key)) = certificate.zip(settings.get(keys::TCP_TLS_KEY_PATH)) else {
        return Ok(None);
    };
    let read = |option: &str, path: &Path| {
        std::fs::read(path)
            .map_err(|error| SetupError::Option(format!("{option} {}: {error}", path.display())))
    };
    let certificate = read("--tcp-tls-cert-path", &certificate)?;
    let key = read("--tcp-tls-key-path", &key)?;
    let tls = server_tls(&certificate, &key)
        .map_err(|error| SetupError::Option(format!("--tcp-tls-cert-path: {error}")))?;
    Ok(Some(tls))
}

/// The stream that cache events of an endpoint are kept in, if `--durable-kv-events` asks for it.
#[must_use]
pub fn event_log(
    settings: &Settings,
    of: &EndpointName,
    link: &NatsLink,
    tasks: &Tasks,
) -> Option<LogPublisher> {
    if !settings.get(keys::DURABLE_KV_EVENTS) {
        return None;
    }
    let names = LogNames::of(&of.namespace, &of.component);
    let options = LogPublisherOptions {
        stream: names.stream,
        subject: names.subject,
        max_age: settings.get(keys::NATS_STREAM_MAX_AGE),
        // The standard library seeds its hashers from the system.
        publisher: RandomState::new().build_hasher().finish(),
    };
    Some(LogPublisher::start(
        JetStream::new(link.clone()),
        options,
        tasks,
    ))
}

/// How the events of an endpoint travel; `host` is where others reach this process.
#[must_use]
pub fn event_carrier(
    settings: &Settings,
    of: &EndpointName,
    host: &str,
    link: &NatsLink,
    tasks: &Tasks,
) -> EventCarrier {
    match settings.get(keys::EVENT_PLANE) {
        EventPlane::Zmq => {
            let own = settings.get(keys::EVENT_PLANE_HOST);
            let host = own.unwrap_or_else(|| host.to_owned());
            EventCarrier::Zmq { host }
        }
        EventPlane::Nats => {
            let events = NatsEvents::new(link, tasks);
            EventCarrier::nats(events, of)
        }
    }
}
