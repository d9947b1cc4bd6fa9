//! What is counted of a request's way from the router to a worker and back, whichever kind of worker it is.

use std::time::Duration;

use kvasir_router::Sent;
use kvasir_telemetry::Metrics;

use crate::models::ServedModel;
use crate::watch::Totals;

/// A request is handed to a worker.
pub(crate) fn dispatched(metrics: &Metrics) {
    metrics
        .router_requests_started_total
        .with_label_values::<&str>(&[])
        .inc();
}

/// The first tokens came, `waited` after the request was handed over. Gives the share of the prompt's blocks
/// that the worker was thought to hold.
pub(crate) fn begun(
    metrics: &Metrics,
    model: &ServedModel,
    sent: &Sent,
    prompt_tokens: usize,
    waited: Duration,
) -> f64 {
    let blocks = prompt_tokens.div_ceil(model.block_size.max(1) as usize);
    let hit_rate = (f64::from(sent.overlap_blocks) / blocks.max(1) as f64).min(1.0);
    metrics
        .router_kv_hit_rate
        .with_label_values::<&str>(&[])
        .observe(hit_rate);
    metrics
        .router_time_to_first_token_seconds
        .with_label_values::<&str>(&[])
        .observe(waited.as_secs_f64());
    metrics
        .router_kv_selected_cached_prefix_tokens_total
        .with_label_values(&[&*model.name, "aggregated"])
        .inc_by(sent.cached_tokens.into());
    hit_rate
}

/// An answer ended: what its worker was like, with the seconds to its first token and between tokens where they
/// were seen.
pub(crate) fn ended(metrics: &Metrics, totals: &Totals, latencies: Option<(f64, f64)>) {
    ended_elsewhere(metrics);
    let (worker, rank) = (
        totals.target.worker.to_string(),
        totals.target.rank.to_string(),
    );
    let labels = [&*worker, &*rank, "decode"];
    metrics
        .worker_last_input_sequence_tokens
        .with_label_values(&labels)
        .set(totals.prompt_tokens.into());
    let Some((first, between)) = latencies else {
        return;
    };
    metrics
        .worker_last_time_to_first_token_seconds
        .with_label_values(&labels)
        .set(first);
    metrics
        .worker_last_inter_token_latency_seconds
        .with_label_values(&labels)
        .set(between);
}

/// An answer ended that moved from one worker to another.
pub(crate) fn ended_elsewhere(metrics: &Metrics) {
    metrics
        .router_requests_total
        .with_label_values::<&str>(&[])
        .inc();
}
