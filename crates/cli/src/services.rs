//! `kvasir indexer`, `kvasir slot-tracker` and `kvasir select`: parts of the router as services, behind the frontend's server.

use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode};
use kvasir_config::{Command, Origin, Settings, keys};
use kvasir_frontend::{
    ByteSource, Cut, HttpServer, Limits, Reply, ReplyBody, WholeApi, WholeService, http_threads,
};
use kvasir_host::HostContext;
use kvasir_services::{
    Answer, AnswerBody, Api, Ask, Indexer, ReplicaSync, SelectOptions, Selector, SlotTracker, Verb,
};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics, log};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::wiring::{self, BadConfig, Failure};
use crate::{descriptors, index_peers, serve, sockets};

/// Largest body, in MiB, as Dynamo's services have it.
const BODY_LIMIT_MB: u64 = 8;

/// Runs the command until a signal.
pub(crate) async fn run(command: Command, settings: &Settings) -> Result<(), Failure> {
    let options = wiring::metric_options(settings, u64::from(std::process::id()));
    let metrics = Metrics::new(&options).map_err(|error| error.to_string())?;
    log::count_drops(&metrics.log_lines_dropped);
    let context = HostContext {
        clock: Clock::new(),
        metrics,
        tasks: Tasks::new(),
    };
    let threads = || serve::event_threads(settings);
    let setup = wiring::service_setup(settings)?;
    match command {
        Command::Indexer => {
            let indexer = Indexer::new(setup, context.clone(), Some(threads()?));
            let peers = index_peers::named(settings)?;
            for peer in &peers {
                let known = indexer.know_peer(&peer.url);
                known
                    .map_err(|error| BadConfig(format!("--indexer-peers {}: {error}", peer.url)))?;
            }
            let indexer = match index_peers::fetch(&peers, settings).await {
                Some(index) => indexer.with_snapshot(index),
                None => indexer,
            };
            listen_to_workers(&indexer, settings).await?;
            serve_api(indexer, context, settings, 8090).await
        }
        Command::SlotTracker => {
            let tracker = SlotTracker::new(setup, context.clone());
            let tracker = tracker.with_sync(sync(settings, &context).await?);
            for peer in sync_peers(settings) {
                let listening = tracker.listen_to(&peer);
                listening.map_err(|error| bad_peer(&error))?;
            }
            serve_api(tracker, context, settings, 8091).await
        }
        _ => {
            let options = SelectOptions {
                ttl: settings.get(keys::SELECTION_CACHE_TTL_SECS),
                entries_max: settings.get(keys::SELECTION_CACHE_MAX_ENTRIES) as usize,
                bytes_max: usize::try_from(settings.get(keys::SELECTION_CACHE_MAX_BYTES))
                    .unwrap_or(usize::MAX),
            };
            let selector = Selector::new(setup, options, context.clone(), Some(threads()?));
            let selector = selector.with_sync(sync(settings, &context).await?);
            let peers = index_peers::named(settings)?;
            let selector = match index_peers::fetch(&peers, settings).await {
                Some(index) => selector.with_snapshot(index),
                None => selector,
            };
            for peer in sync_peers(settings) {
                let listening = selector.listen_to(&peer);
                listening.map_err(|error| bad_peer(&error))?;
            }
            serve_api(selector, context, settings, 8092).await
        }
    }
}

/// The socket for other services of its kind, where one is wanted.
async fn sync(settings: &Settings, context: &HostContext) -> Result<Option<ReplicaSync>, Failure> {
    let Some(port) = settings.get(keys::REPLICA_SYNC_PORT) else {
        return Ok(None);
    };
    let host = settings.get(keys::HTTP_HOST);
    let id = wiring::process_id();
    let sync = ReplicaSync::bind(&host, port, id, context).await;
    let sync = sync.map_err(|error| {
        format!("cannot listen on {host}:{port}: {error}; choose another with --replica-sync-port")
    })?;
    tracing::info!(address = %sync.address(), "telling other services of load");
    Ok(Some(sync))
}

/// Where other services of its kind are.
fn sync_peers(settings: &Settings) -> Vec<String> {
    let peers = settings.get(keys::REPLICA_SYNC_PEERS).unwrap_or_default();
    let peers = peers.split(',').map(|peer| peer.trim().to_owned());
    peers.filter(|peer| !peer.is_empty()).collect()
}

fn bad_peer(error: &str) -> BadConfig {
    BadConfig(format!("--replica-sync-peers: {error}"))
}

/// Listens to the engines of `--listen`: `id=address` or `id:rank=address`.
async fn listen_to_workers(indexer: &Indexer, settings: &Settings) -> Result<(), Failure> {
    let (model, group) = (
        settings.get(keys::LISTEN_MODEL),
        settings.get(keys::LISTEN_GROUP),
    );
    let block_size = settings.get(keys::BLOCK_SIZE);
    for word in settings.get(keys::LISTEN) {
        let bad = |why: &str| BadConfig(format!("--listen {word}: {why}"));
        let expected = "id=tcp://host:port or id:rank=tcp://host:port is expected";
        let (name, endpoint) = word.split_once('=').ok_or_else(|| bad(expected))?;
        let (id, rank) = name.split_once(':').unwrap_or((name, "0"));
        let (Ok(id), Ok(rank)) = (id.trim().parse(), rank.trim().parse()) else {
            return Err(bad(expected).into());
        };
        let named = (model.as_str(), group.as_str(), block_size);
        let listening = indexer.listen(id, rank, endpoint.trim(), named).await;
        listening.map_err(|error| bad(&error))?;
    }
    Ok(())
}

async fn serve_api<A: Api>(
    api: A,
    context: HostContext,
    settings: &Settings,
    port: u16,
) -> Result<(), Failure> {
    let asked = settings.get(keys::HTTP_PORT);
    let is_set = *settings.origin(keys::HTTP_PORT) != Origin::Default;
    let port = if is_set { asked } else { port };
    let address = wiring::resolve("--http-host", &settings.get(keys::HTTP_HOST), port)?;
    let limits = Limits {
        connections_max: descriptors::client_connections(settings),
        ..Limits::default()
    };
    let HostContext {
        clock,
        metrics,
        tasks,
    } = context;
    let door = ServiceDoor {
        api,
        metrics: metrics.clone(),
    };
    let service = WholeService::new(door, (limits, BODY_LIMIT_MB), metrics, clock, tasks);
    let threads = wiring::http_threads(settings);
    let threads = http_threads(threads)
        .map_err(|error| format!("--http-threads {threads}: the threads did not start: {error}"))?;
    let server = HttpServer::start_on(threads, service, address)
        .await
        .map_err(|error| {
            format!("cannot listen on {address}: {error}; choose another port with --http-port")
        })?;
    tracing::info!(address = %server.address(), "listening");
    sockets::notify("READY=1");
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    let timeout = settings.get(keys::HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS);
    match server.shut_down(timeout).await {
        0 => Ok(()),
        cut => Err(format!("{cut} requests were still running when the timeout ended").into()),
    }
}

/// A service as the frontend's server serves it.
struct ServiceDoor<A> {
    api: A,
    metrics: Metrics,
}

impl<A: Api> WholeApi for ServiceDoor<A> {
    async fn answer(&self, head: Parts, body: Bytes) -> Reply {
        let verb = match head.method {
            Method::GET | Method::HEAD => Verb::Get,
            Method::POST => Verb::Post,
            Method::PATCH => Verb::Patch,
            Method::DELETE => Verb::Delete,
            _ => return reply(Answer::status(405)),
        };
        if verb == Verb::Get && head.uri.path() == "/metrics" {
            return self.metrics_page();
        }
        let ask = Ask {
            verb,
            path: head.uri.path().to_owned(),
            query: head.uri.query().map(str::to_owned),
            body,
        };
        reply(self.api.answer(ask).await)
    }

    fn refuse(&self, status: u16, why: &str) -> Reply {
        reply(Answer::refusal(status, why))
    }
}

impl<A: Api> ServiceDoor<A> {
    fn metrics_page(&self) -> Reply {
        self.api.measure();
        let mut page = String::new();
        match self.metrics.render(&mut page) {
            Ok(()) => {
                let kind = "text/plain; version=0.0.4; charset=utf-8";
                whole(StatusCode::OK, Some(kind), page.into())
            }
            Err(error) => reply(Answer::refusal(500, &error.to_string())),
        }
    }
}

fn reply(answer: Answer) -> Reply {
    const JSON: &str = "application/json";
    let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    match answer.body {
        AnswerBody::Empty => whole(status, None, Bytes::new()),
        AnswerBody::Json(text) => whole(status, Some(JSON), text),
        AnswerBody::Bytes(bytes) => whole(status, Some("application/octet-stream"), bytes),
        AnswerBody::Text(text) => whole(status, Some("text/plain; charset=utf-8"), text.into()),
        AnswerBody::JsonParts(parts) => {
            let mut reply = Response::new(ReplyBody::stream(Box::new(AnswerParts { parts })));
            *reply.status_mut() = status;
            let kind = HeaderValue::from_static(JSON);
            reply.headers_mut().insert(CONTENT_TYPE, kind);
            reply
        }
    }
}

fn whole(status: StatusCode, kind: Option<&'static str>, body: Bytes) -> Reply {
    let mut reply = Response::new(ReplyBody::from(body));
    *reply.status_mut() = status;
    if let Some(kind) = kind {
        let kind = HeaderValue::from_static(kind);
        reply.headers_mut().insert(CONTENT_TYPE, kind);
    }
    reply
}

/// An answer in parts.
struct AnswerParts {
    parts: mpsc::Receiver<Option<Bytes>>,
}

impl ByteSource for AnswerParts {
    fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Cut>>> {
        Poll::Ready(match ready!(self.parts.poll_recv(cx)) {
            Some(Some(bytes)) => Some(Ok(bytes)),
            Some(None) => None,
            None => Some(Err(Cut)),
        })
    }
}
