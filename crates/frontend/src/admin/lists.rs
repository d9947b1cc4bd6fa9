//! What operators look at and cannot change: sessions, settings.

use http::StatusCode;
use serde_json::{Value, json};

use crate::App;
use crate::http::reply::{self, Reply};

/// Sessions of each router in one answer.
const SESSIONS_MAX: usize = 200;

/// `GET /sessions`: which are bound, and where.
pub(crate) fn sessions(app: &App) -> Reply {
    let (mut rows, mut total) = (Vec::new(), 0);
    let now = app.clock().now();
    for model in app.models().of_routers() {
        let (bound, listed) = model
            .host
            .ask(|router| (router.sessions(), router.session_rows(SESSIONS_MAX)));
        total += bound;
        rows.extend(listed.into_iter().map(|session| {
            json!({
                "id": &*session.id,
                "router": &**model.host.name(),
                "worker": session.target.to_string(),
                "in_engine": session.in_engine,
                "requests": session.requests,
                "idle_ms_left": session.due.map(|due| (due - now).as_millis() as u64),
            })
        }));
    }
    let rows: Vec<Value> = rows;
    let body = json!({ "total": total, "sessions": rows });
    reply::json(StatusCode::OK, body.to_string())
}

/// `GET /settings`: what is set, and who set it.
pub(crate) fn settings(app: &App) -> Reply {
    reply::json(StatusCode::OK, app.options().settings.clone())
}
