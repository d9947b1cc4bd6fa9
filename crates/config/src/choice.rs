//! The options that are one of several names, as types.
//!
//! Answers: which names does a choice have, and what does each mean? One declaration gives the
//! type, its names for the parser and the words for help. Those of the router and the
//! engine model are declared in `kvasir_options`, which they read, too.

use kvasir_options::choices;
pub use kvasir_options::{
    EngineFamily, PreemptionMode, PrefillLoadModel, QueuePolicy, RouterMode, RouterPolicy,
};

use crate::value::{Kind, SettingType, Value};

choices! {
    /// Kind of the cache shared by workers. Option `shared-cache-type`.
    SharedCacheType {
        None = "none": "no shared cache",
        HiCache = "hicache": "SGLang's hierarchical cache on a Mooncake store",
        Http = "http": "any pool that answers a small HTTP question",
    }

    /// Hash by which replicas compare active sequences. Option `router-tracking-hash`.
    TrackingHash {
        Public = "public-xxh3-v1": "the chain that everybody can compute",
        Keyed = "keyed-xxh3-v1": "seeded from a secret key",
    }

    /// What to do with a request whose prefill worker fails. Option `router-prefill-failure`.
    PrefillFailure {
        Fallback = "fallback": "the decode worker computes the prefill too",
        Fail = "fail": "the request fails",
    }

    /// Which part of a request a mock engine computes. Option `disaggregation-mode`.
    DisaggregationMode {
        Agg = "agg": "all of it",
        Prefill = "prefill": "the prompt",
        Decode = "decode": "the answer to a prompt that another has computed",
    }

    /// Whose words a mock engine server speaks about prompts of others. Option `disaggregation-engine`.
    DisaggregationEngine {
        Vllm = "vllm": "vLLM with a KV connector: `kv_transfer_params`",
        Sglang = "sglang": "SGLang: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`",
    }

    /// Old admission switch. Option `admission-control`.
    AdmissionControl {
        TokenCapacity = "token-capacity": "removed",
        None = "none": "removed",
    }

    /// How workers are discovered. Option `discovery-backend`.
    DiscoveryBackend {
        Kubernetes = "kubernetes": "Kubernetes resources",
        Etcd = "etcd": "leased keys in etcd",
        File = "file": "files in a shared directory",
        Mem = "mem": "in this process only",
        Static = "static": "the workers named by --worker",
    }

    /// Transport of requests to token workers. Option `request-plane`.
    RequestPlane {
        Tcp = "tcp": "direct connections",
        Nats = "nats": "through a NATS server",
        Http = "http": "HTTP/2 posts",
    }

    /// Transport of KV events and load reports. Option `event-plane`.
    EventPlane {
        Nats = "nats": "through a NATS server",
        Zmq = "zmq": "directly from each worker",
    }

    /// Encoding on a plane. Options `event-plane-codec`, `request-plane-codec`.
    PlaneCodec {
        Json = "json": "text",
        Msgpack = "msgpack": "binary",
    }

    /// Field that carries reasoning text. Option `reasoning-field-name`.
    ReasoningField {
        ReasoningContent = "reasoning_content": "as most engines name it",
        Reasoning = "reasoning": "as newer clients expect it",
    }

    /// Which preprocessor turns chats into tokens. Option `dyn-chat-processor`.
    ChatProcessor {
        Dynamo = "dynamo": "Kvasir itself",
        Vllm = "vllm": "vLLM's own",
        Sglang = "sglang": "SGLang's own",
    }

    /// Tokenizer library. Option `tokenizer`.
    TokenizerBackend {
        Default = "default": "the reference library",
        Fastokens = "fastokens": "the fastest that gives the same ids",
    }

    /// How strictly transfers stay in a domain. Option `kv-transfer-enforcement`.
    TransferEnforcement {
        Required = "required": "other domains are excluded",
        Preferred = "preferred": "other domains cost more",
    }

    /// Format of log lines. Option `log-format`.
    LogFormat {
        Text = "text": "human-readable",
        Json = "json": "one JSON object per line",
    }

    /// Model and device of an engine. Option `engine`.
    EnginePreset {
        H200Llama8b = "h200-llama-8b": "Llama-3.1-8B on one H200",
        H200Qwen32b = "h200-qwen-32b": "Qwen3-32B on one H200",
        Polynomial = "polynomial": "the formula of Dynamo's mock engine, 16384 blocks",
        Constant = "constant": "the costs of --step-ms, --prompt-token-ms and --decode-ms, 16384 blocks",
    }

    /// Format of published KV events. Option `event-wire`.
    EventWire {
        Vllm = "vllm": "vLLM 0.24 and later: maps",
        VllmBytes = "vllm-bytes": "the same with block names of 32 bytes",
        Vllm20 = "vllm-0.20": "vLLM 0.20 to 0.23: arrays",
        Vllm09 = "vllm-0.9": "vLLM 0.9: shorter arrays",
        Sglang = "sglang": "SGLang 0.5.20 and later: maps",
        SglangArrays = "sglang-0.5.18": "SGLang up to 0.5.18: arrays",
    }

    /// Format of a trace. Option `trace-format`.
    TraceFormat {
        Auto = "auto": "detected from the first line",
        Mooncake = "mooncake": "block ids, as published with Mooncake",
        Plain = "plain": "tokens, text or hashes",
    }

    /// Command whose options `kvasir config` shows. Option `for`.
    ForCommand {
        Frontend = "frontend": "kvasir frontend",
        Demo = "demo": "kvasir demo",
        Router = "router": "kvasir router",
        Indexer = "indexer": "kvasir indexer",
        SlotTracker = "slot-tracker": "kvasir slot-tracker",
        Select = "select": "kvasir select",
        Mocker = "mocker": "kvasir mocker",
        Replay = "replay": "kvasir replay",
        Why = "why": "kvasir why",
        Workers = "workers": "kvasir workers",
        Top = "top": "kvasir top",
        Doctor = "doctor": "kvasir doctor",
        Health = "health": "kvasir health",
    }
}

/// Lets settings be read as these types.
macro_rules! typed_choices {
    ($($ty:ident),+ $(,)?) => {$(
        impl SettingType for $ty {
            const KIND: Kind = Kind::Choice($ty::CHOICES);
            fn read(value: &Value) -> Option<Self> {
                let Value::Choice(name) = value else { return None };
                Self::find(name)
            }
        }
    )+};
}

typed_choices! {
    AdmissionControl, ChatProcessor, DiscoveryBackend, EngineFamily, EnginePreset, EventPlane,
    DisaggregationEngine, DisaggregationMode, EventWire, ForCommand, LogFormat, PlaneCodec, PreemptionMode, PrefillFailure,
    PrefillLoadModel, QueuePolicy, ReasoningField, RequestPlane, RouterMode, RouterPolicy,
    SharedCacheType,
    TokenizerBackend, TraceFormat, TrackingHash, TransferEnforcement,
}
