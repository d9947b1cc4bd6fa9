//! A law from measured step times.

use kvasir_profile::{StepTimes, StepWork};

use super::estimate::Estimator;
use super::law::StepLaw;

/// Prompts and batches that the law is fitted to.
const NEW_TOKENS: [u32; 7] = [128, 256, 512, 1024, 2048, 4096, 8192];
const CACHED_TOKENS: [u32; 4] = [0, 2048, 8192, 32_768];
const SEQUENCES: [u32; 6] = [1, 4, 16, 64, 128, 256];
const CONTEXTS: [u32; 4] = [128, 512, 2048, 8192];
/// Times that all of them are gone through.
const ROUNDS: u32 = 4;

impl StepLaw {
    /// The law that these step times follow most closely.
    ///
    /// ```
    /// # use kvasir_placement::StepLaw;
    /// # use kvasir_profile::{Constants, StepTimes};
    /// let constants = Constants { step_ms: 20.0, prompt_token_ms: 0.2, decode_ms: 0.5 };
    /// let law = StepLaw::of_times(&StepTimes::Constant(constants));
    /// assert!((law.chunk + law.work(1000.0, 0.0) - 0.22).abs() < 0.01);
    /// assert!((law.decode(10.0, 1000.0) - 0.025).abs() < 0.001);
    /// ```
    #[must_use]
    pub fn of_times(times: &StepTimes) -> Self {
        let mut estimator = Estimator::new(&Self::default());
        for _ in 0..ROUNDS {
            for new in NEW_TOKENS {
                for cached in CACHED_TOKENS {
                    let seconds = times.prefill_ms(new, cached) / 1e3;
                    estimator.learn_prompt(f64::from(new), f64::from(cached), seconds);
                }
            }
            for sequences in SEQUENCES {
                for context in CONTEXTS {
                    let decode_context = u64::from(sequences) * u64::from(context);
                    let work = StepWork {
                        chunks: &[],
                        decodes: sequences,
                        decode_context,
                    };
                    let seconds = times.step_ms(&work) / 1e3;
                    estimator.learn_step(f64::from(sequences), decode_context as f64, seconds);
                }
            }
        }
        estimator.law()
    }

    /// Whether each number is one that an engine can have.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let all = [
            self.chunk,
            self.token,
            self.pair,
            self.step,
            self.stream,
            self.attend,
        ];
        all.iter().all(|n| n.is_finite() && *n >= 0.0) && self.token > 0.0 && self.step > 0.0
    }
}

#[cfg(test)]
mod tests {
    use kvasir_profile::Preset;

    use super::*;

    /// Within a tenth over most of the surface: the law has six numbers and the profile has a table.
    #[test]
    fn measured_profiles_have_a_law() {
        for preset in Preset::ALL {
            let times = StepTimes::Measured(preset.profile().unwrap());
            let law = StepLaw::of_times(&times);
            assert!(law.is_sound(), "{law:?}");
            for (new, cached) in [(1024, 0), (4096, 0), (8192, 8192), (2048, 8192)] {
                let found = law.chunk + law.work(f64::from(new), f64::from(cached));
                let ratio = found * 1e3 / times.prefill_ms(new, cached);
                assert!(
                    (0.8..1.25).contains(&ratio),
                    "{preset:?} {new}+{cached}: {ratio}"
                );
            }
            for (sequences, context) in [(1, 512), (64, 2048), (128, 2048)] {
                let work = StepWork {
                    chunks: &[],
                    decodes: sequences,
                    decode_context: u64::from(sequences) * context,
                };
                let found = law.decode(f64::from(sequences), work.decode_context as f64);
                let ratio = found * 1e3 / times.step_ms(&work);
                assert!(
                    (0.8..1.25).contains(&ratio),
                    "{preset:?} {sequences}x{context}: {ratio}"
                );
            }
        }
    }
}
