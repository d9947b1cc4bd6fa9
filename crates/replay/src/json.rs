//! All numbers of all runs, for machines.

use kvasir_sim::{ArrivalMode, RunReport, Summary};
use serde_json::{Map, Value, json};

use crate::{Plan, RunResult};

/// The report as a JSON document. Only `wall_s` differs between two runs of one seed.
#[must_use]
pub fn json_report(plan: &Plan, finished: &[RunResult]) -> String {
    let trace = plan.traces.first();
    let document = json!({
        "trace": {
            "name": trace.map(|t| t.name.clone()),
            "requests": trace.map(|t| t.requests.len()),
            "prompt_tokens": trace.map(kvasir_sim::Trace::prompt_tokens),
            "span_s": trace.map(|t| t.span().as_secs_f64()),
        },
        "engine": {
            "name": plan.engine_name,
            "block_size": plan.fleet.engine.block_size,
            "num_blocks": plan.fleet.engine.num_blocks,
            "max_num_seqs": plan.fleet.engine.max_num_seqs,
            "max_num_batched_tokens": plan.fleet.engine.max_num_batched_tokens,
        },
        "slo_ms": {
            "ttft": plan.fleet.slo.ttft.as_secs_f64() * 1e3,
            "itl": plan.fleet.slo.itl.as_secs_f64() * 1e3,
        },
        "baseline": plan.policies.get(plan.baseline).map(|policy| policy.name.clone()),
        "runs": finished.iter().map(|f| run(plan, f)).collect::<Vec<_>>(),
    });
    format!("{document:#}\n")
}

fn run(plan: &Plan, finished: &RunResult) -> Value {
    let r = &finished.report;
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| drop(fields.insert(name.to_owned(), value));
    put("policy", r.policy.clone().into());
    match r.arrivals {
        ArrivalMode::Open { speed } => put("speed", speed.into()),
        ArrivalMode::Closed { clients, think } => {
            put("speed", Value::Null);
            put("clients", clients.into());
            put("think_ms", (think.as_secs_f64() * 1e3).into());
        }
    }
    put("workers", r.workers.into());
    put("prefill_workers", r.prefill_workers.into());
    put("seed", r.seed.into());
    put("requests", r.requests.into());
    for (name, count) in counts(r) {
        put(name, count.into());
    }
    for (name, s) in [
        ("ttft_ms", r.ttft),
        ("itl_ms", r.itl),
        ("e2e_ms", r.e2e),
        ("queue_ms", r.queue),
    ] {
        put(name, summary(s));
    }
    let numbers = [
        ("hit_share", r.hit_share),
        ("ideal_hit_share", plan.ideal_hit_share),
        ("output_tokens_per_s", r.output_tokens_per_s),
        ("requests_per_s", r.requests_per_s),
        ("goodput_share", r.goodput_share),
        ("imbalance", r.imbalance),
        ("duration_s", r.duration_s),
        ("wall_s", finished.wall_s),
    ];
    for (name, number) in numbers {
        put(name, number.into());
    }
    Value::Object(fields)
}

fn counts(r: &RunReport) -> [(&'static str, u64); 13] {
    [
        ("completed", r.counts.completed.into()),
        ("refused", r.counts.refused.into()),
        ("rejected", r.counts.rejected.into()),
        ("dropped", r.counts.dropped.into()),
        ("stuck", r.counts.stuck.into()),
        ("prompt_tokens", r.prompt_tokens),
        ("output_tokens", r.output_tokens),
        ("preemptions", r.preemptions),
        ("retries", r.retries),
        ("queued", r.queued),
        ("events_lost", r.events_lost),
        ("events_refused", r.events_refused),
        ("simulated_events", r.events),
    ]
}

fn summary(s: Summary) -> Value {
    json!({ "mean": s.mean, "p50": s.p50, "p90": s.p90, "p99": s.p99 })
}
