//! Prompt times learned online.
//!
//! `seconds = a + b * new + c * new * (cached + new / 2)`: a fixed cost, a cost per token, a cost per pair of
//! tokens that attend to each other. Fitted per worker by least squares with old samples fading, and over
//! all workers for workers with too few samples.

use kvasir_types::WorkerId;

use crate::map::FastMap;

/// Samples before a fit is used.
const SAMPLES_MIN: f64 = 8.0;
/// What is left of a sample's weight after one more.
const MEMORY: f64 = 0.99;
/// Pulls coefficients that the samples do not determine towards 0.
const RIDGE: f64 = 1e-6;

/// Prompt times of a fleet.
#[derive(Clone, Debug, Default)]
pub struct LearnedPrefillTimes {
    all: Fit,
    workers: FastMap<WorkerId, Fit>,
}

impl LearnedPrefillTimes {
    /// Seconds until the first token, once enough was seen.
    #[must_use]
    pub fn predict(&self, worker: WorkerId, new: u32, cached: u32) -> Option<f64> {
        let own = self.workers.get(&worker).filter(|fit| fit.is_ready());
        let fit = own.or(Some(&self.all).filter(|fit| fit.is_ready()))?;
        Some(fit.predict(&features(new, cached)))
    }

    /// Takes note of one prompt.
    pub fn learn(&mut self, worker: WorkerId, new: u32, cached: u32, seconds: f64) {
        let features = features(new, cached);
        self.all.learn(&features, seconds);
        self.workers
            .entry(worker)
            .or_default()
            .learn(&features, seconds);
    }

    /// Forgets a worker; its samples stay in the fit of the fleet.
    pub fn forget(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }
}

/// Scaled so that usual values are near 1 and the equations well behaved.
fn features(new: u32, cached: u32) -> [f64; 3] {
    let (new, cached) = (f64::from(new) / 1000.0, f64::from(cached) / 1000.0);
    [1.0, new, new * (cached + new / 2.0) / 10.0]
}

/// One least-squares fit.
#[derive(Clone, Copy, Debug, Default)]
struct Fit {
    weight: f64,
    products: [[f64; 3]; 3],
    targets: [f64; 3],
    coefficients: [f64; 3],
}

impl Fit {
    fn is_ready(&self) -> bool {
        self.weight >= SAMPLES_MIN * MEMORY.powi(SAMPLES_MIN as i32)
    }

    fn predict(&self, features: &[f64; 3]) -> f64 {
        let terms = self.coefficients.iter().zip(features);
        terms.map(|(c, f)| c * f).sum::<f64>().max(0.0)
    }

    fn learn(&mut self, features: &[f64; 3], seconds: f64) {
        if !seconds.is_finite() {
            return;
        }
        self.weight = self.weight * MEMORY + 1.0;
        for (row, fi) in features.iter().enumerate() {
            for (column, fj) in features.iter().enumerate() {
                let sum = &mut self.products[row][column];
                *sum = *sum * MEMORY + fi * fj;
            }
            self.targets[row] = self.targets[row] * MEMORY + fi * seconds;
        }
        self.coefficients = self.solve();
    }

    /// The non-negative fit: a coefficient that would be negative is left out and the rest solved again.
    fn solve(&self) -> [f64; 3] {
        let mut used = [true; 3];
        loop {
            let solution = self.eliminate(used);
            let worst = (0..3)
                .filter(|&i| solution[i] < 0.0)
                .min_by(|&a, &b| solution[a].total_cmp(&solution[b]));
            match worst {
                Some(i) => used[i] = false,
                None => return solution,
            }
        }
    }

    /// Gauss–Jordan elimination over the coefficients in use; the others are 0.
    fn eliminate(&self, used: [bool; 3]) -> [f64; 3] {
        let ridge = RIDGE * (0..3).map(|i| self.products[i][i]).sum::<f64>();
        let mut rows = [[0.0; 4]; 3];
        for (i, row) in rows.iter_mut().enumerate() {
            for (j, cell) in row.iter_mut().take(3).enumerate() {
                *cell = if used[i] && used[j] {
                    self.products[i][j]
                } else {
                    0.0
                };
            }
            row[i] += if used[i] { ridge } else { 1.0 };
            row[3] = if used[i] { self.targets[i] } else { 0.0 };
        }
        for pivot in 0..3 {
            let lead = rows[pivot][pivot];
            if lead.abs() < f64::MIN_POSITIVE {
                return [0.0; 3];
            }
            let pivot_row = rows[pivot].map(|cell| cell / lead);
            for (i, row) in rows.iter_mut().enumerate() {
                let factor = row[pivot];
                for (cell, from) in row.iter_mut().zip(pivot_row) {
                    *cell = if i == pivot {
                        from
                    } else {
                        *cell - factor * from
                    };
                }
            }
        }
        rows.map(|row| row[3])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn true_seconds(new: u32, cached: u32) -> f64 {
        let (new, cached) = (f64::from(new), f64::from(cached));
        0.010 + 3e-5 * new + 2e-9 * new * (cached + new / 2.0)
    }

    fn taught(samples: u32) -> LearnedPrefillTimes {
        let mut learned = LearnedPrefillTimes::default();
        for i in 0..samples {
            let (new, cached) = (64 << (i % 7), 1024 * (i % 5));
            learned.learn(WorkerId(1), new, cached, true_seconds(new, cached));
        }
        learned
    }

    #[test]
    fn nothing_is_said_before_enough_was_seen() {
        let enough = SAMPLES_MIN as u32;
        assert_eq!(taught(enough - 1).predict(WorkerId(1), 100, 0), None);
        assert!(taught(enough).predict(WorkerId(1), 100, 0).is_some());
    }

    #[test]
    fn the_law_behind_the_samples_is_found() {
        let learned = taught(200);
        for (new, cached) in [(64, 0), (500, 3000), (4000, 0), (4000, 4000)] {
            let (found, truth) = (
                learned.predict(WorkerId(1), new, cached).unwrap(),
                true_seconds(new, cached),
            );
            assert!(
                (found - truth).abs() < 0.02 * truth,
                "{new}+{cached}: {found} for {truth}"
            );
        }
    }

    /// A worker that slows down to a third is followed within a few hundred prompts.
    #[test]
    fn old_samples_fade() {
        let mut learned = taught(200);
        for i in 0..400 {
            let new = 64 << (i % 7);
            learned.learn(WorkerId(1), new, 0, 3.0 * true_seconds(new, 0));
        }
        let found = learned.predict(WorkerId(1), 2048, 0).unwrap();
        let truth = 3.0 * true_seconds(2048, 0);
        assert!((found - truth).abs() < 0.1 * truth, "{found} for {truth}");
    }

    #[test]
    fn a_new_worker_borrows_from_the_fleet_and_then_speaks_for_itself() {
        let mut learned = taught(50);
        let borrowed = learned.predict(WorkerId(2), 1024, 0).unwrap();
        assert!((borrowed - true_seconds(1024, 0)).abs() < 0.002);
        for _ in 0..20 {
            learned.learn(WorkerId(2), 1024, 0, 1.0);
        }
        assert!((learned.predict(WorkerId(2), 1024, 0).unwrap() - 1.0).abs() < 0.01);
        learned.forget(WorkerId(2));
        assert!(learned.predict(WorkerId(2), 1024, 0).unwrap() < 1.0);
    }

    /// Equal prompts leave the equations short of rank; hostile times leave them alone.
    #[test]
    fn no_sample_breaks_the_fit() {
        let mut learned = LearnedPrefillTimes::default();
        for seconds in [
            0.5,
            f64::NAN,
            f64::INFINITY,
            0.5,
            0.0,
            1e300,
            0.5,
            0.5,
            0.5,
            0.5,
            0.5,
            0.5,
        ] {
            learned.learn(WorkerId(1), 512, 0, seconds);
            let said = learned.predict(WorkerId(1), 512, 0).unwrap_or(0.0);
            assert!(said.is_finite() && said >= 0.0);
        }
    }
}
