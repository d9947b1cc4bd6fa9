//! `/mock/…`: faults on command, a restart, what the engine is doing and what it was sent.

use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::body::{Reply, json as reply};
use super::fault::HttpFault;
use super::server::Mock;
use crate::Fault;

/// Answers a control request; `None` for a path or method that is none.
pub(crate) async fn answer(mock: &Mock, method: &Method, path: &str, body: &[u8]) -> Option<Reply> {
    match (method, path) {
        (&Method::GET, "/mock/faults") => Some(faults(mock)),
        (&Method::POST, "/mock/faults") => Some(add(mock, body)),
        (&Method::DELETE, "/mock/faults") => {
            mock.faults.clear();
            Some(faults(mock))
        }
        (&Method::POST, "/mock/event_faults") => Some(event_fault(mock, body).await),
        (&Method::POST, "/mock/restart") => {
            mock.worker.restart().await;
            Some(reply(StatusCode::OK, "{\"success\":true}"))
        }
        (&Method::GET, "/mock/status") => Some(status(mock)),
        (&Method::GET, "/mock/received") => {
            Some(reply(StatusCode::OK, mock.received.list().to_string()))
        }
        (&Method::DELETE, "/mock/received") => {
            mock.received.clear();
            Some(reply(StatusCode::OK, "{\"success\":true}"))
        }
        (&Method::GET, "/mock/cache") => Some(cache(mock)),
        _ => None,
    }
}

fn faults(mock: &Mock) -> Reply {
    let list: Vec<String> = mock
        .faults
        .list()
        .iter()
        .map(HttpFault::to_string)
        .collect();
    reply(StatusCode::OK, json!({ "faults": list }).to_string())
}

/// Takes `{"fault": "…"}` or `{"faults": ["…", …]}`; all of them or none.
fn add(mock: &Mock, body: &[u8]) -> Reply {
    let bad = |message: String| {
        reply(
            StatusCode::BAD_REQUEST,
            json!({ "error": { "message": message } }).to_string(),
        )
    };
    let value: Value = match serde_json::from_slice(body) {
        Ok(value) => value,
        Err(error) => return bad(format!("not JSON: {error}")),
    };
    let one = value.get("fault").into_iter();
    let many = value
        .get("faults")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let mut all: Vec<HttpFault> = Vec::new();
    for fault in one.chain(many) {
        match fault.as_str().unwrap_or_default().parse() {
            Ok(fault) => all.push(fault),
            Err(error) => return bad(format!("{error}")),
        }
    }
    if all.is_empty() {
        return bad("give {\"fault\": \"slow=50\"} or {\"faults\": [..]}".to_owned());
    }
    if !all.into_iter().all(|fault| mock.faults.add(fault)) {
        return bad(
            "there are too many faults; take some back with DELETE /mock/faults".to_owned(),
        );
    }
    faults(mock)
}

/// Takes `{"fault": "drop=3"}` for the event sockets.
async fn event_fault(mock: &Mock, body: &[u8]) -> Reply {
    let bad = |message: String| {
        let text = json!({ "error": { "message": message } }).to_string();
        reply(StatusCode::BAD_REQUEST, text)
    };
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let fault = value
        .get("fault")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let fault = match fault.parse::<Fault>() {
        Ok(fault) => fault,
        Err(error) => return bad(error.to_string()),
    };
    match (fault, mock.events(), mock.cache_faults()) {
        (_, None, None) => {
            return bad("this engine has no event sockets; start it with --events".to_owned());
        }
        // Whoever tells of the cache hears of it from the engine.
        (Fault::RestartEmpty, ..) => mock.worker.restart().await,
        (_, Some(events), _) => events.inject(fault),
        (_, None, Some(faults)) if faults.inject(fault) => {}
        (_, None, Some(_)) => {
            return bad(format!(
                "{} cannot go wrong on the event plane",
                value["fault"]
            ));
        }
    }
    reply(StatusCode::OK, "{\"success\":true}")
}

/// What the cache of each rank holds, whatever its events told.
fn cache(mock: &Mock) -> Reply {
    let Some(events) = mock.events() else {
        let message = "this engine has no event sockets; start it with --events";
        let text = json!({ "error": { "message": message } }).to_string();
        return reply(StatusCode::BAD_REQUEST, text);
    };
    let rank = |rank| {
        let blocks: Vec<u64> = events.held(rank).into_iter().map(|name| name.0).collect();
        json!({ "published": events.published(rank), "blocks": blocks })
    };
    let ranks: Vec<Value> = (0..events.ranks()).map(rank).collect();
    reply(StatusCode::OK, json!({ "ranks": ranks }).to_string())
}

fn status(mock: &Mock) -> Reply {
    let rank = |s: crate::Status| {
        json!({
            "running": s.load.running,
            "waiting": s.load.waiting,
            "used_blocks": s.load.used_blocks,
            "cached_blocks": s.load.cached_blocks,
            "total_blocks": s.load.total_blocks,
            "steps": s.counters.steps,
            "admitted": s.counters.admitted,
            "finished": s.counters.finished,
            "cancelled": s.counters.cancelled,
            "preemptions": s.counters.preemptions,
        })
    };
    let ranks: Vec<Value> = mock.worker.status().map(rank).collect();
    reply(
        StatusCode::OK,
        json!({ "worker": mock.worker.id().0, "ranks": ranks }).to_string(),
    )
}
