//! Three coefficients from noisy samples, none of them negative.
//!
//! Least squares over relative errors, so that a small prompt counts as much as a large one. Old samples fade, a sample
//! far from the fit counts less, and a prior counts as four samples that fade with each one seen.

/// How many samples the prior is worth before the first.
const PRIOR_SAMPLES: f64 = 4.0;
/// Keeps a direction that the samples do not determine where it was.
const INERTIA: f64 = 0.01;
/// Samples from which the fit itself says how large a sample should be.
const TRUSTED_AFTER: u64 = 16;
/// Residuals beyond so many mean residuals count less.
const BEND: f64 = 2.0;
/// Solved with each sample up to here, then with one of [`SOLVE_EVERY`].
const SOLVE_ALL: u64 = 64;
const SOLVE_EVERY: u64 = 8;

/// One fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fit {
    memory: f64,
    prior: [f64; 3],
    products: [[f64; 3]; 3],
    targets: [f64; 3],
    coefficients: [f64; 3],
    samples: u64,
    /// Mean relative residual.
    spread: f64,
}

impl Fit {
    /// A fit that begins at `prior`, whose numbers are above 0.
    pub(crate) fn new(prior: [f64; 3], memory: f64) -> Self {
        let prior = prior.map(|p| if p.is_finite() { p.max(1e-15) } else { 1e-15 });
        Self {
            memory,
            prior,
            products: [[0.0; 3]; 3],
            targets: [0.0; 3],
            coefficients: prior,
            samples: 0,
            spread: 0.3,
        }
    }

    pub(crate) fn coefficients(&self) -> [f64; 3] {
        self.coefficients
    }

    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// How many numbers a fit is.
    pub(crate) const NUMBERS: usize = 20;

    /// All of it, but for its memory.
    pub(crate) fn numbers(&self) -> [f64; Self::NUMBERS] {
        let mut out = [0.0; Self::NUMBERS];
        let all = self.prior.iter().chain(self.products.iter().flatten());
        let all = all.chain(&self.targets).chain(&self.coefficients);
        let last = [self.samples as f64, self.spread];
        for (out, number) in out.iter_mut().zip(all.chain(&last)) {
            *out = *number;
        }
        out
    }

    /// Goes on where the fit ended that these are the numbers of. Says whether it can.
    pub(crate) fn resume(&mut self, numbers: &[f64]) -> bool {
        let Ok(numbers) = <[f64; Self::NUMBERS]>::try_from(numbers) else {
            return false;
        };
        let mut next = numbers.into_iter();
        let mut fit = *self;
        let places = fit
            .prior
            .iter_mut()
            .chain(fit.products.iter_mut().flatten());
        let places = places.chain(&mut fit.targets).chain(&mut fit.coefficients);
        for (place, number) in places.zip(next.by_ref()) {
            *place = number;
        }
        let (samples, spread) = (next.next().unwrap_or(0.0), next.next().unwrap_or(0.3));
        (fit.samples, fit.spread) = (samples as u64, spread);
        let law = fit.coefficients;
        let sound = numbers.iter().all(|n| n.is_finite() && *n >= 0.0)
            && fit.prior.iter().all(|p| *p > 0.0)
            && law.iter().any(|c| *c > 0.0);
        if sound {
            *self = fit;
        }
        sound
    }

    pub(crate) fn predict(&self, features: &[f64; 3]) -> f64 {
        dot(&self.coefficients, features)
    }

    /// Takes a sample; says whether the coefficients changed.
    pub(crate) fn learn(&mut self, features: &[f64; 3], seconds: f64) -> bool {
        let usable = seconds.is_finite() && seconds > 0.0 && features.iter().all(|f| f.is_finite());
        if !usable {
            return false;
        }
        let expected = self.predict(features);
        let trusted = self.samples >= TRUSTED_AFTER && expected > 0.0;
        let scale = if trusted { expected } else { seconds };
        let residual = (seconds - expected) / scale;
        let mut weight = 1.0 / (scale * scale);
        if trusted {
            let bend = BEND * self.spread.max(0.02);
            weight *= (bend / residual.abs().max(1e-12)).min(1.0);
        }
        let off = residual.abs().min(4.0 * self.spread);
        self.spread += (off - self.spread) * 0.05;
        for (row, fi) in features.iter().enumerate() {
            for (column, fj) in features.iter().enumerate() {
                let sum = &mut self.products[row][column];
                *sum = *sum * self.memory + weight * fi * fj;
            }
            self.targets[row] = self.targets[row] * self.memory + weight * fi * seconds;
        }
        self.samples += 1;
        let due = self.samples <= SOLVE_ALL || self.samples.is_multiple_of(SOLVE_EVERY);
        if due {
            self.coefficients = self.solve();
        }
        due
    }

    /// A coefficient that would be negative is left out and the rest solved again.
    fn solve(&self) -> [f64; 3] {
        let mut used = [true; 3];
        for _ in 0..3 {
            let solution = self.eliminate(used);
            let negative = |i: &usize| solution[*i] < 0.0;
            let relative = |i: usize| solution[i] / self.prior[i];
            let worst = (0..3)
                .filter(negative)
                .min_by(|&a, &b| relative(a).total_cmp(&relative(b)));
            match worst {
                Some(i) => used[i] = false,
                None => return solution,
            }
        }
        self.coefficients
    }

    fn eliminate(&self, used: [bool; 3]) -> [f64; 3] {
        let seen = 1.0 + self.samples as f64;
        let fading = PRIOR_SAMPLES / (seen * seen);
        // Units in which a coefficient and its prior are at most 1: a prior far too small pulls no harder than one far
        // too large.
        let mut unit = self.prior;
        for (unit, now) in unit.iter_mut().zip(self.coefficients) {
            *unit = unit.max(now);
        }
        let mut rows = [[0.0; 4]; 3];
        for i in 0..3 {
            if !used[i] {
                rows[i][i] = 1.0;
                continue;
            }
            for j in 0..3 {
                if used[j] {
                    rows[i][j] = self.products[i][j] * unit[i] * unit[j];
                }
            }
            rows[i][i] += fading + INERTIA;
            rows[i][3] = self.targets[i] * unit[i]
                + fading * self.prior[i] / unit[i]
                + INERTIA * self.coefficients[i] / unit[i];
        }
        for pivot in 0..3 {
            let lead = rows[pivot][pivot];
            if lead.abs() < f64::MIN_POSITIVE {
                return self.coefficients;
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
        let mut found = [0.0; 3];
        for i in 0..3 {
            found[i] = if used[i] { rows[i][3] * unit[i] } else { 0.0 };
        }
        match found.iter().all(|c| c.is_finite()) {
            true => found,
            false => self.coefficients,
        }
    }
}

fn dot(a: &[f64; 3], b: &[f64; 3]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// How much slower one rank is than the law of the fleet: what it took over what the law says, old samples fading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RankFactor {
    took: f64,
    expected: f64,
    took_squared: f64,
    product: f64,
    expected_squared: f64,
    samples: u64,
    /// The same over the latest few samples only.
    late_took: f64,
    late_expected: f64,
    applied: Option<f64>,
}

/// What is left of a sample of a rank after one more.
const RANK_MEMORY: f64 = 0.98;
/// The same of the latest few.
const LATE_MEMORY: f64 = 0.8;
/// Fewer samples say nothing about a rank.
const RANK_SAMPLES_MIN: u64 = 8;
/// No sample counts as more or less than so many times what was expected.
const RATIO_MAX: f64 = 4.0;
/// Standard errors beyond which a rank differs from the fleet.
const ERRORS: f64 = 2.0;
/// Standard errors of the latest samples beyond which a rank has changed.
const CHANGE_ERRORS: f64 = 4.0;

impl RankFactor {
    /// The factor in force: 1 unless the rank surely differs.
    pub(crate) fn get(&self) -> f64 {
        self.applied.unwrap_or(1.0)
    }

    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    /// How many numbers a factor is.
    pub(crate) const NUMBERS: usize = 9;

    /// All of it.
    pub(crate) fn numbers(&self) -> [f64; Self::NUMBERS] {
        [
            self.took,
            self.expected,
            self.took_squared,
            self.product,
            self.expected_squared,
            self.samples as f64,
            self.late_took,
            self.late_expected,
            self.applied.unwrap_or(0.0),
        ]
    }

    /// A rank that was known before, by its numbers.
    pub(crate) fn resume(numbers: &[f64]) -> Option<Self> {
        let numbers = <[f64; Self::NUMBERS]>::try_from(numbers).ok()?;
        let [
            took,
            expected,
            took_squared,
            product,
            expected_squared,
            samples,
            late_took,
            late_expected,
            applied,
        ] = numbers;
        let sound = numbers.iter().all(|n| n.is_finite() && *n >= 0.0) && applied < 100.0;
        // Sums of samples, or none.
        let whole = samples == 0.0 || (took > 0.0 && expected > 0.0 && late_expected > 0.0);
        (sound && whole).then_some(Self {
            took,
            expected,
            took_squared,
            product,
            expected_squared,
            samples: samples as u64,
            late_took,
            late_expected,
            applied: (applied > 0.01).then_some(applied),
        })
    }

    /// Took over expected, once enough was seen.
    pub(crate) fn ratio(&self) -> Option<f64> {
        (self.samples >= RANK_SAMPLES_MIN).then(|| self.took / self.expected)
    }

    /// Takes what a sample took and what the law of the fleet says.
    pub(crate) fn learn(&mut self, took: f64, expected: f64) {
        if !(took.is_finite() && expected.is_finite() && took > 0.0 && expected > 0.0) {
            return;
        }
        let about = expected * self.ratio().unwrap_or(1.0);
        let took = took.clamp(about / RATIO_MAX, about * RATIO_MAX);
        self.samples += 1;
        self.took = self.took * RANK_MEMORY + took;
        self.expected = self.expected * RANK_MEMORY + expected;
        self.took_squared = self.took_squared * RANK_MEMORY + took * took;
        self.product = self.product * RANK_MEMORY + took * expected;
        self.expected_squared = self.expected_squared * RANK_MEMORY + expected * expected;
        self.late_took = self.late_took * LATE_MEMORY + took;
        self.late_expected = self.late_expected * LATE_MEMORY + expected;
        if self.samples >= RANK_SAMPLES_MIN {
            self.forget_if_changed();
        }
    }

    /// Compares the rank with the fleet, whose ratio is `usual`; says whether the factor changed.
    pub(crate) fn compare(&mut self, usual: f64) -> bool {
        let Some(ratio) = self.ratio().filter(|_| usual > 0.0) else {
            return false;
        };
        let (factor, error) = (ratio / usual, self.error(ratio) / usual);
        let before = self.applied;
        self.applied = ((factor - 1.0).abs() > ERRORS * error).then_some(factor);
        before != self.applied
    }

    /// Standard error of `factor`.
    fn error(&self, factor: f64) -> f64 {
        let squares = self.took_squared - 2.0 * factor * self.product
            + factor * factor * self.expected_squared;
        squares.max(0.0).sqrt() / self.expected
    }

    /// Where the latest samples surely differ from the older ones, only they count.
    fn forget_if_changed(&mut self) {
        let (all, late) = (
            self.took / self.expected,
            self.late_took / self.late_expected,
        );
        // About as many samples as the late memory spans, of the size of the whole.
        let late_error = self.error(all) * (self.expected / self.late_expected).sqrt();
        if (late - all).abs() > CHANGE_ERRORS * late_error.max(0.02) {
            let share = self.late_expected / self.expected;
            self.took_squared *= share;
            self.product *= share;
            self.expected_squared *= share;
            (self.took, self.expected) = (self.late_took, self.late_expected);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE: [f64; 3] = [0.006, 2.5e-5, 1.5e-9];

    fn sample(i: u32) -> ([f64; 3], f64) {
        let new = f64::from(64 << (i % 8));
        let cached = 2048.0 * f64::from(i % 5);
        let features = [1.0, new, new * (cached + new / 2.0)];
        (features, dot(&TRUE, &features))
    }

    fn worst(fit: &Fit) -> f64 {
        let errors = (0..40).map(|i| {
            let (features, seconds) = sample(i);
            (fit.predict(&features) / seconds - 1.0).abs()
        });
        errors.fold(0.0, f64::max)
    }

    #[test]
    fn a_prior_ten_times_off_is_left_behind_after_fifty_samples() {
        for off in [0.1, 10.0] {
            let mut fit = Fit::new(TRUE.map(|c| c * off), 0.995);
            assert!(worst(&fit) > 0.8);
            for i in 0..50 {
                let (features, seconds) = sample(i * 7);
                // Noise of a tenth either way.
                let noise = 1.0 + 0.1 * f64::from((i * 37) % 21) / 10.0 - 0.1;
                fit.learn(&features, seconds * noise);
            }
            assert!(worst(&fit) < 0.08, "{} at {off}", worst(&fit));
        }
    }

    #[test]
    fn one_sample_in_ten_that_is_nonsense_hardly_matters() {
        let mut fit = Fit::new(TRUE.map(|c| c * 2.0), 0.995);
        for i in 0..400 {
            let (features, seconds) = sample(i);
            let wrong = i > 30 && i % 10 == 3;
            fit.learn(&features, if wrong { seconds * 20.0 } else { seconds });
        }
        assert!(worst(&fit) < 0.08, "{}", worst(&fit));
    }

    #[test]
    fn hostile_samples_leave_finite_numbers() {
        let mut fit = Fit::new(TRUE, 0.995);
        for seconds in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e300, 1e-300] {
            fit.learn(&[1.0, 1e9, 1e18], seconds);
            fit.learn(&[f64::NAN, 1.0, 1.0], 1.0);
            fit.learn(&[0.0; 3], seconds);
        }
        assert!(
            fit.coefficients()
                .iter()
                .all(|c| c.is_finite() && *c >= 0.0)
        );
    }

    #[test]
    fn a_rank_like_the_others_has_no_factor_and_a_slow_one_has() {
        let (mut alike, mut slow) = (RankFactor::default(), RankFactor::default());
        for i in 0..200u32 {
            let noise = 1.0 + f64::from((i * 7919) % 41) / 100.0 - 0.2;
            alike.learn(0.1 * noise, 0.1);
            alike.compare(1.0);
            slow.learn(0.2 * noise, 0.1);
            slow.compare(1.0);
        }
        assert_eq!(alike.get(), 1.0);
        assert!((slow.get() - 2.0).abs() < 0.1, "{}", slow.get());
    }

    #[test]
    fn a_rank_that_slows_to_half_is_followed() {
        let mut rank = RankFactor::default();
        let noise = |i: u32| 1.0 + f64::from((i * 7919) % 41) / 100.0 - 0.2;
        for i in 0..300 {
            rank.learn(0.1 * noise(i), 0.1);
            rank.compare(1.0);
        }
        let mut needed = 0;
        while (rank.get() - 2.0).abs() > 0.2 {
            rank.learn(0.2 * noise(needed), 0.1);
            rank.compare(1.0);
            needed += 1;
            assert!(needed < 200, "{}", rank.get());
        }
        assert!(needed < 40, "{needed}");
    }
}
