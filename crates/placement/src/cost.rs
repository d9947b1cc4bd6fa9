//! What one candidate costs. Lower is better.
//!
//! `cost = (scale * max(0, raw prefill - credit) + decode + requests) * taints`, all in blocks and all in
//! floating point: nothing is rounded on the way. Credits never make the prefill term negative and never
//! touch the decode term.

use kvasir_options::router;

/// The parts of one candidate's cost, as they were when the choice was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct CostTerms {
    /// Prompt blocks waiting on the rank plus those of this prompt, cached ones included.
    pub raw_prefill_blocks: f64,
    /// Blocks taken off that because they are cached somewhere near.
    pub credit_blocks: f64,
    /// Those of them that a cache holds which all workers share.
    #[cfg_attr(feature = "serde", serde(default))]
    pub shared_blocks: f64,
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

/// The settings that a cost is made with: the router's, with what the request overrides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Tokens per block, at least 1.
    pub block_size: u32,
    /// Blocks of cost saved per block held in device memory.
    pub overlap_score_credit: f64,
    /// How fast that credit fades on ranks with more waiting prompt work than the least loaded.
    pub overlap_score_credit_decay: f64,
    /// Weight of the prefill term.
    pub prefill_load_scale: f64,
    /// Cost of each running request, in blocks.
    pub decode_active_request_weight: f64,
    /// Worth of a block in host memory.
    pub host_cache_hit_weight: f64,
    /// Worth of a block on disk or further away.
    pub disk_cache_hit_weight: f64,
    /// Worth of a block in the cache that all share.
    pub shared_cache_multiplier: f64,
    /// Whether prompt tokens count at all.
    pub track_prefill_tokens: bool,
    /// Generation only (conditional disaggregation): credits come off the decode term, but only while
    /// prompt tokens do not count.
    pub decode_stage: bool,
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            block_size: router::BLOCK_SIZE_DEFAULT,
            overlap_score_credit: router::ROUTER_KV_OVERLAP_SCORE_CREDIT.default,
            overlap_score_credit_decay: router::ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY.default,
            prefill_load_scale: router::ROUTER_PREFILL_LOAD_SCALE.default,
            decode_active_request_weight: router::ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT.default,
            host_cache_hit_weight: router::ROUTER_HOST_CACHE_HIT_WEIGHT.default,
            disk_cache_hit_weight: router::ROUTER_DISK_CACHE_HIT_WEIGHT.default,
            shared_cache_multiplier: router::SHARED_CACHE_MULTIPLIER.default,
            track_prefill_tokens: router::ROUTER_TRACK_PREFILL_TOKENS.default,
            decode_stage: false,
        }
    }
}

/// What is known of one candidate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CandidateState {
    /// Prompt tokens waiting there.
    pub prefill_tokens: f64,
    /// Least prompt tokens waiting on any eligible rank.
    pub least_prefill_tokens: f64,
    /// Blocks of this prompt in device memory.
    pub device: f64,
    /// Weighted worth of the blocks in lower tiers.
    pub lower: f64,
    /// Weighted worth of the blocks in the shared cache.
    pub shared: f64,
    /// Blocks running requests hold.
    pub active_blocks: f64,
    /// Tracked blocks of this prompt that are not active there yet.
    pub new_blocks: f64,
    /// Requests running there.
    pub requests: f64,
    /// Factor of the preferred taints; 1 without.
    pub taint_factor: f64,
}

impl Weights {
    /// The cost of a candidate for a prompt of `isl_tokens`, term by term.
    ///
    /// A rank with 320 tokens of prompt waiting, 4 blocks cached, 7 blocks active; a prompt of 160 tokens:
    /// ```
    /// # use kvasir_placement::{CandidateState, Weights};
    /// let state = CandidateState {
    ///     prefill_tokens: 320.0,
    ///     device: 4.0,
    ///     active_blocks: 7.0,
    ///     taint_factor: 1.0,
    ///     ..CandidateState::default()
    /// };
    /// let terms = Weights::default().terms(160, &state);
    /// assert_eq!((terms.raw_prefill_blocks, terms.prefill_blocks, terms.cost), (30.0, 26.0, 33.0));
    /// ```
    #[must_use]
    #[inline(always)] // In the loop over candidates only the sum is used, and the rest falls away.
    pub fn terms(&self, isl_tokens: u32, state: &CandidateState) -> CostTerms {
        let block = f64::from(self.block_size);
        let raw = if self.track_prefill_tokens {
            (state.prefill_tokens + f64::from(isl_tokens)) / block
        } else {
            0.0
        };
        let credit = self.overlap_score_credit * self.decay(isl_tokens, state);
        let credit_blocks = credit * state.device + state.lower + state.shared;
        let prefill = (raw - credit_blocks).max(0.0);
        let mut decode = state.active_blocks + state.new_blocks;
        if self.credits_decode() {
            decode = (decode - credit_blocks).max(0.0);
        }
        let request_cost = self.decode_active_request_weight * state.requests;
        let sum = self.prefill_load_scale * prefill + decode + request_cost;
        CostTerms {
            raw_prefill_blocks: raw,
            credit_blocks,
            shared_blocks: state.shared,
            prefill_blocks: prefill,
            decode_blocks: decode,
            request_cost,
            taint_factor: state.taint_factor,
            cached_blocks: state.device + state.lower,
            cost: sum * state.taint_factor,
        }
    }

    /// Whether the cost has only its usual terms: no fading credit, no credit on decode.
    pub(crate) fn is_plain(&self) -> bool {
        self.overlap_score_credit_decay == 0.0 && !self.credits_decode()
    }

    /// The cost alone where [`Weights::is_plain`] and no taint is preferred: the same operations in the same
    /// order as [`Weights::terms`], and nothing else.
    #[inline(always)]
    pub(crate) fn plain_cost(&self, isl_tokens: f64, state: &CandidateState) -> f64 {
        let raw = match self.track_prefill_tokens {
            true => (state.prefill_tokens + isl_tokens) / f64::from(self.block_size),
            false => 0.0,
        };
        let credit_blocks = self.overlap_score_credit * state.device + state.lower + state.shared;
        let prefill = (raw - credit_blocks).max(0.0);
        let decode = state.active_blocks + state.new_blocks;
        let request_cost = self.decode_active_request_weight * state.requests;
        self.prefill_load_scale * prefill + decode + request_cost
    }

    fn credits_decode(&self) -> bool {
        self.decode_stage && !self.track_prefill_tokens && self.overlap_score_credit > 0.0
    }

    /// What is left of the device credit on a rank with more waiting prompt work than the least loaded.
    #[inline]
    fn decay(&self, isl_tokens: u32, state: &CandidateState) -> f64 {
        if self.overlap_score_credit_decay == 0.0 || !self.track_prefill_tokens {
            return 1.0;
        }
        let more = state.prefill_tokens - state.least_prefill_tokens;
        let request_blocks = f64::from(isl_tokens.div_ceil(self.block_size));
        let excess = more / f64::from(self.block_size) / request_blocks;
        1.0 / (1.0 + self.overlap_score_credit_decay * excess)
    }
}

/// What preferred taints with this sum of weights multiply a cost by: `exp(-tanh(sum))`, in `[1/e, e]`.
#[must_use]
pub fn taint_factor(weights: f64) -> f64 {
    if weights.is_nan() {
        return 1.0;
    }
    (-weights.tanh()).exp()
}

#[cfg(test)]
mod tests;
