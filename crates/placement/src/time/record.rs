//! What was learned, as numbers that outlive the process.
//!
//! Answers one question: how does an estimator go on where another one ended? All sums of the fits are kept, so that nothing is
//! learned twice. What always holds: numbers that no estimator could have written change nothing.

use kvasir_types::WorkerRank;

use super::estimate::Estimator;
use super::fit::{Fit, RankFactor};

/// Numbers of the fleet: two fits, the length of answers, and how many of them were seen.
const FLEET_NUMBERS: usize = 2 * Fit::NUMBERS + 2;
/// Numbers of a rank: a factor for its prompts and one for its steps.
const RANK_NUMBERS: usize = 2 * RankFactor::NUMBERS;

/// What an estimator knows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LearnedRecord {
    /// Of all ranks.
    pub fleet: Vec<f64>,
    /// Of each.
    pub ranks: Vec<(WorkerRank, Vec<f64>)>,
}

impl LearnedRecord {
    /// Ranks that are kept at most.
    pub const RANKS_MAX: usize = 16_384;
}

impl Estimator {
    /// What is known of all ranks.
    #[must_use]
    pub fn fleet_record(&self) -> Vec<f64> {
        let mut out = Vec::with_capacity(FLEET_NUMBERS);
        out.extend(self.prompts.numbers());
        out.extend(self.steps.numbers());
        out.extend([self.output, self.outputs]);
        out
    }

    /// What is known of one rank.
    #[must_use]
    pub fn rank_record(&self, slot: u32) -> Vec<f64> {
        let (prompts, steps) = self.rank_factors(slot);
        [prompts.numbers(), steps.numbers()].concat()
    }

    /// Goes on from what was known of all ranks. Says whether it can.
    pub fn resume_fleet(&mut self, numbers: &[f64]) -> bool {
        let Some((fits, &[output, outputs])) = numbers.split_last_chunk::<2>() else {
            return false;
        };
        if numbers.len() != FLEET_NUMBERS || !(output >= 1.0 && outputs >= 1.0) {
            return false;
        }
        let (prompts, steps) = fits.split_at(Fit::NUMBERS);
        let (mut own_prompts, mut own_steps) = (self.prompts, self.steps);
        let usable = numbers.iter().all(|n| n.is_finite())
            && own_prompts.resume(prompts)
            && own_steps.resume(steps);
        if usable {
            (self.prompts, self.steps) = (own_prompts, own_steps);
            (self.output, self.outputs) = (output, outputs);
            self.changed();
        }
        usable
    }

    /// The same of one rank.
    pub fn resume_rank(&mut self, slot: u32, numbers: &[f64]) -> bool {
        if numbers.len() != RANK_NUMBERS || !numbers.iter().all(|n| n.is_finite()) {
            return false;
        }
        let (prompts, steps) = numbers.split_at(RankFactor::NUMBERS);
        let factors = (RankFactor::resume(prompts), RankFactor::resume(steps));
        let (Some(prompts), Some(steps)) = factors else {
            return false;
        };
        self.set_factors(slot, prompts, steps);
        self.changed();
        true
    }
}
