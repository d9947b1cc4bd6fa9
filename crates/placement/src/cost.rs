//! What one candidate costs. Lower is better.
//!
//! `cost = (scale * max(0, raw prefill - credit) + decode + requests) * taints`, all in blocks and all in
//! floating point: nothing is rounded on the way. Credits never make the prefill term negative and never
//! touch the decode term.

/// The parts of one candidate's cost, as they were when the choice was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Terms {
    /// Prompt blocks waiting on the rank plus those of this prompt, cached ones included.
    pub raw_prefill_blocks: f64,
    /// Blocks taken off that because they are cached somewhere near.
    pub credit_blocks: f64,
    /// What is left to compute: `max(0, raw - credit)`.
    pub prefill_blocks: f64,
    /// Blocks the rank would hold for its running requests with this one added.
    pub decode_blocks: f64,
    /// `decode-active-request-weight` times the requests running there.
    pub request_cost: f64,
    /// What preferred taints multiply the sum by; 1 without them.
    pub taint_factor: f64,
    /// Effective blocks of this prompt the rank holds: device ones plus weighted lower tiers.
    pub cached_blocks: f64,
    /// The sum.
    pub cost: f64,
}
