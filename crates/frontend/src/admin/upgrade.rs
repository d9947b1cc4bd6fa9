//! `POST /upgrade`: another process is to take over from this one.

use http::StatusCode;
use kvasir_openai::ApiError;
use serde_json::json;
use tokio::sync::oneshot;

use crate::App;
use crate::http::reply::{self, Reply};

/// What is said where nobody makes upgrades.
const NOT_HERE: &str = "This server cannot be upgraded in place; restart it";
/// What is said while one is made, and by a process that has been replaced.
const UNDER_WAY: &str = "An upgrade is under way, or done: ask again on a new connection";

/// Asks for an upgrade and waits for how it goes.
pub(crate) async fn upgrade(app: &App) -> Reply {
    let Some(door) = app.upgrades() else {
        return reply::error(&ApiError::new(501, NOT_HERE));
    };
    let (answer, outcome) = oneshot::channel();
    if app.is_handed_over() || app.is_draining() || door.try_send(answer).is_err() {
        return reply::error(&ApiError::new(409, UNDER_WAY));
    }
    match outcome.await {
        Ok(Ok(pid)) => {
            let body = json!({ "pid": pid, "replaced_pid": std::process::id() });
            reply::json(StatusCode::OK, body.to_string())
        }
        Ok(Err(error)) => reply::error(&ApiError::new(500, error)),
        Err(_) => reply::error(&ApiError::new(409, UNDER_WAY)),
    }
}
