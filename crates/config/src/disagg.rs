//! The JSON value of `router-conditional-disagg-config`.
//!
//! Answers: when may a request skip the prefill worker? Unknown fields and bad numbers are
//! refused here, once; the router gets plain numbers.

use serde_json::Value as Json;

/// Tokens left to compute below which the decode worker may do the prefill itself.
const EFF_ISL_THRESHOLD: u64 = 2048;
/// Share of the prompt left to compute below which it may.
const EFF_ISL_RATIO_THRESHOLD: f64 = 0.7;

/// Which test lets a request skip the prefill worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisaggPolicy {
    /// Little of the prompt is left to compute.
    IslBounding,
    /// The chosen prefill worker is loaded.
    PrefillLoad,
    /// Either of the two.
    IslOrLoad,
}

/// Checked settings of conditional disaggregation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConditionalDisagg {
    /// The test.
    pub policy: DisaggPolicy,
    /// Uncached prompt tokens must be below this.
    pub eff_isl_threshold: u64,
    /// Uncached share of the prompt must be below this.
    pub eff_isl_ratio_threshold: f64,
    /// Prefill worker counts as loaded above this many batches of waiting tokens.
    pub prefill_busy_threshold: Option<f64>,
    /// Decode worker may not take prefill above this share of its blocks.
    pub decode_busy_threshold: Option<f64>,
}

impl Default for ConditionalDisagg {
    fn default() -> Self {
        Self {
            policy: DisaggPolicy::IslBounding,
            eff_isl_threshold: EFF_ISL_THRESHOLD,
            eff_isl_ratio_threshold: EFF_ISL_RATIO_THRESHOLD,
            prefill_busy_threshold: None,
            decode_busy_threshold: None,
        }
    }
}

impl ConditionalDisagg {
    /// Reads the option's text; `None` for anything but an object of known fields in range.
    ///
    /// ```
    /// use kvasir_config::ConditionalDisagg;
    /// let read = ConditionalDisagg::from_json;
    /// assert_eq!(read(r#"{"eff_isl_threshold": 512}"#).map(|c| c.eff_isl_threshold), Some(512));
    /// assert!(read(r#"{"eff_isl_treshold": 512}"#).is_none());
    /// ```
    pub fn from_json(text: &str) -> Option<Self> {
        let Json::Object(fields) = serde_json::from_str(text).ok()? else {
            return None;
        };
        let mut out = Self::default();
        for (name, value) in &fields {
            match name.as_str() {
                "policy" => out.policy = policy(value.as_str()?)?,
                "eff_isl_threshold" => out.eff_isl_threshold = value.as_u64()?,
                "eff_isl_ratio_threshold" => {
                    let ratio = value.as_f64().filter(|ratio| (0.0..=1.0).contains(ratio))?;
                    out.eff_isl_ratio_threshold = ratio;
                }
                "prefill_busy_threshold" => out.prefill_busy_threshold = threshold(value)?,
                "decode_busy_threshold" => out.decode_busy_threshold = threshold(value)?,
                _ => return None,
            }
        }
        Some(out)
    }

    /// Whether the policy looks at the prefill worker's load.
    pub fn is_load_aware(&self) -> bool {
        matches!(
            self.policy,
            DisaggPolicy::PrefillLoad | DisaggPolicy::IslOrLoad
        )
    }
}

fn policy(name: &str) -> Option<DisaggPolicy> {
    match name {
        "isl_bounding" => Some(DisaggPolicy::IslBounding),
        "prefill_load" => Some(DisaggPolicy::PrefillLoad),
        "isl_or_load" => Some(DisaggPolicy::IslOrLoad),
        _ => None,
    }
}

/// A number above zero, or null for unset; the outer `None` is a bad value.
fn threshold(value: &Json) -> Option<Option<f64>> {
    if value.is_null() {
        return Some(None);
    }
    value
        .as_f64()
        .filter(|number| *number > 0.0 && number.is_finite())
        .map(Some)
}
