//! What a request's settings come to: the router's, with what the request overrides.

use kvasir_placement::{Overrides, Weights};

use crate::{Role, RouterConfig};

/// The settings of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RequestSettings {
    pub(crate) weights: Weights,
    pub(crate) temperature: f64,
    pub(crate) shares: bool,
}

impl RequestSettings {
    /// Puts a request's overrides over the router's settings.
    pub(crate) fn of(config: &RouterConfig, own: &Overrides) -> Self {
        let mut weights = Weights {
            block_size: config.kv_cache_block_size.max(1),
            overlap_score_credit: own
                .overlap_score_credit
                .unwrap_or(config.router_kv_overlap_score_credit),
            overlap_score_credit_decay: config.router_kv_overlap_score_credit_decay,
            prefill_load_scale: own
                .prefill_load_scale
                .unwrap_or(config.router_prefill_load_scale),
            decode_active_request_weight: config.router_decode_active_request_weight,
            host_cache_hit_weight: config.router_host_cache_hit_weight,
            disk_cache_hit_weight: config.router_disk_cache_hit_weight,
            shared_cache_multiplier: own
                .shared_cache_multiplier
                .unwrap_or(config.shared_cache_multiplier),
            track_prefill_tokens: own
                .track_prefill_tokens
                .unwrap_or(config.router_track_prefill_tokens),
            decode_stage: config.router_role == Role::Decode || config.router_conditional_disagg,
        };
        // The older spelling beats the newer scale, and its 0 also beats the newer credit.
        if let Some(weight) = own.overlap_score_weight {
            weights.prefill_load_scale = weight;
            if weight == 0.0 {
                weights.overlap_score_credit = 0.0;
            }
        }
        Self {
            weights,
            temperature: own.router_temperature.unwrap_or(config.router_temperature),
            shares: own.assume_kv_reuse.unwrap_or(config.router_assume_kv_reuse),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(own: Overrides) -> (f64, f64) {
        let weights = RequestSettings::of(&RouterConfig::default(), &own).weights;
        (weights.prefill_load_scale, weights.overlap_score_credit)
    }

    #[test]
    fn the_older_weight_is_the_scale_and_its_zero_also_the_credit() {
        let none = Overrides::default();
        assert_eq!(with(none), (1.0, 1.0));
        let legacy = |weight| Overrides {
            overlap_score_weight: Some(weight),
            prefill_load_scale: Some(7.0),
            overlap_score_credit: Some(0.5),
            ..none
        };
        assert_eq!(with(legacy(3.0)), (3.0, 0.5));
        assert_eq!(with(legacy(0.0)), (0.0, 0.0));
        let new = Overrides {
            overlap_score_weight: None,
            ..legacy(0.0)
        };
        assert_eq!(with(new), (7.0, 0.5));
    }

    #[test]
    fn each_override_replaces_its_setting() {
        let own = Overrides {
            router_temperature: Some(0.7),
            assume_kv_reuse: Some(false),
            track_prefill_tokens: Some(false),
            shared_cache_multiplier: Some(0.1),
            ..Overrides::default()
        };
        let settings = RequestSettings::of(&RouterConfig::default(), &own);
        assert_eq!((settings.temperature, settings.shares), (0.7, false));
        assert!(!settings.weights.track_prefill_tokens);
        assert_eq!(settings.weights.shared_cache_multiplier, 0.1);
    }
}
