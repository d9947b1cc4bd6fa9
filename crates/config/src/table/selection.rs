//! Rows: which workers there are, how one is chosen, when one counts as busy.

use std::path::PathBuf;
use std::time::Duration;

use crate::choice::{AdmissionControl, RouterMode, RouterPolicy};
use crate::command::Scope;
use crate::rule_text;
use crate::spec::{Group, options, var};

options! { WORKERS_ROWS, Group::Workers, Scope::FRONTEND;

    /// URL of an engine server to route to; may be given several times.
    ///
    /// The server needs no changes; request bodies are forwarded unchanged. With at least one,
    /// discovery is `static` and `--router-mode` is `kv` unless set otherwise.
    ///
    /// What the server does not report can follow its URL: `block-size`, `kv-blocks`,
    /// `max-num-batched-tokens`, `max-num-seqs`, `data-parallel-size`, `events`, `replay`, `taint`, `device`,
    /// `role` (`prefill` or `decode`), `bootstrap-port`,
    /// `topology` (a place, such as `zone:a1`), `kv-transfer-domain` and `kv-transfer-preferred-weight` (where its prompts stay), `api-key-file`, each as `name=value` after a comma.
    WORKER: Vec<String> = "worker" =>
        scope(Scope::FRONTEND.and(Scope::DOCTOR)).env(&[var("KVASIR_WORKERS")])
        .space_separated().rule(&rule_text::WORKER)
        .metavar("URL[,NAME=VALUE]").common().effective();

    /// URL of an engine server that computes prompts for others; may be given several times.
    ///
    /// Prompts go there first and the servers of `--worker` answer: vLLM with a KV connector, SGLang with
    /// `--disaggregation-mode`. While there is none, the servers of `--worker` do both. Additions are those of `--worker`;
    /// `bootstrap-port` where an SGLang server does not report it.
    PREFILL_WORKER: Vec<String> = "prefill-worker" =>
        scope(Scope::FRONTEND.and(Scope::DOCTOR)).env(&[var("KVASIR_PREFILL_WORKER")])
        .space_separated().rule(&rule_text::WORKER)
        .metavar("URL[,NAME=VALUE]").effective();

    /// Read workers from this file, one per line as for `--worker`, and watch it for changes.
    ///
    /// Blank lines and lines that begin with `#` are ignored. An invalid file is an error at start;
    /// later it is logged and the workers stay as they were.
    WORKERS_FILE: Option<PathBuf> = "workers-file" =>
        env(&[var("KVASIR_WORKERS_FILE")]).metavar("FILE").common().effective();

    /// Route to the pods of a Kubernetes cluster that have these labels, such as `app=vllm`.
    ///
    /// Engine servers in them need no changes. Services with the labels say which of their pods are ready; pods with the labels
    /// count, too, where no such Service names them. Discovery is `static` and `--router-mode` is `kv` unless set otherwise.
    WORKER_SELECTOR: Option<String> = "worker-selector" =>
        env(&[var("KVASIR_WORKER_SELECTOR")]).rule(&rule_text::LABELS).common().effective();

    /// Port of the engines that `--worker-selector` finds, by number or by name.
    ///
    /// The name is the one that the Service gives the port, or the container where no Service names the pod.
    WORKER_PORT: Option<String> = "worker-port" =>
        env(&[var("KVASIR_WORKER_PORT")]).rule(&rule_text::PORT)
        .default_note("the only port, that named http, or 8000 where none is declared").effective();

    /// API key for engine servers that have no key of their own.
    ///
    /// Not a flag: other users of a machine can read command lines. The key of one worker is given with
    /// `api-key-file=FILE` after its URL.
    WORKER_API_KEY: Option<String> = "worker-api-key" =>
        scope(Scope::FRONTEND.and(Scope::DOCTOR))
        .env(&[var("KVASIR_WORKER_API_KEY")]).secret().effective();

    /// Certificate authority for https workers, instead of the system's.
    WORKER_TLS_CA_PATH: Option<PathBuf> = "worker-tls-ca-path" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER).and(Scope::DOCTOR))
        .env(&[var("KVASIR_WORKER_TLS_CA_PATH")]).metavar("FILE").effective();

    /// Number of workers to wait for at start; 0 does not wait.
    ///
    /// Of workers that discovery finds each model waits for so many of its own. Until those that are named serve, `/health` says `loading`.
    ROUTER_MIN_INITIAL_WORKERS: u32 = "router-min-initial-workers" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER)).env(&[var("DYN_ROUTER_MIN_INITIAL_WORKERS")]).default("0").effective();
}

options! { SELECTION_ROWS, Group::Selection, Scope::ROUTING;

    /// How to choose a worker.
    ///
    /// Engine servers use `kv` unless a mode is given, however they were added: `--worker`, the workers file or
    /// `kvasir workers add`.
    ROUTER_MODE: RouterMode = "router-mode" of router =>
        env(&[var("DYN_ROUTER_MODE")])
        .default_note("round-robin; kv for engine servers, in the demo and with --load-aware")
        .metavar("MODE").common().effective();

    /// What `kv` mode takes for the cost of a placement.
    ///
    /// `kv` adds blocks by the weights given. `time` adds the seconds that all requests wait; it learns
    /// how long prompts and steps take, holds a request back while every good worker is behind, and has no
    /// weights: credit, scale and request weight do not matter to it.
    ///
    /// Engine servers of `kvasir frontend` are placed by `time` unless an option of Dynamo's router is given, by flag, file or
    /// a variable `DYN_ROUTER_…`: whoever gives one gets its cost.
    ROUTER_POLICY: RouterPolicy = "router-policy" of router =>
        env(&[var("KVASIR_ROUTER_POLICY")]).metavar("POLICY")
        .default_note("kv; time for engine servers where no option of Dynamo's router is given").common().effective();

    /// What `time` takes for the speed of the workers until it has learned it.
    ///
    /// A measured profile (`h200-llama-8b`, `h200-qwen-32b`), or a JSON file with the seconds of a worker as `/workers` shows
    /// them: `chunk`, `token`, `pair`, `step`, `stream`, `attend`.
    ENGINE_PROFILE: Option<String> = "engine-profile" =>
        env(&[var("KVASIR_ENGINE_PROFILE")]).metavar("NAME|FILE").default_note("a guess").effective();

    /// Let another policy decide beside the real one, without acting on it.
    ///
    /// A policy as in `kvasir replay --policy`: a mode or `time`, then `option=value`, between commas, such as
    /// `kv,router-prefill-load-scale=16`. How often it would place a request elsewhere, and what the time model thinks of
    /// that, is in the metrics, `kvasir why`, `kvasir top` and at `/shadow`. At most 200 placements a second are compared.
    SHADOW_POLICY: Option<String> = "shadow-policy" =>
        scope(Scope::SERVE).env(&[var("KVASIR_SHADOW_POLICY")]).metavar("POLICY").effective();

    /// Route by load alone and ignore caches.
    ///
    /// Sets `kv` mode, credit 0, no KV events, no reuse, no indexer, no shared cache, no
    /// prediction; tracks active blocks and prefill tokens. Overrides contrary options.
    LOAD_AWARE: bool = "load-aware" =>
        env(&[var("DYN_ROUTER_LOAD_AWARE")]).default("false").effective();

    /// Tokens in a KV block; must match the engines.
    KV_CACHE_BLOCK_SIZE: Option<u32> = "kv-cache-block-size" of router =>
        scope(Scope::ROUTING.and(Scope::DOCTOR)).env(&[var("DYN_KV_CACHE_BLOCK_SIZE")])
        .default_note("what the model's workers announce").common().effective();

    /// A worker is busy when more than this share of its KV blocks is in use.
    ACTIVE_DECODE_BLOCKS_THRESHOLD: Option<f64> = "active-decode-blocks-threshold" of router =>
        scope(Scope::SERVE.and(Scope::REPLAY)).env(&[var("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD")])
        .aliases(&["busy-threshold"]).effective();

    /// A worker is busy above this many prompt tokens that are not computed yet.
    ACTIVE_PREFILL_TOKENS_THRESHOLD: Option<u64> = "active-prefill-tokens-threshold" of router =>
        scope(Scope::SERVE.and(Scope::REPLAY)).env(&[var("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD")])
        .effective();

    /// The same as a multiple of `max_num_batched_tokens`; either threshold makes a worker busy.
    ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC: Option<f64> = "active-prefill-tokens-threshold-frac" of router =>
        scope(Scope::SERVE.and(Scope::REPLAY))
        .env(&[var("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC")]).effective();

    /// Keep a session on its worker until it was idle for this many seconds.
    ROUTER_SESSION_AFFINITY_TTL_SECS: Option<u64> = "router-session-affinity-ttl-secs" of router =>
        scope(Scope::SERVE.and(Scope::REPLAY)).env(&[var("DYN_ROUTER_SESSION_AFFINITY_TTL_SECS")])
        .metavar("SECONDS").effective();

    /// Maximum number of sessions; beyond it the least recently used is dropped.
    ROUTER_MAX_SESSIONS: u32 = "router-max-sessions" of router =>
        env(&[var("KVASIR_ROUTER_MAX_SESSIONS")]).effective();

    /// Weight of GPU workers relative to CPU workers in `device-aware-weighted` mode.
    ///
    /// A worker is a CPU worker if `device=cpu` follows its URL, or if its engine says so on `/server_info`.
    ENCODER_CUDA_TO_CPU_RATIO: u32 = "encoder-cuda-to-cpu-ratio" of router =>
        scope(Scope::SERVE).env(&[var("DYN_ENCODER_CUDA_TO_CPU_RATIO")]).effective();

    /// Longest time that a worker is ejected after failed requests; 0 never ejects.
    ///
    /// The first ejection takes 0.25 s and each further one twice as long, until the worker serves a request again.
    RUNTIME_INHIBITED_DURATION_SECS: Duration = "runtime-inhibited-duration-secs" of router =>
        env(&[var("DYN_RUNTIME_INHIBITED_DURATION_SECS")]).metavar("SECONDS").effective();

    /// Route requests for LoRA adapters to workers that have them loaded.
    LORA_ENABLED: bool = "lora-enabled" => env(&[var("DYN_LORA_ENABLED")]).default("false");

    /// What a placement costs among workers that compute prompts for others.
    ///
    /// A name of `--router-policy`, or `default` for what that says.
    ROUTER_PREFILL_POLICY: String = "router-prefill-policy" =>
        env(&[var("DYN_ROUTER_PREFILL_POLICY")]).default("default").metavar("NAME").effective();

    /// What a placement costs among workers that answer.
    ///
    /// A name of `--router-policy`, or `default` for what that says.
    ROUTER_DECODE_POLICY: String = "router-decode-policy" =>
        env(&[var("DYN_ROUTER_DECODE_POLICY")]).default("default").metavar("NAME").effective();

    /// What a placement costs where the two options above are not given.
    ///
    /// A name of `--router-policy`, or `default` for what that says.
    ROUTER_WORKER_SELECTION_POLICY: String = "router-worker-selection-policy" =>
        env(&[var("DYN_ROUTER_WORKER_SELECTION_POLICY")]).default("default").metavar("NAME").effective();

    /// Removed admission switch.
    ADMISSION_CONTROL: Option<AdmissionControl> = "admission-control" =>
        scope(Scope::SERVE).env(&[var("DYN_ADMISSION_CONTROL")])
        .ignored("use the busy thresholds and the queue");
}
