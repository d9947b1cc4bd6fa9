//! Workloads without a trace, each following from a seed.
//!
//! Lengths vary by half around their mean; arrivals are a Poisson process. Prompts are pieces, so that
//! what is shared is exactly what the workload says.

use std::time::Duration;

use kvasir_types::{Rng, Time};

use crate::{Piece, PromptSource, Trace, TraceRequest};

/// Requests, tenants and documents of a workload; more are refused.
const REQUESTS_MAX: u64 = 5_000_000;

/// What kind of traffic, and how much. Made from text such as `chat,sessions=200,turns=6`.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    kind: WorkloadKind,
    /// Conversations, tasks, documents' questions or requests.
    count: u64,
    /// Arrivals a second of whatever is counted.
    rate: f64,
    /// Shared tokens: system prompt, task, document.
    shared: u32,
    /// Tokens of each user's part.
    own: u32,
    /// Tokens of an answer.
    output: u32,
    /// Tenants or documents.
    groups: u64,
    /// Turns of a conversation, siblings of a task.
    each: u32,
    /// Between an answer and the next turn.
    think: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkloadKind {
    Tenants,
    Chat,
    Agents,
    Documents,
}

/// Why a workload was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkloadError {
    /// No such kind.
    #[error("there is no workload `{0}`; there are tenants, chat, agents and documents")]
    Kind(String),
    /// No such setting of this kind.
    #[error("workload `{kind}` has no setting `{name}`; it has {known}")]
    Setting {
        /// The kind.
        kind: String,
        /// What was given.
        name: String,
        /// What it has.
        known: String,
    },
    /// Not a value.
    #[error("`{value}` is no value of `{name}`: a number above 0 is needed")]
    Value {
        /// The setting.
        name: String,
        /// What was given.
        value: String,
    },
    /// A limit of ours.
    #[error("the workload has {0} requests; at most {REQUESTS_MAX} are taken")]
    TooMany(u64),
}

impl WorkloadKind {
    const NAMES: [(&str, WorkloadKind); 4] = [
        ("tenants", Self::Tenants),
        ("chat", Self::Chat),
        ("agents", Self::Agents),
        ("documents", Self::Documents),
    ];

    /// Names of its settings, in the order of [`Workload::slot`].
    const fn settings(self) -> [&'static str; 8] {
        match self {
            Self::Tenants => [
                "requests", "rate", "system", "user", "output", "tenants", "", "",
            ],
            Self::Chat => [
                "sessions", "rate", "system", "user", "output", "tenants", "turns", "think-ms",
            ],
            Self::Agents => [
                "tasks", "rate", "context", "branch", "output", "", "siblings", "",
            ],
            Self::Documents => [
                "requests",
                "rate",
                "document",
                "question",
                "output",
                "documents",
                "",
                "",
            ],
        }
    }

    fn defaults(self) -> Workload {
        let (count, rate, shared, own, output, groups, each) = match self {
            Self::Tenants => (2000, 20.0, 2000, 300, 200, 50, 1),
            Self::Chat => (400, 2.0, 1000, 200, 250, 20, 6),
            Self::Agents => (200, 2.0, 8000, 200, 300, 1, 8),
            Self::Documents => (2000, 8.0, 12_000, 60, 150, 100, 1),
        };
        let think = Duration::from_secs(8);
        Workload {
            kind: self,
            count,
            rate,
            shared,
            own,
            output,
            groups,
            each,
            think,
        }
    }
}

impl Workload {
    /// Reads `kind` or `kind,setting=value,..`.
    ///
    /// ```
    /// # use kvasir_sim::Workload;
    /// let trace = Workload::parse("chat,sessions=3,turns=2")?.trace(7);
    /// assert_eq!(trace.requests.len(), 6);
    /// assert!(Workload::parse("chat,turn=2").is_err());
    /// # Ok::<(), kvasir_sim::WorkloadError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, WorkloadError> {
        let mut parts = text.split(',').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let kind = WorkloadKind::NAMES
            .into_iter()
            .find(|(known, _)| *known == name);
        let Some((_, kind)) = kind else {
            return Err(WorkloadError::Kind(name.to_owned()));
        };
        let mut workload = kind.defaults();
        for part in parts.filter(|part| !part.is_empty()) {
            let (setting, value) = part.split_once('=').unwrap_or((part, ""));
            workload.set(name, setting.trim(), value.trim())?;
        }
        let requests = workload
            .count
            .saturating_mul(u64::from(workload.each))
            .max(workload.groups);
        match requests > REQUESTS_MAX {
            true => Err(WorkloadError::TooMany(requests)),
            false => Ok(workload),
        }
    }

    fn set(&mut self, kind: &str, name: &str, value: &str) -> Result<(), WorkloadError> {
        let settings = self.kind.settings();
        let Some(at) = settings.iter().position(|s| !s.is_empty() && *s == name) else {
            let known: Vec<&str> = settings.into_iter().filter(|s| !s.is_empty()).collect();
            let (kind, name) = (kind.to_owned(), name.to_owned());
            return Err(WorkloadError::Setting {
                kind,
                name,
                known: known.join(", "),
            });
        };
        let number: f64 = value
            .parse()
            .ok()
            .filter(|n| (1e-6..1e9).contains(n))
            .ok_or_else(|| WorkloadError::Value {
                name: name.to_owned(),
                value: value.to_owned(),
            })?;
        let whole = number.ceil();
        match at {
            0 => self.count = whole as u64,
            1 => self.rate = number,
            2 => self.shared = whole as u32,
            3 => self.own = whole as u32,
            4 => self.output = whole as u32,
            5 => self.groups = whole as u64,
            6 => self.each = whole as u32,
            _ => self.think = Duration::from_nanos((number * 1e6) as u64),
        }
        Ok(())
    }

    /// The workload as a trace.
    #[must_use]
    pub fn trace(&self, seed: u64) -> Trace {
        let mut builder = TraceBuilder {
            workload: self,
            rng: Rng::new(seed),
            made: Vec::new(),
            now: 0.0,
            popularity: popularity(self.groups),
        };
        for _ in 0..self.count {
            builder.now -= ln(1.0 - builder.rng.unit()) / self.rate;
            match self.kind {
                WorkloadKind::Tenants | WorkloadKind::Documents => builder.single(),
                WorkloadKind::Chat => builder.conversation(),
                WorkloadKind::Agents => builder.siblings(),
            }
        }
        let name = WorkloadKind::NAMES
            .into_iter()
            .find(|(_, kind)| *kind == self.kind);
        Trace {
            name: name.map_or_else(String::new, |(name, _)| name.to_owned()),
            requests: builder.made,
        }
    }
}

struct TraceBuilder<'w> {
    workload: &'w Workload,
    rng: Rng,
    made: Vec<TraceRequest>,
    now: f64,
    /// Sums of the groups' weights.
    popularity: Vec<f64>,
}

/// Groups have the weights 1, 1/2, 1/3, ..
fn popularity(groups: u64) -> Vec<f64> {
    let mut sum = 0.0;
    let weigh = |group: u64| {
        sum += 1.0 / group as f64;
        sum
    };
    (1..=groups.max(1)).map(weigh).collect()
}

/// The natural logarithm of a number above 0, by operations that are exact to the bit on every machine;
/// the library's is not.
fn ln(x: f64) -> f64 {
    let (mut mantissa, mut halvings) = (x, 0.0);
    while mantissa < 0.75 {
        mantissa *= 2.0;
        halvings += 1.0;
    }
    let ratio = (mantissa - 1.0) / (mantissa + 1.0);
    let (mut term, mut sum) = (ratio, 0.0);
    for power in 0..20 {
        sum += term / f64::from(2 * power + 1);
        term *= ratio * ratio;
    }
    2.0 * sum - halvings * std::f64::consts::LN_2
}

impl TraceBuilder<'_> {
    /// A length around `mean`.
    fn around(&mut self, mean: u32) -> u32 {
        mean / 2 + self.rng.below(u64::from(mean) + 1) as u32 + u32::from(mean < 2)
    }

    /// One of the groups, by popularity.
    fn group(&mut self) -> u64 {
        let at = self.rng.unit() * self.popularity.last().copied().unwrap_or(1.0);
        self.popularity.partition_point(|sum| *sum <= at) as u64
    }

    /// The shared piece of a group: always the same, of a length of its own.
    fn shared(&self, group: u64) -> Piece {
        let mut rng = Rng::new(0x5EED ^ group.wrapping_mul(0x9E37_79B9));
        let mean = self.workload.shared;
        let len = (mean / 2 + rng.below(u64::from(mean) + 1) as u32).max(1);
        Piece {
            seed: rng.next_u64(),
            len,
        }
    }

    fn own(&mut self) -> Piece {
        let len = self.around(self.workload.own).max(1);
        Piece {
            seed: self.rng.next_u64(),
            len,
        }
    }

    fn push(&mut self, pieces: &[Piece], follows: Option<(u32, Duration)>) -> Piece {
        let answer = Piece {
            seed: self.rng.next_u64(),
            len: self.around(self.workload.output).max(1),
        };
        self.made.push(TraceRequest {
            at: Time::from_secs_f64(self.now),
            prompt: PromptSource::Pieces(pieces.into()),
            output_tokens: answer.len,
            answer_seed: answer.seed,
            follows,
            priority: 0,
        });
        answer
    }

    fn single(&mut self) {
        let group = self.group();
        let pieces = [self.shared(group), self.own()];
        self.push(&pieces, None);
    }

    fn conversation(&mut self) {
        let group = self.group();
        let mut pieces = vec![self.shared(group)];
        let mut follows = None;
        for _ in 0..self.workload.each {
            let own = self.own();
            pieces.push(own);
            let answer = self.push(&pieces, follows);
            pieces.push(answer);
            follows = Some((self.made.len() as u32 - 1, self.workload.think));
        }
    }

    fn siblings(&mut self) {
        let task = Piece {
            seed: self.rng.next_u64(),
            len: self.around(self.workload.shared).max(1),
        };
        for _ in 0..self.workload.each {
            let own = self.own();
            self.push(&[task, own], None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_one() {
        for x in [1e-9, 0.1, 0.5, 0.74, 0.75, 0.999, 1.0] {
            assert!((ln(x) - f64::ln(x)).abs() < 1e-12, "{x}");
        }
    }

    #[test]
    fn small_groups_are_popular() {
        let workload = Workload::parse("tenants,tenants=10").unwrap();
        let mut seen = [0; 10];
        for request in workload.trace(1).requests {
            let PromptSource::Pieces(pieces) = request.prompt else {
                continue;
            };
            let builder = |group| {
                TraceBuilder {
                    workload: &workload,
                    rng: Rng::new(0),
                    made: Vec::new(),
                    now: 0.0,
                    popularity: Vec::new(),
                }
                .shared(group)
            };
            let group = (0..10).find(|g| builder(*g) == pieces[0]).unwrap();
            seen[group as usize] += 1;
        }
        assert!(
            seen[0] > 2 * seen[4] && seen.iter().all(|n| *n > 20),
            "{seen:?}"
        );
    }
}
