//! Listening, and what all requests of one server share.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_text::TextModel;
use kvasir_types::{DpRank, RequestId, Rng};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::ask::Fields;
use super::error::Refusal;
use super::fault::{Faults, HttpFault};
use super::metrics::Stats;
use super::received::Received;
use super::routes::route;
use super::transfer::HttpPart;
use crate::{CacheFaults, EventSockets, Worker};

/// Connections at once; the next ones wait in the kernel's backlog.
const CONNECTIONS_MAX: usize = 16_384;
/// A client has this long to send its headers.
const HEADERS_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after `accept` failed for want of descriptors or memory.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// The connection is closed without an answer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the mock engine hangs up, as it was told to")]
pub(crate) struct Hangup;

/// A server to be.
#[derive(Clone, Debug)]
pub struct MockServerOptions {
    /// The name under which the model is served.
    pub model: Arc<str>,
    /// What `/v1/models` says the model comes from.
    pub root: String,
    /// Tokenizer and template.
    pub text: Arc<TextModel>,
    /// Faults to begin with.
    pub faults: Vec<HttpFault>,
    /// What names and shares of struck requests follow from.
    pub seed: u64,
    /// Whether `usage` says how many prompt tokens came from the cache.
    pub prompt_tokens_details: bool,
    /// Adapters of the model that are served, too.
    pub adapters: Vec<MockAdapter>,
    /// Which part of requests it computes.
    pub part: HttpPart,
}

/// A LoRA adapter. What is cached for it is of no use to others.
#[derive(Clone, Debug)]
pub struct MockAdapter {
    /// The name under which it is served.
    pub name: Arc<str>,
    /// What `/v1/models` says it comes from.
    pub path: String,
}

impl MockAdapter {
    /// `NAME=PATH`, or a name that is its own path.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let (name, path) = text.split_once('=').unwrap_or((text, text));
        Self {
            name: name.into(),
            path: path.to_owned(),
        }
    }
}

/// What all requests of one server share.
#[derive(Debug)]
pub(crate) struct Mock {
    pub(crate) worker: Worker,
    pub(crate) model: Arc<str>,
    pub(crate) root: String,
    pub(crate) text: Arc<TextModel>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) stats: Stats,
    pub(crate) received: Received,
    pub(crate) tasks: Tasks,
    pub(crate) prompt_tokens_details: bool,
    pub(crate) adapters: Vec<MockAdapter>,
    pub(crate) part: HttpPart,
    /// Its engine has died.
    dead: watch::Sender<bool>,
    clock: Clock,
    seed: u64,
    requests: AtomicU64,
    events: OnceLock<Arc<EventSockets>>,
    /// Of an engine that tells of its cache on an event plane.
    cache_faults: OnceLock<Arc<CacheFaults>>,
}

impl Mock {
    /// The engine's event sockets, if it has some.
    pub(crate) fn events(&self) -> Option<&EventSockets> {
        self.events.get().map(|events| &**events)
    }

    /// What can go wrong with its events on an event plane, if it is on one.
    pub(crate) fn cache_faults(&self) -> Option<&CacheFaults> {
        self.cache_faults.get().map(|faults| &**faults)
    }

    /// Its engine dies: what is being answered is, and then its door closes.
    pub(crate) fn die(&self) {
        self.dead.send_replace(true);
    }

    async fn died(&self) {
        let _ = self.dead.subscribe().wait_for(|dead| *dead).await;
    }

    pub(crate) fn unix_secs(&self) -> u64 {
        self.clock.unix_secs(self.clock.now())
    }

    pub(crate) fn max_model_len(&self) -> u32 {
        self.worker.options().engine.max_model_len
    }

    /// A request's id inside the engine.
    pub(crate) fn next_id(&self) -> RequestId {
        let n = self.requests.fetch_add(1, Ordering::Relaxed);
        RequestId(u128::from(self.seed) << 64 | u128::from(n))
    }

    /// A request's name outside.
    pub(crate) fn next_name(&self) -> String {
        let n = self.requests.fetch_add(1, Ordering::Relaxed);
        format!(
            "{:016x}",
            Rng::new(self.seed ^ n.rotate_left(17)).next_u64()
        )
    }

    /// Requests without a wish go to the ranks in turn.
    pub(crate) fn next_rank(&self) -> DpRank {
        let ranks = u64::from(self.worker.options().ranks.max(1));
        DpRank((self.requests.load(Ordering::Relaxed) % ranks) as u32)
    }

    /// The adapter that is asked for, if it is one. Refuses another model's name; no name is this model's.
    pub(crate) fn check_model(&self, fields: &Fields) -> Result<Option<Arc<str>>, Refusal> {
        let asked = fields.get("model").and_then(|m| m.as_str());
        let Some(asked) = asked.filter(|asked| **asked != *self.model) else {
            return Ok(None);
        };
        let adapter = self.adapters.iter().find(|a| *a.name == *asked);
        match adapter {
            Some(adapter) => Ok(Some(Arc::clone(&adapter.name))),
            None => Err(Refusal::unknown_model(asked, &self.model)),
        }
    }
}

/// A mock engine that listens.
#[derive(Debug)]
pub struct MockServer {
    address: SocketAddr,
    mock: Arc<Mock>,
}

impl MockServer {
    /// Listens on `address` and answers with `worker`; port 0 takes a free one. Ends when `tasks` drain.
    pub async fn start(
        tasks: &Tasks,
        address: SocketAddr,
        worker: Worker,
        options: MockServerOptions,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let mock = Arc::new(Mock {
            worker,
            model: options.model,
            root: options.root,
            text: options.text,
            faults: Arc::new(Faults::new(options.faults, options.seed)),
            stats: Stats::default(),
            received: Received::default(),
            tasks: tasks.clone(),
            prompt_tokens_details: options.prompt_tokens_details,
            adapters: options.adapters,
            part: options.part,
            dead: watch::Sender::new(false),
            clock: Clock::new(),
            seed: options.seed,
            requests: AtomicU64::new(0),
            events: OnceLock::new(),
            cache_faults: OnceLock::new(),
        });
        tasks.spawn(accept(tasks.clone(), listener, Arc::clone(&mock)));
        Ok(Self { address, mock })
    }

    /// Tells clients of the engine's event sockets, as vLLM does; takes event faults for them.
    pub fn announce_events(&self, events: Arc<EventSockets>) {
        let _ = self.mock.events.set(events);
    }

    /// Takes event faults for an engine that tells of its cache on an event plane.
    pub fn take_event_faults(&self, faults: Arc<CacheFaults>) {
        let _ = self.mock.cache_faults.set(faults);
    }

    /// What strikes requests, for the engine's other doors.
    #[must_use]
    pub fn faults(&self) -> Arc<Faults> {
        Arc::clone(&self.mock.faults)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The engine behind it.
    #[must_use]
    pub fn worker(&self) -> &Worker {
        &self.mock.worker
    }
}

async fn accept(tasks: Tasks, listener: TcpListener, mock: Arc<Mock>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        let accepted = tokio::select! {
            () = tasks.draining() => return,
            () = mock.died() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                tasks.spawn(serve(tasks.clone(), stream, Arc::clone(&mock), place));
            }
            Err(_) => tokio::time::sleep(ACCEPT_BACKOFF).await,
        }
    }
}

async fn serve(tasks: Tasks, stream: TcpStream, mock: Arc<Mock>, _place: OwnedSemaphorePermit) {
    let _ = stream.set_nodelay(true);
    let own = Arc::clone(&mock);
    let service =
        service_fn(move |request: http::Request<Incoming>| route(Arc::clone(&mock), request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    // How a connection ends is the client's affair, or a fault that was asked for.
    let _ = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = tasks.draining() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = own.died() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
}
