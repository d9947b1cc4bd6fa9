//! The pages about models: which are served, and whether anybody serves one.

use bytes::BytesMut;
use http::StatusCode;
use kvasir_openai::{ApiError, ModelInfo};

use crate::app::App;
use crate::http::reply::{self, Reply};
use crate::models::ServedModel;

/// All models that are served now.
pub(crate) fn list(app: &App) -> Reply {
    if app.is_draining() {
        return reply::error(&ApiError::not_ready());
    }
    let ready = app.models().all().into_iter().filter(|m| m.is_ready());
    let list: Vec<ModelInfo> = ready.map(|m| info(&m)).collect();
    reply::json(StatusCode::OK, kvasir_openai::models(&list))
}

/// One model.
pub(crate) fn one(app: &App, id: &str) -> Reply {
    match app.models().get(id) {
        None => reply::error(&ApiError::model_not_found()),
        Some(model) => {
            let mut out = BytesMut::new();
            info(&model).write(&mut out);
            reply::json(StatusCode::OK, out.freeze())
        }
    }
}

/// Whether anybody serves it, as the reference says it.
pub(crate) fn ready(app: &App, id: &str) -> Reply {
    let Some(model) = app.models().get(id) else {
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

fn info(model: &ServedModel) -> ModelInfo {
    ModelInfo {
        id: model.name.to_string(),
        created: model.created,
        context_window: model.context_length.into(),
        max_output_tokens: None,
    }
}
