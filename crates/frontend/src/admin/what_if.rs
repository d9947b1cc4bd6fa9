//! `POST /what_if`: how the latest decisions would have gone with other weights.

use std::collections::BTreeMap;

use http::{Request, StatusCode};
use hyper::body::Incoming;
use kvasir_openai::ApiError;
use kvasir_router::{MovedDecision, RankShare, WeightChange, WhatIf, WhatIfSum};
use kvasir_types::WorkerRank;
use serde::Deserialize;
use serde_json::{Value, json};

use super::read_short;
use crate::App;
use crate::http::reply::{self, Reply};
use crate::models::model_of_prefill_pool;

/// Decisions of each router that are scored again. They are scored while the router waits, twice some 150 ns each.
const LAST_MAX: usize = 1000;
/// The same where nothing is asked for.
const LAST_DEFAULT: usize = 500;

/// What is asked.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct WhatIfRequest {
    model: Option<String>,
    last: Option<usize>,
    weights: WeightChange,
}

/// Answers with the decisions of all routers together.
pub(crate) async fn what_if(app: &App, request: Request<Incoming>) -> Reply {
    let (parts, incoming) = request.into_parts();
    let body = match read_short(app, &parts, incoming).await {
        Ok(body) => body,
        Err(error) => return reply::error(&error),
    };
    let asked = match parse(&body) {
        Ok(asked) => asked,
        Err(error) => return reply::error(&error),
    };
    let last = asked.last.unwrap_or(LAST_DEFAULT);
    let mut sum = WhatIf::default();
    let named = asked.model.as_deref();
    let of_named = named.and_then(|name| app.models().get(name));
    for pool in app.prefill_pools().of_routers() {
        if named.is_none_or(|name| model_of_prefill_pool(&pool.name) == name) {
            let of_router =
                |router: &kvasir_router::Router| router.what_if(&asked.weights, last, None);
            add(&mut sum, pool.host.ask(of_router));
        }
    }
    for model in app.models().of_routers() {
        let is_meant = named.is_none()
            || of_named
                .as_ref()
                .is_some_and(|of| *of.host.name() == *model.host.name());
        if is_meant {
            let of_router =
                |router: &kvasir_router::Router| router.what_if(&asked.weights, last, named);
            add(&mut sum, model.host.ask(of_router));
        }
    }
    sum.moves.sort_by_key(|moved| std::cmp::Reverse(moved.at));
    sum.moves.truncate(WhatIf::MOVES_MAX);
    reply::json(StatusCode::OK, to_json(app, &sum).to_string())
}

fn parse(body: &[u8]) -> Result<WhatIfRequest, ApiError> {
    let asked: WhatIfRequest = serde_json::from_slice(body)
        .map_err(|error| ApiError::bad_request(format!("The body is not understood: {error}")))?;
    if let Some(name) = asked.weights.fault() {
        let text = format!("weights.{name} must be a number of at least 0");
        return Err(ApiError::bad_request(text));
    }
    if asked
        .last
        .is_some_and(|last| !(1..=LAST_MAX).contains(&last))
    {
        return Err(ApiError::bad_request("last must be 1 to 1000"));
    }
    Ok(asked)
}

fn add(sum: &mut WhatIf, more: WhatIf) {
    let both = |one: WhatIfSum, other: WhatIfSum| WhatIfSum {
        cached_blocks: one.cached_blocks + other.cached_blocks,
        queued_prompt_blocks: one.queued_prompt_blocks + other.queued_prompt_blocks,
        decode_blocks: one.decode_blocks + other.decode_blocks,
    };
    sum.considered += more.considered;
    sum.skipped += more.skipped;
    sum.partial += more.partial;
    sum.moved += more.moved;
    sum.prompt_blocks += more.prompt_blocks;
    sum.before = both(sum.before, more.before);
    sum.after = both(sum.after, more.after);
    for (rank, share) in more.ranks {
        let of_rank = sum.ranks.entry(rank).or_default();
        of_rank.before += share.before;
        of_rank.after += share.after;
    }
    sum.moves.extend(more.moves);
}

fn to_json(app: &App, sum: &WhatIf) -> Value {
    json!({
        "considered": sum.considered,
        "skipped": sum.skipped,
        "partial": sum.partial,
        "moved": sum.moved,
        "prompt_blocks": sum.prompt_blocks,
        "before": sum.before,
        "after": sum.after,
        "ranks": ranks(&sum.ranks),
        "moves": sum.moves.iter().map(|moved| row(app, moved)).collect::<Vec<_>>(),
    })
}

fn ranks(ranks: &BTreeMap<WorkerRank, RankShare>) -> Vec<Value> {
    let row = |(rank, share): (&WorkerRank, &RankShare)| json!({ "worker": rank.to_string(), "before": share.before, "after": share.after });
    ranks.iter().map(row).collect()
}

fn row(app: &App, moved: &MovedDecision) -> Value {
    json!({
        "id": moved.id.to_string(),
        "at": app.clock().unix_millis(moved.at),
        "model": moved.model.as_deref(),
        "from": moved.from.to_string(),
        "to": moved.to.to_string(),
        "cost": [moved.cost.0, moved.cost.1],
        "cached_blocks": [moved.cached_blocks.0, moved.cached_blocks.1],
        "blocks": moved.request_blocks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_bodies_are_told_what_is_wrong() {
        let said = |body: &str| {
            parse(body.as_bytes())
                .map(|_| ())
                .map_err(|e| e.to_string())
        };
        assert_eq!(said("{}"), Ok(()));
        assert_eq!(said(r#"{"weights":{"prefill_load_scale":2}}"#), Ok(()));
        for (wrong, word) in [
            ("1", "not understood"),
            (r#"{"weights":{"nonsense":2}}"#, "nonsense"),
            (
                r#"{"weights":{"prefill_load_scale":-1}}"#,
                "prefill_load_scale",
            ),
            (r#"{"last":0}"#, "1 to 1000"),
            (r#"{"last":1001}"#, "1 to 1000"),
        ] {
            assert!(said(wrong).unwrap_err().contains(word), "{wrong}");
        }
    }
}
