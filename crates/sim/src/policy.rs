//! A policy: the router's settings in one word, as `kvasir replay --policy` takes it.

use std::time::Duration;

use kvasir_index::{Approximate, IndexOptions};
use kvasir_router::{ConfigError, Mode, RouterConfig};

/// How requests are placed in one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// What it is called in reports: the text it was made from.
    pub name: String,
    /// The router's settings.
    pub router: RouterConfig,
    /// What its approximate index believes, if it has one.
    pub approximate: Approximate,
}

/// Why a policy was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy `{policy}`: {source}")]
pub struct PolicyError {
    /// The policy.
    pub policy: String,
    /// What is wrong with it.
    pub source: ConfigError,
}

impl Policy {
    /// Reads `mode` or `mode,option=value,switch,no-switch`; a mode may also be left out, and is `kv`.
    ///
    /// ```
    /// # use kvasir_sim::Policy;
    /// let policy = Policy::parse("kv,router-prefill-load-scale=16")?;
    /// assert_eq!(policy.router.router_prefill_load_scale, 16.0);
    /// assert!(Policy::parse("kv,router-prefil-load-scale=16").is_err());
    /// # Ok::<(), kvasir_sim::PolicyError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let mut policy = Self {
            name: text.to_owned(),
            router: RouterConfig {
                router_mode: Mode::Kv,
                ..RouterConfig::default()
            },
            approximate: Approximate::default(),
        };
        for part in text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
        {
            policy.put(part).map_err(|source| PolicyError {
                policy: text.to_owned(),
                source,
            })?;
        }
        Ok(policy)
    }

    fn put(&mut self, part: &str) -> Result<(), ConfigError> {
        let Some((name, value)) = part.split_once('=') else {
            let mode = self.router.set("router-mode", part);
            return mode.or_else(|_| self.router.set(part, ""));
        };
        let number = |least: f64| {
            let number: Option<f64> = value.trim().parse().ok();
            number
                .filter(|n| n.is_finite() && *n >= least)
                .ok_or_else(|| ConfigError::Value {
                    name: name.to_owned(),
                    value: value.to_owned(),
                    expected: "a number",
                })
        };
        match name
            .trim()
            .trim_start_matches('-')
            .replace('_', "-")
            .as_str()
        {
            "router-ttl-secs" => {
                self.approximate.ttl =
                    Duration::try_from_secs_f64(number(0.0)?).unwrap_or(Duration::MAX);
            }
            "router-max-tree-size" => self.approximate.max_blocks = number(1.0)? as usize,
            "router-prune-target-ratio" => {
                self.approximate.prune_target_ratio = number(0.0)?.min(1.0)
            }
            _ => return self.router.set(name.trim(), value),
        }
        Ok(())
    }

    /// Whether placements ask the index at all.
    pub(crate) fn uses_index(&self) -> bool {
        self.router.router_mode == Mode::Kv && self.router.router_kv_overlap_score_credit > 0.0
    }

    pub(crate) fn index_options(&self) -> IndexOptions {
        let seconds = self.router.router_predicted_ttl_secs;
        IndexOptions {
            approximate: (!self.router.router_kv_events).then_some(self.approximate),
            predicted_ttl: seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()),
            ..IndexOptions::default()
        }
    }
}
