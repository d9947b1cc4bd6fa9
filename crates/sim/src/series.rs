//! What went on over time, in few enough points to draw.

use std::time::Duration;

/// Samples at most; when there are more, every second one goes and the step doubles.
const SAMPLES_MAX: usize = 480;
/// The first step.
const FIRST_STEP: Duration = Duration::from_millis(100);

/// Loads of every rank, at equal steps of time.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Time between two samples.
    pub step: Duration,
    /// Requests in each rank, by sample.
    pub loads: Vec<Vec<u32>>,
}

impl Default for Series {
    fn default() -> Self {
        Self {
            step: FIRST_STEP,
            loads: Vec::new(),
        }
    }
}

impl Series {
    /// Takes a sample and says when the next one is due.
    pub(crate) fn sample(&mut self, loads: impl Iterator<Item = u32>) -> Duration {
        self.loads.push(loads.collect());
        if self.loads.len() > SAMPLES_MAX {
            let mut at = 0;
            self.loads.retain(|_| {
                at += 1;
                at % 2 == 1
            });
            self.step *= 2;
        }
        self.step
    }
}
