//! Rows: retries, migration, shutdown, workers' own limits.

use std::time::Duration;

use crate::command::Scope;
use crate::spec::{Group, options, var};

options! { RESILIENCE_ROWS, Group::Resilience, Scope::SERVE;

    /// Retries on other workers after a failure before the first byte of the response.
    ///
    /// A request whose worker died under it, or answered with status 500, 502 or 504, is tried once more at most: it may be what makes
    /// workers fail. It is named in the log.
    RETRY_LIMIT: u32 = "retry-limit" =>
        scope(Scope::SERVE.and(Scope::ROUTER)).env(&[var("KVASIR_RETRY_LIMIT")]).default("2").ints(0, 1000).effective();

    /// Times that a started stream may be migrated to another worker.
    ///
    /// A stream whose next worker fails within 16 tokens is not migrated again. Workers that are discovered announce a limit for their
    /// model, which counts where this option is not set; `kvasir mocker` announces its own.
    MIGRATION_LIMIT: u32 = "migration-limit" =>
        scope(Scope::SERVE.and(Scope::MOCKER)).env(&[var("DYN_MIGRATION_LIMIT")]).default("0").effective();

    /// Do not migrate sequences longer than this, in tokens.
    MIGRATION_MAX_SEQ_LEN: Option<u32> = "migration-max-seq-len" =>
        env(&[var("DYN_MIGRATION_MAX_SEQ_LEN")]).ints(1, u32::MAX as u64).effective();

    /// Time to wait at shutdown for running requests.
    ///
    /// A second signal exits at once.
    HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS: Duration = "http-graceful-shutdown-timeout-secs" =>
        env(&[var("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS")]).default("300").metavar("SECONDS")
        .effective();

    /// Time to keep accepting requests after SIGTERM, until load balancers have noticed.
    ///
    /// Meanwhile `/health` answers 503 and responses close their connections. Then new requests are refused. SIGINT,
    /// and a second SIGTERM, do not wait.
    GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS: Duration = "graceful-shutdown-grace-period-secs" =>
        scope(Scope::SERVE.and(Scope::ROUTER))
        .env(&[var("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS")]).default("5").metavar("SECONDS")
        .effective();

    /// Time that a process on the request plane waits at shutdown for running requests.
    ///
    /// A second signal exits at once.
    RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS: Duration = "runtime-graceful-shutdown-timeout-secs" =>
        scope(Scope::ROUTER.and(Scope::MOCKER)).env(&[var("DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS")]).default("900")
        .metavar("SECONDS").effective();

    /// Maximum number of concurrent requests of a worker that joins a fleet; unset is no limit.
    ENGINE_REQUEST_LIMIT: Option<u32> = "engine-request-limit" =>
        scope(Scope::MOCKER).env(&[var("DYN_ENGINE_REQUEST_LIMIT")]).ints(1, u32::MAX as u64)
        .effective();

    /// Requests that a worker queues beside those before it refuses more.
    DYNAMO_REQUEST_QUEUE_LIMIT: u32 = "dynamo-request-queue-limit" =>
        scope(Scope::MOCKER).env(&[var("DYN_DYNAMO_REQUEST_QUEUE_LIMIT")]).default("16")
        .ints(2, u32::MAX as u64).effective();
}
