//! The cost of every candidate for one prompt, and the choice among them.
//!
//! Costs one walk over the prompt, one visit to each rank that holds or runs some of it, and one short loop
//! over the candidates. Buffers are kept between prompts: nothing is allocated per candidate.

use std::sync::Arc;

use kvasir_types::{Rng, SequenceHash, Time, WorkerRank};

use crate::choice::{Lowest, Won, draw};
use crate::cost::taint_factor;
use crate::ledger::Figures;
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

/// What is to be scored, and when.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
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
    pub terms: Terms,
}

/// How many of the cheapest candidates are kept for the record.
pub const KEPT: usize = 8;

/// What this prompt has to do with one slot, in blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Touch {
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
    touches: Vec<Touch>,
    touched: Vec<u32>,
    costs: Vec<(f64, u32)>,
    cheapest: Cheapest,
    most_held: f64,
}

impl Scorer {
    /// Most effective blocks of the last prompt that a candidate held.
    #[must_use]
    pub fn most_held(&self) -> f64 {
        self.most_held
    }

    /// Scores `eligible` and chooses. `kept` becomes the cheapest [`KEPT`], the winner among them.
    pub fn choose(
        &mut self,
        scene: &Scene<'_>,
        temperature: f64,
        eligible: &Bits,
        ledger: &mut Ledger,
        rng: &mut Rng,
        kept: &mut Vec<Candidate>,
    ) -> Option<(u32, Won)> {
        self.prepare(scene, ledger);
        self.most_held = self.most_held_by(eligible);
        self.costs.clear();
        self.cheapest = Cheapest::default();
        let sheet = Sheet::new(scene, &self.touches, eligible, ledger);
        let mut sweep = Sweep {
            lowest: Lowest::new(),
            cheapest: &mut self.cheapest,
            costs: (temperature > 0.0).then_some(&mut self.costs),
        };
        if sheet.is_plain() {
            eligible.for_each(|slot| sweep.offer(sheet.plain_cost(slot), slot, rng));
        } else {
            eligible.for_each(|slot| sweep.offer(sheet.terms(slot).cost, slot, rng));
        }
        let mut won = sweep.lowest.won();
        if temperature > 0.0 {
            won = draw(&mut self.costs, temperature, rng);
        }
        kept.clear();
        if let Some((winner, _)) = won {
            self.cheapest.include(winner);
            for slot in self.cheapest.slots() {
                kept.push(Candidate {
                    rank: scene.fleet.rank(slot).unwrap_or_default(),
                    terms: sheet.terms(slot),
                });
            }
        }
        self.reset();
        won
    }

    /// The terms of one slot, as if it were the only candidate and without preferred taints.
    pub fn one(&mut self, scene: &Scene<'_>, slot: u32, ledger: &mut Ledger) -> Terms {
        let prompt = Prompt {
            preferred_taints: &[],
            ..*scene.prompt
        };
        let scene = Scene {
            prompt: &prompt,
            ..*scene
        };
        let mut only = Bits::default();
        only.set(slot, true);
        let mut terms = Terms::default();
        self.all(&scene, &only, ledger, |_, found| terms = found);
        terms
    }

    /// Calls `each(slot, terms)` for every eligible slot, in slot order.
    pub fn all(
        &mut self,
        scene: &Scene<'_>,
        eligible: &Bits,
        ledger: &mut Ledger,
        mut each: impl FnMut(u32, Terms),
    ) {
        self.prepare(scene, ledger);
        let sheet = Sheet::new(scene, &self.touches, eligible, ledger);
        eligible.for_each(|slot| each(slot, sheet.terms(slot)));
        self.reset();
    }

    /// Notes what ranks hold and run of the prompt.
    fn prepare(&mut self, scene: &Scene<'_>, ledger: &mut Ledger) {
        let Scene {
            weights,
            prompt,
            fleet,
            ..
        } = *scene;
        let Self {
            touches, touched, ..
        } = self;
        touches.resize(fleet.slot_end() as usize, Touch::default());
        touched.reserve(prompt.overlap.ranks.len());
        let blocks = f64::from(prompt.isl_tokens.div_ceil(weights.block_size.max(1)));
        let shared = prompt.overlap.shared_beyond(0);
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
                touch.shared_less = weights.shared_cache_multiplier * f64::from(shared - beyond);
            }
            touched.push(slot);
        }
        if prompt.shares {
            ledger.depths(prompt.sequence, |slot, depth| {
                let Some(touch) = touches.get_mut(slot as usize) else {
                    return false;
                };
                let new = touch.active == 0.0;
                if new {
                    touch.active = f64::from(depth);
                    touched.push(slot);
                }
                new
            });
        }
    }

    fn most_held_by(&self, eligible: &Bits) -> f64 {
        let mut most = 0.0_f64;
        for &slot in self.touched.iter().filter(|slot| eligible.has(**slot)) {
            if let Some(touch) = self.touches.get(slot as usize) {
                most = most.max(touch.device + touch.lower);
            }
        }
        most
    }

    fn reset(&mut self) {
        for slot in self.touched.drain(..) {
            if let Some(touch) = self.touches.get_mut(slot as usize) {
                *touch = Touch::default();
            }
        }
    }
}

/// Everything a cost is made of, laid out for one prompt.
struct Sheet<'a> {
    scene: &'a Scene<'a>,
    touches: &'a [Touch],
    figures: &'a [Figures],
    ledger: &'a Ledger,
    isl_tokens: f64,
    blocks: f64,
    /// Worth of the shared cache to a rank that holds nothing.
    shared: f64,
    /// Least prompt tokens waiting on any eligible rank, where the credit fades by it.
    least: f64,
}

impl<'a> Sheet<'a> {
    fn new(
        scene: &'a Scene<'a>,
        touches: &'a [Touch],
        eligible: &Bits,
        ledger: &'a Ledger,
    ) -> Self {
        let Scene {
            weights, prompt, ..
        } = *scene;
        let mut least = 0.0;
        if weights.overlap_score_credit_decay > 0.0 {
            let tokens = eligible.iter().map(|s| ledger.prefill_tokens(s, scene.now));
            least = tokens.min().unwrap_or(0) as f64;
        }
        let shared = f64::from(prompt.overlap.shared_beyond(0));
        Self {
            scene,
            touches,
            figures: ledger.figures(),
            ledger,
            isl_tokens: f64::from(prompt.isl_tokens),
            blocks: prompt.sequence.len() as f64,
            shared: weights.shared_cache_multiplier * shared,
            least,
        }
    }

    /// Whether nothing but the usual terms counts, so that [`Sheet::plain_cost`] may be used.
    fn is_plain(&self) -> bool {
        self.scene.weights.is_plain()
            && self.scene.prompt.preferred_taints.is_empty()
            && !self.ledger.decays()
    }

    #[inline(always)] // The body of the loop over candidates.
    fn plain_facts(&self, slot: u32) -> Facts {
        let at = slot as usize;
        let (Some(touch), Some(figures)) = (self.touches.get(at), self.figures.get(at)) else {
            return Facts::default();
        };
        Facts {
            prefill_tokens: figures.prefill_tokens,
            least_prefill_tokens: self.least,
            device: touch.device,
            lower: touch.lower,
            shared: self.shared - touch.shared_less,
            active_blocks: figures.active_blocks,
            new_blocks: self.blocks - touch.active,
            requests: figures.requests,
            taint_factor: 1.0,
        }
    }

    #[inline(always)]
    fn plain_cost(&self, slot: u32) -> f64 {
        let facts = self.plain_facts(slot);
        self.scene.weights.plain_cost(self.isl_tokens, &facts)
    }

    #[inline]
    fn terms(&self, slot: u32) -> Terms {
        let mut facts = self.plain_facts(slot);
        let Scene {
            now,
            weights,
            prompt,
            fleet,
        } = *self.scene;
        if self.ledger.decays() {
            facts.prefill_tokens = self.ledger.prefill_tokens(slot, now) as f64;
        }
        facts.taint_factor = preference(prompt.preferred_taints, slot, fleet);
        let terms = weights.terms(prompt.isl_tokens, &facts);
        debug_assert!(
            !self.is_plain() || terms.cost == self.plain_cost(slot) || terms.cost.is_nan(),
            "both ways to the cost agree to the last bit"
        );
        terms
    }
}

/// One pass over the candidates.
struct Sweep<'a> {
    lowest: Lowest,
    cheapest: &'a mut Cheapest,
    /// All of them, where one is to be drawn.
    costs: Option<&'a mut Vec<(f64, u32)>>,
}

impl Sweep<'_> {
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
struct Cheapest {
    list: [(f64, u32); KEPT],
    len: usize,
    /// What the next must cost less than.
    below: f64,
}

impl Default for Cheapest {
    fn default() -> Self {
        Self {
            list: [(f64::INFINITY, u32::MAX); KEPT],
            len: 0,
            below: f64::INFINITY,
        }
    }
}

impl Cheapest {
    fn keep(&mut self, cost: f64, slot: u32) {
        let mut at = self.len.min(KEPT - 1);
        while at > 0 && self.list[at - 1].0 > cost {
            self.list[at] = self.list[at - 1];
            at -= 1;
        }
        self.list[at] = (cost, slot);
        self.len = (self.len + 1).min(KEPT);
        if self.len == KEPT {
            self.below = self.list[KEPT - 1].0;
        }
    }

    /// Makes sure that the winner is among them.
    fn include(&mut self, winner: u32) {
        if !self.slots().any(|slot| slot == winner) {
            self.len = (self.len + 1).min(KEPT);
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
