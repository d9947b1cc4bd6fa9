//! Rows: the KV cache index.

use std::path::PathBuf;
use std::time::Duration;

use crate::choice::SharedCacheType;
use crate::command::Scope;
use crate::spec::{Group, options, var};
use crate::value::Bytes;

options! { CACHE_ROWS, Group::Cache, Scope::ROUTING;

    /// Use KV events of the engines; off predicts caches from routed requests.
    ROUTER_KV_EVENTS: bool = "router-kv-events" of router =>
        env(&[var("DYN_ROUTER_USE_KV_EVENTS"), var("DYN_USE_KV_EVENTS")]).aliases(&["kv-events"])
        .common().effective();

    /// Read KV events from JetStream; must also be set on workers.
    ///
    /// A worker that announces an event channel of its own is heard there.
    ROUTER_DURABLE_KV_EVENTS: bool = "router-durable-kv-events" =>
        env(&[var("DYN_ROUTER_DURABLE_KV_EVENTS"), var("DYN_DURABLE_KV_EVENTS")]).default("false")
        .deprecated("leave it out, since workers keep their own events for replay").effective();

    /// Delete the stored stream and snapshot at start; JetStream only.
    ROUTER_RESET_STATES: bool = "router-reset-states" =>
        env(&[var("DYN_ROUTER_RESET_STATES")]).default("false").effective();

    /// Take a snapshot when the stream has more messages than this; JetStream only.
    ROUTER_SNAPSHOT_THRESHOLD: u32 = "router-snapshot-threshold" =>
        env(&[var("DYN_ROUTER_SNAPSHOT_THRESHOLD")]).default("1000000").ints(1, u32::MAX as u64).effective();

    /// How long a predicted block counts as cached; only without KV events.
    ROUTER_TTL_SECS: Duration = "router-ttl-secs" of router =>
        env(&[var("DYN_ROUTER_TTL_SECS")]).metavar("SECONDS").effective();

    /// Number of predicted blocks that starts pruning; only without KV events.
    ROUTER_MAX_TREE_SIZE: u64 = "router-max-tree-size" of router =>
        env(&[var("DYN_ROUTER_MAX_TREE_SIZE")]).effective();

    /// Share of that size to prune down to; only without KV events.
    ROUTER_PRUNE_TARGET_RATIO: f64 = "router-prune-target-ratio" of router =>
        env(&[var("DYN_ROUTER_PRUNE_TARGET_RATIO")]).effective();

    /// Threads that read KV events and apply them to the index; each rank stays on one thread.
    ROUTER_EVENT_THREADS: u32 = "router-event-threads" =>
        env(&[var("DYN_ROUTER_EVENT_THREADS")]).default("4").ints(1, 1024).effective();

    /// Count a routed prompt as cached on its worker for this time, before events confirm it.
    ///
    /// Helps bursts of requests with a common prefix, which arrive before the first event. Needs KV events.
    ROUTER_PREDICTED_TTL_SECS: Option<Duration> = "router-predicted-ttl-secs" of router =>
        env(&[var("DYN_ROUTER_PREDICTED_TTL_SECS")]).metavar("SECONDS").effective();

    /// Memory limit of the index; beyond it the least recently used blocks are dropped.
    INDEX_MAX_BYTES: Bytes = "index-max-bytes" =>
        env(&[var("KVASIR_INDEX_MAX_BYTES")]).default("4GiB").effective();

    /// Query the index of another router instead of keeping one.
    ///
    /// One that has `--serve-indexer` and the same workers is found through discovery. While none answers, placements go by load.
    USE_REMOTE_INDEXER: bool = "use-remote-indexer" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER)).env(&[var("DYN_USE_REMOTE_INDEXER")]).default("false").effective();

    /// Serve this router's index to other routers, on the request plane.
    SERVE_INDEXER: bool = "serve-indexer" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER)).env(&[var("DYN_SERVE_INDEXER")]).default("false").effective();

    /// Kind of cache that workers share: its blocks are credited to every worker.
    ///
    /// A pool that fails or answers late costs the credit and no request.
    SHARED_CACHE_TYPE: SharedCacheType = "shared-cache-type" =>
        env(&[var("DYN_SHARED_CACHE_TYPE")]).default("none").metavar("TYPE").effective();

    /// Value of a block in the shared cache, relative to one in device memory.
    SHARED_CACHE_MULTIPLIER: f64 = "shared-cache-multiplier" of router =>
        env(&[var("DYN_SHARED_CACHE_MULTIPLIER")]).effective();
}

options! { SNAPSHOT_ROWS, Group::Cache, Scope::FRONTEND;

    /// Where the shared cache is: the URL that `http` asks, or the event socket of `hicache`.
    ///
    /// `hicache` takes what workers announce where this is not given.
    SHARED_CACHE_URL: Option<String> = "shared-cache-url" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER)).env(&[var("KVASIR_SHARED_CACHE_URL")]).metavar("URL").effective();

    /// Time that the shared cache has to answer, in milliseconds; a later answer is not waited for.
    SHARED_CACHE_TIMEOUT_MS: u32 = "shared-cache-timeout-ms" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER)).env(&[var("KVASIR_SHARED_CACHE_TIMEOUT_MS")]).default("25").ints(1, 10_000).effective();

    /// File for snapshots of the index, so that a restart keeps it.
    ///
    /// Written periodically and at shutdown, read at start. Events missed meanwhile are replayed, and
    /// blocks of an engine that was restarted are dropped. Unset rebuilds the index from replay.
    INDEX_SNAPSHOT: Option<PathBuf> = "index-snapshot" =>
        env(&[var("KVASIR_INDEX_SNAPSHOT")]).metavar("FILE").effective();

    /// Seconds between two snapshots of the index while it changes.
    ///
    /// A large index is written less often: at most 5 % of the time is spent on it.
    INDEX_SNAPSHOT_INTERVAL_SECS: Duration = "index-snapshot-interval-secs" =>
        env(&[var("KVASIR_INDEX_SNAPSHOT_INTERVAL_SECS")]).default("60").positive()
        .metavar("SECONDS").effective();
}
