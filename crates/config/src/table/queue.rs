//! Rows: the admission queue.

use std::path::PathBuf;
use std::time::Duration;

use crate::choice::QueuePolicy;
use crate::command::Scope;
use crate::spec::{Group, options, var};

options! { QUEUE_ROWS, Group::Queue, Scope::ROUTING;

    /// Queue requests while every worker has more waiting prompt tokens than this many batches.
    ///
    /// A multiple of the worker's `max_num_batched_tokens`. `none` never queues.
    ROUTER_QUEUE_THRESHOLD: Option<f64> = "router-queue-threshold" of router =>
        env(&[var("DYN_ROUTER_QUEUE_THRESHOLD")]).common().effective();

    /// Order of the queue.
    ROUTER_QUEUE_POLICY: QueuePolicy = "router-queue-policy" of router =>
        env(&[var("DYN_ROUTER_QUEUE_POLICY")]).metavar("POLICY").effective();

    /// Maximum number of queued requests; more are refused as overload.
    ROUTER_QUEUE_MAX_REQUESTS: u32 = "router-queue-max-requests" of router =>
        env(&[var("KVASIR_ROUTER_QUEUE_MAX_REQUESTS")]).effective();

    /// Longest time in the queue; then a request is refused as overload.
    ROUTER_QUEUE_MAX_WAIT_SECS: Duration = "router-queue-max-wait-secs" of router =>
        env(&[var("KVASIR_ROUTER_QUEUE_MAX_WAIT_SECS")])
        .default_note("600; 5 with --overload-protection").metavar("SECONDS").effective();

    /// Protect engines from overload without further settings.
    ///
    /// A worker is given what it was seen to begin within one second, at least 8 requests; the rest waits here. A request
    /// that would wait for more than 1.5 s, by how fast the queue moves, is refused at once, and one that has waited for
    /// 5 s (`--router-queue-max-wait-secs`) is refused. Off by itself when `--router-queue-threshold`,
    /// `--router-policy-config` or a busy threshold is set, unless this option is set as well.
    OVERLOAD_PROTECTION: bool = "overload-protection" =>
        scope(Scope::FRONTEND).env(&[var("KVASIR_OVERLOAD_PROTECTION")]).default("true").common().effective();

    /// YAML file with policy classes and their shares.
    ROUTER_POLICY_CONFIG: Option<PathBuf> = "router-policy-config" =>
        env(&[var("DYN_ROUTER_POLICY_CONFIG")]).metavar("FILE").effective();

    /// Repeat the cache lookup of a request that has been queued for this time; 0 never.
    ROUTER_OVERLAP_REFRESH_AFTER_SECS: Duration = "router-overlap-refresh-after-secs" of router =>
        env(&[var("DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS")]).metavar("SECONDS").effective();
}
