//! The router's settings, each field named after its option.
//!
//! `router-prefill-load-scale` on the command line is `router_prefill_load_scale` here, and
//! [`RouterConfig::set`] takes either spelling, so that a host without a command line can vary any of them by
//! name. Ranges are checked there too and are those of the option table: a test in `kvasir-cli`, which sees both,
//! compares them at and beyond their ends. Relations between options are `kvasir-config`'s business.

use std::fmt;
use std::str::FromStr;

use kvasir_placement::{PolicyConfig, QueuePolicy};
use kvasir_profile::Preset;

/// Seconds beyond which a span is surely a mistake: a thousand years.
const SECS_MAX: f64 = 31_536_000_000.0;
/// How long a booking that nobody speaks of may last.
const EXPIRY_SECS: std::ops::RangeInclusive<f64> = 0.001..=31_536_000.0;
/// Most decisions that are kept.
const DECISION_LOG_MAX: u32 = 1 << 24;

/// How a worker is chosen (`router-mode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub enum Mode {
    /// Each free worker in turn.
    #[default]
    RoundRobin,
    /// Any free worker.
    Random,
    /// Lowest cost: uncached prompt work plus decode load.
    Kv,
    /// The worker that the request names.
    Direct,
    /// The less loaded of two drawn at random.
    PowerOfTwo,
    /// Fewest requests in flight.
    LeastLoaded,
    /// Processors and accelerators in proportion, then fewest in flight.
    DeviceAwareWeighted,
}

/// How booked prompt work is thought to shrink before its first token (`router-prefill-load-model`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PrefillLoadModel {
    /// Not at all.
    #[default]
    None,
    /// By the time a measured profile predicts.
    Aic,
    /// By the time learned from each worker's own first tokens.
    Learned,
}

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

/// The router's settings with Dynamo's defaults. Clone one, [`set`](Self::set) what differs.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    /// Tokens per block; from the model card, must match the workers. At least 1.
    pub kv_cache_block_size: u32,
    /// How a worker is chosen.
    pub router_mode: Mode,
    /// What part of a request this router places.
    pub router_role: Role,
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
    /// Look the overlap of a parked request up again after this long; 0 never.
    pub router_overlap_refresh_after_secs: f64,
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
    /// How long a worker that fails is set aside at most; 0 never. The first time it is much shorter.
    pub runtime_inhibited_duration_secs: f64,
    /// Decisions kept for `why`. Ours.
    pub router_decision_log: u32,
    /// Seed of every draw. Ours.
    pub router_seed: u64,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            kv_cache_block_size: 16,
            router_mode: Mode::RoundRobin,
            router_role: Role::Aggregated,
            router_kv_overlap_score_credit: 1.0,
            router_kv_overlap_score_credit_decay: 0.0,
            router_prefill_load_scale: 1.0,
            router_decode_active_request_weight: 0.0,
            router_host_cache_hit_weight: 0.75,
            router_disk_cache_hit_weight: 0.25,
            shared_cache_multiplier: 0.5,
            router_temperature: 0.0,
            router_kv_events: true,
            router_predicted_ttl_secs: None,
            router_track_active_blocks: true,
            router_track_output_blocks: false,
            router_assume_kv_reuse: true,
            router_track_prefill_tokens: true,
            router_prefill_load_model: PrefillLoadModel::None,
            aic_profile: None,
            router_queue_threshold: Some(16.0),
            router_queue_policy: QueuePolicy::Fcfs,
            router_policy_config: None,
            router_queue_max_requests: 16_384,
            router_queue_max_wait_secs: 600.0,
            router_overlap_refresh_after_secs: 10.0,
            router_active_request_expiry_secs: 300.0,
            active_decode_blocks_threshold: None,
            active_prefill_tokens_threshold: None,
            active_prefill_tokens_threshold_frac: None,
            router_session_affinity_ttl_secs: None,
            router_max_sessions: 100_000,
            encoder_cuda_to_cpu_ratio: 8,
            runtime_inhibited_duration_secs: 5.0,
            router_decision_log: 4096,
            router_seed: 0,
        }
    }
}

/// Why a setting was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No such option.
    #[error("the router has no option `{0}`")]
    Unknown(String),
    /// Not a value of this option.
    #[error("`{value}` is no value of `{name}`: {expected}")]
    Value {
        /// The option.
        name: String,
        /// What was given.
        value: String,
        /// What it takes.
        expected: &'static str,
    },
}

impl RouterConfig {
    /// Sets an option by name, with or without leading dashes, with dashes or underscores. `load-aware`,
    /// the deprecated `router-kv-overlap-score-weight` and `no-` negations are understood.
    ///
    /// ```
    /// # use kvasir_router::{Mode, RouterConfig};
    /// let mut config = RouterConfig::default();
    /// config.set("router-mode", "kv")?;
    /// config.set("router_prefill_load_scale", "16")?;
    /// config.set("no-router-kv-events", "")?;
    /// assert_eq!((config.router_mode, config.router_kv_events), (Mode::Kv, false));
    /// assert!(config.set("router-temprature", "1").is_err());
    /// assert!(config.set("router-temperature", "-1").is_err());
    /// # Ok::<(), kvasir_router::ConfigError>(())
    /// ```
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), ConfigError> {
        let key = name.trim_start_matches('-').replace('_', "-");
        let result = match key.strip_prefix("no-") {
            Some(positive) => switch(value, true).and_then(|on| self.put(positive, bool_text(!on))),
            None => self.put(&key, value.trim()),
        };
        result.map_err(|problem| match problem {
            Problem::Unknown => ConfigError::Unknown(name.to_owned()),
            Problem::Expected(expected) => ConfigError::Value {
                name: name.to_owned(),
                value: value.to_owned(),
                expected,
            },
        })
    }

    fn put(&mut self, key: &str, value: &str) -> Result<(), Problem> {
        match key {
            // Unset leaves it to others: the workers' word, the scale that this old option stands for.
            "kv-cache-block-size"
            | "router-block-size"
            | "router-kv-overlap-score-weight"
            | "kv-overlap-score-weight"
                if is_none(value) => {}
            "kv-cache-block-size" | "router-block-size" => {
                self.kv_cache_block_size = ranged(value, 1..=u32::MAX)?;
            }
            "router-mode" => self.router_mode = named(value, Mode::NAMES)?,
            "router-role" => self.router_role = named(value, Role::NAMES)?,
            "router-prefill-load-model" => {
                self.router_prefill_load_model = named(value, PrefillLoadModel::NAMES)?;
            }
            "router-queue-policy" => self.router_queue_policy = named(value, QUEUE_POLICIES)?,
            "aic-profile" => self.aic_profile = optional(value, preset)?,
            "load-aware" => {
                if switch(value, true)? {
                    self.load_aware();
                }
            }
            "router-kv-overlap-score-weight" | "kv-overlap-score-weight" => {
                self.overlap_score_weight(real(value)?);
            }
            "active-decode-blocks-threshold" | "busy-threshold" => {
                self.active_decode_blocks_threshold = optional(value, share)?;
            }
            _ => return self.put_number(key, value),
        }
        Ok(())
    }

    fn put_number(&mut self, key: &str, value: &str) -> Result<(), Problem> {
        match key {
            "router-kv-overlap-score-credit" => self.router_kv_overlap_score_credit = share(value)?,
            "router-kv-overlap-score-credit-decay" => {
                self.router_kv_overlap_score_credit_decay = real(value)?;
            }
            "router-prefill-load-scale" => self.router_prefill_load_scale = real(value)?,
            "router-decode-active-request-weight" => {
                self.router_decode_active_request_weight = real(value)?;
            }
            "router-host-cache-hit-weight" => self.router_host_cache_hit_weight = share(value)?,
            "router-disk-cache-hit-weight" => self.router_disk_cache_hit_weight = share(value)?,
            "shared-cache-multiplier" => self.shared_cache_multiplier = share(value)?,
            "router-temperature" => self.router_temperature = real(value)?,
            "router-predicted-ttl-secs" => {
                self.router_predicted_ttl_secs = optional(value, secs)?;
            }
            "router-queue-threshold" => self.router_queue_threshold = optional(value, above_zero)?,
            "router-queue-max-requests" => {
                self.router_queue_max_requests = ranged(value, 1..=u32::MAX)?
            }
            "router-queue-max-wait-secs" => self.router_queue_max_wait_secs = secs(value)?,
            "router-overlap-refresh-after-secs" => {
                self.router_overlap_refresh_after_secs = secs(value)?;
            }
            "router-active-request-expiry-secs" => {
                self.router_active_request_expiry_secs = within(value, EXPIRY_SECS)?;
            }
            "active-prefill-tokens-threshold" => {
                self.active_prefill_tokens_threshold = optional(value, whole)?;
            }
            "active-prefill-tokens-threshold-frac" => {
                self.active_prefill_tokens_threshold_frac = optional(value, real)?;
            }
            "router-session-affinity-ttl-secs" => {
                self.router_session_affinity_ttl_secs =
                    optional(value, |v| ranged(v, 1..=31_536_000))?;
            }
            "router-max-sessions" => self.router_max_sessions = ranged(value, 1..=u32::MAX)?,
            "encoder-cuda-to-cpu-ratio" => {
                self.encoder_cuda_to_cpu_ratio = ranged(value, 1..=u32::MAX)?;
            }
            "runtime-inhibited-duration-secs" => {
                self.runtime_inhibited_duration_secs = secs(value)?;
            }
            "router-decision-log" => {
                self.router_decision_log = ranged(value, 0..=DECISION_LOG_MAX)?
            }
            "router-seed" => self.router_seed = whole(value)?,
            _ => return self.put_switch(key, value),
        }
        Ok(())
    }

    fn put_switch(&mut self, key: &str, value: &str) -> Result<(), Problem> {
        let field = match key {
            "router-kv-events" | "kv-events" => &mut self.router_kv_events,
            "router-track-active-blocks" | "track-active-blocks" => {
                &mut self.router_track_active_blocks
            }
            "router-track-output-blocks" | "track-output-blocks" => {
                &mut self.router_track_output_blocks
            }
            "router-assume-kv-reuse" | "assume-kv-reuse" => &mut self.router_assume_kv_reuse,
            "router-track-prefill-tokens" => &mut self.router_track_prefill_tokens,
            _ => return Err(Problem::Unknown),
        };
        *field = switch(value, true)?;
        Ok(())
    }

    /// The preset `--load-aware`: kv mode that counts load and ignores caches, whatever was set before.
    pub fn load_aware(&mut self) {
        self.router_mode = Mode::Kv;
        self.router_kv_overlap_score_credit = 0.0;
        self.router_kv_events = false;
        self.router_assume_kv_reuse = false;
        self.router_track_active_blocks = true;
        self.router_track_prefill_tokens = true;
        self.shared_cache_multiplier = 0.0;
        self.router_predicted_ttl_secs = None;
    }

    /// The deprecated overlap score weight: it is the prefill scale, and 0 also ignores caches.
    pub fn overlap_score_weight(&mut self, weight: f64) {
        self.router_prefill_load_scale = weight;
        if weight == 0.0 {
            self.router_kv_overlap_score_credit = 0.0;
        }
    }

    /// Whether decisions are recorded in an approximate or predicted index.
    #[must_use]
    pub fn records_decisions(&self) -> bool {
        self.needs_index() && (!self.router_kv_events || self.router_predicted_ttl_secs.is_some())
    }

    /// Whether an index is of any use: only in kv mode with a credit.
    #[must_use]
    pub fn needs_index(&self) -> bool {
        self.router_mode == Mode::Kv && self.router_kv_overlap_score_credit > 0.0
    }
}

/// What is wrong with a value, before the names are known.
enum Problem {
    Unknown,
    Expected(&'static str),
}

type Names<T> = &'static [(&'static str, T)];

impl Mode {
    const NAMES: Names<Self> = &[
        ("round-robin", Self::RoundRobin),
        ("random", Self::Random),
        ("kv", Self::Kv),
        ("direct", Self::Direct),
        ("power-of-two", Self::PowerOfTwo),
        ("least-loaded", Self::LeastLoaded),
        ("device-aware-weighted", Self::DeviceAwareWeighted),
    ];

    /// As `router-mode` spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        let found = Self::NAMES.iter().find(|(_, mode)| *mode == self);
        found.map_or("", |(name, _)| name)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Role {
    const NAMES: Names<Self> = &[
        ("aggregated", Self::Aggregated),
        ("prefill", Self::Prefill),
        ("decode", Self::Decode),
    ];
}

impl PrefillLoadModel {
    const NAMES: Names<Self> = &[
        ("none", Self::None),
        ("aic", Self::Aic),
        ("learned", Self::Learned),
    ];
}

const QUEUE_POLICIES: Names<QueuePolicy> = &[
    ("fcfs", QueuePolicy::Fcfs),
    ("lcfs", QueuePolicy::Lcfs),
    ("wspt", QueuePolicy::Wspt),
    ("wspt-uncached", QueuePolicy::WsptUncached),
];

fn named<T: Copy>(value: &str, names: Names<T>) -> Result<T, Problem> {
    let wanted = value.to_ascii_lowercase().replace('_', "-");
    let found = names.iter().find(|(name, _)| *name == wanted);
    found
        .map(|(_, value)| *value)
        .ok_or(Problem::Expected("not one of its names"))
}

fn preset(value: &str) -> Result<Preset, Problem> {
    Preset::find(value).ok_or(Problem::Expected("not an embedded profile"))
}

fn real(value: &str) -> Result<f64, Problem> {
    let number = value
        .parse()
        .ok()
        .filter(|v: &f64| v.is_finite() && *v >= 0.0);
    number.ok_or(Problem::Expected("a finite number, at least 0"))
}

fn share(value: &str) -> Result<f64, Problem> {
    let number = value.parse().ok().filter(|v: &f64| (0.0..=1.0).contains(v));
    number.ok_or(Problem::Expected("a number from 0 to 1"))
}

fn above_zero(value: &str) -> Result<f64, Problem> {
    let number = real(value).ok().filter(|v| *v > 0.0);
    number.ok_or(Problem::Expected("a finite number above 0"))
}

fn secs(value: &str) -> Result<f64, Problem> {
    within(value, 0.0..=SECS_MAX)
}

fn within(value: &str, range: std::ops::RangeInclusive<f64>) -> Result<f64, Problem> {
    let number = value.parse().ok().filter(|v| range.contains(v));
    number.ok_or(Problem::Expected("a number in its range"))
}

fn whole<T: FromStr>(value: &str) -> Result<T, Problem> {
    value
        .parse()
        .map_err(|_| Problem::Expected("a whole number, at least 0"))
}

fn ranged<T: FromStr + PartialOrd>(
    value: &str,
    range: std::ops::RangeInclusive<T>,
) -> Result<T, Problem> {
    let number = value.parse().ok().filter(|v| range.contains(v));
    number.ok_or(Problem::Expected("a whole number in its range"))
}

fn optional<T>(
    value: &str,
    read: impl Fn(&str) -> Result<T, Problem>,
) -> Result<Option<T>, Problem> {
    match is_none(value) {
        true => Ok(None),
        false => read(value).map(Some),
    }
}

fn is_none(value: &str) -> bool {
    value.is_empty() || value.eq_ignore_ascii_case("none")
}

fn switch(value: &str, bare: bool) -> Result<bool, Problem> {
    match value.to_ascii_lowercase().as_str() {
        "" => Ok(bare),
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err(Problem::Expected("true or false")),
    }
}

fn bool_text(on: bool) -> &'static str {
    if on { "true" } else { "false" }
}
