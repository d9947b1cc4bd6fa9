//! What a request asks of its placement: settings of its own, and which workers it may or would like to have.

use std::collections::BTreeMap;

use kvasir_router::{Constraints, Overrides};
use serde::Deserialize;

/// `router_config_override`.
#[derive(Deserialize)]
pub(crate) struct ConfigOverride {
    overlap_score_credit: Option<f64>,
    prefill_load_scale: Option<f64>,
    overlap_score_weight: Option<f64>,
    router_temperature: Option<f64>,
    assume_kv_reuse: Option<bool>,
    track_prefill_tokens: Option<bool>,
    shared_cache_multiplier: Option<f64>,
}

impl ConfigOverride {
    /// For the router.
    pub(crate) const fn overrides(&self) -> Overrides {
        Overrides {
            overlap_score_credit: self.overlap_score_credit,
            prefill_load_scale: self.prefill_load_scale,
            overlap_score_weight: self.overlap_score_weight,
            router_temperature: self.router_temperature,
            assume_kv_reuse: self.assume_kv_reuse,
            track_prefill_tokens: self.track_prefill_tokens,
            shared_cache_multiplier: self.shared_cache_multiplier,
        }
    }
}

/// `routing_constraints`.
#[derive(Deserialize)]
pub(crate) struct RoutingConstraints {
    #[serde(default)]
    required_taints: Vec<String>,
    #[serde(default)]
    preferred_taints: BTreeMap<String, f64>,
}

impl RoutingConstraints {
    /// Writes them where the router reads them.
    pub(crate) fn apply(&self, constraints: &mut Constraints) {
        let required = self.required_taints.iter();
        constraints.required_taints = required.map(|taint| taint.as_str().into()).collect();
        let preferred = self.preferred_taints.iter();
        constraints.preferred_taints = preferred
            .map(|(taint, weight)| (taint.as_str().into(), *weight))
            .collect();
    }
}
