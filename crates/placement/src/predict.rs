//! How long a prompt will take before its first token.
//!
//! Answers one question: for this many new and cached tokens on this worker, after
//! how long is the charge taken as gone? `None` is always a possible answer and means that it does not
//! decay before the first token.

mod learned;

pub use learned::LearnedPrefillTimes;

use std::time::Duration;

use kvasir_profile::StepTimes;
use kvasir_types::WorkerId;

/// A source of predictions.
#[derive(Clone, Debug, Default)]
pub enum PrefillModel {
    /// Predicts nothing.
    #[default]
    None,
    /// Reads them off measurements of such an engine.
    Measured(StepTimes),
    /// Learns them from each worker's own first tokens.
    Learned(Box<LearnedPrefillTimes>),
}

impl PrefillModel {
    /// Time until the first token of a prompt with `new` tokens to compute on top of `cached` ones.
    #[must_use]
    pub fn predict(&self, worker: WorkerId, new: u32, cached: u32) -> Option<Duration> {
        let millis = match self {
            Self::None => return None,
            Self::Measured(times) => times.prefill_ms(new, cached),
            Self::Learned(learned) => learned.predict(worker, new, cached)? * 1000.0,
        };
        Duration::try_from_secs_f64(millis / 1000.0).ok()
    }

    /// Takes note of a prompt that took this long alone at the head of its worker's prompts.
    pub fn learn(&mut self, worker: WorkerId, new: u32, cached: u32, took: Duration) {
        if let Self::Learned(learned) = self {
            learned.learn(worker, new, cached, took.as_secs_f64());
        }
    }

    /// Forgets a worker.
    pub fn forget(&mut self, worker: WorkerId) {
        if let Self::Learned(learned) = self {
            learned.forget(worker);
        }
    }

    /// Whether charges decay with time, so that a queue must be checked while nothing happens.
    #[must_use]
    pub fn decays(&self) -> bool {
        !matches!(self, Self::None)
    }
}
