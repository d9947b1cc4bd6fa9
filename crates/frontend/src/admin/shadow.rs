//! `/shadow`: what another policy would have done.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Value, json};

use crate::App;
use crate::http::reply::{self, Reply};
use crate::models::ServedModel;

/// `GET /shadow`: how the shadow policy of each router fares beside the real one; no row without one.
pub(crate) fn shadow(app: &App) -> Reply {
    let row = |model: &Arc<ServedModel>| {
        model.host.ask(|router| {
            let (policy, stats) = router.shadow()?;
            Some(json!({
                "model": &**model.host.name(),
                "policy": policy,
                "placements": stats.placements,
                "compared": stats.compared,
                "disagreed": stats.disagreed,
                "disagreement": stats.disagreement(),
                "mean_regret_s": stats.mean_regret_s(),
                "better_s": stats.better_s,
                "worse_s": stats.worse_s,
            }))
        })
    };
    let rows: Vec<Value> = app.models().of_routers().iter().filter_map(row).collect();
    reply::json(StatusCode::OK, json!({ "shadows": rows }).to_string())
}
