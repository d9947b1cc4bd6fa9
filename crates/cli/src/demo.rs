//! `kvasir demo`: frontend, mock workers and sample traffic in one process, for a first look.
//!
//! Everything is the real thing but the model: requests go through HTTP, template, tokenizer, index and router
//! to mock engines with real block pools, whose cache events flow back into the index.

mod answers;
mod processes;
mod summary;
mod traffic;

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvasir_config::{Settings, keys};
use kvasir_engine::{CacheEvent, EngineConfig, Load};
use kvasir_frontend::{App, ServedModel, WorkerLink};
use kvasir_host::{LocalEvents, ModelSpec};
use kvasir_mocker::{Observer, TokenWorker, WorkerOptions};
use kvasir_router::{Input, LoadReport, WorkerSpec};
use kvasir_tasks::RuntimeThreads;
use kvasir_telemetry::Clock;
use kvasir_text::TextModel;
use kvasir_transport::MemoryPlane;
use kvasir_types::{DpRank, KvEvent, TransportKind, WorkerId, WorkerRank};
use kvasir_upstream::{Pool, WorkerTls, parse_url};

use crate::wiring::{self, Failure};
use crate::{serve, traces};
use processes::Processes;
use summary::Summary;
use traffic::Traffic;

/// The model's name unless `--model-name` gives another.
const MODEL: &str = "kvasir-demo";
/// Tokens in a block unless `--kv-cache-block-size` says otherwise.
const BLOCK_SIZE: u32 = 16;
/// Tokens of cache in each mock worker: small, so that eviction can be seen.
const CACHE_TOKENS: u32 = 32_768;
/// Longest prompt and answer.
const CONTEXT_LENGTH: u32 = 8192;
/// How often the summary is shown on a terminal, and where nobody watches.
const SUMMARY_EVERY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// Runs the demo until a signal.
pub(crate) async fn run(settings: &Settings) -> Result<(), Failure> {
    let app = serve::app(settings, Clock::new())?;
    wiring::say_how(settings);
    // Events are applied until these are dropped.
    let event_threads = serve::event_threads(settings)?;
    let block_size = settings
        .get(keys::KV_CACHE_BLOCK_SIZE)
        .unwrap_or(BLOCK_SIZE);
    let name = settings
        .get(keys::MODEL_NAME)
        .unwrap_or_else(|| MODEL.into());
    let disagg = settings.get(keys::DISAGG);
    let (model, kept) = match settings.get(keys::PROCESSES) || disagg {
        true => {
            let started = Processes::start(&app, settings, event_threads, &name, block_size);
            let (processes, model) = started.await?;
            (model, Kept::Processes(Box::new(processes)))
        }
        false => {
            let model = start_model(&app, settings, &event_threads, &name, block_size).await?;
            (model, Kept::Threads(event_threads))
        }
    };
    let server = serve::listen(&app, settings).await?;
    let scheme = match settings.get(keys::TLS_CERT_PATH) {
        Some(_) => "https",
        None => "http",
    };
    let url = format!("{scheme}://{}", loopback(server.address()));
    let operators = server.admin_address().unwrap_or(server.address());
    let dashboard = match app.options().admin_enabled {
        true => format!("{scheme}://{}/dashboard", loopback(operators)),
        false => "switched off with the admin API".to_owned(),
    };
    let workers = settings.get(keys::WORKERS);
    let workers = match disagg {
        true => {
            let (prefill, decode) = processes::split(workers);
            format!("{prefill} mock workers that compute prompts and {decode} that answer")
        }
        false => format!("{workers} mock workers"),
    };
    greet(&url, &dashboard, &model.name, &workers);
    if settings.get(keys::TRAFFIC) {
        let summary = Arc::new(Mutex::new(Summary::default()));
        // It talks to itself: it believes its own certificate.
        let tls = match settings.get(keys::TLS_CERT_PATH) {
            Some(path) => WorkerTls::with_authority(&path)?,
            None => WorkerTls::default(),
        };
        let traffic = Traffic::new(
            Pool::new(parse_url(&url)?, tls),
            Arc::clone(&model.name),
            Arc::clone(&app),
            Arc::clone(&summary),
        );
        traffic.start(wiring::seed(settings));
        app.tasks().spawn(show(app.tasks().clone(), summary));
    }
    let ended = serve::until_signal(server, settings, &OnceLock::new(), None).await;
    if let Kept::Processes(processes) = kept {
        processes.end().await;
    }
    traces::flush(&app).await;
    ended
}

/// What the demo has as long as it runs.
enum Kept {
    /// Events of engines in this process are applied by these.
    Threads(#[expect(dead_code, reason = "kept, not read")] RuntimeThreads),
    /// Engines in processes of their own.
    Processes(Box<Processes>),
}

/// Serves the demo's model with its mock workers.
async fn start_model(
    app: &Arc<App>,
    settings: &Settings,
    event_threads: &RuntimeThreads,
    name: &str,
    block_size: u32,
) -> Result<Arc<ServedModel>, Failure> {
    let text = Arc::new(TextModel::builtin()?);
    let spec = ModelSpec {
        name: name.into(),
        block_size,
        context_length: CONTEXT_LENGTH,
        parent: None,
        migration_limit: 0,
    };
    let plane = MemoryPlane::new();
    let model = wiring::router_setup(settings)?.make(&spec, None, app.context());
    let tokens = Some(Arc::clone(&text)).into();
    let model = ServedModel::new(model, tokens, TransportKind::Plane);
    app.models().insert(Arc::clone(&model));
    let options = WorkerOptions {
        engine: EngineConfig {
            block_size,
            num_blocks: CACHE_TOKENS / block_size.max(1),
            max_model_len: CONTEXT_LENGTH,
            ..EngineConfig::default()
        },
        ranks: 1,
        answer: answers::in_words(&text)?,
    };
    for id in 1..=u64::from(settings.get(keys::WORKERS)) {
        let reporter = Reporter::new(&model, WorkerId(id), event_threads).await;
        start_worker(app, &model, &plane, reporter, options.clone())?;
    }
    Ok(model)
}

fn start_worker(
    app: &App,
    model: &Arc<ServedModel>,
    plane: &MemoryPlane,
    reporter: Reporter,
    options: WorkerOptions,
) -> Result<(), Failure> {
    let id = reporter.worker;
    let spec = WorkerSpec {
        kv_total_blocks: Some(options.engine.num_blocks.into()),
        max_num_batched_tokens: Some(options.engine.max_num_batched_tokens.into()),
        max_num_seqs: Some(options.engine.max_num_seqs.into()),
        ..WorkerSpec::new(id)
    };
    let observer: Arc<dyn Observer> = Arc::new(reporter);
    TokenWorker::spawn(app.tasks(), plane, id, options, &observer)
        .map_err(|error| format!("a mock worker cannot start: {error}"))?;
    let link = WorkerLink::plane("memory", &model.name, Arc::new(plane.clone()));
    model.join(spec, link);
    Ok(())
}

/// Carries what a mock engine of one rank says to the index and the router.
struct Reporter {
    model: Arc<ServedModel>,
    worker: WorkerId,
    /// Nobody takes its events if the router asks no index.
    events: Option<LocalEvents>,
}

impl Reporter {
    async fn new(model: &Arc<ServedModel>, worker: WorkerId, threads: &RuntimeThreads) -> Self {
        let rank = WorkerRank {
            worker,
            rank: DpRank(0),
        };
        let events = match model.host.needs().index {
            true => Some(model.host.subscribe_local(rank, Some(threads)).await),
            false => None,
        };
        Self {
            model: Arc::clone(model),
            worker,
            events,
        }
    }
}

impl Observer for Reporter {
    fn cache_event(&self, _: WorkerRank, _: u64, event: &CacheEvent) {
        if let Some(events) = &self.events {
            events.push(event.event.clone());
        }
    }

    fn step_ended(&self, _: WorkerRank) {
        if let Some(events) = &self.events {
            events.flush();
        }
    }

    fn restarted(&self, _: WorkerRank) {
        if let Some(events) = &self.events {
            events.push(KvEvent::Cleared { tier: None });
            events.flush();
        }
    }

    fn load(&self, rank: WorkerRank, load: &Load) {
        self.model.host.tell(Input::Load(LoadReport {
            rank,
            kv_used_blocks: Some(load.used_blocks.into()),
            ..LoadReport::default()
        }));
    }
}

/// The address that a client on this machine uses.
fn loopback(address: SocketAddr) -> SocketAddr {
    let ip = match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => std::net::Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => std::net::Ipv6Addr::LOCALHOST.into(),
        other => other.ip(),
    };
    SocketAddr::new(ip, address.port())
}

fn greet(url: &str, dashboard: &str, model: &str, workers: &str) {
    let text = format!(
        r#"
Kvasir demo: model {model} on {workers} at {url}
Dashboard, where requests go and why: {dashboard}

Ask something, then the same again: the second time its prefix is cached and it goes to the same worker.

  curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": "When does my parcel leave if I bring it at noon?"}}],
    "nvext": {{"extra_fields": ["worker_id", "timing"]}}}}'

  add "stream": true for server-sent events · {url}/metrics for Prometheus
  kvasir demo --traffic for a live load · kvasir demo --help for every setting · Ctrl-C to stop

"#
    );
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Shows the summary again and again: in place on a terminal, one below the other elsewhere.
async fn show(tasks: kvasir_tasks::Tasks, summary: Arc<Mutex<Summary>>) {
    let terminal = std::io::stdout().is_terminal();
    let every = SUMMARY_EVERY[usize::from(!terminal)];
    let mut lines_up = 0;
    loop {
        let done = tokio::select! {
            () = tokio::time::sleep(every) => false,
            () = tasks.draining() => true,
        };
        let table = summary
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .table();
        let mut out = std::io::stdout();
        if terminal && lines_up > 0 {
            let _ = write!(out, "\x1b[{lines_up}A\x1b[J");
        }
        let _ = out.write_all(table.as_bytes());
        let _ = out.flush();
        lines_up = table.lines().count();
        if done {
            return;
        }
    }
}
