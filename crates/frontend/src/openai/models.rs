//! The pages about models: which are served, and whether anybody serves one.

use bytes::BytesMut;
use http::StatusCode;
use kvasir_openai::{ApiError, ModelInfo};
use kvasir_types::Role;

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

/// Whether anybody serves it, and which parts of requests are computed by how many workers, as the reference says it.
pub(crate) fn ready(app: &App, id: &str) -> Reply {
    let Some(model) = app.models().get(id) else {
        return reply::error(&ApiError::model_not_found());
    };
    let links = model.links();
    let pool = app.prefill_pool(&model.name);
    let in_role = |role: Role| {
        let specs = model.specs();
        let of_role = specs.iter().filter(|spec| links.role(spec.id) == role);
        of_role.count()
    };
    let workers = [
        (Role::Aggregated, in_role(Role::Aggregated)),
        (Role::Decode, in_role(Role::Decode)),
        (Role::Prefill, pool.as_ref().map_or(0, |p| p.specs().len())),
    ];
    let is_present = |role: Role| !workers.contains(&(role, 0));
    let mut types = serde_json::Map::new();
    let (mut present, mut missing) = (Vec::new(), Vec::new());
    for (role, count) in workers.into_iter().filter(|(_, count)| *count > 0) {
        // One that needs no other stands alone.
        let needs: Option<Role> = match role {
            Role::Aggregated => None,
            Role::Decode => Some(Role::Prefill),
            Role::Prefill => Some(Role::Decode),
        };
        let names: Vec<[&str; 1]> = needs.iter().map(|role| [role.name()]).collect();
        types.insert(
            role.name().to_owned(),
            serde_json::json!({ "workers": count, "needs": names }),
        );
        present.push(role.name());
        missing.extend(needs.filter(|role| !is_present(*role)).map(Role::name));
    }
    if types.is_empty() {
        let none = serde_json::json!({ "workers": 0, "needs": [] });
        types.insert(Role::Aggregated.name().to_owned(), none);
        missing.push(Role::Aggregated.name());
    }
    // Those that answer compute prompts too where nobody else does, unless they cannot or are not to.
    let serves_alone = app.options().two_step.serves_alone && !links.needs_prefill();
    let is_whole = is_present(Role::Aggregated) || serves_alone || is_present(Role::Prefill);
    let ready = model.is_ready() && is_whole;
    let body = serde_json::json!({
        "model": &*model.name,
        "ready": ready,
        "namespaces": { "dynamo": {
            "ready": ready,
            "worker_types": types,
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
