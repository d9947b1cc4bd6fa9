//! Rows: terms of the cost formula, load tracking, the prefill-time model.

use std::path::PathBuf;
use std::time::Duration;

use crate::choice::{PrefillLoadModel, TrackingHash};
use crate::command::Scope;
use crate::rule_text::{ACCEPT_RATES, PEERS, SOCKET};
use crate::spec::{Group, options, var};

options! { COST_ROWS, Group::Cost, Scope::ROUTING;

    /// Credit for each cached block, from 0 to 1; 0 ignores caches and runs no indexer.
    ROUTER_KV_OVERLAP_SCORE_CREDIT: f64 = "router-kv-overlap-score-credit" of router =>
        env(&[var("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT")]).common().effective();

    /// How fast the credit decays as a worker's load grows; 0 does not decay.
    ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY: f64 = "router-kv-overlap-score-credit-decay" of router =>
        env(&[var("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY")]).effective();

    /// Weight of prefill work relative to decode load.
    ///
    /// Raise it for lower time to first token, lower it for steadier decoding.
    ROUTER_PREFILL_LOAD_SCALE: f64 = "router-prefill-load-scale" of router =>
        env(&[var("DYN_ROUTER_PREFILL_LOAD_SCALE")]).common().effective();

    /// Former weight of cache overlap.
    ///
    /// Sets `--router-prefill-load-scale`; 0 also sets `--router-kv-overlap-score-credit` to 0.
    /// Takes precedence over both.
    ROUTER_KV_OVERLAP_SCORE_WEIGHT: Option<f64> = "router-kv-overlap-score-weight" of router =>
        env(&[var("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT"), var("DYN_OVERLAP_SCORE_WEIGHT")])
        .aliases(&["kv-overlap-score-weight"]).effective()
        .deprecated("use --router-prefill-load-scale and --router-kv-overlap-score-credit");

    /// Cost of each active request on a worker, in blocks, in addition to its blocks.
    ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT: f64 = "router-decode-active-request-weight" of router =>
        env(&[var("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT")]).effective();

    /// Value of a block cached in host memory, relative to one in device memory.
    ROUTER_HOST_CACHE_HIT_WEIGHT: f64 = "router-host-cache-hit-weight" of router =>
        env(&[var("DYN_ROUTER_HOST_CACHE_HIT_WEIGHT")]).effective();

    /// Value of a block cached on disk, relative to one in device memory.
    ROUTER_DISK_CACHE_HIT_WEIGHT: f64 = "router-disk-cache-hit-weight" of router =>
        env(&[var("DYN_ROUTER_DISK_CACHE_HIT_WEIGHT")]).effective();

    /// Softmax temperature of the choice: 0 takes the lowest cost, higher spreads more.
    ROUTER_TEMPERATURE: f64 = "router-temperature" of router =>
        env(&[var("DYN_ROUTER_TEMPERATURE")]).common().effective();
}

options! { TRACKING_ROWS, Group::Tracking, Scope::ROUTING;

    /// Track the blocks of active requests; turn off for a router of prefill workers.
    ROUTER_TRACK_ACTIVE_BLOCKS: bool = "router-track-active-blocks" of router =>
        env(&[var("DYN_ROUTER_TRACK_ACTIVE_BLOCKS")]).aliases(&["track-active-blocks"]).effective();

    /// Track blocks of generated tokens too; needs tracking of active blocks.
    ROUTER_TRACK_OUTPUT_BLOCKS: bool = "router-track-output-blocks" of router =>
        env(&[var("DYN_ROUTER_TRACK_OUTPUT_BLOCKS")]).aliases(&["track-output-blocks"]).effective();

    /// Count a block once when several active requests of a worker share it.
    ROUTER_ASSUME_KV_REUSE: bool = "router-assume-kv-reuse" of router =>
        env(&[var("DYN_ROUTER_ASSUME_KV_REUSE")]).aliases(&["assume-kv-reuse"]).effective();

    /// Track prompt tokens that are not computed yet; turn off for a router of decode workers.
    ROUTER_TRACK_PREFILL_TOKENS: bool = "router-track-prefill-tokens" of router =>
        env(&[var("DYN_ROUTER_TRACK_PREFILL_TOKENS")]).effective();

    /// How tracked prefill work decays while the prefill runs.
    ROUTER_PREFILL_LOAD_MODEL: PrefillLoadModel = "router-prefill-load-model" of router =>
        env(&[var("DYN_ROUTER_PREFILL_LOAD_MODEL")]).metavar("MODEL").effective();

    /// Free the tracked load of a request after this time without activity.
    ROUTER_ACTIVE_REQUEST_EXPIRY_SECS: Duration = "router-active-request-expiry-secs" of router =>
        env(&[var("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS")]).metavar("SECONDS").effective();

    /// Synchronise tracked load and sessions with other router replicas, over the event plane.
    ROUTER_REPLICA_SYNC: bool = "router-replica-sync" =>
        env(&[var("DYN_ROUTER_REPLICA_SYNC")]).default("false").effective();

    /// Other replicas, linked without a broker: `host:port`, separated by commas; each address of a name is one.
    ///
    /// They tell each other load, sessions and what operators say of workers, and one that starts takes over the index of another.
    /// Needs `--router-peer-secret-file`.
    ROUTER_PEERS: Option<String> = "router-peers" =>
        scope(Scope::FRONTEND).env(&[var("KVASIR_ROUTER_PEERS")]).metavar("PEERS").rule(&PEERS).effective();

    /// Address on which other replicas are listened for.
    ///
    /// With `--discovery-backend file` or `etcd` it is written there, and those that others wrote are peers: nobody has to be named.
    ROUTER_PEER_LISTEN: Option<String> = "router-peer-listen" =>
        scope(Scope::FRONTEND).env(&[var("KVASIR_ROUTER_PEER_LISTEN")]).metavar("ADDRESS").rule(&SOCKET).effective();

    /// File with what all linked replicas know and nobody else does, at least 16 characters.
    ROUTER_PEER_SECRET_FILE: Option<PathBuf> = "router-peer-secret-file" =>
        scope(Scope::FRONTEND).env(&[var("KVASIR_ROUTER_PEER_SECRET_FILE")]).metavar("FILE").effective();

    /// Hash with which replicas compare active sequences.
    ROUTER_TRACKING_HASH: TrackingHash = "router-tracking-hash" =>
        env(&[var("DYN_ROUTER_TRACKING_HASH")]).default("public-xxh3-v1");

    /// File with the 32-byte key of `keyed-xxh3-v1`.
    ROUTER_TRACKING_KEY_FILE: Option<PathBuf> = "router-tracking-key-file" =>
        env(&[var("DYN_ROUTER_TRACKING_KEY_FILE")]).metavar("FILE");

    /// Id of that key; the same on all replicas.
    ROUTER_TRACKING_KEY_ID: Option<String> = "router-tracking-key-id" =>
        env(&[var("DYN_ROUTER_TRACKING_KEY_ID")]).metavar("NAME");
}

options! { AIC_ROWS, Group::Aic, Scope::ROUTING.and(Scope::MOCKER);

    /// Engine the estimate is for; needed by `--router-prefill-load-model aic`.
    AIC_BACKEND: Option<String> = "aic-backend" => env(&[var("DYN_AIC_BACKEND")]).metavar("NAME");

    /// Hardware the estimate is for; needed by `aic`.
    AIC_SYSTEM: Option<String> = "aic-system" => env(&[var("DYN_AIC_SYSTEM")]).metavar("NAME").effective();

    /// Model the estimate is for; needed by `aic`.
    AIC_MODEL_PATH: Option<String> = "aic-model-path" =>
        env(&[var("DYN_AIC_MODEL_PATH")]).metavar("PATH").effective();

    /// Version of that engine.
    AIC_BACKEND_VERSION: Option<String> = "aic-backend-version" =>
        env(&[var("DYN_AIC_BACKEND_VERSION")]).default_note("the backend's default")
        .metavar("VERSION");

    /// Tensor-parallel size.
    AIC_TP_SIZE: u32 = "aic-tp-size" => env(&[var("DYN_AIC_TP_SIZE")]).default("1").ints(1, 65_536);

    /// Tensor-parallel size of the experts.
    AIC_MOE_TP_SIZE: Option<u32> = "aic-moe-tp-size" =>
        env(&[var("DYN_AIC_MOE_TP_SIZE")]).ints(1, 65_536);

    /// Expert-parallel size.
    AIC_MOE_EP_SIZE: Option<u32> = "aic-moe-ep-size" =>
        env(&[var("DYN_AIC_MOE_EP_SIZE")]).ints(1, 65_536);

    /// Data-parallel size of attention.
    AIC_ATTENTION_DP_SIZE: Option<u32> = "aic-attention-dp-size" =>
        env(&[var("DYN_AIC_ATTENTION_DP_SIZE")]).ints(1, 65_536);

    /// Speculative tokens per step.
    AIC_NEXTN: Option<u32> = "aic-nextn" => env(&[var("DYN_AIC_NEXTN")]).ints(0, 5);

    /// Share of speculative tokens accepted, by position.
    AIC_NEXTN_ACCEPT_RATES: Option<String> = "aic-nextn-accept-rates" =>
        env(&[var("DYN_AIC_NEXTN_ACCEPT_RATES")]).rule(&ACCEPT_RATES);
}
