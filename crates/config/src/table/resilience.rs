//! Rows: retries, migration, shutdown, workers' own limits.

use std::time::Duration;

use crate::command::Scope;
use crate::spec::{Group, options, var};

options! { RESILIENCE_ROWS, Group::Resilience, Scope::SERVE;

    /// Other workers to try when one fails before the first byte of an answer.
    RETRY_LIMIT: u32 = "retry-limit" =>
        env(&[var("KVASIR_RETRY_LIMIT")]).default("2").ints(0, 1000).effective();

    /// Times a stream may be continued on another worker after it has begun.
    MIGRATION_LIMIT: u32 = "migration-limit" =>
        env(&[var("DYN_MIGRATION_LIMIT")]).default("0").effective();

    /// Do not continue a sequence longer than this elsewhere.
    MIGRATION_MAX_SEQ_LEN: Option<u32> = "migration-max-seq-len" =>
        env(&[var("DYN_MIGRATION_MAX_SEQ_LEN")]).ints(1, u32::MAX as u64).effective();

    /// Wait so long at shutdown for requests under way.
    ///
    /// A second signal ends at once.
    HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS: Duration = "http-graceful-shutdown-timeout-secs" =>
        env(&[var("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS")]).default("300").metavar("SECONDS")
        .effective();

    /// Go on taking requests for so long after SIGTERM, until callers have noticed.
    ///
    /// Meanwhile `/health` says 503, so that balancers send nothing more, and answers end their connections. Then new
    /// requests are refused. SIGINT, and a second SIGTERM, do not wait.
    GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: Duration = "graceful-shutdown-grace-period-secs" =>
        scope(Scope::SERVE.and(Scope::ROUTER))
        .env(&[var("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS")]).default("5").metavar("SECONDS")
        .effective();

    /// Wait so long for everything else of the process to end.
    RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS: Duration = "runtime-graceful-shutdown-timeout-secs" =>
        scope(Scope::ALL).env(&[var("DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS")]).default("900")
        .metavar("SECONDS");

    /// Requests a worker serves at once; unset sets no limit.
    ENGINE_REQUEST_LIMIT: Option<u32> = "engine-request-limit" =>
        scope(Scope::MOCKER).env(&[var("DYN_ENGINE_REQUEST_LIMIT")]).ints(1, u32::MAX as u64);

    /// Requests a worker holds beside those before it refuses.
    DYNAMO_REQUEST_QUEUE_LIMIT: u32 = "dynamo-request-queue-limit" =>
        scope(Scope::MOCKER).env(&[var("DYN_DYNAMO_REQUEST_QUEUE_LIMIT")]).default("16")
        .ints(2, u32::MAX as u64);
}
