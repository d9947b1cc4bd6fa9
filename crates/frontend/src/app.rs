//! The application behind the listener: what is served, under which settings, and where requests go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::BytesMut;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use hyper::body::Incoming;
use kvasir_openai::{ApiError, Endpoint, Health, ModelInfo};
use kvasir_telemetry::{Clock, Metrics, Tracer};
use kvasir_transport::Tasks;
use kvasir_types::RequestId;
use tokio_util::sync::CancellationToken;

use crate::admin;
use crate::admin::dump;
use crate::admin::openapi;
use crate::fleet::members::Members;
use crate::http::body;
use crate::http::framing;
use crate::http::ids::RequestIds;
use crate::http::in_flight::InFlight;
use crate::http::keys::{API_KEY, ApiKeys};
use crate::http::limits::Limits;
use crate::http::reply::{self, Reply};
use crate::http::routes::{Audience, NoRoute, Paths, Route};
use crate::http::tls::ServerTls;
use crate::http::via::Via;
use crate::models::{Models, ServedModel};
use crate::observe::meter::ModelMeters;
use crate::observe::outcomes::Outcomes;
use crate::openai::generate;
use crate::proxy;
use crate::refusal::{self, Refusal};
use crate::request::ahead::Places;
use crate::request::migrate::MigrationOptions;

/// Workers that the health page names as waited for.
const AWAITED_NAMED_MAX: usize = 16;

/// What a client without a key is told.
const NO_KEY: &str = "A key is needed: authorization: Bearer KEY";
/// What a client with another key is told.
const WRONG_KEY: &str = "The key is not valid: it is none of those that are known here";
/// What an operator with another token is told.
const WRONG_TOKEN: &str =
    "The token is not valid: authorization: Bearer TOKEN brings another than the admin token";
/// What an operator without the token is told.
const NO_TOKEN: &str = "The admin token is needed: authorization: Bearer TOKEN";

/// Which listener a request came in at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// Clients'; operators' too, unless they have one of their own.
    Data,
    /// Operators' own.
    Admin,
}

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
    /// Tokens in a block of every model (`--kv-cache-block-size`); none: what its workers say.
    pub kv_cache_block_size: Option<u32>,
    /// Where spans go (`--otel-export-enabled`).
    pub tracer: Option<Tracer>,
    /// Our certificate (`--tls-cert-path`); without one the doors are plain.
    pub tls: Option<ServerTls>,
}

impl Default for AppOptions {
    fn default() -> Self {
        Self {
            body_limit_mb: 45,
            overload_status: kvasir_openai::DEFAULT_OVERLOAD_STATUS,
            retry_limit: 2,
            migration: MigrationOptions::default(),
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
            kv_cache_block_size: None,
            tracer: None,
            tls: None,
        }
    }
}

/// The application.
pub struct App {
    options: AppOptions,
    models: Models,
    members: Members,
    metrics: Metrics,
    /// Of requests for models that are not served; made when the first one comes.
    unknown: OnceLock<Arc<ModelMeters>>,
    clock: Clock,
    tasks: Tasks,
    in_flight: InFlight,
    outcomes: Outcomes,
    /// Nobody is to send new work any more.
    leaving: CancellationToken,
    is_leaving: AtomicBool,
    draining: AtomicBool,
    ids: RequestIds,
    via: Via,
    ahead: Places,
}

impl App {
    /// An application that serves no model yet.
    #[must_use]
    pub fn new(options: AppOptions, metrics: Metrics, clock: Clock, tasks: Tasks) -> Arc<Self> {
        metrics
            .build_info
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1.0);
        let ids = RequestIds::new();
        Arc::new(Self {
            outcomes: Outcomes::new(options.outcomes_max),
            options,
            models: Models::default(),
            members: Members::default(),
            metrics,
            unknown: OnceLock::new(),
            clock,
            tasks,
            in_flight: InFlight::default(),
            leaving: CancellationToken::new(),
            is_leaving: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            via: Via::new(ids.next()),
            ids,
            ahead: Places::default(),
        })
    }

    /// Its settings.
    #[must_use]
    pub fn options(&self) -> &AppOptions {
        &self.options
    }

    /// What it serves.
    #[must_use]
    pub fn models(&self) -> &Models {
        &self.models
    }

    /// Which engine servers are to be its workers.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// What it counts.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What is counted of requests for models that are not served.
    pub(crate) fn meters_of_unknown(&self) -> &Arc<ModelMeters> {
        let unknown = || ModelMeters::unknown(&self.metrics);
        self.unknown.get_or_init(unknown)
    }

    /// The time.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Where it spawns.
    #[must_use]
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// Requests under way.
    #[must_use]
    pub fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }

    /// How the latest requests ended.
    pub(crate) fn outcomes(&self) -> &Outcomes {
        &self.outcomes
    }

    /// Says on its health page that nobody is to send new work, and serves what comes.
    pub fn start_leaving(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
        self.leaving.cancel();
    }

    /// Whether it is about to end.
    pub(crate) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed)
    }

    /// Waits until it is about to end.
    pub(crate) async fn leaving(&self) {
        self.leaving.cancelled().await;
    }

    /// Refuses new work from now on.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.start_leaving();
    }

    /// Whether new work is refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Turns that are computed ahead.
    pub(crate) fn ahead(&self) -> &Places {
        &self.ahead
    }

    /// How it signs what it passes on.
    pub(crate) fn via(&self) -> &Via {
        &self.via
    }

    pub(crate) fn new_request_id(&self) -> RequestId {
        self.ids.next()
    }

    /// Answers one HTTP request that came in at `door`.
    pub async fn handle(self: &Arc<Self>, mut request: Request<Incoming>, door: Door) -> Reply {
        if let Err(refusal) = framing::check(&request) {
            let (head, _) = request.into_parts();
            let mut reply = Refusal::from(refusal).answer(self, &head);
            framing::close_after(&mut reply); // Where its body ends is in doubt: nothing more is read.
            return reply;
        }
        match self.find(&request, door) {
            Ok((route, audience)) => {
                if audience == Audience::Clients && !self.options.keys.is_empty() {
                    // The key is ours: engines do not see it.
                    request.headers_mut().remove(AUTHORIZATION);
                    request.headers_mut().remove(API_KEY);
                }
                self.answer(route, request, door).await
            }
            Err(refusal) => {
                let (head, body) = request.into_parts();
                body::leave(&head, body).await;
                refusal.answer(self, &head)
            }
        }
    }

    /// What is asked for, and for whom that is; why not if it is not to be had.
    fn find<B>(&self, request: &Request<B>, door: Door) -> Result<(Route, Audience), Box<Refusal>> {
        refusal::check_head(self, request)?;
        self.via.check(request.headers()).map_err(Refusal::from)?;
        let (method, path) = (request.method(), request.uri().path());
        let not_found =
            || Err(Refusal::from(ApiError::route_not_found(method.as_str(), path)).into());
        let (route, audience) = match self.options.paths.find(method, path) {
            Ok((_, audience)) if !self.is_served(audience, door) => return not_found(),
            Ok(found) => found,
            Err(NoRoute::Method(allowed)) => {
                return Err(Refusal::method(method.as_str(), allowed).into());
            }
            Err(NoRoute::NotFound) => return not_found(),
        };
        if let Err(error) = self.admit(audience, door, request.headers()) {
            return Err(Refusal::from(error).of(&route, path).into());
        }
        if audience == Audience::Clients
            && self.in_flight.count() >= self.options.limits.requests_max
        {
            return Err(self.too_many().of(&route, path).into());
        }
        Ok((route, audience))
    }

    async fn answer(
        self: &Arc<Self>,
        route: Route,
        request: Request<Incoming>,
        door: Door,
    ) -> Reply {
        match route {
            Route::Chat => generate::handle(self, Endpoint::Chat, request).await,
            Route::Completions => generate::handle(self, Endpoint::Completions, request).await,
            Route::Engine(path) => proxy::pass(self, request, path).await,
            Route::Stored(path) => proxy::seek(self, request, &path).await,
            Route::Models => self.list_models(),
            Route::Model(id) => self.one_model(&id),
            Route::ModelReady(id) => self.model_ready(&id),
            Route::Health => self.health(),
            Route::Live => reply::json(StatusCode::OK, kvasir_openai::live()),
            Route::Metrics => self.metrics_page(),
            Route::OpenApi => self.describe(door),
            Route::BusyThreshold => admin::busy_threshold(self, request).await,
            Route::Workers if request.method() == Method::POST => {
                admin::add_worker(self, request).await
            }
            Route::Workers => admin::workers(self),
            Route::Worker(name) => admin::remove_worker(self, &name, request.uri().query()),
            Route::Dump => dump::answer(self).await,
            Route::Decisions => admin::decisions(self),
            Route::Decision(id) => admin::decision(self, &id),
        }
    }

    /// Whether routes for this audience are behind this door.
    fn is_served(&self, audience: Audience, door: Door) -> bool {
        match audience {
            Audience::Anyone => true,
            Audience::Clients => door == Door::Data,
            Audience::Operators => {
                let here = door == Door::Admin || !self.options.admin_apart;
                here && self.options.admin_enabled
            }
        }
    }

    /// Whether a request with these headers may pass. The admin token, where there is one, is the only key to
    /// operators' routes.
    fn admit(&self, audience: Audience, door: Door, headers: &HeaderMap) -> Result<(), ApiError> {
        let (keys, needed, wrong) = match audience {
            Audience::Anyone => return Ok(()),
            Audience::Operators if !self.options.admin_token.is_empty() => {
                (&self.options.admin_token, NO_TOKEN, WRONG_TOKEN)
            }
            Audience::Operators if door == Door::Admin => return Ok(()),
            _ => (&self.options.keys, NO_KEY, WRONG_KEY),
        };
        if keys.admit(headers) {
            return Ok(());
        }
        let is_shown = headers.contains_key(AUTHORIZATION) || headers.contains_key(API_KEY);
        Err(ApiError::new(401, if is_shown { wrong } else { needed }))
    }

    /// Refuses as in an overload, without reading any further.
    fn too_many(&self) -> Refusal {
        self.limit_reached("requests");
        Refusal {
            is_overload: true,
            ..ApiError::overloaded(self.options.overload_status).into()
        }
    }

    /// A client did not take its answer within its timeout: the answer ends.
    pub(crate) fn client_stalled(&self, what: &str) {
        self.limit_reached("client_time");
        tracing::debug!("client stalled: {what}");
    }

    /// Counts that a limit of the server was reached.
    pub(crate) fn limit_reached(&self, limit: &'static str) {
        let reached = &self.metrics.limit_reached_total;
        reached.with_label_values(&[limit]).inc();
    }

    fn describe(&self, door: Door) -> Reply {
        let client_key = !self.options.keys.is_empty();
        let scope = openapi::Scope {
            clients: self.is_served(Audience::Clients, door),
            operators: self.is_served(Audience::Operators, door),
            client_key,
            operator_key: !self.options.admin_token.is_empty() || door == Door::Data && client_key,
        };
        let document = openapi::document(&self.options.paths, scope);
        reply::json(StatusCode::OK, document.to_string())
    }

    fn list_models(&self) -> Reply {
        if self.is_draining() {
            return reply::error(&ApiError::not_ready());
        }
        let ready = self.models.all().into_iter().filter(|m| m.is_ready());
        let list: Vec<ModelInfo> = ready.map(|m| info(&m)).collect();
        reply::json(StatusCode::OK, kvasir_openai::models(&list))
    }

    fn one_model(&self, id: &str) -> Reply {
        match self.models.get(id) {
            None => reply::error(&ApiError::model_not_found()),
            Some(model) => {
                let mut out = BytesMut::new();
                info(&model).write(&mut out);
                reply::json(StatusCode::OK, out.freeze())
            }
        }
    }

    fn model_ready(&self, id: &str) -> Reply {
        let Some(model) = self.models.get(id) else {
            return reply::error(&ApiError::model_not_found());
        };
        let ready = model.is_ready();
        let present: &[&str] = if ready { &["aggregated"] } else { &[] };
        let missing: &[&str] = if ready { &[] } else { &["aggregated"] };
        let body = serde_json::json!({
            "model": &*model.name,
            "ready": ready,
            "namespaces": { "dynamo": {
                "ready": ready,
                "worker_types": { "aggregated": { "workers": model.specs().len(), "needs": [] } },
                "present": present,
                "missing_worker_types": missing,
            } },
        });
        let status = if ready {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        reply::json(status, body.to_string())
    }

    /// What a client is told that names a model which nobody serves: it may still come with a worker that has not
    /// answered yet.
    pub(crate) fn unknown_model(&self) -> ApiError {
        match self.members.awaited().is_empty() {
            true => ApiError::model_not_found(),
            false => ApiError::not_ready(),
        }
    }

    fn health(&self) -> Reply {
        if self.is_leaving() {
            return reply::json(
                StatusCode::SERVICE_UNAVAILABLE,
                kvasir_openai::not_ready("draining"),
            );
        }
        let mut health = Health::default();
        for model in self.models.all() {
            model.describe(&mut health);
        }
        let awaited = self.members.awaited();
        let status = match health.is_ready() {
            true => StatusCode::OK,
            false => StatusCode::SERVICE_UNAVAILABLE,
        };
        let named = awaited.iter().take(AWAITED_NAMED_MAX);
        health.waiting_for = named.map(ToString::to_string).collect();
        reply::json(status, health.to_body())
    }

    fn metrics_page(&self) -> Reply {
        for model in self.models.all() {
            self.metrics
                .model_migration_limit
                .with_label_values(&[&*model.name])
                .set(self.options.migration.limit.into());
        }
        self.models.measure(&self.metrics, self.clock.now());
        let mut page = String::new();
        if let Err(error) = self.metrics.render(&mut page) {
            tracing::error!(%error, "metrics could not be rendered");
            return reply::error(&ApiError::internal());
        }
        let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        reply::whole(StatusCode::OK, text, page.into())
    }
}

fn info(model: &ServedModel) -> ModelInfo {
    ModelInfo {
        id: model.name.to_string(),
        created: model.created,
        context_window: model.context_length.into(),
        max_output_tokens: None,
    }
}
