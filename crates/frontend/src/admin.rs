//! Answers to operators: thresholds, workers, decisions.
//!
//! Everything here reads the router between two steps, or tells it something; nothing is decided here.

pub(crate) mod dump;
pub(crate) mod openapi;
pub(crate) mod pages;
mod workers;

use std::collections::HashSet;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, Method, Request, StatusCode};
use hyper::body::Incoming;
use kvasir_openai::{ApiError, BusyError, BusyThreshold, BusyUpdate, busy_thresholds};
use kvasir_router::{Decision, Input, Router, ThresholdUpdate};
use kvasir_types::RequestId;
use serde_json::{Value, json};

use crate::App;
use crate::http::body;
use crate::http::long_work;
use crate::http::reply::{self, Reply};
use crate::models::ServedModel;

pub(crate) use workers::{add_worker, remove_worker, workers};

/// What is said of a request that nobody knows, or knows no more.
const NO_DECISION: &str = "no decision about this request is remembered; the latest ones are kept";
/// What is said of a body that is longer than any that operators have a use for.
const TOO_LONG: &str = "Request body exceeds the 128 KiB that operators' requests may have";
/// Decisions in one answer.
const DECISIONS_MAX: usize = 100;

/// `GET` and `POST /busy_threshold`.
pub(crate) async fn busy_threshold(app: &App, request: Request<Incoming>) -> Reply {
    if request.method() != Method::POST {
        let list: Vec<BusyThreshold> = app.models().all().iter().map(|m| thresholds(m)).collect();
        return reply::json(StatusCode::OK, busy_thresholds(&list));
    }
    let (parts, incoming) = request.into_parts();
    let body = match read_short(app, &parts, incoming).await {
        Ok(body) => body,
        Err(error) => return reply::error(&error),
    };
    match BusyUpdate::parse(&body).and_then(|update| set_thresholds(app, &update)) {
        Ok(row) => {
            let mut out = BytesMut::new();
            row.write(&mut out);
            reply::json(StatusCode::OK, out.freeze())
        }
        Err(error) => busy_error(&error),
    }
}

/// Reads the body of an operator's request, which is short.
async fn read_short(app: &App, parts: &Parts, incoming: Incoming) -> Result<Bytes, ApiError> {
    let body = body::read_json(app.http(), parts, incoming).await?;
    match long_work::is_long(body.len()) {
        true => Err(ApiError::new(413, TOO_LONG)),
        false => Ok(body),
    }
}

/// Reads, or takes over what the update names. An unknown model can be asked about, not changed.
fn set_thresholds(app: &App, update: &BusyUpdate) -> Result<BusyThreshold, BusyError> {
    let Some(model) = app.models().get(&update.model) else {
        if update.is_read() {
            return Ok(BusyThreshold {
                model: update.model.clone(),
                ..BusyThreshold::default()
            });
        }
        return Err(BusyError::unknown_model(&update.model));
    };
    if !update.is_read() {
        model.host.tell(Input::Thresholds(ThresholdUpdate {
            active_decode_blocks: update.decode_blocks.map(Some),
            active_prefill_tokens: update.prefill_tokens.map(Some),
            active_prefill_tokens_frac: update.prefill_tokens_frac.map(Some),
        }));
        tracing::info!(model = %model.name, ?update, "busy thresholds changed");
    }
    Ok(thresholds(&model))
}

fn thresholds(model: &ServedModel) -> BusyThreshold {
    let now = model.host.ask(|router| router.thresholds());
    BusyThreshold {
        model: model.name.to_string(),
        decode_blocks: now.active_decode_blocks,
        prefill_tokens: now.active_prefill_tokens,
        prefill_tokens_frac: now.active_prefill_tokens_frac,
    }
}

fn busy_error(error: &BusyError) -> Reply {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::BAD_REQUEST);
    let mut reply = reply::json(status, error.to_body());
    if error.plain {
        reply.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        );
    }
    reply
}

/// `GET /decisions`: the latest, newest first.
pub(crate) fn decisions(app: &App) -> Reply {
    let mut rows: Vec<(kvasir_types::Time, Value)> = Vec::new();
    let mut seen = HashSet::new();
    for model in app.models().of_routers() {
        model.host.ask(|router| {
            for decision in router.decisions().take(DECISIONS_MAX) {
                let mut row = decision_row(app, &model, router, decision);
                // What came of a request is what its last worker made of it.
                let superseded = !seen.insert(decision.id);
                row["superseded"] = superseded.into();
                if superseded {
                    row["outcome"] = Value::Null;
                }
                rows.push((decision.at, row));
            }
        });
    }
    rows.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    rows.truncate(DECISIONS_MAX);
    let rows: Vec<Value> = rows.into_iter().map(|(_, row)| row).collect();
    reply::json(StatusCode::OK, json!({ "decisions": rows }).to_string())
}

/// `GET /decisions/{id}`: why a request went where it went. The id may have its `chatcmpl-` still on, and
/// may be the client's own (`x-request-id`).
pub(crate) fn decision(app: &App, id: &str) -> Reply {
    let bare = id
        .strip_prefix("chatcmpl-")
        .or_else(|| id.strip_prefix("cmpl-"))
        .unwrap_or(id);
    // Clients' own names may look like our ids.
    let named = |name| app.observer().outcomes().named(name);
    let requests = [RequestId::parse(bare), named(id), named(bare)];
    for request in requests.into_iter().flatten() {
        if let Some(row) = explained(app, request) {
            return reply::json(StatusCode::OK, row.to_string());
        }
    }
    reply::error(&ApiError::new(404, NO_DECISION))
}

fn explained(app: &App, request: RequestId) -> Option<Value> {
    let models = app.models().of_routers();
    models.iter().find_map(|model| {
        model.host.ask(|router| {
            let decision = router.explain(request)?;
            Some(decision_row(app, model, router, decision))
        })
    })
}

/// `of_router` is a model of the router that decided.
fn decision_row(app: &App, of_router: &ServedModel, router: &Router, decision: &Decision) -> Value {
    let mut row = serde_json::to_value(decision).unwrap_or_default();
    let asked = decision.model.as_deref();
    let asked = asked.and_then(|name| app.models().get(name));
    let model = asked.as_deref().unwrap_or(of_router);
    if let Some(fields) = row.as_object_mut() {
        let name = decision.model.as_deref().unwrap_or(&model.name);
        fields.insert("model".into(), Value::from(name));
        fields.insert(
            "at_unix_ms".into(),
            Value::from(app.clock().unix_millis(decision.at)),
        );
        let mode = router.config().router_mode.name();
        fields.insert("router_mode".into(), mode.into());
        let formulas: Vec<String> = decision.formulas().map(|f| f.to_string()).collect();
        fields.insert("formulas".into(), Value::from(formulas));
        let url = |candidate: &kvasir_router::Candidate| model.url_of(candidate.rank.worker);
        let urls: Vec<Option<String>> = decision.candidates.iter().map(url).collect();
        fields.insert("candidate_urls".into(), Value::from(urls));
        fields.insert("block_size".into(), Value::from(model.block_size));
        let ended = app.observer().outcomes().of(decision.id);
        fields.insert("outcome".into(), ended.map(|e| e.to_json()).into());
    }
    row
}
