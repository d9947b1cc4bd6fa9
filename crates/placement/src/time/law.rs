//! How long an engine takes, as a law of six numbers.
//!
//! Answers one question: what do a prompt and a decode step take, in seconds? A step with a prompt takes `chunk`, plus
//! `token` for each new token, plus `pair` for each pair of tokens that attend to each other; a step that only decodes
//! takes `step`, plus `stream` for each sequence, plus `attend` for each token that the sequences attend to. Both add up
//! in a mixed step, less one `step`: the weights are read once.
//!
//! What always holds: no number is negative, so more work never takes less time.

/// The six numbers, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct StepLaw {
    /// Fixed cost of a step that computes some of a prompt.
    pub chunk: f64,
    /// Of each new token of a prompt.
    pub token: f64,
    /// Of each pair of a new token and one that it attends to.
    pub pair: f64,
    /// Fixed cost of a step that only decodes.
    pub step: f64,
    /// Of each sequence that decodes.
    pub stream: f64,
    /// Of each token that decoding sequences attend to.
    pub attend: f64,
}

impl Default for StepLaw {
    /// An accelerator of no particular kind. It only starts the estimates.
    fn default() -> Self {
        Self {
            chunk: 0.008,
            token: 5e-5,
            pair: 2e-9,
            step: 0.010,
            stream: 5e-5,
            attend: 2e-8,
        }
    }
}

impl StepLaw {
    /// Seconds of computing `new` tokens on top of `cached` ones, without the fixed cost of the steps.
    #[must_use]
    #[inline(always)]
    pub fn work(&self, new: f64, cached: f64) -> f64 {
        self.token * new + self.pair * new * (cached + 0.5 * new)
    }

    /// Seconds of one step of `sequences` that attend to `context` tokens in all.
    ///
    /// ```
    /// # use kvasir_placement::StepLaw;
    /// let law = StepLaw { step: 0.005, stream: 1e-5, attend: 1e-8, ..StepLaw::default() };
    /// assert!((law.decode(100.0, 100_000.0) - 0.007).abs() < 1e-12);
    /// ```
    #[must_use]
    #[inline(always)]
    pub fn decode(&self, sequences: f64, context: f64) -> f64 {
        self.step + self.stream * sequences + self.attend * context
    }

    /// What decodes add to a step that computes some of a prompt.
    #[must_use]
    #[inline(always)]
    pub fn ride(&self, sequences: f64, context: f64) -> f64 {
        self.stream * sequences + self.attend * context
    }

    /// The law of a rank whose prompts and whose steps take so many times as long.
    #[must_use]
    pub fn scaled(&self, prompts: f64, steps: f64) -> Self {
        Self {
            chunk: self.chunk * prompts,
            token: self.token * prompts,
            pair: self.pair * prompts,
            step: self.step * steps,
            stream: self.stream * steps,
            attend: self.attend * steps,
        }
    }
}
