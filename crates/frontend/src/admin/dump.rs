//! `GET /dump`: what the index holds, as the events that would make it.
//!
//! The shape is that of Dynamo's standalone indexer, so that its tools and peers can read it. For looking and
//! comparing: the answer is as large as the index, some 100 bytes a block.

use std::sync::Arc;

use http::StatusCode;
use kvasir_openai::ApiError;
use kvasir_wire::native::RouterEvent;
use serde_json::{Map, Value, json};

use crate::App;
use crate::http::reply::{self, Reply};
use crate::models::ServedModel;

/// The group that a fleet without groups is.
const GROUP: &str = "default";

/// Answers with the indexes of all routers, each under the name that it has.
pub(crate) async fn answer(app: &App) -> Reply {
    let models = app.models().of_routers();
    let text = tokio::task::spawn_blocking(move || {
        let page: Map<String, Value> = models.iter().map(dump).collect();
        Value::Object(page).to_string()
    });
    match text.await {
        Ok(text) => reply::json(StatusCode::OK, text),
        Err(_) => reply::error(&ApiError::internal()),
    }
}

fn dump(model: &Arc<ServedModel>) -> (String, Value) {
    let numbered = (1..).zip(model.host.index().dump());
    let events: Vec<Value> = numbered
        .map(|(id, (rank, event))| {
            let event = RouterEvent {
                rank,
                id,
                residency: None,
                position: None,
                event,
            };
            event.to_value().to_json()
        })
        .collect();
    let block_size = model.block_size;
    let body = json!({ "block_size": block_size, "events": events });
    (format!("{}:{GROUP}", model.host.name()), body)
}
