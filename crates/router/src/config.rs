//! The router's settings, each field named after its option.
//!
//! `--router-prefill-load-scale` is `router_prefill_load_scale` here. Defaults, ranges and names are declared in
//! `kvasir_options`, which the option table reads, too.
//!
//! Elsewhere: relations between options (`kvasir-config`); where values come from (the host).

use kvasir_options::{PrefillLoadModel, RouterMode, RouterPolicy, router};
use kvasir_placement::{PolicyConfig, QueuePolicy};
use kvasir_profile::Preset;

use crate::{ShadowPolicy, StepLaw};

/// Which part of a request's life this router places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// All of it.
    #[default]
    Aggregated,
    /// The prompt only.
    Prefill,
    /// Generation only.
    Decode,
}

/// The router's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// Tokens per block; from the model card, must match the workers. At least 1.
    pub kv_cache_block_size: u32,
    /// How a worker is chosen.
    pub router_mode: RouterMode,
    /// What `kv` mode takes for the cost of a placement.
    pub router_policy: RouterPolicy,
    /// What part of a request this router places.
    pub router_role: Role,
    /// Whether decode workers may compute prompts, though there are prefill workers: then what they have cached counts even where
    /// the prompt comes from elsewhere.
    pub router_conditional_disagg: bool,
    /// Blocks of cost saved per block held in device memory.
    pub router_kv_overlap_score_credit: f64,
    /// How fast that credit fades on workers with more waiting prompt work than the least loaded one.
    pub router_kv_overlap_score_credit_decay: f64,
    /// Weight of the prefill term against the decode term.
    pub router_prefill_load_scale: f64,
    /// Cost of each request running on a worker, in blocks.
    pub router_decode_active_request_weight: f64,
    /// Worth of a block in host memory.
    pub router_host_cache_hit_weight: f64,
    /// Worth of a block on disk or further away.
    pub router_disk_cache_hit_weight: f64,
    /// Worth of a block in the cache that all share.
    pub shared_cache_multiplier: f64,
    /// 0 takes the cheapest; above, draws with a softmax over normalised costs.
    pub router_temperature: f64,
    /// Whether engines announce their blocks; if not, decisions are recorded in an approximate index.
    pub router_kv_events: bool,
    /// Record decisions for this long in a predicted side index.
    pub router_predicted_ttl_secs: Option<f64>,
    /// Count the blocks of running requests.
    pub router_track_active_blocks: bool,
    /// Count the blocks they generate, too.
    pub router_track_output_blocks: bool,
    /// Running requests on a worker share equal blocks.
    pub router_assume_kv_reuse: bool,
    /// Count prompt tokens not yet computed.
    pub router_track_prefill_tokens: bool,
    /// How booked prompt work shrinks.
    pub router_prefill_load_model: PrefillLoadModel,
    /// The measured profile that `aic` predicts with; what the `aic-*` options name.
    pub aic_profile: Option<Preset>,
    /// Park requests while every eligible rank has more than this many batches of prompt waiting.
    pub router_queue_threshold: Option<f64>,
    /// Order of the parked.
    pub router_queue_policy: QueuePolicy,
    /// Policy classes; they replace the queue threshold and policy. The file is read by an edge.
    pub router_policy_config: Option<PolicyConfig>,
    /// Refuse when this many are parked. Ours: the threshold itself never refuses.
    pub router_queue_max_requests: u32,
    /// Refuse a request parked for longer than this. Ours.
    pub router_queue_max_wait_secs: f64,
    /// Give ranks only what they were seen to take, queue the rest and refuse at once what would wait too long. Ours.
    pub overload_protection: bool,
    /// Look the overlap of a parked request up again after this long; 0 never.
    pub router_overlap_refresh_after_secs: f64,
    /// Tell other replicas what is booked here.
    pub router_replica_sync: bool,
    /// Free bookings that nobody spoke of for this long.
    pub router_active_request_expiry_secs: f64,
    /// A rank is busy above this share of its KV blocks.
    pub active_decode_blocks_threshold: Option<f64>,
    /// A rank is busy above this many waiting prompt tokens.
    pub active_prefill_tokens_threshold: Option<u64>,
    /// A rank is busy above this many batches of waiting prompt tokens.
    pub active_prefill_tokens_threshold_frac: Option<f64>,
    /// Sessions by header live this long when idle; `None` ignores the header.
    pub router_session_affinity_ttl_secs: Option<u64>,
    /// Sessions remembered; the one unused for longest goes first. Ours.
    pub router_max_sessions: u32,
    /// How much more an accelerator is worth than a processor (`device-aware-weighted`).
    pub encoder_cuda_to_cpu_ratio: u32,
    /// How long a worker that fails is ejected at most; 0 never. The first time it is much shorter.
    pub runtime_inhibited_duration_secs: f64,
    /// How long prompts and steps take, to begin with, where that is learned. Ours.
    pub engine_law: Option<StepLaw>,
    /// Another policy that decides beside this one and acts on nothing. Ours.
    pub shadow_policy: Option<ShadowPolicy>,
    /// Decisions kept for `why`. Ours.
    pub router_decision_log: u32,
    /// Seed of every draw. Ours.
    pub router_seed: u64,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            kv_cache_block_size: router::BLOCK_SIZE_DEFAULT,
            router_mode: router::ROUTER_MODE.default,
            router_policy: router::ROUTER_POLICY.default,
            router_role: Role::Aggregated,
            router_conditional_disagg: false,
            router_kv_overlap_score_credit: router::ROUTER_KV_OVERLAP_SCORE_CREDIT.default,
            router_kv_overlap_score_credit_decay: router::ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY
                .default,
            router_prefill_load_scale: router::ROUTER_PREFILL_LOAD_SCALE.default,
            router_decode_active_request_weight: router::ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT
                .default,
            router_host_cache_hit_weight: router::ROUTER_HOST_CACHE_HIT_WEIGHT.default,
            router_disk_cache_hit_weight: router::ROUTER_DISK_CACHE_HIT_WEIGHT.default,
            shared_cache_multiplier: router::SHARED_CACHE_MULTIPLIER.default,
            router_temperature: router::ROUTER_TEMPERATURE.default,
            router_kv_events: router::ROUTER_KV_EVENTS.default,
            router_predicted_ttl_secs: router::ROUTER_PREDICTED_TTL_SECS.default,
            router_track_active_blocks: router::ROUTER_TRACK_ACTIVE_BLOCKS.default,
            router_track_output_blocks: router::ROUTER_TRACK_OUTPUT_BLOCKS.default,
            router_assume_kv_reuse: router::ROUTER_ASSUME_KV_REUSE.default,
            router_track_prefill_tokens: router::ROUTER_TRACK_PREFILL_TOKENS.default,
            router_prefill_load_model: router::ROUTER_PREFILL_LOAD_MODEL.default,
            aic_profile: None,
            router_queue_threshold: router::ROUTER_QUEUE_THRESHOLD.default,
            router_queue_policy: router::ROUTER_QUEUE_POLICY.default,
            router_policy_config: None,
            router_queue_max_requests: router::ROUTER_QUEUE_MAX_REQUESTS.default,
            router_queue_max_wait_secs: router::ROUTER_QUEUE_MAX_WAIT_SECS.default,
            overload_protection: false,
            router_overlap_refresh_after_secs: router::ROUTER_OVERLAP_REFRESH_AFTER_SECS.default,
            router_replica_sync: false,
            router_active_request_expiry_secs: router::ROUTER_ACTIVE_REQUEST_EXPIRY_SECS.default,
            active_decode_blocks_threshold: router::ACTIVE_DECODE_BLOCKS_THRESHOLD.default,
            active_prefill_tokens_threshold: router::ACTIVE_PREFILL_TOKENS_THRESHOLD.default,
            active_prefill_tokens_threshold_frac: router::ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC
                .default,
            router_session_affinity_ttl_secs: router::ROUTER_SESSION_AFFINITY_TTL_SECS.default,
            router_max_sessions: router::ROUTER_MAX_SESSIONS.default,
            encoder_cuda_to_cpu_ratio: router::ENCODER_CUDA_TO_CPU_RATIO.default,
            runtime_inhibited_duration_secs: router::RUNTIME_INHIBITED_DURATION_SECS.default,
            engine_law: None,
            shadow_policy: None,
            router_decision_log: router::ROUTER_DECISION_LOG.default,
            router_seed: 0,
        }
    }
}

impl RouterConfig {
    /// Whether decisions are recorded in an approximate or predicted index.
    #[must_use]
    pub fn records_decisions(&self) -> bool {
        self.needs_index() && (!self.router_kv_events || self.router_predicted_ttl_secs.is_some())
    }

    /// Whether an index is of any use: only in kv mode with a credit, or to a shadow of that kind.
    #[must_use]
    pub fn needs_index(&self) -> bool {
        let by_cache = |config: &Self| {
            config.router_mode == RouterMode::Kv && config.router_kv_overlap_score_credit > 0.0
        };
        by_cache(self) || self.shadow().is_some_and(by_cache)
    }

    /// Whether blocks of running requests are told apart by name.
    #[must_use]
    pub fn names_active_blocks(&self) -> bool {
        let by_load = |config: &Self| config.router_mode == RouterMode::Kv;
        self.router_track_active_blocks && (by_load(self) || self.shadow().is_some_and(by_load))
    }

    fn shadow(&self) -> Option<&Self> {
        self.shadow_policy.as_ref().map(|shadow| &*shadow.config)
    }

    /// Whether it is learned how long prompts and steps take: to place by it, or to price what a shadow does.
    #[must_use]
    pub fn learns_seconds(&self) -> bool {
        self.counts_seconds() || self.shadow_policy.is_some()
    }

    /// Whether placements cost seconds.
    #[must_use]
    pub fn counts_seconds(&self) -> bool {
        self.router_mode == RouterMode::Kv && self.router_policy == RouterPolicy::Time
    }
}
