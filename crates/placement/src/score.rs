//! The cost of every candidate for one prompt, and the choice among them.
//!
//! Costs one walk over the prompt, one visit to each rank that holds or runs some of it, and one short loop
//! over the candidates. Buffers are kept between prompts: nothing is allocated per candidate.

use std::sync::Arc;

use kvasir_types::{Rng, SequenceHash, Time};

use crate::choice::{Lowest, Won, draw};
use crate::cost::taint_factor;
use crate::{Bits, Facts, Fleet, Ledger, Overlap, Terms, Weights};

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

/// A candidate with its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// The rank's slot.
    pub slot: u32,
    /// Its cost, term by term.
    pub terms: Terms,
}

/// What this prompt has to do with one slot.
#[derive(Clone, Copy, Debug, Default)]
struct Touch {
    device: f64,
    lower: f64,
    /// Shared-cache worth that the device part already covers.
    shared_less: f64,
    /// Leading blocks active there.
    active: u32,
}

/// How many of the cheapest candidates are kept for the record.
pub const KEPT: usize = 8;

/// The buffers of scoring.
#[derive(Clone, Debug, Default)]
pub struct Scorer {
    touches: Vec<Touch>,
    touched: Vec<u32>,
    costs: Vec<(f64, u32)>,
    kept: Vec<(f64, u32)>,
    shared: f64,
    least: u64,
}

impl Scorer {
    /// Scores `eligible` and chooses. `kept` becomes the cheapest [`KEPT`], the winner among them.
    #[expect(
        clippy::too_many_arguments,
        reason = "the whole situation, borrowed piece by piece"
    )]
    pub fn choose(
        &mut self,
        now: Time,
        weights: &Weights,
        temperature: f64,
        prompt: &Prompt<'_>,
        eligible: &Bits,
        fleet: &Fleet,
        ledger: &mut Ledger,
        rng: &mut Rng,
        kept: &mut Vec<Scored>,
    ) -> Option<(u32, Won)> {
        self.prepare(now, weights, prompt, eligible, fleet, ledger);
        self.costs.clear();
        self.kept.clear();
        let mut lowest = Lowest::new();
        for slot in eligible.iter() {
            let facts = self.facts(now, prompt, slot, fleet, ledger);
            let cost = weights.terms(prompt.isl_tokens, &facts).cost;
            if temperature > 0.0 {
                self.costs.push((cost, slot));
            } else {
                lowest.offer(cost, slot, rng);
            }
            keep(&mut self.kept, cost, slot);
        }
        let won = if temperature > 0.0 {
            draw(&mut self.costs, temperature, rng)
        } else {
            lowest.won()
        };
        if let Some((winner, _)) = won {
            self.explain(now, weights, prompt, winner, fleet, ledger, kept);
        }
        self.reset();
        won
    }

    /// The terms of one slot, as if it were the only candidate and without preferred taints.
    pub fn one(
        &mut self,
        now: Time,
        weights: &Weights,
        prompt: &Prompt<'_>,
        slot: u32,
        fleet: &Fleet,
        ledger: &mut Ledger,
    ) -> Terms {
        let mut only = Bits::default();
        only.set(slot, true);
        self.prepare(now, weights, prompt, &only, fleet, ledger);
        let plain = Prompt {
            preferred_taints: &[],
            ..*prompt
        };
        let facts = self.facts(now, &plain, slot, fleet, ledger);
        self.reset();
        weights.terms(prompt.isl_tokens, &facts)
    }

    /// Calls `each(slot, terms)` for every eligible slot, in slot order.
    #[expect(
        clippy::too_many_arguments,
        reason = "the whole situation, borrowed piece by piece"
    )]
    pub fn all(
        &mut self,
        now: Time,
        weights: &Weights,
        prompt: &Prompt<'_>,
        eligible: &Bits,
        fleet: &Fleet,
        ledger: &mut Ledger,
        mut each: impl FnMut(u32, Terms),
    ) {
        self.prepare(now, weights, prompt, eligible, fleet, ledger);
        for slot in eligible.iter() {
            let facts = self.facts(now, prompt, slot, fleet, ledger);
            each(slot, weights.terms(prompt.isl_tokens, &facts));
        }
        self.reset();
    }

    fn prepare(
        &mut self,
        now: Time,
        weights: &Weights,
        prompt: &Prompt<'_>,
        eligible: &Bits,
        fleet: &Fleet,
        ledger: &mut Ledger,
    ) {
        self.touches
            .resize(fleet.slot_end() as usize, Touch::default());
        let Self {
            touches, touched, ..
        } = self;
        let blocks = f64::from(prompt.isl_tokens.div_ceil(weights.block_size.max(1)));
        let worth = weights.shared_cache_multiplier;
        let shared = prompt.overlap.shared_beyond(0);
        self.shared = worth * f64::from(shared);
        for found in &prompt.overlap.ranks {
            let Some(slot) = fleet.slot(found.rank) else {
                continue;
            };
            let Some(touch) = touches.get_mut(slot as usize) else {
                continue;
            };
            // NaN becomes 0; more than the prompt cannot be held.
            touch.device = found.device.max(0.0).min(blocks);
            touch.lower = weights.host_cache_hit_weight * f64::from(found.host)
                + weights.disk_cache_hit_weight * f64::from(found.disk);
            if shared > 0 {
                let beyond = prompt.overlap.shared_beyond(touch.device as u32);
                touch.shared_less = worth * f64::from(shared - beyond);
            }
            touched.push(slot);
        }
        if prompt.shares {
            ledger.depths(prompt.sequence, |slot, depth| {
                let Some(touch) = touches.get_mut(slot as usize) else {
                    return false;
                };
                let new = touch.active == 0;
                if new {
                    touch.active = depth;
                    touched.push(slot);
                }
                new
            });
        }
        self.least = 0;
        if weights.overlap_score_credit_decay > 0.0 {
            let tokens = eligible.iter().map(|s| ledger.prefill_tokens(s, now));
            self.least = tokens.min().unwrap_or(0);
        }
    }

    fn reset(&mut self) {
        for slot in self.touched.drain(..) {
            if let Some(touch) = self.touches.get_mut(slot as usize) {
                *touch = Touch::default();
            }
        }
    }

    #[inline]
    fn facts(
        &self,
        now: Time,
        prompt: &Prompt<'_>,
        slot: u32,
        fleet: &Fleet,
        ledger: &Ledger,
    ) -> Facts {
        let touch = self.touches.get(slot as usize).copied().unwrap_or_default();
        let (active_blocks, prefill_tokens, requests) = ledger.figures(slot, now);
        Facts {
            prefill_tokens,
            least_prefill_tokens: self.least,
            device: touch.device,
            lower: touch.lower,
            shared: self.shared - touch.shared_less,
            active_blocks,
            new_blocks: (prompt.sequence.len() as u32).saturating_sub(touch.active),
            requests,
            taint_factor: preference(prompt.preferred_taints, slot, fleet),
        }
    }

    /// Fills `kept` with the terms of the cheapest, cheapest first; the winner replaces the last of them
    /// if it is not one.
    #[expect(
        clippy::too_many_arguments,
        reason = "the whole situation, borrowed piece by piece"
    )]
    fn explain(
        &mut self,
        now: Time,
        weights: &Weights,
        prompt: &Prompt<'_>,
        winner: u32,
        fleet: &Fleet,
        ledger: &Ledger,
        kept: &mut Vec<Scored>,
    ) {
        if !self.kept.iter().any(|(_, slot)| *slot == winner)
            && let Some(last) = self.kept.last_mut()
        {
            last.1 = winner;
        }
        kept.clear();
        for &(_, slot) in &self.kept {
            let facts = self.facts(now, prompt, slot, fleet, ledger);
            let terms = weights.terms(prompt.isl_tokens, &facts);
            kept.push(Scored { slot, terms });
        }
    }
}

/// Keeps the cheapest, sorted; the first of equals stays first.
#[inline]
fn keep(kept: &mut Vec<(f64, u32)>, cost: f64, slot: u32) {
    if kept.len() == KEPT {
        if kept.last().is_some_and(|(dearest, _)| *dearest <= cost) {
            return;
        }
        kept.pop();
    }
    let at = kept.partition_point(|(other, _)| *other <= cost);
    kept.insert(at, (cost, slot));
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
