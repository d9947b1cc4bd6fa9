//! A router's settings, as programs for Dynamo write them.
//!
//! Answers one question: what do the names of `KvRouterConfig` mean here? Defaults, ranges and choices are those of the options
//! (`kvasir_options`); a name that neither knows is refused.
//!
//! What always holds: a value that an option could not have is a `ValueError` that names it; a setting that has no effect in a program
//! is kept and says so in [`KvRouterConfig::without_effect`].

use std::path::Path;
use std::time::Duration;

use kvasir_embed::{LogReading, Sharing};
use kvasir_host::PolicyFile;
use kvasir_index::{Approximate, IndexOptions};
use kvasir_options::{PrefillLoadModel, QueuePolicy, RouterMode, RouterPolicy, router};
use kvasir_router::RouterConfig;
use kvasir_setup::measured_profile;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use serde_json::{Map, Value};

/// Names that may stand without their name, in this order.
const POSITIONAL: [&str; 5] = [
    "overlap_score_weight",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "router_temperature",
    "use_kv_events",
];

/// Messages in a stream past which a snapshot is taken, unless it is said.
const SNAPSHOT_THRESHOLD: u64 = 1_000_000;

/// A setting's type, from JSON.
trait FromJson: Sized {
    fn from_json(value: &Value) -> Option<Self>;
    fn to_json(&self) -> Value;
}

impl FromJson for f64 {
    fn from_json(value: &Value) -> Option<Self> {
        value.as_f64()
    }
    fn to_json(&self) -> Value {
        Value::from(*self)
    }
}

impl FromJson for bool {
    fn from_json(value: &Value) -> Option<Self> {
        value.as_bool()
    }
    fn to_json(&self) -> Value {
        Value::from(*self)
    }
}

impl FromJson for u64 {
    fn from_json(value: &Value) -> Option<Self> {
        value.as_u64()
    }
    fn to_json(&self) -> Value {
        Value::from(*self)
    }
}

impl FromJson for String {
    fn from_json(value: &Value) -> Option<Self> {
        value.as_str().map(Into::into)
    }
    fn to_json(&self) -> Value {
        Value::from(self.as_str())
    }
}

impl<T: FromJson> FromJson for Option<T> {
    fn from_json(value: &Value) -> Option<Self> {
        match value {
            Value::Null => Some(None),
            value => T::from_json(value).map(Some),
        }
    }
    fn to_json(&self) -> Value {
        self.as_ref().map_or(Value::Null, T::to_json)
    }
}

/// One list of settings: fields, defaults, getters, and how each is set by name.
macro_rules! settings {
    ($( $(#[doc = $doc:literal])+ $name:ident: $ty:ty = $default:expr, )+) => {
        /// How a router chooses: `KvRouterConfig(overlap_score_weight=None, host_cache_hit_weight=0.75, disk_cache_hit_weight=0.25,
        /// router_temperature=0.0, use_kv_events=True, *, ...)`.
        ///
        /// The names and defaults are those of Dynamo 1.6.1, and those of its older releases too. Each can be read back under its name.
        #[pyclass(frozen, get_all, eq, skip_from_py_object, module = "kvasir")]
        #[derive(Clone, Debug, PartialEq)]
        pub(crate) struct KvRouterConfig {
            $( $(#[doc = $doc])+ pub(crate) $name: $ty, )+
        }

        impl Default for KvRouterConfig {
            fn default() -> Self {
                Self { $( $name: $default, )+ }
            }
        }

        impl KvRouterConfig {
            const NAMES: &'static [&'static str] = &[ $( stringify!($name), )+ ];

            /// Sets one by name from Python; false if there is none of that name.
            fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
                match name {
                    $( stringify!($name) => {
                        self.$name = value.extract::<$ty>().map_err(|error| {
                            let text = format!("argument '{name}': {}", error.value(value.py()));
                            PyTypeError::new_err(text)
                        })?;
                    } )+
                    _ => return Ok(false),
                }
                Ok(true)
            }

            /// Sets one by name from JSON.
            fn set_json(&mut self, name: &str, value: &Value) -> Result<(), String> {
                match name {
                    $( stringify!($name) => match FromJson::from_json(value) {
                        Some(value) => self.$name = value,
                        None => return Err(format!("{name} cannot be {value}")),
                    }, )+
                    _ => return Err(format!(
                        "unknown field `{name}`, expected one of {}", Self::NAMES.join(", ")
                    )),
                }
                Ok(())
            }

            fn json(&self) -> Map<String, Value> {
                let mut all = Map::new();
                $( all.insert(stringify!($name).into(), self.$name.to_json()); )+
                all
            }
        }
    };
}

settings! {
    /// Older name of `prefill_load_scale`; 0 switches the index off.
    overlap_score_weight: Option<f64> = None,
    /// Worth of a block in host memory.
    host_cache_hit_weight: f64 = router::ROUTER_HOST_CACHE_HIT_WEIGHT.default,
    /// Worth of a block on disk or further away.
    disk_cache_hit_weight: f64 = router::ROUTER_DISK_CACHE_HIT_WEIGHT.default,
    /// 0 takes the cheapest worker, more draws among the cheap.
    router_temperature: f64 = router::ROUTER_TEMPERATURE.default,
    /// Whether workers publish what their caches hold.
    use_kv_events: bool = router::ROUTER_KV_EVENTS.default,
    /// Whether replicas tell each other what they book.
    router_replica_sync: bool = false,
    /// Count the blocks of running requests.
    router_track_active_blocks: bool = router::ROUTER_TRACK_ACTIVE_BLOCKS.default,
    /// Count the blocks that they generate, too.
    router_track_output_blocks: bool = router::ROUTER_TRACK_OUTPUT_BLOCKS.default,
    /// Running requests of a worker share equal blocks.
    router_assume_kv_reuse: bool = router::ROUTER_ASSUME_KV_REUSE.default,
    /// Count prompt tokens that are not computed yet.
    router_track_prefill_tokens: bool = router::ROUTER_TRACK_PREFILL_TOKENS.default,
    /// How booked prompt work shrinks before the first token: none, aic or learned.
    router_prefill_load_model: String = "none".into(),
    /// Without events: how long a routed block counts as cached.
    router_ttl_secs: f64 = router::ROUTER_TTL_SECS.default,
    /// Without events: ttl or lru.
    router_approximate_cache_policy: String = "ttl".into(),
    /// Hold requests back while every worker has more batches of prompt waiting than this.
    router_queue_threshold: Option<f64> = None,
    /// Threads that apply events.
    router_event_threads: u64 = 4,
    /// Order of those held back: fcfs, lcfs, wspt or wspt-uncached.
    router_queue_policy: String = "fcfs".into(),
    /// Ask an index that runs elsewhere.
    use_remote_indexer: bool = false,
    /// Let others ask this index.
    serve_indexer: bool = false,
    /// Remember what sessions sent.
    enable_session_prefix_index: bool = false,
    /// Worth of a block in a cache that workers share; none takes the default.
    shared_cache_multiplier: Option<f64> = None,
    /// Which cache workers share.
    shared_cache_type: String = "none".into(),
    /// Beside events: how long a routed prompt counts as cached.
    router_predicted_ttl_secs: Option<f64> = None,
    /// Decide per request whether to prefill elsewhere.
    conditional_disagg_enabled: bool = false,
    /// How that is decided.
    conditional_disagg_policy: String = "isl_bounding".into(),
    /// Uncached tokens from which on it is done.
    conditional_disagg_eff_isl_threshold: u64 = 2048,
    /// Uncached share from which on it is done.
    conditional_disagg_eff_isl_ratio_threshold: f64 = 0.7,
    /// Load of prefill workers from which on it is not done.
    conditional_disagg_prefill_busy_threshold: Option<f64> = None,
    /// Load of decode workers from which on it is done.
    conditional_disagg_decode_busy_threshold: Option<f64> = None,
    /// Blocks of cost saved per block held in device memory.
    overlap_score_credit: f64 = router::ROUTER_KV_OVERLAP_SCORE_CREDIT.default,
    /// How fast that credit fades with the prompt work that waits.
    overlap_score_credit_decay: f64 = router::ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY.default,
    /// Weight of the prefill term against the decode term.
    prefill_load_scale: f64 = router::ROUTER_PREFILL_LOAD_SCALE.default,
    /// Cost of each running request, in blocks.
    decode_active_request_weight: f64 = router::ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT.default,
    /// A file with policy classes.
    router_policy_config: Option<String> = None,
    /// Cost policy of prefill workers.
    router_prefill_policy: Option<String> = None,
    /// Cost policy of decode workers.
    router_decode_policy: Option<String> = None,
    /// How blocks are named between routers.
    router_tracking_hash: String = "public-xxh3-v1".into(),
    /// A key for that.
    router_tracking_key_file: Option<String> = None,
    /// Its name.
    router_tracking_key_id: Option<String> = None,
    /// Older: events are read from JetStream, which keeps them.
    durable_kv_events: bool = false,
    /// Older: events between two snapshots.
    router_snapshot_threshold: Option<u64> = Some(SNAPSHOT_THRESHOLD),
    /// Older: forget what is stored at the start.
    router_reset_states: bool = false,
    /// Older: without events, blocks remembered.
    router_max_tree_size: u64 = router::ROUTER_MAX_TREE_SIZE.default,
    /// Older: what share of them a pruning leaves.
    router_prune_target_ratio: f64 = router::ROUTER_PRUNE_TARGET_RATIO.default,
    /// Older: do not wait for the first worker.
    skip_initial_worker_wait: bool = false,
}

/// Settings that are kept and have no effect in a router of this process.
const WITHOUT_EFFECT: [&str; 13] = [
    "router_event_threads",
    "enable_session_prefix_index",
    "shared_cache_type",
    "conditional_disagg_enabled",
    "conditional_disagg_policy",
    "conditional_disagg_eff_isl_threshold",
    "conditional_disagg_eff_isl_ratio_threshold",
    "conditional_disagg_prefill_busy_threshold",
    "conditional_disagg_decode_busy_threshold",
    "router_prefill_policy",
    "router_tracking_hash",
    "router_tracking_key_file",
    "router_tracking_key_id",
];

impl KvRouterConfig {
    /// Refuses values that the options behind the names could not have.
    fn check(&self) -> Result<(), String> {
        let numbers = [
            (
                "host_cache_hit_weight",
                Some(self.host_cache_hit_weight),
                router::ROUTER_HOST_CACHE_HIT_WEIGHT.range,
            ),
            (
                "disk_cache_hit_weight",
                Some(self.disk_cache_hit_weight),
                router::ROUTER_DISK_CACHE_HIT_WEIGHT.range,
            ),
            (
                "router_temperature",
                Some(self.router_temperature),
                router::ROUTER_TEMPERATURE.range,
            ),
            (
                "router_ttl_secs",
                Some(self.router_ttl_secs),
                router::ROUTER_TTL_SECS.range,
            ),
            (
                "router_queue_threshold",
                self.router_queue_threshold,
                router::ROUTER_QUEUE_THRESHOLD.range,
            ),
            (
                "shared_cache_multiplier",
                self.shared_cache_multiplier,
                router::SHARED_CACHE_MULTIPLIER.range,
            ),
            (
                "router_predicted_ttl_secs",
                self.router_predicted_ttl_secs,
                router::ROUTER_PREDICTED_TTL_SECS.range,
            ),
            (
                "overlap_score_weight",
                self.overlap_score_weight,
                router::ROUTER_KV_OVERLAP_SCORE_WEIGHT.range,
            ),
            (
                "overlap_score_credit",
                Some(self.overlap_score_credit),
                router::ROUTER_KV_OVERLAP_SCORE_CREDIT.range,
            ),
            (
                "overlap_score_credit_decay",
                Some(self.overlap_score_credit_decay),
                router::ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY.range,
            ),
            (
                "prefill_load_scale",
                Some(self.prefill_load_scale),
                router::ROUTER_PREFILL_LOAD_SCALE.range,
            ),
            (
                "decode_active_request_weight",
                Some(self.decode_active_request_weight),
                router::ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT.range,
            ),
            (
                "router_prune_target_ratio",
                Some(self.router_prune_target_ratio),
                router::ROUTER_PRUNE_TARGET_RATIO.range,
            ),
        ];
        for (name, value, range) in numbers {
            if let Some(value) = value.filter(|value| !range.allows(*value)) {
                return Err(format!("{name} cannot be {value}: {}", allowed(&range)));
            }
        }
        self.queue_policy()?;
        self.load_model()?;
        policy_named("router_decode_policy", self.router_decode_policy.as_deref())?;
        policy_named(
            "router_prefill_policy",
            self.router_prefill_policy.as_deref(),
        )?;
        if self.use_kv_events && self.router_approximate_cache_policy == "lru" {
            return Err("router_approximate_cache_policy lru needs use_kv_events=False".into());
        }
        if !self.use_kv_events && self.router_predicted_ttl_secs.is_some() {
            return Err("router_predicted_ttl_secs needs use_kv_events=True".into());
        }
        match self.router_approximate_cache_policy.as_str() {
            "ttl" | "lru" => Ok(()),
            other => Err(format!(
                "router_approximate_cache_policy cannot be {other:?}: ttl or lru"
            )),
        }
    }

    fn queue_policy(&self) -> Result<QueuePolicy, String> {
        let name = &self.router_queue_policy;
        QueuePolicy::find(name).ok_or_else(|| {
            let known: Vec<&str> = QueuePolicy::CHOICES
                .iter()
                .map(|choice| choice.name)
                .collect();
            format!(
                "router_queue_policy cannot be {name:?}: {}",
                known.join(", ")
            )
        })
    }

    fn load_model(&self) -> Result<PrefillLoadModel, String> {
        match self.router_prefill_load_model.as_str() {
            "none" => Ok(PrefillLoadModel::None),
            "learned" => Ok(PrefillLoadModel::Learned),
            // Without a profile (`with_profile`) nothing shrinks, as Dynamo has it without its configurator.
            "aic" | "ais" => Ok(PrefillLoadModel::None),
            other => Err(format!(
                "router_prefill_load_model cannot be {other:?}: none, aic or learned"
            )),
        }
    }

    /// By which cost workers are compared.
    pub(crate) fn decode_policy(&self) -> RouterPolicy {
        let named = policy_named("router_decode_policy", self.router_decode_policy.as_deref());
        named.ok().flatten().unwrap_or(RouterPolicy::Kv)
    }

    /// The classes that the policy file names, if there is one.
    pub(crate) fn policies(&self) -> PyResult<Option<PolicyFile>> {
        let Some(path) = &self.router_policy_config else {
            return Ok(None);
        };
        let read = PolicyFile::read(Path::new(path));
        let bad = |error| PyValueError::new_err(format!("router_policy_config {path}: {error}"));
        read.map(Some).map_err(bad)
    }

    /// What a router with these settings shares with others.
    pub(crate) fn sharing(&self) -> Sharing {
        let threshold = self.router_snapshot_threshold;
        let log = LogReading {
            snapshot_threshold: threshold.unwrap_or(SNAPSHOT_THRESHOLD),
            reset: self.router_reset_states,
        };
        Sharing {
            replicas: self.router_replica_sync,
            sessions: false,
            remote_index: self.use_remote_indexer,
            serves_index: self.serve_indexer,
            log: self.durable_kv_events.then_some(log),
        }
    }

    /// Prompt work shrinks as a machine computes it that was measured, if that is asked for and one is named: its system and its model.
    pub(crate) fn with_profile(
        &self,
        brain: RouterConfig,
        measured: Option<(String, String)>,
    ) -> PyResult<RouterConfig> {
        let is_asked = matches!(self.router_prefill_load_model.as_str(), "aic" | "ais");
        let Some((system, model)) = measured.filter(|_| is_asked) else {
            return Ok(brain);
        };
        let profile = measured_profile(&system, &model)
            .map_err(|error| PyValueError::new_err(format!("ais_perf_config: {error}")))?;
        Ok(RouterConfig {
            router_prefill_load_model: PrefillLoadModel::Aic,
            aic_profile: Some(profile),
            ..brain
        })
    }

    fn checked(self) -> PyResult<Self> {
        self.check().map_err(PyValueError::new_err)?;
        Ok(self.with_older_weight())
    }

    /// The older weight is the scale, and its 0 also the credit.
    fn with_older_weight(mut self) -> Self {
        if let Some(weight) = self.overlap_score_weight {
            self.prefill_load_scale = weight;
            if weight == 0.0 {
                self.overlap_score_credit = 0.0;
            }
        }
        self
    }

    /// What the brain is made from.
    pub(crate) fn brain(
        &self,
        block_size: u32,
        mode: RouterMode,
        policy: RouterPolicy,
        seed: u64,
    ) -> RouterConfig {
        let defaults = RouterConfig::default();
        RouterConfig {
            kv_cache_block_size: block_size,
            router_mode: mode,
            router_policy: policy,
            router_kv_overlap_score_credit: self.overlap_score_credit,
            router_kv_overlap_score_credit_decay: self.overlap_score_credit_decay,
            router_prefill_load_scale: self.prefill_load_scale,
            router_decode_active_request_weight: self.decode_active_request_weight,
            router_host_cache_hit_weight: self.host_cache_hit_weight,
            router_disk_cache_hit_weight: self.disk_cache_hit_weight,
            shared_cache_multiplier: self
                .shared_cache_multiplier
                .unwrap_or(defaults.shared_cache_multiplier),
            router_temperature: self.router_temperature,
            router_kv_events: self.use_kv_events,
            router_predicted_ttl_secs: self.router_predicted_ttl_secs,
            router_track_active_blocks: self.router_track_active_blocks,
            router_track_output_blocks: self.router_track_output_blocks,
            router_assume_kv_reuse: self.router_assume_kv_reuse,
            router_track_prefill_tokens: self.router_track_prefill_tokens,
            router_prefill_load_model: self.load_model().unwrap_or(PrefillLoadModel::None),
            router_queue_threshold: self.router_queue_threshold,
            router_queue_policy: self.queue_policy().unwrap_or(QueuePolicy::Fcfs),
            router_seed: seed,
            ..defaults
        }
    }

    /// What the index remembers.
    pub(crate) fn index(&self) -> IndexOptions {
        let by_age = match self.router_approximate_cache_policy.as_str() {
            "lru" => Duration::MAX,
            _ => Duration::from_secs_f64(self.router_ttl_secs),
        };
        let approximate = Approximate {
            ttl: by_age,
            max_blocks: usize::try_from(self.router_max_tree_size).unwrap_or(usize::MAX),
            prune_target_ratio: self.router_prune_target_ratio,
        };
        IndexOptions {
            max_bytes: 0,
            approximate: (!self.use_kv_events).then_some(approximate),
            predicted_ttl: self.router_predicted_ttl_secs.map(Duration::from_secs_f64),
        }
    }
}

/// The cost policy that `value` names; none for the one of all.
fn policy_named(name: &str, value: Option<&str>) -> Result<Option<RouterPolicy>, String> {
    match value {
        None | Some("default") => Ok(None),
        Some(value) => {
            let found = RouterPolicy::find(value).map(Some);
            found.ok_or_else(|| format!("{name} cannot be {value:?}: default, kv or time"))
        }
    }
}

fn allowed(range: &kvasir_options::Range) -> String {
    match range {
        kvasir_options::Range::Number {
            min,
            max,
            above_min,
        } => match (max.is_finite(), above_min) {
            (true, _) => format!("it must be between {min} and {max}"),
            (false, true) => format!("it must be finite and more than {min}"),
            (false, false) => format!("it must be finite and at least {min}"),
        },
        _ => "it is out of range".into(),
    }
}

#[pymethods]
impl KvRouterConfig {
    #[new]
    #[pyo3(signature = (*args, **kwargs), text_signature = "(overlap_score_weight=None, host_cache_hit_weight=0.75, disk_cache_hit_weight=0.25, router_temperature=0.0, \
        use_kv_events=True, *, router_replica_sync=False, router_track_active_blocks=True, \
        router_track_output_blocks=False, router_assume_kv_reuse=True, router_track_prefill_tokens=True, \
        router_prefill_load_model='none', router_ttl_secs=120.0, router_approximate_cache_policy='ttl', \
        router_queue_threshold=None, router_event_threads=4, router_queue_policy='fcfs', use_remote_indexer=False, \
        serve_indexer=False, enable_session_prefix_index=False, shared_cache_multiplier=None, shared_cache_type='none', \
        router_predicted_ttl_secs=None, conditional_disagg_enabled=False, conditional_disagg_policy='isl_bounding', \
        conditional_disagg_eff_isl_threshold=2048, conditional_disagg_eff_isl_ratio_threshold=0.7, \
        conditional_disagg_prefill_busy_threshold=None, conditional_disagg_decode_busy_threshold=None, \
        overlap_score_credit=1.0, overlap_score_credit_decay=0.0, prefill_load_scale=1.0, \
        decode_active_request_weight=0.0, router_policy_config=None, router_prefill_policy=None, \
        router_decode_policy=None, router_tracking_hash='public-xxh3-v1', router_tracking_key_file=None, \
        router_tracking_key_id=None, durable_kv_events=False, router_snapshot_threshold=1000000, \
        router_reset_states=False, router_max_tree_size=1048576, router_prune_target_ratio=0.8, \
        skip_initial_worker_wait=False)")]
    fn new(args: &Bound<'_, PyTuple>, kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut config = Self::default();
        if args.len() > POSITIONAL.len() {
            return Err(PyTypeError::new_err(format!(
                "KvRouterConfig() takes {} positional arguments ({}), {} were given; name the others",
                POSITIONAL.len(),
                POSITIONAL.join(", "),
                args.len()
            )));
        }
        for (name, value) in POSITIONAL.iter().zip(args.iter()) {
            config.set(name, &value)?;
        }
        for (name, value) in kwargs.into_iter().flatten() {
            let name: String = name.extract()?;
            let at = POSITIONAL.iter().position(|known| *known == name);
            if at.is_some_and(|at| at < args.len()) {
                return Err(PyTypeError::new_err(format!(
                    "KvRouterConfig() got {name} twice"
                )));
            }
            if !config.set(&name, &value)? {
                return Err(PyTypeError::new_err(format!(
                    "KvRouterConfig() got an unexpected keyword argument '{name}'"
                )));
            }
        }
        config.checked()
    }

    /// The settings that a JSON object has, and defaults for the others. A name that there is not is a `ValueError`.
    #[staticmethod]
    fn from_json(config_json: &str) -> PyResult<Self> {
        let bad = |text: String| {
            PyValueError::new_err(format!("Failed to parse KvRouterConfig JSON: {text}"))
        };
        let value: Value =
            serde_json::from_str(config_json).map_err(|error| bad(error.to_string()))?;
        let Value::Object(members) = value else {
            return Err(bad("it is not an object".into()));
        };
        let mut config = Self::default();
        for (name, value) in &members {
            config.set_json(name, value).map_err(bad)?;
        }
        config.checked()
    }

    /// All settings as a JSON object that `from_json` takes.
    fn to_json(&self) -> String {
        Value::Object(self.json()).to_string()
    }

    /// Another with the same settings.
    fn copy(&self) -> Self {
        self.clone()
    }

    /// The same settings but for those named here.
    #[pyo3(signature = (overlap_score_weight=None, *, overlap_score_credit=None, overlap_score_credit_decay=None, prefill_load_scale=None, decode_active_request_weight=None))]
    fn with_overrides(
        &self,
        overlap_score_weight: Option<f64>,
        overlap_score_credit: Option<f64>,
        overlap_score_credit_decay: Option<f64>,
        prefill_load_scale: Option<f64>,
        decode_active_request_weight: Option<f64>,
    ) -> PyResult<Self> {
        let same = self.clone();
        Self {
            overlap_score_weight: overlap_score_weight.or(match prefill_load_scale {
                // The newer name is the later word.
                Some(_) => None,
                None => same.overlap_score_weight,
            }),
            overlap_score_credit: overlap_score_credit.unwrap_or(same.overlap_score_credit),
            overlap_score_credit_decay: overlap_score_credit_decay
                .unwrap_or(same.overlap_score_credit_decay),
            prefill_load_scale: prefill_load_scale.unwrap_or(same.prefill_load_scale),
            decode_active_request_weight: decode_active_request_weight
                .unwrap_or(same.decode_active_request_weight),
            ..same
        }
        .checked()
    }

    /// Names of settings that differ from their defaults and have no effect in a router of this process.
    fn without_effect(&self) -> Vec<&'static str> {
        let (own, defaults) = (self.json(), Self::default().json());
        WITHOUT_EFFECT
            .into_iter()
            .filter(|name| own.get(*name) != defaults.get(*name))
            .collect()
    }

    fn __repr__(&self) -> String {
        let (own, defaults) = (self.json(), Self::default().json());
        let set = own
            .iter()
            .filter(|(name, value)| defaults.get(*name) != Some(value));
        let set: Vec<String> = set.map(|(name, value)| format!("{name}={value}")).collect();
        format!("KvRouterConfig({})", set.join(", "))
    }
}
