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
    ROUTER_QUEUE_THRESHOLD: Option<f64> = "router-queue-threshold" =>
        env(&[var("DYN_ROUTER_QUEUE_THRESHOLD")]).default("16.0").positive().common().effective();

    /// Who leaves the queue first.
    ROUTER_QUEUE_POLICY: QueuePolicy = "router-queue-policy" =>
        env(&[var("DYN_ROUTER_QUEUE_POLICY")]).default("fcfs").metavar("POLICY").effective();

    /// Requests the queue may hold; more are refused as overload.
    ROUTER_QUEUE_MAX_REQUESTS: u32 = "router-queue-max-requests" =>
        env(&[var("KVASIR_ROUTER_QUEUE_MAX_REQUESTS")]).default("16384").ints(1, u32::MAX as u64)
        .effective();

    /// Refuse a request as overload when it has waited so long.
    ROUTER_QUEUE_MAX_WAIT_SECS: Duration = "router-queue-max-wait-secs" =>
        env(&[var("KVASIR_ROUTER_QUEUE_MAX_WAIT_SECS")]).default("600").metavar("SECONDS")
        .effective();

    /// YAML file with policy classes and their shares.
    ROUTER_POLICY_CONFIG: Option<PathBuf> = "router-policy-config" =>
        env(&[var("DYN_ROUTER_POLICY_CONFIG")]).metavar("FILE").effective();

    /// Look caches up again for a request that waited so long; 0 never.
    ROUTER_OVERLAP_REFRESH_AFTER_SECS: Duration = "router-overlap-refresh-after-secs" =>
        env(&[var("DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS")]).default("10").metavar("SECONDS")
        .effective();
}
