//! Rows: the cache picture.

use std::path::PathBuf;
use std::time::Duration;

use crate::choice::SharedCacheType;
use crate::command::Scope;
use crate::spec::{Group, options, var};
use crate::value::Bytes;

options! { CACHE_ROWS, Group::Cache, Scope::ROUTING;

    /// Learn caches from the events of engines; off predicts them from requests.
    ROUTER_KV_EVENTS: bool = "router-kv-events" of router =>
        env(&[var("DYN_ROUTER_USE_KV_EVENTS"), var("DYN_USE_KV_EVENTS")]).aliases(&["kv-events"])
        .common().effective();

    /// Read events from JetStream; set it on workers too.
    ROUTER_DURABLE_KV_EVENTS: bool = "router-durable-kv-events" =>
        env(&[var("DYN_ROUTER_DURABLE_KV_EVENTS"), var("DYN_DURABLE_KV_EVENTS")]).default("false")
        .deprecated("leave it out, since workers keep their own events for replay");

    /// Forget the stored stream and snapshot at start; JetStream only.
    ROUTER_RESET_STATES: bool = "router-reset-states" =>
        env(&[var("DYN_ROUTER_RESET_STATES")]).default("false");

    /// Take a snapshot when the stream holds more messages than this; JetStream only.
    ROUTER_SNAPSHOT_THRESHOLD: u32 = "router-snapshot-threshold" =>
        env(&[var("DYN_ROUTER_SNAPSHOT_THRESHOLD")]).default("1000000").ints(1, u32::MAX as u64);

    /// How long a predicted block is believed; only without events.
    ROUTER_TTL_SECS: Duration = "router-ttl-secs" of router =>
        env(&[var("DYN_ROUTER_TTL_SECS")]).metavar("SECONDS").effective();

    /// Predicted blocks to keep before pruning; only without events.
    ROUTER_MAX_TREE_SIZE: u64 = "router-max-tree-size" of router =>
        env(&[var("DYN_ROUTER_MAX_TREE_SIZE")]).effective();

    /// Share of that size to prune down to; only without events.
    ROUTER_PRUNE_TARGET_RATIO: f64 = "router-prune-target-ratio" of router =>
        env(&[var("DYN_ROUTER_PRUNE_TARGET_RATIO")]).effective();

    /// Threads that read cache events and apply them to the index; each rank stays on one of them.
    ROUTER_EVENT_THREADS: u32 = "router-event-threads" =>
        env(&[var("DYN_ROUTER_EVENT_THREADS")]).default("4").ints(1, 1024).effective();

    /// Believe for so long that a request's prompt will be cached where it was sent.
    ///
    /// Helps bursts of requests with one prefix, which arrive before the first event. Needs events.
    ROUTER_PREDICTED_TTL_SECS: Option<Duration> = "router-predicted-ttl-secs" of router =>
        env(&[var("DYN_ROUTER_PREDICTED_TTL_SECS")]).metavar("SECONDS").effective();

    /// Memory the index may use; beyond it the blocks longest unused are forgotten.
    INDEX_MAX_BYTES: Bytes = "index-max-bytes" =>
        env(&[var("KVASIR_INDEX_MAX_BYTES")]).default("4GiB").effective();

    /// Ask a router that serves its index instead of keeping one here.
    USE_REMOTE_INDEXER: bool = "use-remote-indexer" =>
        env(&[var("DYN_USE_REMOTE_INDEXER")]).default("false");

    /// Serve this router's index to others.
    SERVE_INDEXER: bool = "serve-indexer" => env(&[var("DYN_SERVE_INDEXER")]).default("false");

    /// Cache that several workers share.
    SHARED_CACHE_TYPE: SharedCacheType = "shared-cache-type" =>
        env(&[var("DYN_SHARED_CACHE_TYPE")]).default("none").metavar("TYPE");

    /// Worth of a block in the shared cache, against one on the device.
    SHARED_CACHE_MULTIPLIER: f64 = "shared-cache-multiplier" of router =>
        env(&[var("DYN_SHARED_CACHE_MULTIPLIER")]);
}

options! { KEPT_ROWS, Group::Cache, Scope::FRONTEND;

    /// File to keep the index in from one start to the next.
    ///
    /// Written when draining and now and then, read at start: events that were missed meanwhile are
    /// replayed, and what an engine lost by a restart of its own is dropped. Leave it out to learn
    /// everything from replay.
    INDEX_SNAPSHOT: Option<PathBuf> = "index-snapshot" =>
        env(&[var("KVASIR_INDEX_SNAPSHOT")]).metavar("FILE").effective();

    /// Seconds between two writes of the index while it changes, so that a crash loses no more.
    ///
    /// A large index is written less often: at most a twentieth of the time is spent on it.
    INDEX_SNAPSHOT_INTERVAL_SECS: Duration = "index-snapshot-interval-secs" =>
        env(&[var("KVASIR_INDEX_SNAPSHOT_INTERVAL_SECS")]).default("60").positive()
        .metavar("SECONDS").effective();
}
