//! What a request may say about its placement: pins, constraints, hints, overrides.

use std::sync::Arc;

use kvasir_options::router;
use kvasir_types::{DpRank, TransportKind, WorkerId};

/// A worker, or a worker and rank, that the request names. A rank without a worker has no effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pin {
    /// The worker to use.
    pub worker: Option<WorkerId>,
    /// Its rank; needed where the worker has several.
    pub rank: Option<DpRank>,
}

/// Which workers may serve the request, and which it would rather have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Constraints {
    /// Only these workers; `None` for all.
    pub allowed: Option<Vec<WorkerId>>,
    /// Only workers that are reached this way; `None` for all.
    pub transport: Option<TransportKind>,
    /// The worker must carry every one of these.
    pub required_taints: Vec<Arc<str>>,
    /// A worker's cost is multiplied by `exp(-tanh(w))`, `w` being the sum of the weights it carries.
    pub preferred_taints: Vec<(Arc<str>, f64)>,
    /// Narrows the candidates to workers that have this adapter loaded, if any has.
    pub lora: Option<Arc<str>>,
}

/// What the client knows about its request (`nvext.agent_hints` and the headers that override it).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hints {
    /// Seconds by which the request moves ahead in the queue; negative is 0.
    pub priority: Option<i32>,
    /// The older spelling of `priority`, used only without it.
    pub latency_sensitivity: Option<f64>,
    /// Tiers of the queue: a higher one always goes first.
    pub strict_priority: u32,
    /// How many tokens the client expects to be generated.
    pub osl: Option<u32>,
}

impl Hints {
    /// Seconds by which the request moves ahead in the queue.
    ///
    /// ```
    /// # use kvasir_placement::Hints;
    /// let both = Hints { priority: Some(3), latency_sensitivity: Some(9.0), ..Hints::default() };
    /// assert_eq!(both.priority_jump(), 3.0);
    /// let old = Hints { latency_sensitivity: Some(9.0), ..Hints::default() };
    /// assert_eq!(old.priority_jump(), 9.0);
    /// assert_eq!(Hints { priority: Some(-2), ..old }.priority_jump(), 0.0);
    /// ```
    #[must_use]
    pub fn priority_jump(&self) -> f64 {
        let asked = match (self.priority, self.latency_sensitivity) {
            (Some(priority), _) => f64::from(priority),
            (None, Some(sensitivity)) if sensitivity.is_finite() => sensitivity,
            _ => 0.0,
        };
        asked.max(0.0)
    }
}

/// Settings that one request changes for itself (`router_config_override`).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overrides {
    /// Replaces `router-kv-overlap-score-credit`.
    pub overlap_score_credit: Option<f64>,
    /// Replaces `router-prefill-load-scale`.
    pub prefill_load_scale: Option<f64>,
    /// The older spelling: becomes the scale, and 0 also becomes the credit; beats both.
    pub overlap_score_weight: Option<f64>,
    /// Replaces `router-temperature`.
    pub router_temperature: Option<f64>,
    /// Replaces `router-assume-kv-reuse`.
    pub assume_kv_reuse: Option<bool>,
    /// Replaces `router-track-prefill-tokens`.
    pub track_prefill_tokens: Option<bool>,
    /// Replaces `shared-cache-multiplier`.
    pub shared_cache_multiplier: Option<f64>,
}

impl Overrides {
    /// The first value that the option it replaces could not have, by name.
    pub fn check(&self) -> Result<(), InvalidOverride> {
        if *self == Self::default() {
            return Ok(());
        }
        let numbers = [
            (
                "overlap_score_credit",
                self.overlap_score_credit,
                router::ROUTER_KV_OVERLAP_SCORE_CREDIT.range,
            ),
            (
                "prefill_load_scale",
                self.prefill_load_scale,
                router::ROUTER_PREFILL_LOAD_SCALE.range,
            ),
            (
                "overlap_score_weight",
                self.overlap_score_weight,
                router::ROUTER_KV_OVERLAP_SCORE_WEIGHT.range,
            ),
            (
                "router_temperature",
                self.router_temperature,
                router::ROUTER_TEMPERATURE.range,
            ),
            (
                "shared_cache_multiplier",
                self.shared_cache_multiplier,
                router::SHARED_CACHE_MULTIPLIER.range,
            ),
        ];
        for (name, value, range) in numbers {
            if let Some(value) = value.filter(|value| !range.allows(*value)) {
                return Err(InvalidOverride { name, value });
            }
        }
        Ok(())
    }
}

/// An override outside of what the option it replaces may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InvalidOverride {
    /// The field.
    pub name: &'static str,
    /// What it was set to.
    pub value: f64,
}
