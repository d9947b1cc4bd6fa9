//! Rows: the admission queue.

use std::path::PathBuf;
use std::time::Duration;

use crate::choice::QueuePolicy;
use crate::command::Scope;
use crate::spec::{Group, options, var};

options! { QUEUE_ROWS, Group::Queue, Scope::ROUTING;

    /// Hold requests back while every worker has more than so many batches of prompt tokens.
    ///
    /// A multiple of the worker's `max_num_batched_tokens`. `none` never holds back.
    ROUTER_QUEUE_THRESHOLD: Option<f64> = "router-queue-threshold" of router =>
        env(&[var("DYN_ROUTER_QUEUE_THRESHOLD")]).common().effective();

    /// Who leaves the queue first.
    ROUTER_QUEUE_POLICY: QueuePolicy = "router-queue-policy" of router =>
        env(&[var("DYN_ROUTER_QUEUE_POLICY")]).metavar("POLICY").effective();

    /// Requests the queue may hold; more are refused as overload.
    ROUTER_QUEUE_MAX_REQUESTS: u32 = "router-queue-max-requests" of router =>
        env(&[var("KVASIR_ROUTER_QUEUE_MAX_REQUESTS")]).effective();

    /// Refuse a request as overload when it has waited so long.
    ROUTER_QUEUE_MAX_WAIT_SECS: Duration = "router-queue-max-wait-secs" of router =>
        env(&[var("KVASIR_ROUTER_QUEUE_MAX_WAIT_SECS")]).metavar("SECONDS").effective();

    /// YAML file with policy classes and their shares.
    ROUTER_POLICY_CONFIG: Option<PathBuf> = "router-policy-config" =>
        env(&[var("DYN_ROUTER_POLICY_CONFIG")]).metavar("FILE").effective();

    /// Look caches up again for a request that waited so long; 0 never.
    ROUTER_OVERLAP_REFRESH_AFTER_SECS: Duration = "router-overlap-refresh-after-secs" of router =>
        env(&[var("DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS")]).metavar("SECONDS").effective();
}
