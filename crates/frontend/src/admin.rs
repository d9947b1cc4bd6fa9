//! Answers to operators: thresholds, workers, decisions, the dashboard.
//!
//! Everything here reads the router between two steps, or tells it something; nothing is decided here.

pub(crate) mod dashboard;
mod decisions;
pub(crate) mod dump;
mod lists;
pub(crate) mod openapi;
pub(crate) mod pages;
mod shadow;
mod upgrade;
mod what_if;
mod workers;

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, Method, Request, StatusCode};
use hyper::body::Incoming;
use kvasir_openai::{ApiError, BusyError, BusyThreshold, BusyUpdate, busy_thresholds};
use kvasir_router::{Input, ThresholdUpdate};

use crate::App;
use crate::http::body;
use crate::http::long_work;
use crate::http::reply::{self, Reply};
use crate::models::ServedModel;

pub(crate) use decisions::{decision, decisions};
pub(crate) use lists::{sessions, settings};
pub(crate) use shadow::shadow;
pub(crate) use upgrade::upgrade;
pub(crate) use what_if::what_if;
pub use workers::read_worker;
pub(crate) use workers::{add_worker, remove_worker, workers};

/// What is said of a body that is longer than any that operators have a use for.
const TOO_LONG: &str = "Request body exceeds the 128 KiB that operators' requests may have";

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
        let of_prompts = ThresholdUpdate {
            active_prefill_tokens: update.prefill_tokens.map(Some),
            active_prefill_tokens_frac: update.prefill_tokens_frac.map(Some),
            ..ThresholdUpdate::default()
        };
        if let Some(pool) = app.prefill_pool(&update.model) {
            pool.host.tell(Input::Thresholds(of_prompts));
        }
        model.host.tell(Input::Thresholds(ThresholdUpdate {
            active_decode_blocks: update.decode_blocks.map(Some),
            ..of_prompts
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
