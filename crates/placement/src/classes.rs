//! Policy classes: which queue a request waits in, and what that queue allows.
//!
//! A class is named by the request, or found from its policy family and from how much of its prompt is
//! cached nowhere. Reading the file they are written in is an edge's job.

use crate::{Gate, QueuePolicy};

/// One class.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyClass {
    /// Its name, unique.
    pub name: String,
    /// The family and the bucket it serves; `None` for a class that only its name reaches.
    pub serves: Option<(String, String)>,
    /// Order of its queue.
    pub queue_policy: QueuePolicy,
    /// Tokens it may dispatch per round of the ring; 0 counts as 1.
    pub quantum: u64,
    /// When ranks are closed to it.
    pub gate: Gate,
    /// Requests waiting, per worker.
    pub request_queue_limit_per_worker: Option<u64>,
    /// Prompt tokens waiting, per worker.
    pub raw_isl_token_queue_limit_per_worker: Option<u64>,
    /// Cached prompt tokens waiting, per worker.
    pub cached_token_queue_limit_per_worker: Option<u64>,
}

impl PolicyClass {
    /// The one class of a router without classes.
    #[must_use]
    pub fn only(queue_policy: QueuePolicy, gate: Gate) -> Self {
        Self {
            name: "default".to_owned(),
            serves: None,
            queue_policy,
            quantum: 1,
            gate,
            request_queue_limit_per_worker: None,
            raw_isl_token_queue_limit_per_worker: None,
            cached_token_queue_limit_per_worker: None,
        }
    }
}

/// Prompts with at least this many uncached tokens fall into this bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The floor.
    pub min_tokens: u64,
    /// Its name.
    pub bucket: String,
}

/// All classes of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyConfig {
    /// Family of requests that name none, or an unknown one.
    pub default_policy_family: String,
    /// Buckets by floor: the first at 0, each higher than the one before.
    pub uncached_isl_buckets: Vec<Bucket>,
    /// The classes.
    pub classes: Vec<PolicyClass>,
}

/// What is wrong with a set of classes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyConfigError {
    /// There is none.
    #[error("there are no classes")]
    NoClasses,
    /// Two have this name.
    #[error("two classes are called {0}")]
    DuplicateName(String),
    /// The first bucket's floor is not 0, or this one's is not above the one before.
    #[error("bucket {0}: the first min_tokens must be 0, each other one above the one before")]
    BucketOrder(String),
    /// This family and bucket have no class, or more than one.
    #[error("family {family}, bucket {bucket}: exactly one class must serve it, {found} do")]
    NotExactlyOne {
        /// The family.
        family: String,
        /// The bucket.
        bucket: String,
        /// How many.
        found: usize,
    },
    /// A class serves a bucket that is not listed.
    #[error("bucket {0} is not in uncached_isl_buckets")]
    UnknownBucket(String),
    /// No class serves the default family.
    #[error("no class serves the default family {0}")]
    UnknownDefaultFamily(String),
}

impl PolicyConfig {
    /// Whether every request finds exactly one class.
    pub fn check(&self) -> Result<(), PolicyConfigError> {
        if self.classes.is_empty() {
            return Err(PolicyConfigError::NoClasses);
        }
        for (i, class) in self.classes.iter().enumerate() {
            if self.classes.iter().take(i).any(|c| c.name == class.name) {
                return Err(PolicyConfigError::DuplicateName(class.name.clone()));
            }
        }
        let mut floor = None;
        for bucket in &self.uncached_isl_buckets {
            let ascends = floor.map_or(bucket.min_tokens == 0, |f| bucket.min_tokens > f);
            if !ascends {
                return Err(PolicyConfigError::BucketOrder(bucket.bucket.clone()));
            }
            floor = Some(bucket.min_tokens);
        }
        self.check_families()
    }

    fn check_families(&self) -> Result<(), PolicyConfigError> {
        let default = &self.default_policy_family;
        if !self.families().any(|family| family == default) {
            return Err(PolicyConfigError::UnknownDefaultFamily(default.clone()));
        }
        for (_, bucket) in self.classes.iter().filter_map(|c| c.serves.as_ref()) {
            if !self
                .uncached_isl_buckets
                .iter()
                .any(|b| b.bucket == *bucket)
            {
                return Err(PolicyConfigError::UnknownBucket(bucket.clone()));
            }
        }
        for family in self.families() {
            for Bucket { bucket, .. } in &self.uncached_isl_buckets {
                let serves = |c: &&PolicyClass| {
                    c.serves
                        .as_ref()
                        .is_some_and(|(f, b)| f == family && b == bucket)
                };
                let found = self.classes.iter().filter(serves).count();
                if found != 1 {
                    return Err(PolicyConfigError::NotExactlyOne {
                        family: family.clone(),
                        bucket: bucket.clone(),
                        found,
                    });
                }
            }
        }
        Ok(())
    }

    fn families(&self) -> impl Iterator<Item = &String> {
        self.classes
            .iter()
            .filter_map(|c| c.serves.as_ref().map(|(family, _)| family))
    }

    /// The class of a request that names `requested` and has this many uncached tokens; 0 if none fits.
    #[must_use]
    pub fn class_of(&self, requested: Option<&str>, uncached_tokens: u64) -> usize {
        let named = requested.and_then(|name| self.classes.iter().position(|c| c.name == name));
        if let Some(at) = named {
            return at;
        }
        let default = self.default_policy_family.as_str();
        let family = requested
            .filter(|name| self.families().any(|family| family == name))
            .unwrap_or(default);
        let mut below = self.uncached_isl_buckets.iter().rev();
        let bucket = below.find(|b| b.min_tokens <= uncached_tokens);
        let serves = |c: &PolicyClass| match (&c.serves, bucket) {
            (Some((f, b)), Some(bucket)) => f == family && *b == bucket.bucket,
            _ => false,
        };
        self.classes.iter().position(serves).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(name: &str, serves: Option<(&str, &str)>) -> PolicyClass {
        PolicyClass {
            name: name.to_owned(),
            serves: serves.map(|(f, b)| (f.to_owned(), b.to_owned())),
            ..PolicyClass::only(QueuePolicy::Fcfs, Gate::default())
        }
    }

    fn bucket(min_tokens: u64, name: &str) -> Bucket {
        Bucket {
            min_tokens,
            bucket: name.to_owned(),
        }
    }

    fn config() -> PolicyConfig {
        PolicyConfig {
            default_policy_family: "chat".to_owned(),
            uncached_isl_buckets: vec![bucket(0, "warm"), bucket(1000, "cold")],
            classes: vec![
                class("chat-warm", Some(("chat", "warm"))),
                class("chat-cold", Some(("chat", "cold"))),
                class("batch-warm", Some(("batch", "warm"))),
                class("batch-cold", Some(("batch", "cold"))),
                class("urgent", None),
            ],
        }
    }

    #[test]
    fn family_and_bucket_find_the_class() {
        let config = config();
        assert_eq!(config.check(), Ok(()));
        for (requested, uncached, name) in [
            (None, 0, "chat-warm"),
            (None, 999, "chat-warm"),
            (None, 1000, "chat-cold"),
            (Some("batch"), 5, "batch-warm"),
            (Some("batch"), 5000, "batch-cold"),
            (Some("nobody knows"), 5, "chat-warm"),
            (Some("urgent"), 5000, "urgent"),
            (Some("batch-cold"), 0, "batch-cold"),
        ] {
            let found = config.class_of(requested, uncached);
            assert_eq!(config.classes[found].name, name, "{requested:?} {uncached}");
        }
    }

    #[test]
    fn every_family_and_bucket_needs_exactly_one_class() {
        let broken = |change: fn(&mut PolicyConfig)| {
            let mut config = config();
            change(&mut config);
            config.check().unwrap_err()
        };
        let missing = broken(|c| drop(c.classes.remove(3)));
        assert!(matches!(
            missing,
            PolicyConfigError::NotExactlyOne { found: 0, .. }
        ));
        let twice = broken(|c| c.classes.push(class("more", Some(("chat", "warm")))));
        assert!(matches!(
            twice,
            PolicyConfigError::NotExactlyOne { found: 2, .. }
        ));
        let named = broken(|c| c.classes.push(class("urgent", None)));
        assert_eq!(named, PolicyConfigError::DuplicateName("urgent".to_owned()));
        let floor = broken(|c| c.uncached_isl_buckets[0].min_tokens = 1);
        assert_eq!(floor, PolicyConfigError::BucketOrder("warm".to_owned()));
        let equal = broken(|c| c.uncached_isl_buckets[1].min_tokens = 0);
        assert_eq!(equal, PolicyConfigError::BucketOrder("cold".to_owned()));
        let family = broken(|c| c.default_policy_family = "x".to_owned());
        assert_eq!(
            family,
            PolicyConfigError::UnknownDefaultFamily("x".to_owned())
        );
        let unknown = broken(|c| c.classes.push(class("x", Some(("chat", "tepid")))));
        assert_eq!(
            unknown,
            PolicyConfigError::UnknownBucket("tepid".to_owned())
        );
        assert_eq!(broken(|c| c.classes.clear()), PolicyConfigError::NoClasses);
    }
}
