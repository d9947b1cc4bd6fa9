//! How long an engine's forward pass takes.
//!
//! Answers one question: given what a step computes (prompt chunks with what is cached before them, and
//! decoding sequences with what they attend to), how many milliseconds does it take? Three ways to know:
//! a measured [`Profile`], the [`Polynomial`] that Dynamo's mock engine uses, or [`Constants`].
//!
//! Invariants: every answer is finite and at least 0; more tokens or more context never take less time
//! where the measurements show it; no call allocates.
//!
//! Elsewhere: who is in a step (`kvasir-engine`), what a prediction is used for (`kvasir-placement`).

mod formula;
mod grid;
mod h200;
mod preset;
mod profile;

pub use formula::{Constants, Polynomial};
pub use grid::{GridError, Point};
pub use preset::Preset;
pub use profile::Profile;

/// A chunk of one prompt that a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Tokens computed.
    pub new: u32,
    /// Tokens of the same sequence whose keys and values are there already.
    pub cached: u32,
}

/// What one forward pass computes.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepWork<'a> {
    /// Prompt chunks, one per sequence.
    pub chunks: &'a [Chunk],
    /// Sequences that compute one token each.
    pub decodes: u32,
    /// Tokens that those sequences attend to, summed over them.
    pub decode_context: u64,
}

impl StepWork<'_> {
    /// Whether the step computes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.decodes == 0
    }

    /// Tokens attended to by the average decoding sequence.
    fn mean_context(&self) -> f64 {
        self.decode_context as f64 / f64::from(self.decodes.max(1))
    }
}

/// A source of step times.
#[derive(Clone, Debug)]
pub enum StepTimes {
    /// Interpolated from measurements.
    Measured(Profile),
    /// A fitted polynomial.
    Polynomial(Polynomial),
    /// Fixed costs.
    Constant(Constants),
}

impl StepTimes {
    /// Milliseconds of one step; 0 if it computes nothing.
    #[must_use]
    pub fn step_ms(&self, work: &StepWork<'_>) -> f64 {
        if work.is_empty() {
            return 0.0;
        }
        match self {
            Self::Measured(profile) => profile.step_ms(work),
            Self::Polynomial(polynomial) => polynomial.step_ms(work),
            Self::Constant(constants) => constants.step_ms(work),
        }
    }

    /// Milliseconds to compute `new` prompt tokens of one sequence alone on top of `cached` ones.
    #[must_use]
    pub fn prefill_ms(&self, new: u32, cached: u32) -> f64 {
        self.step_ms(&StepWork {
            chunks: &[Chunk { new, cached }],
            ..StepWork::default()
        })
    }
}
