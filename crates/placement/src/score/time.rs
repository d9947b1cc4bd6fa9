//! Scoring by a cost of another policy: the same walk over the prompt, the same choice, other terms.

use kvasir_types::Rng;

use super::{CandidateScan, CostInputs, Scorer, ScoringContext, TopCandidates, preference};
use crate::choice::{LowestCost, WinReason, draw};
use crate::{Candidate, Ledger, SlotSet};

/// What this prompt has to do with one slot, in blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SlotBlocks {
    /// Effective blocks in its caches.
    pub(crate) held: f64,
    /// Leading blocks of running requests.
    pub(crate) active: f64,
}

/// A cost for one slot.
pub(crate) trait SlotCost {
    /// The cost without taints.
    fn cost(&self, slot: u32, blocks: SlotBlocks) -> f64;
    /// The candidate with its terms.
    fn candidate(&self, slot: u32, blocks: SlotBlocks, taint_factor: f64) -> Candidate;
}

impl Scorer {
    /// [`Scorer::choose`] by another cost.
    pub(crate) fn choose_by(
        &mut self,
        context: &ScoringContext<'_>,
        (eligible, temperature): (&SlotSet, f64),
        ledger: &mut Ledger,
        rng: &mut Rng,
        kept: Option<&mut Vec<Candidate>>,
        by: &impl SlotCost,
    ) -> Option<(u32, WinReason)> {
        self.prepare(context, ledger);
        self.most_held = self.most_held_by(eligible);
        self.costs.clear();
        self.cheapest = TopCandidates::default();
        let shared = f64::from(context.prompt.overlap.shared_beyond(0))
            * context.weights.shared_cache_multiplier;
        let overlaps = &self.overlaps;
        let blocks = |slot: u32| {
            let found = overlaps.get(slot as usize).copied().unwrap_or_default();
            SlotBlocks {
                held: found.device + found.lower + (shared - found.shared_less),
                active: found.active,
            }
        };
        let taints = context.prompt.preferred_taints;
        let mut scan = CandidateScan {
            lowest: LowestCost::new(),
            cheapest: &mut self.cheapest,
            costs: (temperature > 0.0).then_some(&mut self.costs),
        };
        if taints.is_empty() {
            eligible.for_each(|slot| scan.offer(by.cost(slot, blocks(slot)), slot, rng));
        } else {
            eligible.for_each(|slot| {
                let factor = preference(taints, slot, context.fleet);
                scan.offer(by.cost(slot, blocks(slot)) * factor, slot, rng);
            });
        }
        let mut won = scan.lowest.won();
        if temperature > 0.0 {
            won = draw(&mut self.costs, temperature, rng);
        }
        if let (Some((winner, _)), Some(kept)) = (won, kept) {
            kept.clear();
            self.cheapest.include(winner);
            let inputs = CostInputs::new(context, overlaps, eligible, ledger);
            for slot in self.cheapest.slots() {
                let factor = preference(taints, slot, context.fleet);
                let mut candidate = by.candidate(slot, blocks(slot), factor);
                let state = inputs.state(slot);
                candidate.terms.shared_blocks = state.shared;
                kept.push(Candidate { state, ..candidate });
            }
        }
        self.reset();
        won
    }
}
