//! The cost of every candidate for one prompt, and the choice among them.
//!
//! Costs one walk over the prompt, one visit to each rank that holds or runs some of it, and one short loop
//! over the candidates. Buffers are kept between prompts: nothing is allocated per candidate.

mod time;

pub(crate) use time::{SlotBlocks, SlotCost};

use std::sync::Arc;

use kvasir_types::{Rng, SequenceHash, Time, WorkerRank};

use crate::choice::{LowestCost, WinReason, draw};
use crate::cost::taint_factor;
use crate::ledger::RankTotals;
use crate::{CandidateState, CostTerms, Fleet, Ledger, Overlap, SlotSet, TimeTerms, Weights};

/// A prompt as the cost sees it.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Its tokens, at least 1.
    pub isl_tokens: u32,
    /// What ranks hold of it.
    pub overlap: &'a Overlap,
    /// Chained hashes of its complete blocks; empty where blocks are not tracked.
    pub sequence: &'a [SequenceHash],
    /// Whether equal blocks of running requests are the same blocks.
    pub shares: bool,
    /// Taints that change the cost.
    pub preferred_taints: &'a [(Arc<str>, f64)],
}

/// What is to be scored, and when.
#[derive(Clone, Copy, Debug)]
pub struct ScoringContext<'a> {
    /// The moment.
    pub now: Time,
    /// The settings.
    pub weights: &'a Weights,
    /// The prompt.
    pub prompt: &'a Prompt<'a>,
    /// Who is there.
    pub fleet: &'a Fleet,
}

/// A candidate with its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Candidate {
    /// The rank.
    pub rank: WorkerRank,
    /// Its cost, term by term.
    pub terms: CostTerms,
    /// What the linear cost is made from, so that it can be made again with other weights ([`Weights::terms`]); empty
    /// where the rank was named and not weighed.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub state: CandidateState,
    /// The same in seconds, where the policy counts in seconds.
    #[cfg_attr(
        feature = "serde",
        serde(default, skip_serializing_if = "Option::is_none")
    )]
    pub seconds: Option<TimeTerms>,
}

/// How many of the cheapest candidates are kept for the record.
pub const CANDIDATES_KEPT: usize = 8;

/// What this prompt has to do with one slot, in blocks.
#[derive(Clone, Copy, Debug, Default)]
struct SlotOverlap {
    device: f64,
    lower: f64,
    /// Shared-cache worth that the device part already covers.
    shared_less: f64,
    /// Leading blocks active there.
    active: f64,
}

/// The buffers of scoring.
#[derive(Clone, Debug, Default)]
pub struct Scorer {
    /// By slot; all default between prompts.
    overlaps: Vec<SlotOverlap>,
    touched_slots: Vec<u32>,
    costs: Vec<(f64, u32)>,
    cheapest: TopCandidates,
    most_held: f64,
}

impl Scorer {
    /// Most effective blocks of the last prompt that a candidate held.
    #[must_use]
    pub fn most_held(&self) -> f64 {
        self.most_held
    }

    /// Scores `eligible` and chooses. `kept` becomes the cheapest [`CANDIDATES_KEPT`], the winner among them.
    pub fn choose(
        &mut self,
        context: &ScoringContext<'_>,
        temperature: f64,
        eligible: &SlotSet,
        ledger: &mut Ledger,
        rng: &mut Rng,
        kept: &mut Vec<Candidate>,
    ) -> Option<(u32, WinReason)> {
        self.prepare(context, ledger);
        self.most_held = self.most_held_by(eligible);
        self.costs.clear();
        self.cheapest = TopCandidates::default();
        let inputs = CostInputs::new(context, &self.overlaps, eligible, ledger);
        let mut scan = CandidateScan {
            lowest: LowestCost::new(),
            cheapest: &mut self.cheapest,
            costs: (temperature > 0.0).then_some(&mut self.costs),
        };
        if inputs.is_plain() {
            eligible.for_each(|slot| scan.offer(inputs.plain_cost(slot), slot, rng));
        } else {
            eligible.for_each(|slot| scan.offer(inputs.terms(slot).cost, slot, rng));
        }
        let mut won = scan.lowest.won();
        if temperature > 0.0 {
            won = draw(&mut self.costs, temperature, rng);
        }
        kept.clear();
        if let Some((winner, _)) = won {
            self.cheapest.include(winner);
            for slot in self.cheapest.slots() {
                kept.push(Candidate {
                    rank: context.fleet.rank(slot).unwrap_or_default(),
                    terms: inputs.terms(slot),
                    state: inputs.state(slot),
                    seconds: None,
                });
            }
        }
        self.reset();
        won
    }

    /// The terms of one slot, as if it were the only candidate and without preferred taints.
    pub fn one(
        &mut self,
        context: &ScoringContext<'_>,
        slot: u32,
        ledger: &mut Ledger,
    ) -> CostTerms {
        let prompt = Prompt {
            preferred_taints: &[],
            ..*context.prompt
        };
        let context = ScoringContext {
            prompt: &prompt,
            ..*context
        };
        let mut only = SlotSet::default();
        only.set(slot, true);
        let mut terms = CostTerms::default();
        self.all(&context, &only, ledger, |_, found| terms = found);
        terms
    }

    /// Calls `each(slot, terms)` for every eligible slot, in slot order.
    pub fn all(
        &mut self,
        context: &ScoringContext<'_>,
        eligible: &SlotSet,
        ledger: &mut Ledger,
        mut each: impl FnMut(u32, CostTerms),
    ) {
        self.prepare(context, ledger);
        let inputs = CostInputs::new(context, &self.overlaps, eligible, ledger);
        eligible.for_each(|slot| each(slot, inputs.terms(slot)));
        self.reset();
    }

    /// Notes what ranks hold and run of the prompt.
    fn prepare(&mut self, context: &ScoringContext<'_>, ledger: &mut Ledger) {
        let ScoringContext {
            weights,
            prompt,
            fleet,
            ..
        } = *context;
        let Self {
            overlaps,
            touched_slots,
            ..
        } = self;
        overlaps.resize(fleet.slot_end() as usize, SlotOverlap::default());
        touched_slots.reserve(prompt.overlap.ranks.len());
        let blocks = f64::from(prompt.isl_tokens.div_ceil(weights.block_size.max(1)));
        let shared = prompt.overlap.shared_beyond(0);
        for found in &prompt.overlap.ranks {
            let Some(slot) = fleet.slot(found.rank) else {
                continue;
            };
            let Some(overlap) = overlaps.get_mut(slot as usize) else {
                continue;
            };
            // NaN becomes 0; more than the prompt cannot be held.
            overlap.device = found.device.max(0.0).min(blocks);
            overlap.lower = weights.host_cache_hit_weight * f64::from(found.host)
                + weights.disk_cache_hit_weight * f64::from(found.disk);
            if shared > 0 {
                let beyond = prompt.overlap.shared_beyond(overlap.device as u32);
                overlap.shared_less = weights.shared_cache_multiplier * f64::from(shared - beyond);
            }
            touched_slots.push(slot);
        }
        if prompt.shares {
            ledger.depths(prompt.sequence, |slot, depth| {
                let Some(overlap) = overlaps.get_mut(slot as usize) else {
                    return false;
                };
                let new = overlap.active == 0.0;
                if new {
                    overlap.active = f64::from(depth);
                    touched_slots.push(slot);
                }
                new
            });
        }
    }

    fn most_held_by(&self, eligible: &SlotSet) -> f64 {
        let mut most = 0.0_f64;
        for &slot in self
            .touched_slots
            .iter()
            .filter(|slot| eligible.has(**slot))
        {
            if let Some(overlap) = self.overlaps.get(slot as usize) {
                most = most.max(overlap.device + overlap.lower);
            }
        }
        most
    }

    fn reset(&mut self) {
        for slot in self.touched_slots.drain(..) {
            if let Some(overlap) = self.overlaps.get_mut(slot as usize) {
                *overlap = SlotOverlap::default();
            }
        }
    }
}

/// Everything a cost is made of, laid out for one prompt.
struct CostInputs<'a> {
    context: &'a ScoringContext<'a>,
    overlaps: &'a [SlotOverlap],
    totals: &'a [RankTotals],
    ledger: &'a Ledger,
    isl_tokens: f64,
    blocks: f64,
    /// Worth of the shared cache to a rank that holds nothing.
    shared: f64,
    /// Least prompt tokens waiting on any eligible rank, where the credit fades by it.
    least: f64,
}

impl<'a> CostInputs<'a> {
    fn new(
        context: &'a ScoringContext<'a>,
        overlaps: &'a [SlotOverlap],
        eligible: &SlotSet,
        ledger: &'a Ledger,
    ) -> Self {
        let ScoringContext {
            weights, prompt, ..
        } = *context;
        let mut least = 0.0;
        if weights.overlap_score_credit_decay > 0.0 {
            let tokens = eligible
                .iter()
                .map(|s| ledger.prefill_tokens(s, context.now));
            least = tokens.min().unwrap_or(0) as f64;
        }
        let shared = f64::from(prompt.overlap.shared_beyond(0));
        Self {
            context,
            overlaps,
            totals: ledger.totals(),
            ledger,
            isl_tokens: f64::from(prompt.isl_tokens),
            blocks: prompt.sequence.len() as f64,
            shared: weights.shared_cache_multiplier * shared,
            least,
        }
    }

    /// Whether nothing but the usual terms counts, so that [`CostInputs::plain_cost`] may be used.
    fn is_plain(&self) -> bool {
        self.context.weights.is_plain()
            && self.context.prompt.preferred_taints.is_empty()
            && !self.ledger.decays()
    }

    #[inline(always)] // The body of the loop over candidates.
    fn plain_state(&self, slot: u32) -> CandidateState {
        let at = slot as usize;
        let (Some(overlap), Some(totals)) = (self.overlaps.get(at), self.totals.get(at)) else {
            return CandidateState::default();
        };
        CandidateState {
            prefill_tokens: totals.prefill_tokens,
            least_prefill_tokens: self.least,
            device: overlap.device,
            lower: overlap.lower,
            shared: self.shared - overlap.shared_less,
            active_blocks: totals.active_blocks,
            new_blocks: self.blocks - overlap.active,
            requests: totals.requests,
            taint_factor: 1.0,
        }
    }

    #[inline(always)]
    fn plain_cost(&self, slot: u32) -> f64 {
        let state = self.plain_state(slot);
        self.context.weights.plain_cost(self.isl_tokens, &state)
    }

    #[inline]
    fn state(&self, slot: u32) -> CandidateState {
        let mut state = self.plain_state(slot);
        let ScoringContext {
            now, prompt, fleet, ..
        } = *self.context;
        if self.ledger.decays() {
            state.prefill_tokens = self.ledger.prefill_tokens(slot, now) as f64;
        }
        state.taint_factor = preference(prompt.preferred_taints, slot, fleet);
        state
    }

    #[inline]
    fn terms(&self, slot: u32) -> CostTerms {
        let state = self.state(slot);
        let ScoringContext {
            weights, prompt, ..
        } = *self.context;
        let terms = weights.terms(prompt.isl_tokens, &state);
        debug_assert!(
            !self.is_plain() || terms.cost == self.plain_cost(slot) || terms.cost.is_nan(),
            "both ways to the cost agree to the last bit"
        );
        terms
    }
}

/// One pass over the candidates.
struct CandidateScan<'a> {
    lowest: LowestCost,
    cheapest: &'a mut TopCandidates,
    /// All of them, where one is to be drawn.
    costs: Option<&'a mut Vec<(f64, u32)>>,
}

impl CandidateScan<'_> {
    #[inline(always)]
    fn offer(&mut self, cost: f64, slot: u32, rng: &mut Rng) {
        match &mut self.costs {
            Some(costs) => costs.push((cost, slot)),
            None => self.lowest.offer(cost, slot, rng),
        }
        if cost < self.cheapest.below {
            self.cheapest.keep(cost, slot);
        }
    }
}

/// The cheapest so far, sorted; the first of equals stays first.
#[derive(Clone, Copy, Debug)]
struct TopCandidates {
    list: [(f64, u32); CANDIDATES_KEPT],
    len: usize,
    /// What the next must cost less than.
    below: f64,
}

impl Default for TopCandidates {
    fn default() -> Self {
        Self {
            list: [(f64::INFINITY, u32::MAX); CANDIDATES_KEPT],
            len: 0,
            below: f64::INFINITY,
        }
    }
}

impl TopCandidates {
    fn keep(&mut self, cost: f64, slot: u32) {
        let mut at = self.len.min(CANDIDATES_KEPT - 1);
        while at > 0 && self.list[at - 1].0 > cost {
            self.list[at] = self.list[at - 1];
            at -= 1;
        }
        self.list[at] = (cost, slot);
        self.len = (self.len + 1).min(CANDIDATES_KEPT);
        if self.len == CANDIDATES_KEPT {
            self.below = self.list[CANDIDATES_KEPT - 1].0;
        }
    }

    /// Makes sure that the winner is among them.
    fn include(&mut self, winner: u32) {
        if !self.slots().any(|slot| slot == winner) {
            self.len = (self.len + 1).min(CANDIDATES_KEPT);
            self.list[self.len - 1] = (f64::INFINITY, winner);
        }
    }

    fn slots(&self) -> impl Iterator<Item = u32> {
        self.list.iter().take(self.len).map(|(_, slot)| *slot)
    }
}

fn preference(taints: &[(Arc<str>, f64)], slot: u32, fleet: &Fleet) -> f64 {
    if taints.is_empty() {
        return 1.0;
    }
    let carried = taints.iter().filter(|(name, _)| fleet.carries(slot, name));
    taint_factor(carried.map(|(_, weight)| weight).sum())
}

#[cfg(test)]
mod tests;
