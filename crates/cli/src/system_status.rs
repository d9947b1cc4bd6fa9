//! The status server of processes that serve no HTTP themselves (`--system-port`): whether they are up, their metrics, and the
//! files of a model that a worker's card names.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode};
use kvasir_config::{Settings, keys};
use kvasir_frontend::{HttpServer, Limits, Reply, ReplyBody, WholeApi, WholeService, http_threads};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics};
use kvasir_types::Time;
use kvasir_worker::HostedFiles;

use crate::wiring::{self, Failure};

/// What clients send has no body.
const BODY_LIMIT_MB: u64 = 1;
/// Connections at once: probes and scrapers.
const CONNECTIONS_MAX: usize = 64;
/// How long the end waits for a page that is being read.
const END: Duration = Duration::from_secs(1);

/// Brings gauges up to date before they are read.
type Measure = Box<dyn Fn() + Send + Sync>;

/// What a status server says.
pub(crate) struct StatusSource {
    pub(crate) metrics: Metrics,
    pub(crate) clock: Clock,
    /// The endpoints that this process serves when it is ready.
    pub(crate) endpoints: Vec<String>,
    pub(crate) measure: Measure,
    /// Handed out to frontends that read the worker's card.
    pub(crate) files: HostedFiles,
}

/// A status server that runs.
pub(crate) struct SystemStatus {
    server: HttpServer<WholeService<StatusApi>>,
    ready: Arc<AtomicBool>,
}

impl SystemStatus {
    /// Listens where the options say; none if they say nothing.
    pub(crate) async fn start(
        settings: &Settings,
        source: StatusSource,
    ) -> Result<Option<Self>, Failure> {
        let Some(port) = settings.get(keys::SYSTEM_PORT) else {
            return Ok(None);
        };
        let address = wiring::resolve("--system-host", &settings.get(keys::SYSTEM_HOST), port)?;
        let (metrics, clock) = (source.metrics.clone(), source.clock);
        let ready = Arc::new(AtomicBool::new(false));
        let api = StatusApi {
            began: clock.now(),
            ready: Arc::clone(&ready),
            source,
        };
        let limits = Limits {
            connections_max: CONNECTIONS_MAX,
            ..Limits::default()
        };
        // Tasks of its own: it answers until the rest has ended.
        let tasks = Tasks::new();
        let service = WholeService::new(api, (limits, BODY_LIMIT_MB), metrics, clock, tasks);
        let threads =
            http_threads(1).map_err(|error| format!("the status server did not start: {error}"))?;
        let server = HttpServer::start_on(threads, service, address)
            .await
            .map_err(|error| {
                format!(
                    "cannot listen on {address}: {error}; choose another port with --system-port"
                )
            })?;
        tracing::info!(address = %server.address(), "status server listens");
        Ok(Some(Self { server, ready }))
    }

    /// Where it listens.
    pub(crate) fn port(&self) -> u16 {
        self.server.address().port()
    }

    /// What `/health` says from now on.
    pub(crate) fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Release);
    }

    /// Ends it.
    pub(crate) async fn end(self) {
        self.server.shut_down(END).await;
    }
}

struct StatusApi {
    source: StatusSource,
    ready: Arc<AtomicBool>,
    began: Time,
}

impl StatusApi {
    /// `{"status":"ready","uptime":{"secs":2,"nanos":793031335},"endpoints":{"generate":"ready"}}`, as Dynamo's processes say it.
    fn health(&self, is_ready: bool) -> Reply {
        let up = self.source.clock.now() - self.began;
        let state = if is_ready { "ready" } else { "notready" };
        let endpoints = self.source.endpoints.iter();
        let endpoints: serde_json::Map<String, serde_json::Value> =
            endpoints.map(|name| (name.clone(), state.into())).collect();
        let body = serde_json::json!({
            "status": state,
            "uptime": {"secs": up.as_secs(), "nanos": up.subsec_nanos()},
            "endpoints": endpoints,
        });
        let status = match is_ready {
            true => StatusCode::OK,
            false => StatusCode::SERVICE_UNAVAILABLE,
        };
        whole(status, "application/json", body.to_string())
    }

    fn metrics(&self) -> Reply {
        (self.source.measure)();
        let mut page = String::new();
        match self.source.metrics.render(&mut page) {
            Ok(()) => whole(
                StatusCode::OK,
                "text/plain; version=0.0.4; charset=utf-8",
                page,
            ),
            Err(error) => self.refuse(500, &error.to_string()),
        }
    }

    /// Read on the status server's own thread: only its other pages wait for the disk.
    fn file(&self, path: &Path) -> Reply {
        match std::fs::read(path) {
            Ok(bytes) => whole(StatusCode::OK, "application/octet-stream", bytes),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a file that the card names cannot be read");
                self.refuse(500, "this file cannot be read here")
            }
        }
    }
}

impl WholeApi for StatusApi {
    async fn answer(&self, head: Parts, _: Bytes) -> Reply {
        if head.method != Method::GET && head.method != Method::HEAD {
            return self.refuse(405, "only GET is answered here");
        }
        match head.uri.path() {
            "/health" => self.health(self.ready.load(Ordering::Acquire)),
            "/live" => self.health(true),
            "/metrics" => self.metrics(),
            path => match self.source.files.find(path) {
                Some(file) => self.file(file),
                None => self.refuse(404, "here are /health, /live and /metrics"),
            },
        }
    }

    fn refuse(&self, status: u16, why: &str) -> Reply {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        whole(status, "text/plain; charset=utf-8", format!("{why}\n"))
    }
}

fn whole(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(ReplyBody::from(body.into()));
    *reply.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    reply.headers_mut().insert(CONTENT_TYPE, kind);
    reply
}
