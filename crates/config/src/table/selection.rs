//! Rows: which workers there are, how one is chosen, when one counts as busy.

use std::path::PathBuf;
use std::time::Duration;

use crate::choice::{AdmissionControl, RouterMode};
use crate::command::Scope;
use crate::rule_text;
use crate::spec::{Group, options, var};

options! { WORKERS_ROWS, Group::Workers, Scope::FRONTEND.and(Scope::ROUTER);

    /// An engine server to route to; give it once for each.
    ///
    /// The server is used as it is: the body of a request reaches it unchanged. With at least one,
    /// discovery is `static` and `--router-mode` is `kv` unless said otherwise.
    ///
    /// What the server does not tell can follow its URL: `block-size`, `kv-blocks`,
    /// `max-num-batched-tokens`, `data-parallel-size`, `events`, `replay`, `taint`, `api-key-file`,
    /// each as `name=value` after a comma.
    WORKER: Vec<String> = "worker" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER).and(Scope::DOCTOR)).env(&[var("KVASIR_WORKERS")])
        .space_separated().rule(&rule_text::WORKER)
        .metavar("URL[,NAME=VALUE]").common().effective();

    /// Take workers from this file, one a line as `--worker` takes them, and follow its changes.
    ///
    /// Blank lines and lines that begin with `#` are left out. A file that cannot be read or
    /// understood stops the start; later it leaves the workers as they were and says so.
    WORKERS_FILE: Option<PathBuf> = "workers-file" =>
        env(&[var("KVASIR_WORKERS_FILE")]).metavar("FILE").common().effective();

    /// Key that engine servers want, where a worker has none of its own.
    ///
    /// Not a flag: other users of a machine can read command lines. A worker's own is given with
    /// `api-key-file=FILE` after its URL.
    WORKER_API_KEY: Option<String> = "worker-api-key" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER).and(Scope::DOCTOR))
        .env(&[var("KVASIR_WORKER_API_KEY")]).secret().effective();

    /// Certificate authority of workers reached by https, instead of the system's.
    WORKER_TLS_CA_PATH: Option<PathBuf> = "worker-tls-ca-path" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER).and(Scope::DOCTOR))
        .env(&[var("KVASIR_WORKER_TLS_CA_PATH")]).metavar("FILE").effective();

    /// Wait at start until so many workers are there; 0 does not wait.
    ROUTER_MIN_INITIAL_WORKERS: u32 = "router-min-initial-workers" =>
        env(&[var("DYN_ROUTER_MIN_INITIAL_WORKERS")]).default("0");
}

options! { SELECTION_ROWS, Group::Selection, Scope::ROUTING;

    /// How to choose a worker.
    ///
    /// Engine servers are routed by `kv` unless a mode is given, whoever names them: `--worker`, the workers file or
    /// `kvasir workers add`.
    ROUTER_MODE: RouterMode = "router-mode" of router =>
        env(&[var("DYN_ROUTER_MODE")])
        .default_note("round-robin; kv for engine servers, in the demo and with --load-aware")
        .metavar("MODE").common().effective();

    /// Route by load alone and ignore caches.
    ///
    /// Sets `kv` mode, credit 0, no KV events, no reuse, no indexer, no shared cache, no
    /// prediction; tracks active blocks and prefill tokens. Wins over contrary options.
    LOAD_AWARE: bool = "load-aware" =>
        env(&[var("DYN_ROUTER_LOAD_AWARE")]).default("false").effective();

    /// Tokens in a KV block; must be what the engines use.
    KV_CACHE_BLOCK_SIZE: Option<u32> = "kv-cache-block-size" of router =>
        scope(Scope::ROUTING.and(Scope::DOCTOR)).env(&[var("DYN_KV_CACHE_BLOCK_SIZE")])
        .default_note("what the model's workers announce").common().effective();

    /// A worker is busy above this share of its KV blocks in use.
    ACTIVE_DECODE_BLOCKS_THRESHOLD: Option<f64> = "active-decode-blocks-threshold" of router =>
        scope(Scope::SERVE.and(Scope::REPLAY)).env(&[var("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD")])
        .aliases(&["busy-threshold"]).effective();

    /// A worker is busy above so many prompt tokens waiting or in prefill.
    ACTIVE_PREFILL_TOKENS_THRESHOLD: Option<u64> = "active-prefill-tokens-threshold" of router =>
        scope(Scope::SERVE.and(Scope::REPLAY)).env(&[var("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD")])
        .effective();

    /// The same as a multiple of the worker's batch limit; either one makes it busy.
    ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC: Option<f64> = "active-prefill-tokens-threshold-frac" of router =>
        scope(Scope::SERVE.and(Scope::REPLAY))
        .env(&[var("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC")]).effective();

    /// Keep a session on its worker until it has been silent for so many seconds.
    ROUTER_SESSION_AFFINITY_TTL_SECS: Option<u64> = "router-session-affinity-ttl-secs" of router =>
        scope(Scope::SERVE).env(&[var("DYN_ROUTER_SESSION_AFFINITY_TTL_SECS")])
        .metavar("SECONDS").effective();

    /// Sessions to remember; beyond it the one unused for longest is forgotten.
    ROUTER_MAX_SESSIONS: u32 = "router-max-sessions" of router =>
        env(&[var("KVASIR_ROUTER_MAX_SESSIONS")]).effective();

    /// Weight of GPU encoders against CPU ones in `device-aware-weighted` mode.
    ENCODER_CUDA_TO_CPU_RATIO: u32 = "encoder-cuda-to-cpu-ratio" of router =>
        scope(Scope::SERVE).env(&[var("DYN_ENCODER_CUDA_TO_CPU_RATIO")]).effective();

    /// Longest time that a worker is left out for failing requests; 0 never leaves one out.
    ///
    /// It is a quarter of a second the first time and twice as long each time until the worker serves one again.
    RUNTIME_INHIBITED_DURATION_SECS: Duration = "runtime-inhibited-duration-secs" of router =>
        env(&[var("DYN_RUNTIME_INHIBITED_DURATION_SECS")]).metavar("SECONDS").effective();

    /// Route requests for LoRA adapters to workers that have them loaded.
    LORA_ENABLED: bool = "lora-enabled" => env(&[var("DYN_LORA_ENABLED")]).default("false");

    /// Selector for prefill workers.
    ROUTER_PREFILL_POLICY: String = "router-prefill-policy" =>
        env(&[var("DYN_ROUTER_PREFILL_POLICY")]).default("default").metavar("NAME");

    /// Selector for decode workers.
    ROUTER_DECODE_POLICY: String = "router-decode-policy" =>
        env(&[var("DYN_ROUTER_DECODE_POLICY")]).default("default").metavar("NAME");

    /// Selector for all workers where the two options above are not given.
    ROUTER_WORKER_SELECTION_POLICY: String = "router-worker-selection-policy" =>
        env(&[var("DYN_ROUTER_WORKER_SELECTION_POLICY")]).default("default").metavar("NAME");

    /// Removed admission switch.
    ADMISSION_CONTROL: Option<AdmissionControl> = "admission-control" =>
        scope(Scope::SERVE).env(&[var("DYN_ADMISSION_CONTROL")])
        .ignored("use the busy thresholds and the queue");
}
