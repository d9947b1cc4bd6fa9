//! Step times from formulas.

use crate::StepWork;

/// Tokens by which the decode polynomial divides the context.
const POLYNOMIAL_CONTEXT_TOKENS: f64 = 16_384.0;

/// The polynomial of Dynamo's mock engine: a prompt of `n` new tokens takes
/// `4.209989e-7 n² + 1.518344e-2 n + 16.50142` ms, a decode step with `a` = context / 16384 takes
/// `-25.74 a² + 54.01 a + 5.74` ms. The second one falls again past its top (`a` near 1.05, 34 ms);
/// a step with more context takes as long as at the top.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polynomial;

impl Polynomial {
    pub(crate) fn step_ms(self, work: &StepWork<'_>) -> f64 {
        let new: f64 = work.chunks.iter().map(|c| f64::from(c.new)).sum();
        let prompt = match work.chunks {
            [] => 0.0,
            _ => 4.209_989e-7 * new * new + 1.518_344e-2 * new + 16.501_42,
        };
        let top = 54.01 / (2.0 * 25.74);
        let a = (work.decode_context as f64 / POLYNOMIAL_CONTEXT_TOKENS).min(top);
        let decode = match work.decodes {
            0 => 0.0,
            _ => -25.74 * a * a + 54.01 * a + 5.74,
        };
        prompt + decode
    }
}

/// Fixed costs, in milliseconds; negative and non-finite ones count as 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Constants {
    /// Of any step.
    pub step_ms: f64,
    /// Of each prompt token computed, in addition.
    pub prompt_token_ms: f64,
    /// Of each decoding sequence, in addition.
    pub decode_ms: f64,
}

impl Constants {
    pub(crate) fn step_ms(&self, work: &StepWork<'_>) -> f64 {
        let clean = |ms: f64| if ms.is_finite() { ms.max(0.0) } else { 0.0 };
        let new: u64 = work.chunks.iter().map(|c| u64::from(c.new)).sum();
        clean(self.step_ms)
            + clean(self.prompt_token_ms) * new as f64
            + clean(self.decode_ms) * f64::from(work.decodes)
    }
}
