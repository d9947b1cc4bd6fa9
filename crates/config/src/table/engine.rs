//! Rows: the engine model, replays of traffic, the mock server.

use std::path::PathBuf;

use crate::choice::{EngineFamily, EnginePreset, EventWire, PreemptionMode, TraceFormat};
use crate::command::Scope;
use crate::rule_text::{
    COUNT_OR_ALL, EVENT_FAULT, FAULT, JSON_OBJECT, NUMBERS, TCP, WORKER_AT, WORKER_SPEED_AT,
};
use crate::spec::{Group, options, var};

options! { ENGINE_ROWS, Group::Engine, Scope::REPLAY.and(Scope::MOCKER);

    /// Model and device whose step times and cache size are simulated.
    ENGINE: EnginePreset = "engine" =>
        env(&[var("KVASIR_ENGINE")]).default("h200-llama-8b").common().effective();

    /// Milliseconds of any step, with `--engine constant`.
    STEP_MS: f64 = "step-ms" =>
        env(&[var("KVASIR_STEP_MS")]).default("20.0").floats(0.0, 60_000.0).effective();

    /// Milliseconds of each prompt token that is computed, with `--engine constant`.
    PROMPT_TOKEN_MS: f64 = "prompt-token-ms" =>
        env(&[var("KVASIR_PROMPT_TOKEN_MS")]).default("0.2").floats(0.0, 60_000.0).effective();

    /// Milliseconds of each sequence that decodes in a step, with `--engine constant`.
    DECODE_MS: f64 = "decode-ms" =>
        env(&[var("KVASIR_DECODE_MS")]).default("0.2").floats(0.0, 60_000.0).effective();

    /// Engine whose caching behaviour is simulated.
    ENGINE_TYPE: EngineFamily = "engine-type" of engine =>
        env(&[var("KVASIR_ENGINE_TYPE")]).effective();

    /// End when standard input is closed: for engines that end with the process that started them.
    UNTIL_STDIN_CLOSES: bool = "until-stdin-closes" =>
        scope(Scope::MOCKER).default("false").flag_only().effective();

    /// KV blocks of one rank.
    NUM_BLOCKS: Option<u32> = "num-blocks" =>
        env(&[var("KVASIR_NUM_BLOCKS")]).aliases(&["num-gpu-blocks-override"])
        .ints(2, u32::MAX as u64).default_note("what fits beside the model's weights")
        .common().effective();

    /// Maximum number of requests in a batch.
    MAX_NUM_SEQS: u32 = "max-num-seqs" of engine =>
        env(&[var("KVASIR_MAX_NUM_SEQS")]).effective();

    /// Maximum number of tokens computed in a step.
    MAX_NUM_BATCHED_TOKENS: u32 = "max-num-batched-tokens" of engine =>
        env(&[var("KVASIR_MAX_NUM_BATCHED_TOKENS")]).effective();

    /// Maximum length of a request, prompt and output together, in tokens.
    MAX_MODEL_LEN: Option<u32> = "max-model-len" of engine =>
        env(&[var("KVASIR_MAX_MODEL_LEN")])
        .default_note("131072, or what the cache holds").effective();

    /// Share cached blocks between requests.
    ENABLE_PREFIX_CACHING: bool = "enable-prefix-caching" of engine =>
        env(&[var("KVASIR_ENABLE_PREFIX_CACHING")]).effective();

    /// Compute long prompts in chunks.
    ENABLE_CHUNKED_PREFILL: bool = "enable-chunked-prefill" of engine =>
        env(&[var("KVASIR_ENABLE_CHUNKED_PREFILL")]).effective();

    /// Maximum number of prompt tokens of one request in a step.
    LONG_PREFILL_TOKEN_THRESHOLD: Option<u32> = "long-prefill-token-threshold" of engine =>
        env(&[var("KVASIR_LONG_PREFILL_TOKEN_THRESHOLD")])
        .default_note("no limit").effective();

    /// Which request is preempted when the cache is full.
    PREEMPTION_MODE: PreemptionMode = "preemption-mode" of engine =>
        env(&[var("KVASIR_PREEMPTION_MODE")]).effective();

    /// Run steps this many times faster than measured.
    SPEEDUP: f64 = "speedup" of engine =>
        env(&[var("KVASIR_SPEEDUP")]).aliases(&["speedup-ratio"]).common()
        .effective();

    /// Data-parallel ranks of each worker.
    DATA_PARALLEL_SIZE: u32 = "data-parallel-size" =>
        env(&[var("KVASIR_DATA_PARALLEL_SIZE")]).default("1").ints(1, 1024).effective();
}

options! { REPLAY_ROWS, Group::Replay, Scope::REPLAY;

    /// Trace to replay, one JSON object per line; this or --workload.
    TRACE: Option<PathBuf> = "trace" =>
        env(&[var("KVASIR_TRACE")]).metavar("FILE").common().effective();

    /// Format of the trace.
    TRACE_FORMAT: TraceFormat = "trace-format" =>
        env(&[var("KVASIR_TRACE_FORMAT")]).default("auto").effective();

    /// Tokens per block id in a Mooncake trace.
    TRACE_BLOCK_SIZE: u32 = "trace-block-size" =>
        env(&[var("KVASIR_TRACE_BLOCK_SIZE")]).default("512").ints(1, 1 << 20).effective();

    /// Synthetic traffic: `tenants`, `chat`, `agents` or `documents`, with settings.
    ///
    /// For example `chat,sessions=200,turns=6,rate=3`.
    WORKLOAD: Option<String> = "workload" =>
        env(&[var("KVASIR_WORKLOAD")]).metavar("KIND[,SETTING=N]").common().effective();

    /// Spread requests with equal timestamps over the time until the next timestamp.
    ///
    /// Published traces have rounded timestamps; replayed as they are, they make artificial bursts.
    SPREAD: bool = "spread" => env(&[var("KVASIR_SPREAD")]).default("true").effective();

    /// Number of requests to replay, from the start of the trace.
    REQUESTS: Option<u64> = "requests" =>
        env(&[var("KVASIR_REQUESTS")]).ints(1, u64::MAX).default_note("all").effective();

    /// A policy to compare: a router mode, then router options. May be given several times.
    ///
    /// For example `kv,router-prefill-load-scale=16`. Without any: round-robin, random,
    /// least-loaded and kv.
    POLICY: Vec<String> = "policy" =>
        env(&[var("KVASIR_POLICY")]).space_separated().metavar("MODE[,OPTION=VALUE]").common()
        .effective();

    /// Engines that compute prompts for the --workers that answer; `all` plays every split of --workers.
    ///
    /// Each policy is played three ways: every engine does both, prompts are computed apart, and the same unless little of a
    /// prompt is left to compute where it is answered. How long a prompt is on its way: --kv-transfer-bandwidth.
    PREFILL_WORKERS: Option<String> = "prefill-workers" =>
        env(&[var("KVASIR_PREFILL_WORKERS")]).rule(&COUNT_OR_ALL).common().effective();

    /// Replay speed relative to the trace; several are separated by commas.
    SPEED: String = "speed" =>
        env(&[var("KVASIR_SPEED")]).default("1.0").rule(&NUMBERS).common().effective();

    /// Ignore timestamps and use this many closed-loop clients; several are separated by commas.
    CLOSED_LOOP: Option<String> = "closed-loop" =>
        env(&[var("KVASIR_CLOSED_LOOP")]).rule(&NUMBERS).effective();

    /// Time between a response and the client's next request in a closed loop, in milliseconds.
    THINK_MS: f64 = "think-ms" =>
        env(&[var("KVASIR_THINK_MS")]).default("0").floats(0.0, 86_400_000.0).metavar("MS")
        .effective();

    /// Runs of each policy, each with a different seed.
    SEEDS: u32 = "seeds" => env(&[var("KVASIR_SEEDS")]).default("1").ints(1, 1000).effective();

    /// Write all results to a JSON file.
    REPORT_JSON: Option<PathBuf> = "report-json" =>
        env(&[var("KVASIR_REPORT_JSON")]).aliases(&["json"]).metavar("FILE").common().effective();

    /// Write a self-contained HTML report with plots to a file.
    REPORT_HTML: Option<PathBuf> = "report-html" =>
        env(&[var("KVASIR_REPORT_HTML")]).aliases(&["html"]).metavar("FILE").common().effective();

    /// Policy that the others are compared with.
    BASELINE: Option<String> = "baseline" =>
        env(&[var("KVASIR_BASELINE")]).metavar("POLICY").default_note("the first").effective();

    /// Goodput target: time to first token, in milliseconds.
    SLO_TTFT_MS: f64 = "slo-ttft-ms" =>
        env(&[var("KVASIR_SLO_TTFT_MS")]).default("2000").positive().metavar("MS").effective();

    /// Goodput target: mean inter-token latency, in milliseconds.
    SLO_ITL_MS: f64 = "slo-itl-ms" =>
        env(&[var("KVASIR_SLO_ITL_MS")]).default("25").positive().metavar("MS").effective();

    /// Router replicas, each with its own index and load.
    REPLICAS: u32 = "replicas" =>
        env(&[var("KVASIR_REPLICAS")]).default("1").ints(1, 256).effective();

    /// Replicas synchronise their tracked load.
    REPLICA_SYNC: bool = "replica-sync" =>
        env(&[var("KVASIR_REPLICA_SYNC")]).default("false").effective();

    /// Delay of all that a router hears, KV events and other replicas, in milliseconds.
    EVENT_LATENCY_MS: f64 = "event-latency-ms" =>
        env(&[var("KVASIR_EVENT_LATENCY_MS")]).default("1").floats(0.0, 86_400_000.0).metavar("MS")
        .effective();

    /// Share of KV events that are lost on their way to a router.
    EVENT_LOSS: f64 = "event-loss" =>
        env(&[var("KVASIR_EVENT_LOSS")]).default("0").floats(0.0, 1.0).effective();

    /// Stop a worker: `1@60` is worker 1 after 60 seconds. May be given several times.
    WORKER_LEAVES: Vec<String> = "worker-leaves" =>
        env(&[var("KVASIR_WORKER_LEAVES")]).rule(&WORKER_AT).effective();

    /// Start or restart a worker with an empty cache. May be given several times.
    WORKER_JOINS: Vec<String> = "worker-joins" =>
        env(&[var("KVASIR_WORKER_JOINS")]).rule(&WORKER_AT).effective();

    /// Speed of a worker in percent of its engine's, from a moment on: `2=50@0` is worker 2 at half speed.
    ///
    /// May be given several times: for engines of different speed, and for one that slows down.
    WORKER_SPEED: Vec<String> = "worker-speed" =>
        env(&[var("KVASIR_WORKER_SPEED")]).rule(&WORKER_SPEED_AT).effective();

    /// Number of parallel runs.
    JOBS: Option<u32> = "jobs" =>
        env(&[var("KVASIR_JOBS")]).ints(1, 1024).default_note("one per core").effective();
}

options! { MOCKER_ROWS, Group::Mocker, Scope::MOCKER;

    /// Write KV events to JetStream instead of an event channel, for routers with `--router-durable-kv-events`.
    DURABLE_KV_EVENTS: bool = "durable-kv-events" =>
        env(&[var("KVASIR_DURABLE_KV_EVENTS")]).default("false").effective();

    /// Publish KV events at this address over ZeroMQ, as an engine does.
    ///
    /// Each further rank, then each further worker, uses the next port; port 0 takes free ones.
    EVENTS: Option<String> = "events" =>
        env(&[var("KVASIR_EVENTS")]).default_note("no events").rule(&TCP).effective().common();

    /// Serve replays of missed KV events at this address; needs --events.
    REPLAY: Option<String> = "replay" =>
        env(&[var("KVASIR_REPLAY")]).default_note("no replay").rule(&TCP).effective().common();

    /// The same as a JSON object, as vLLM takes it.
    ///
    /// Fields that are used: enable_kv_cache_events, publisher, endpoint, replay_endpoint, topic, buffer_steps.
    KV_EVENTS_CONFIG: Option<String> = "kv-events-config" =>
        env(&[var("KVASIR_KV_EVENTS_CONFIG")]).default_note("no events").rule(&JSON_OBJECT)
        .effective();

    /// First port for KV events over ZeroMQ, as in vLLM; 0 takes free ports.
    ///
    /// Each worker uses one port per rank for events, then one per rank for replays.
    KV_EVENTS_PORT: Option<u16> = "kv-events-port" =>
        env(&[var("KVASIR_KV_EVENTS_PORT")]).default_note("no events").metavar("PORT").effective()
        .common();

    /// LoRA adapters to serve, each under its name; a path is only shown.
    LORA_MODULES: Vec<String> = "lora-modules" =>
        env(&[var("KVASIR_LORA_MODULES")]).metavar("NAME[=PATH]").effective();

    /// How calls of tools are written in the answers, as a worker's card says it to frontends.
    DYN_TOOL_CALL_PARSER: Option<String> = "dyn-tool-call-parser" =>
        env(&[var("DYN_TOOL_CALL_PARSER")]).metavar("NAME").effective();

    /// How reasoning is written in the answers, as a worker's card says it to frontends.
    DYN_REASONING_PARSER: Option<String> = "dyn-reasoning-parser" =>
        env(&[var("DYN_REASONING_PARSER")]).metavar("NAME").effective();

    /// Engine and release whose event format is used.
    EVENT_WIRE: Option<EventWire> = "event-wire" =>
        env(&[var("KVASIR_EVENT_WIRE")]).default_note("vllm, or sglang with --engine-type sglang")
        .effective();

    /// A fault of KV events to start with, as the control route takes it; may be given several times.
    ///
    /// `drop=COUNT`, `duplicate`, `reorder`, `delay=MS`, `mute`, `unmute`, `restart-sequence`,
    /// `restart-empty`, `silent-clear`, `forget-replay=KEEP` or `block-size=TOKENS`.
    EVENT_FAULT_AT_START: Vec<String> = "event-fault-at-start" =>
        env(&[var("KVASIR_EVENT_FAULT_AT_START")]).rule(&EVENT_FAULT).effective();

    /// Report in `usage` how many prompt tokens were cached.
    ENABLE_PROMPT_TOKENS_DETAILS: bool = "enable-prompt-tokens-details" =>
        env(&[var("KVASIR_ENABLE_PROMPT_TOKENS_DETAILS")]).default("true").effective();

    /// A fault to start with, as the control route takes it; may be given several times.
    ///
    /// `refuse`, `stall`, `slow=MS`, `die=TOKENS`, `cut=TOKENS` or `status=CODE`, each with
    /// `:share=0.1` to affect a share of the requests and `:count=3` to affect that many.
    FAULT_AT_START: Vec<String> = "fault-at-start" =>
        env(&[var("KVASIR_FAULT_AT_START")]).aliases(&["fault"]).rule(&FAULT).effective();
}
