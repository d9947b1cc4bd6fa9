//! What all handlers share: settings, served models, wanted workers, and what watches requests.
//!
//! State alone: which handler answers a request is known by `dispatch`, and nothing here calls one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use kvasir_host::HostContext;
use kvasir_openai::ApiError;
use kvasir_router::{BypassTerms, TwoStepTerms};
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, Metrics, Tracer};
use kvasir_types::WorkerRecord;
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::fleet::FleetContext;
use crate::fleet::Peers;
use crate::fleet::members::{Members, SourceName, SourceState, WorkerSource};
use crate::http::context::HttpContext;
use crate::http::in_flight::InFlight;
use crate::http::keys::ApiKeys;
use crate::http::limits::Limits;
use crate::http::long_work::LongWork;
use crate::http::routes::Paths;
use crate::http::tls::ServerTls;
use crate::http::via::Via;
use crate::models::text_counts::TextCounts;
use crate::models::{Models, ServedModel, prefill_pool_name};
use crate::observe::observer::Observer;
use crate::request::migrate::MigrationOptions;
use crate::request::speculative_prefill::PrefillSlots;

/// Settings of the HTTP side.
#[derive(Clone, Debug)]
pub struct AppOptions {
    /// Largest body, in MiB (`DYN_HTTP_BODY_LIMIT_MB`).
    pub body_limit_mb: u64,
    /// Status of an overload answer (`DYN_HTTP_OVERLOAD_STATUS_CODE`).
    pub overload_status: u16,
    /// Attempts after the first, before the first token (`--retry-limit`).
    pub retry_limit: u32,
    /// When an answer that broke off goes on elsewhere.
    pub migration: MigrationOptions,
    /// When a request is served without a prefill worker, though its model has or had some.
    pub two_step: TwoStepTerms,
    /// When a prompt goes past the prefill workers (`--router-conditional-disagg`); none: never.
    pub bypass: Option<BypassTerms>,
    /// Whether requests may carry extensions (`DYN_DISABLE_FRONTEND_NVEXT`).
    pub nvext_enabled: bool,
    /// Whether operators' routes are there (`DYN_DISABLE_FRONTEND_ADMIN_API`).
    pub admin_enabled: bool,
    /// Whether operators' routes are at a door of their own (`--admin-port`).
    pub admin_apart: bool,
    /// What operators show (`--admin-token-file`); without one, operators at the clients' door are clients.
    pub admin_token: ApiKeys,
    /// Where the routes are.
    pub paths: Paths,
    /// How long an engine's first event may be waited for before a stream begins, so that an error in it still sets
    /// the status (`DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS`); none: it travels in the stream.
    pub error_peek: Option<Duration>,
    /// How long and how much is borne.
    pub limits: Limits,
    /// Who may ask (`--http-api-key-file`).
    pub keys: ApiKeys,
    /// Requests whose end is remembered (`--router-decision-log`).
    pub outcomes_max: usize,
    /// What to do with fields of a body that nobody knows (`DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS`).
    pub unknown_fields: kvasir_openai::Unknown,
    /// Response field that carries reasoning (`--reasoning-field-name`).
    pub reasoning_field: kvasir_openai::ReasoningField,
    /// Stream events that tell of what is complete before the answer is (`--enable-streaming-tool-dispatch`,
    /// `--enable-streaming-reasoning-dispatch`).
    pub stream_dispatch: StreamDispatch,
    /// Whether a request that allows no call of its tools keeps them out of its prompt
    /// (`--exclude-tools-when-tool-choice-none`).
    pub exclude_tools: bool,
    /// Tokens in a block of every model (`--kv-cache-block-size`); none: what its workers say.
    pub kv_cache_block_size: Option<u32>,
    /// Where spans go (`--otel-export-enabled`).
    pub tracer: Option<Tracer>,
    /// Our certificate (`--tls-cert-path`); without one the doors are plain.
    pub tls: Option<ServerTls>,
    /// All settings with their origin, as JSON without secrets, for operators to look at.
    pub settings: Bytes,
}

/// Which events tell of a part of a streamed answer as soon as it is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamDispatch {
    /// `tool_call_dispatch`.
    pub tool_calls: bool,
    /// `reasoning_dispatch`.
    pub reasoning: bool,
}

impl Default for AppOptions {
    fn default() -> Self {
        Self {
            body_limit_mb: 45,
            overload_status: kvasir_openai::DEFAULT_OVERLOAD_STATUS,
            retry_limit: 2,
            migration: MigrationOptions::default(),
            two_step: TwoStepTerms::default(),
            bypass: None,
            nvext_enabled: true,
            admin_enabled: true,
            admin_apart: false,
            admin_token: ApiKeys::default(),
            paths: Paths::default(),
            error_peek: None,
            limits: Limits::default(),
            keys: ApiKeys::default(),
            outcomes_max: 4096,
            unknown_fields: kvasir_openai::Unknown::Refuse,
            reasoning_field: kvasir_openai::ReasoningField::default(),
            stream_dispatch: StreamDispatch::default(),
            exclude_tools: true,
            kv_cache_block_size: None,
            tracer: None,
            tls: None,
            settings: Bytes::from_static(b"{}"),
        }
    }
}

/// The application's state.
pub struct App {
    options: AppOptions,
    models: Arc<Models>,
    /// The pools of models' prefill workers.
    prefill_pools: Arc<Models>,
    text_counts: TextCounts,
    members: Members,
    /// Who operators add at run time; there is no such source before the first.
    operators: OnceLock<WorkerSource>,
    peers: Peers,
    context: HostContext,
    http: HttpContext,
    observer: Observer,
    via: Via,
    prefill_slots: PrefillSlots,
    /// Whoever dumps the index holds it.
    dump_turn: Arc<Semaphore>,
    /// Files are read without which no worker can serve.
    loading: AtomicBool,
    upgrades: OnceLock<UpgradeDoor>,
}

/// How an upgrade went: the process that serves now, or why none does.
pub type UpgradeOutcome = Result<u32, String>;
/// Somebody who asks for an upgrade and waits for how it goes.
pub type UpgradeAsk = oneshot::Sender<UpgradeOutcome>;
/// Where upgrades are asked for, one at a time.
pub(crate) type UpgradeDoor = mpsc::Sender<UpgradeAsk>;

impl App {
    /// An application that serves no model yet.
    #[must_use]
    pub fn new(options: AppOptions, metrics: Metrics, clock: Clock, tasks: Tasks) -> Arc<Self> {
        metrics
            .build_info
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1.0);
        let tracer = options.tracer.clone();
        let observer = Observer::new(clock, metrics.clone(), options.outcomes_max, tracer);
        let context = HostContext {
            clock,
            metrics: metrics.clone(),
            tasks: tasks.clone(),
        };
        let limits = (
            options.limits,
            options.body_limit_mb,
            options.overload_status,
        );
        let tls = options.tls.clone();
        Arc::new(Self {
            options,
            models: Arc::default(),
            prefill_pools: Arc::default(),
            text_counts: TextCounts::default(),
            members: Members::default(),
            operators: OnceLock::new(),
            peers: Peers::default(),
            context,
            http: HttpContext::new(limits, tls, metrics, clock, tasks),
            via: Via::new(observer.new_request_id()),
            observer,
            prefill_slots: PrefillSlots::default(),
            dump_turn: Arc::new(Semaphore::new(1)),
            loading: AtomicBool::new(false),
            upgrades: OnceLock::new(),
        })
    }

    /// Its settings.
    #[must_use]
    pub fn options(&self) -> &AppOptions {
        &self.options
    }

    /// What it serves.
    #[must_use]
    pub fn models(&self) -> &Arc<Models> {
        &self.models
    }

    /// The pools of workers that compute the prompts of models, each under the model's name and a suffix.
    #[must_use]
    pub fn prefill_pools(&self) -> &Arc<Models> {
        &self.prefill_pools
    }

    /// The pool of a model's prefill workers, if there ever was one that has not been given up.
    pub(crate) fn prefill_pool(&self, model: &str) -> Option<Arc<ServedModel>> {
        match self.prefill_pools.is_empty() {
            true => None,
            false => self.prefill_pools.get(&prefill_pool_name(model)),
        }
    }

    /// Which workers there are to be.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// What a fleet of its workers works with.
    #[must_use]
    pub fn fleet_context(&self) -> FleetContext {
        FleetContext {
            host: self.context.clone(),
            models: Arc::clone(&self.models),
            prefill_pools: Arc::clone(&self.prefill_pools),
            members: self.members.clone(),
            peers: self.peers.clone(),
            shortage: self.http.shortage.clone(),
            via: self.via.field().clone(),
            kv_cache_block_size: self.options.kv_cache_block_size,
        }
    }

    /// Replicas that are named.
    pub(crate) fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The workers that operators add at run time.
    pub(crate) fn operators(&self) -> &WorkerSource {
        let source = || self.members.source(SourceName::new("api", "/workers"));
        self.operators.get_or_init(source)
    }

    /// What it counts.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        self.observer.metrics()
    }

    /// The time.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.observer.clock()
    }

    /// Where it spawns.
    #[must_use]
    pub fn tasks(&self) -> &Tasks {
        &self.http.tasks
    }

    /// What it hands to the hosts of its routers.
    #[must_use]
    pub fn context(&self) -> &HostContext {
        &self.context
    }

    /// What the caches of its tokenizers have done.
    pub(crate) fn text_counts(&self) -> &TextCounts {
        &self.text_counts
    }

    /// Requests under way.
    #[must_use]
    pub fn in_flight(&self) -> &InFlight {
        &self.http.in_flight
    }

    /// Where work goes that would hold up a serving thread.
    pub(crate) fn long_work(&self) -> &LongWork {
        &self.http.long_work
    }

    /// What watches its requests.
    pub(crate) fn observer(&self) -> &Observer {
        &self.observer
    }

    /// What listeners and body readers need.
    pub(crate) fn http(&self) -> &HttpContext {
        &self.http
    }

    /// Says on its health page that nobody is to send new work, and serves what comes.
    pub fn start_leaving(&self) {
        self.http.start_leaving();
    }

    /// Another process accepts connections at our sockets from now on, or no longer does. Those that are open are served, and told to
    /// come back on another.
    pub fn set_handed_over(&self, handed_over: bool) {
        self.http.set_handed_over(handed_over);
        for model in self.models.all() {
            model.host.set_sessions_elsewhere(handed_over);
        }
    }

    /// Whether another process accepts connections at our sockets.
    #[must_use]
    pub fn is_handed_over(&self) -> bool {
        *self.http.handed_over().borrow()
    }

    /// Connections of clients that are open.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.http.connections.count()
    }

    /// The workers that operators added at run time.
    #[must_use]
    pub fn operators_workers(&self) -> Vec<WorkerRecord> {
        self.operators
            .get()
            .map(WorkerSource::records)
            .unwrap_or_default()
    }

    /// Adds workers as operators do.
    pub fn add_operators_workers(&self, workers: Vec<WorkerRecord>) {
        for worker in workers {
            let shown = worker.transport.to_string();
            if let Err(error) = self.operators().join(worker) {
                tracing::error!(worker = shown, %error, "a worker that an operator had added is not taken over");
            }
        }
    }

    /// Where an upgrade is asked for; none: this process cannot be upgraded in place.
    pub(crate) fn upgrades(&self) -> Option<&UpgradeDoor> {
        self.upgrades.get()
    }

    /// From now on operators may ask for an upgrade; whoever calls this makes it. Once.
    pub fn take_upgrades(&self) -> Option<mpsc::Receiver<UpgradeAsk>> {
        let (door, asked) = mpsc::channel(1);
        self.upgrades.set(door).ok().map(|()| asked)
    }

    /// Refuses new work from now on.
    pub fn start_draining(&self) {
        self.http.start_draining();
    }

    /// Whether new work is refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.http.is_draining()
    }

    /// Slots for speculative prefills.
    pub(crate) fn prefill_slots(&self) -> &PrefillSlots {
        &self.prefill_slots
    }

    /// Whose turn it is to dump the index; there is one at a time.
    pub(crate) fn dump_turn(&self) -> &Arc<Semaphore> {
        &self.dump_turn
    }

    /// How it signs what it passes on.
    pub(crate) fn via(&self) -> &Via {
        &self.via
    }

    /// Files are read without which no worker can serve, or no longer. Its health page says so, and models may still come.
    pub fn set_loading(&self, loading: bool) {
        self.loading.store(loading, Ordering::Relaxed);
    }

    /// Whether such files are read.
    pub(crate) fn is_loading(&self) -> bool {
        self.loading.load(Ordering::Relaxed)
    }

    /// What a client is told that names a model which nobody serves: it may still come with a worker that has not
    /// answered yet.
    pub(crate) fn unknown_model(&self) -> ApiError {
        let sources = self.members.sources();
        let mut states = sources.iter().map(|(_, state)| state);
        let starts = self.is_loading() || states.any(|state| *state == SourceState::Starting);
        match starts || !self.members.awaited().is_empty() {
            true => ApiError::not_ready(),
            false => ApiError::model_not_found(),
        }
    }
}
