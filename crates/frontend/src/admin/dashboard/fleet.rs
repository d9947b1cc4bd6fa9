//! The rows of the fleet: one for each rank, one for each worker that serves nothing.

use std::collections::{BTreeMap, HashMap};

use kvasir_router::{Load, Router, WorkerSpec};
use kvasir_types::{WorkerId, WorkerRank};
use serde_json::{Value, json};

use crate::App;
use crate::admin::workers::plane_address;
use crate::fleet::members::{Member, MemberState};
use crate::models::{ServedModel, model_of_prefill_pool};
use crate::observe::outcomes::RequestOutcome;

/// Rows that are shown; the lowest ids where there are more.
pub(super) const ROWS_MAX: usize = 4096;

/// What came of a rank's latest requests, in tokens of their prompts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RankHits {
    answers: u32,
    prompt: u64,
    predicted: u64,
    reported: u64,
}

/// The same of all ranks.
pub(super) type FleetHits = HashMap<WorkerRank, RankHits>;

/// Adds an answer whose engine said what it found.
pub(super) fn add_hit(hits: &mut FleetHits, ended: &RequestOutcome) {
    let (Some(target), Some(prompt), Some(reported)) = (
        ended.prefill.or(ended.target),
        ended.prompt_tokens,
        ended.cached_tokens,
    ) else {
        return;
    };
    let hit = hits.entry(target).or_default();
    hit.answers += 1;
    hit.prompt += u64::from(prompt);
    hit.predicted += u64::from(ended.predicted_tokens.unwrap_or(0).min(prompt));
    hit.reported += u64::from(reported);
}

/// All rows by key, each as JSON, and how many are left out.
pub(super) fn rows(app: &App, hits: &FleetHits) -> (BTreeMap<String, String>, usize) {
    let members: BTreeMap<WorkerId, Member> = app.members().list().into_iter().collect();
    let mut rows: BTreeMap<String, Value> = BTreeMap::new();
    let mut left_out = 0;
    let pools = app.prefill_pools().all();
    for model in app.models().all().into_iter().chain(pools) {
        let specs = model.specs();
        let figures: Vec<(&WorkerSpec, WorkerRank, Load, [bool; 3])> =
            model.host.ask(|router| figures(router, &specs));
        for (spec, rank, load, flags) in figures {
            let key = format!("{rank} {}", model.host.name());
            if let Some(row) = rows.get_mut(&key) {
                if let Some(models) = row["models"].as_array_mut() {
                    models.push(Value::from(model_of_prefill_pool(&model.name)));
                }
                continue;
            }
            if rows.len() >= ROWS_MAX {
                left_out += 1;
                continue;
            }
            let member = members.get(&spec.id);
            let mut row = rank_row(&model, spec, rank, &load, hits.get(&rank));
            row["state"] = state(member, flags).into();
            row["removable"] = member.is_some().into();
            row["address"] = member.and_then(plane_address).into();
            rows.insert(key, row);
        }
    }
    let serving: std::collections::HashSet<&str> = rows
        .values()
        .filter_map(|row| row["worker"].as_str())
        .collect();
    let absent = members
        .iter()
        .filter(|(id, _)| !serving.contains(&*id.0.to_string()));
    let absent: Vec<(String, Value)> = absent.map(|(id, member)| absent_row(*id, member)).collect();
    left_out += absent
        .len()
        .saturating_sub(ROWS_MAX.saturating_sub(rows.len()));
    let room = ROWS_MAX.saturating_sub(rows.len());
    rows.extend(absent.into_iter().take(room));
    let rows = rows.into_iter().map(|(key, mut row)| {
        row["key"] = Value::from(&*key);
        let text = row.to_string();
        (key, text)
    });
    (rows.collect(), left_out)
}

/// What the router knows of each rank: its load; busy, down, draining.
fn figures<'s>(
    router: &Router,
    specs: &'s [WorkerSpec],
) -> Vec<(&'s WorkerSpec, WorkerRank, Load, [bool; 3])> {
    let of_spec = |spec: &'s WorkerSpec| {
        let member = router.fleet().member(spec.id);
        let flags = [
            member.is_some_and(|member| member.is_busy()),
            member.is_some_and(|member| member.ejected_until().is_some()),
            member.is_some_and(|member| member.is_draining()),
        ];
        let ranks = spec.rank_iter();
        ranks.map(move |rank| (spec, rank, router.load(rank).unwrap_or_default(), flags))
    };
    specs.iter().flat_map(of_spec).collect()
}

/// The worst that is to be said of a worker.
fn state(member: Option<&Member>, [busy, down, draining]: [bool; 3]) -> &'static str {
    let of_member = member.map_or(MemberState::Serving, |member| member.state);
    match of_member {
        _ if draining => MemberState::Draining.name(),
        _ if down => "down",
        MemberState::Serving if busy => "busy",
        other => other.name(),
    }
}

fn rank_row(
    model: &ServedModel,
    spec: &WorkerSpec,
    rank: WorkerRank,
    load: &Load,
    hits: Option<&RankHits>,
) -> Value {
    let hits = hits.copied().unwrap_or_default();
    json!({
        "worker": rank.worker.0.to_string(),
        "rank": rank.rank.0,
        "ranks": spec.rank_count(),
        "models": [model_of_prefill_pool(&model.name)],
        "role": model.links().role(rank.worker).name(),
        "url": model.url_of(rank.worker),
        "requests": load.requests,
        "prefill_tokens": load.prefill_tokens,
        "decode_blocks": load.active_blocks,
        "kv_blocks": spec.kv_total_blocks,
        "batch_tokens": spec.max_num_batched_tokens,
        "cache": model.host.views().get(rank).map(|view| cache(&view.row())),
        "hits": [hits.answers, hits.prompt, hits.predicted, hits.reported],
    })
}

/// What the page shows of a cache view.
fn cache(row: &Value) -> Value {
    let events = &row["events"];
    json!({
        "state": row["state"],
        "cause": row["cause"],
        "advice": row["advice"],
        "credit": row["credit"],
        "last_fault": row["last_fault"],
        "connected": events["connected"],
        "recovering": events["recovering"],
        "lag_ms": events["delay_ms"],
    })
}

fn absent_row(id: WorkerId, member: &Member) -> (String, Value) {
    let row = json!({
        "worker": id.0.to_string(),
        "rank": 0,
        "ranks": 1,
        "models": [],
        "role": member.record.role.name(),
        "url": member.record.transport.http().map(ToString::to_string),
        "address": plane_address(member),
        "state": member.state.name(),
        "removable": true,
        "requests": 0,
        "prefill_tokens": 0,
        "decode_blocks": 0,
        "kv_blocks": null,
        "batch_tokens": null,
        "cache": null,
        "hits": [0, 0, 0, 0],
    });
    (format!("{}/-", id.0), row)
}
