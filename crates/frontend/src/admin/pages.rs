//! The pages for probes, scrapers and passers-by: health, metrics, and what this is.

use http::header::{ACCEPT, LOCATION};
use http::{HeaderMap, HeaderValue, StatusCode};
use kvasir_openai::{ApiError, DiscoveryHealth, Health};
use serde_json::json;

use crate::app::App;
use crate::fleet::members::SourceState;
use crate::http::reply::{self, Reply};

/// Where the operators' page is.
const DASHBOARD: &str = "/dashboard";
/// Workers that the health page names as waited for.
const AWAITED_NAMED_MAX: usize = 16;

/// What this is. A browser is sent on to the dashboard, if that is at this door.
pub(crate) fn root(app: &App, has_page: bool, headers: &HeaderMap) -> Reply {
    let accepts = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    let is_browser = accepts.is_some_and(|accept| accept.contains("text/html"));
    if has_page && is_browser {
        let mut reply = reply::json(StatusCode::SEE_OTHER, "");
        let page = HeaderValue::from_static(DASHBOARD);
        reply.headers_mut().insert(LOCATION, page);
        return reply;
    }
    let paths = &app.options().paths;
    let page = json!({
        "name": "kvasir",
        "version": env!("CARGO_PKG_VERSION"),
        "about": "A KV-cache-aware router for LLM inference with an OpenAI API",
        "chat": paths.chat,
        "models": paths.models,
        "health": paths.health,
        "metrics": paths.metrics,
        "api": "/openapi.json",
        "dashboard": has_page.then_some(DASHBOARD),
    });
    reply::json(StatusCode::OK, page.to_string())
}

/// Whether requests are served, and by whom.
pub(crate) fn health(app: &App) -> Reply {
    let stage = match app.http().is_leaving() {
        true => Some("draining"),
        false => app.is_loading().then_some("loading"),
    };
    if let Some(stage) = stage {
        let body = kvasir_openai::not_ready(stage);
        return reply::json(StatusCode::SERVICE_UNAVAILABLE, body);
    }
    let mut health = Health::default();
    for model in app.models().all() {
        model.describe(&mut health);
    }
    let awaited = app.members().awaited();
    let status = match health.is_ready() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let named = awaited.iter().take(AWAITED_NAMED_MAX);
    health.waiting_for = named.map(|worker| worker.transport.to_string()).collect();
    health.discovery = discovery(app);
    reply::json(status, health.to_body())
}

/// What the health page says of discovery.
fn discovery(app: &App) -> Vec<DiscoveryHealth> {
    let sources = app.members().sources().into_iter();
    let backends = sources.filter(|(name, _)| name.is_backend());
    let described = backends.map(|(name, state)| {
        let (state, error) = match state {
            SourceState::Ready => ("ready", None),
            SourceState::Starting => ("starting", None),
            SourceState::Lost(why) => ("lost", Some(why)),
        };
        let source = name.instance.clone();
        DiscoveryHealth {
            source,
            state,
            error,
        }
    });
    described.collect()
}

/// All series, brought up to date.
pub(crate) fn metrics(app: &App) -> Reply {
    for model in app.models().all() {
        app.metrics()
            .model_migration_limit
            .with_label_values(&[&*model.name])
            .set(app.options().migration.limit_of(&model).into());
    }
    let bodies = app.http().bodies.used();
    app.metrics().http_body_bytes.set(bodies as f64);
    app.prefill_pools()
        .measure(app.metrics(), app.clock().now());
    app.models().measure(app.metrics(), app.clock().now());
    app.text_counts().add(&app.models().all(), app.metrics());
    let mut page = String::new();
    if let Err(error) = app.metrics().render(&mut page) {
        tracing::error!(%error, "metrics could not be rendered");
        return reply::error(&ApiError::internal());
    }
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    reply::whole(StatusCode::OK, text, page.into())
}
