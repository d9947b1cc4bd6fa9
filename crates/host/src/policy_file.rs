//! The file of `--router-policy-config`: classes of requests, each with its own queue.
//!
//! YAML, read once at the start. A model may have a profile of its own, which then replaces the root's.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;

use kvasir_router::{Bucket, Gate, PolicyClass, PolicyConfig, QueuePolicy};
use serde::Deserialize;

/// Longest file that is read.
const BYTES_MAX: u64 = 1 << 20;

/// What is wrong with a file, in words for its writer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PolicyFileError(String);

/// The file: one profile for all models, and those of single models.
#[derive(Clone, Debug)]
pub struct PolicyFile {
    root: Profile,
    models: BTreeMap<String, Profile>,
}

/// The file as it is written: the root's profile stands at the top.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    #[serde(default = "default_family")]
    default_policy_family: String,
    #[serde(default = "one_bucket")]
    uncached_isl_buckets: Vec<RawBucket>,
    #[serde(default)]
    classes: Vec<RawClass>,
    #[serde(default)]
    models: BTreeMap<String, Profile>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    #[serde(default = "default_family")]
    default_policy_family: String,
    #[serde(default = "one_bucket")]
    uncached_isl_buckets: Vec<RawBucket>,
    #[serde(default)]
    classes: Vec<RawClass>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBucket {
    min_tokens: u64,
    bucket: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawClass {
    name: String,
    policy_family: Option<String>,
    cache_bucket: Option<String>,
    #[serde(default)]
    queue_policy: RawOrder,
    quantum: u64,
    prefill_busy_threshold: Option<u64>,
    prefill_busy_threshold_frac: Option<f64>,
    request_queue_limit_per_worker: Option<u64>,
    raw_isl_token_queue_limit_per_worker: Option<u64>,
    cached_token_queue_limit_per_worker: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RawOrder {
    #[default]
    Fcfs,
    Wspt,
}

fn default_family() -> String {
    "default".into()
}

fn one_bucket() -> Vec<RawBucket> {
    vec![RawBucket {
        min_tokens: 0,
        bucket: "all".into(),
    }]
}

impl PolicyFile {
    /// Reads and checks a file; an error says what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, PolicyFileError> {
        let unreadable = |error: io::Error| PolicyFileError(error.to_string());
        let file = std::fs::File::open(path).map_err(unreadable)?;
        let mut text = String::new();
        let mut bounded = file.take(BYTES_MAX + 1);
        bounded.read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > BYTES_MAX {
            let text = format!("it has more than {BYTES_MAX} bytes, the most that are read");
            return Err(PolicyFileError(text));
        }
        Self::parse(&text).map_err(PolicyFileError)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let raw: RawFile = serde_saphyr::from_str(text).map_err(|error| {
            let error = error.to_string();
            error.strip_prefix("error: ").unwrap_or(&error).to_owned()
        })?;
        let file = Self {
            root: Profile {
                default_policy_family: raw.default_policy_family,
                uncached_isl_buckets: raw.uncached_isl_buckets,
                classes: raw.classes,
            },
            models: raw.models,
        };
        let profiles = file
            .models
            .iter()
            .map(|(name, profile)| (name.as_str(), profile));
        for (name, profile) in profiles.chain([("", &file.root)]) {
            profile.check().map_err(|error| match name {
                "" => error,
                _ => format!("models.{name}: {error}"),
            })?;
        }
        Ok(file)
    }

    /// The classes of `model`.
    #[must_use]
    pub fn of_model(&self, model: &str) -> PolicyConfig {
        self.models.get(model).unwrap_or(&self.root).to_config()
    }
}

impl Profile {
    fn check(&self) -> Result<(), String> {
        for class in &self.classes {
            if class.quantum == 0 {
                return Err(format!("class {}: quantum must be at least 1", class.name));
            }
            if class.policy_family.is_some() != class.cache_bucket.is_some() {
                let name = &class.name;
                return Err(format!(
                    "class {name}: give both policy_family and cache_bucket, or neither"
                ));
            }
            let frac = class.prefill_busy_threshold_frac;
            if frac.is_some_and(|frac| !frac.is_finite() || frac < 0.0) {
                let name = &class.name;
                return Err(format!(
                    "class {name}: prefill_busy_threshold_frac must be at least 0"
                ));
            }
        }
        self.to_config().check().map_err(|error| error.to_string())
    }

    fn to_config(&self) -> PolicyConfig {
        let bucket = |b: &RawBucket| Bucket {
            min_tokens: b.min_tokens,
            bucket: b.bucket.clone(),
        };
        PolicyConfig {
            default_policy_family: self.default_policy_family.clone(),
            uncached_isl_buckets: self.uncached_isl_buckets.iter().map(bucket).collect(),
            classes: self.classes.iter().map(RawClass::to_class).collect(),
        }
    }
}

impl RawClass {
    fn to_class(&self) -> PolicyClass {
        PolicyClass {
            name: self.name.clone(),
            serves: self.policy_family.clone().zip(self.cache_bucket.clone()),
            queue_policy: match self.queue_policy {
                RawOrder::Fcfs => QueuePolicy::Fcfs,
                RawOrder::Wspt => QueuePolicy::Wspt,
            },
            quantum: self.quantum,
            gate: Gate {
                tokens: self.prefill_busy_threshold,
                batches: self.prefill_busy_threshold_frac,
            },
            request_queue_limit_per_worker: self.request_queue_limit_per_worker,
            raw_isl_token_queue_limit_per_worker: self.raw_isl_token_queue_limit_per_worker,
            cached_token_queue_limit_per_worker: self.cached_token_queue_limit_per_worker,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "
default_policy_family: interactive
uncached_isl_buckets:
  - {min_tokens: 0, bucket: short}
  - {min_tokens: 4096, bucket: long}
classes:
  - {name: quick, policy_family: interactive, cache_bucket: short, quantum: 8192}
  - name: slow
    policy_family: interactive
    cache_bucket: long
    quantum: 2048
    queue_policy: wspt
    prefill_busy_threshold_frac: 2.0
    request_queue_limit_per_worker: 4
models:
  other:
    classes: [{name: one, policy_family: default, cache_bucket: all, quantum: 1}]
";

    #[test]
    fn a_models_own_profile_replaces_the_roots() {
        let file = PolicyFile::parse(GOOD).unwrap();
        let root = file.of_model("any");
        assert_eq!(root.classes.len(), 2);
        assert_eq!(root.classes[1].queue_policy, QueuePolicy::Wspt);
        assert_eq!(
            root.classes[1].gate,
            Gate {
                tokens: None,
                batches: Some(2.0)
            }
        );
        assert_eq!(root.classes[1].request_queue_limit_per_worker, Some(4));
        let other = file.of_model("other");
        assert_eq!(
            (other.classes.len(), other.classes[0].name.as_str()),
            (1, "one")
        );
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| PolicyFile::parse(text).unwrap_err();
        assert!(error("classes: [{name: a, quantum: 0}]").contains("quantum"));
        let half = "classes: [{name: a, quantum: 1, policy_family: f}]";
        assert!(error(half).contains("both policy_family and cache_bucket"));
        assert!(error("classes: [{name: a, quantum: 1, what: 2}]").contains("what"));
        assert!(error("classes: [{name: a}]").contains("quantum"));
        assert!(error("clases: []").contains("clases"));
        assert!(error("models: {m: {clases: []}}").contains("clases"));
        assert!(!error("clases: []").starts_with("error"));
        assert!(!error("- not a map").is_empty());
        assert!(!error("classes: [").is_empty());
        let twice = GOOD.replace("name: slow", "name: quick");
        assert!(error(&twice).contains("quick"));
    }
}
