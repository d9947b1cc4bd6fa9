//! What a check says: a verdict, why, and what to change.

use serde::Serialize;

/// What is looked at, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// It answers.
    Reachable,
    /// It serves the model.
    Model,
    /// Its version is one whose events are known.
    Version,
    /// Its blocks have the size that the frontend thinks.
    BlockSize,
    /// It keeps prefixes.
    PrefixCaching,
    /// Its event socket can be reached.
    EventSocket,
    /// Events of a real request arrive.
    EventsArrive,
    /// Its replay socket answers.
    Replay,
    /// Our tokens are its tokens.
    Tokens,
    /// What is predicted is what it reports.
    CachedTokens,
    /// The store where workers announce themselves can be read.
    Discovery,
    /// Workers announce themselves there.
    Keys,
    /// Their model cards can be read, and fit together.
    Cards,
    /// A worker answers over its request plane.
    Requests,
    /// A worker says what its cache holds.
    Recovery,
    /// Two servers share a request.
    Pair,
}

impl Check {
    /// All that are made of an engine server. The others are of planes, and of two servers.
    pub const ALL: [Self; 10] = [
        Self::Reachable,
        Self::Model,
        Self::Version,
        Self::BlockSize,
        Self::PrefixCaching,
        Self::EventSocket,
        Self::EventsArrive,
        Self::Replay,
        Self::Tokens,
        Self::CachedTokens,
    ];

    /// Its name for people and programs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reachable => "reachable",
            Self::Model => "model",
            Self::Version => "version",
            Self::BlockSize => "block-size",
            Self::PrefixCaching => "prefix-caching",
            Self::EventSocket => "event-socket",
            Self::EventsArrive => "events-arrive",
            Self::Replay => "replay",
            Self::Tokens => "tokens",
            Self::CachedTokens => "cached-tokens",
            Self::Discovery => "discovery",
            Self::Keys => "keys",
            Self::Cards => "cards",
            Self::Requests => "requests",
            Self::Recovery => "recovery",
            Self::Pair => "pair",
        }
    }
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As it should be.
    Pass,
    /// Wrong.
    Fail,
    /// Could not be looked at; why is said, and where it can be mended, how.
    Skip,
}

/// AdviceTarget command line to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AdviceTarget {
    /// The engine's. Flags are those of its kind; vLLM's where that is not known.
    Engine,
    /// That of `kvasir frontend`, and of `kvasir doctor` when it is run again.
    Kvasir,
}

/// One thing to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Where.
    #[serde(rename = "where")]
    pub whose: AdviceTarget,
    /// The words to add or replace on that command line; empty if no flag mends it.
    pub args: Vec<String>,
    /// In a sentence.
    pub text: String,
}

/// What one check found at one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub check: Check,
    /// How it ended.
    pub outcome: Outcome,
    /// What was found.
    pub why: String,
    /// What mends it: any one of these, best first.
    pub advice: Vec<Advice>,
}

impl Finding {
    /// What a check found, without advice.
    #[must_use]
    pub const fn new(check: Check, outcome: Outcome, why: String) -> Self {
        Self {
            check,
            outcome,
            why,
            advice: Vec::new(),
        }
    }

    /// The same, with one more thing that mends it.
    #[must_use]
    pub fn with(mut self, advice: Advice) -> Self {
        self.advice.push(advice);
        self
    }
}

/// A finding without its check's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) outcome: Outcome,
    pub(crate) why: String,
    pub(crate) advice: Vec<Advice>,
}

impl Verdict {
    pub(crate) fn pass(why: impl Into<String>) -> Self {
        Self::of(Outcome::Pass, why, Vec::new())
    }

    pub(crate) fn fail(why: impl Into<String>, advice: Vec<Advice>) -> Self {
        Self::of(Outcome::Fail, why, advice)
    }

    pub(crate) fn skip(why: impl Into<String>) -> Self {
        Self::of(Outcome::Skip, why, Vec::new())
    }

    pub(crate) fn of(outcome: Outcome, why: impl Into<String>, advice: Vec<Advice>) -> Self {
        Self {
            outcome,
            why: why.into(),
            advice,
        }
    }
}
