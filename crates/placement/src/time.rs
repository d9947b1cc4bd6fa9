//! Placement by seconds: each candidate costs what it makes everybody wait.
//!
//! Answers two questions. Where does a request wait least and make others wait least? And is that rank so far from done
//! that the choice had better be made later, when more is known? Everything is learned from the ledger's own journal;
//! there is nothing to set.
//!
//! What always holds: what is planned is forgotten when the pass that planned it ends.
//!
//! Elsewhere: who is held and in which order (`kvasir-router`).

mod copies;
mod cost;
mod estimate;
mod fit;
mod law;
mod profile;
mod record;
mod returns;
#[cfg(test)]
mod tests;
mod writes;

pub use cost::TimeTerms;
pub use estimate::{Estimator, GAP_TOKENS};
pub use law::StepLaw;
pub use record::LearnedRecord;

use std::time::Duration;

use kvasir_types::{Rng, SequenceHash, Time};

use crate::score::{SlotBlocks, SlotCost};
use crate::{
    Candidate, CostTerms, Fleet, FleetView, Ledger, LedgerNote, Overlap, PlacementRequest,
    ScoringContext, SlotSet, WinReason,
};
use copies::{Copies, Prefix};
use cost::{CacheUse, RankPlan, RankTime, TimedPrompt, known_batch};
use returns::Returns;
use writes::CacheWrites;

/// Which part of a request's life is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedWork {
    /// The prompt is computed where the request goes.
    pub prompt: bool,
    /// The answer is made there.
    pub answer: bool,
}

/// What has been learned of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LearnedTimes {
    /// The rank's law.
    pub law: StepLaw,
    /// How many times as long its prompts take as those of the fleet.
    pub prompt_factor: f64,
    /// The same for its steps.
    pub step_factor: f64,
    /// Samples of its prompts.
    pub prompt_samples: u64,
    /// Samples of its steps.
    pub step_samples: u64,
}

/// Placement by seconds.
#[derive(Clone, Debug)]
pub struct TimePolicy {
    work: PlacedWork,
    block_size: u32,
    estimator: Estimator,
    seen: u64,
    /// By slot.
    ranks: Vec<RankTime>,
    plans: Vec<RankPlan>,
    planned: Vec<u32>,
    writes: CacheWrites,
    returns: Returns,
    copies: Copies,
}

/// A request under this policy.
#[derive(Clone, Copy, Debug)]
pub struct TimedRequest<'a> {
    /// As every policy sees it.
    pub request: &'a PlacementRequest<'a>,
    /// Tokens of the answer, where the client says.
    pub osl: Option<u32>,
}

impl TimePolicy {
    /// A policy that knows nothing but `prior`.
    #[must_use]
    pub fn new(prior: &StepLaw, block_size: u32, work: PlacedWork) -> Self {
        Self {
            work,
            block_size: block_size.max(1),
            estimator: Estimator::new(prior),
            seen: u64::MAX,
            ranks: Vec::new(),
            plans: Vec::new(),
            planned: Vec::new(),
            writes: CacheWrites::default(),
            returns: Returns::default(),
            copies: Copies::default(),
        }
    }

    /// What it has learned.
    #[must_use]
    pub fn estimator(&self) -> &Estimator {
        &self.estimator
    }

    /// The same, to go on from what was learned before.
    pub fn estimator_mut(&mut self) -> &mut Estimator {
        &mut self.estimator
    }

    /// What it has learned of one rank.
    #[must_use]
    pub fn learned(&self, slot: u32) -> LearnedTimes {
        let (prompt_factor, step_factor) = self.estimator.factors(slot);
        let (prompt_samples, step_samples) = self.estimator.rank_samples(slot);
        LearnedTimes {
            law: self.estimator.law_of(slot),
            prompt_factor,
            step_factor,
            prompt_samples,
            step_samples,
        }
    }

    /// A slot has a rank; `new` if it was another's before.
    pub fn joined(&mut self, slot: u32, max_batched: u64, new: bool) {
        if new {
            self.writes.forget(slot);
            self.returns.forget(slot);
        }
        self.estimator.set_rank(slot, known_batch(max_batched), new);
    }

    /// Ranks have other slots now, from the first of each pair to the second, and nothing is booked.
    pub fn moved(&mut self, moves: &[(u32, u32)]) {
        self.writes.grow(
            moves
                .iter()
                .map(|(_, to)| *to as usize + 1)
                .max()
                .unwrap_or(0),
        );
        self.estimator.moved(moves);
        self.writes.moved(moves);
        self.returns.moved();
    }

    /// A request came, of whose prompt so many blocks are cached somewhere. If it goes on from an earlier one, that one is no
    /// longer expected back, and loads changed.
    pub fn arrived(
        &mut self,
        now: Time,
        ledger: &mut Ledger,
        sequence: &[SequenceHash],
        blocks: u32,
    ) -> bool {
        let slot = self.returns.arrived(now, sequence, blocks);
        slot.inspect(|slot| ledger.mark_changed(*slot)).is_some()
    }

    /// Learns from what the ledger noted, and follows the loads.
    pub fn sync(&mut self, fleet: &Fleet, ledger: &mut Ledger) {
        let estimator = &mut self.estimator;
        let end = fleet.slot_end() as usize;
        let (writes, returns) = (&mut self.writes, &mut self.returns);
        writes.grow(end);
        returns.grow(end);
        ledger.read_journal(|note| {
            // An answer in one piece says nothing about time, but its prompt is in the cache all the same.
            if let LedgerNote::FirstToken {
                slot, new, cached, ..
            }
            | LedgerNote::Unseen {
                slot, new, cached, ..
            } = note
            {
                writes.prompt(slot, f64::from(new), f64::from(cached));
            }
            if let LedgerNote::Freed { slot, at, tail, .. } = note
                && let Some(tail) = tail
            {
                returns.ended(slot, at, tail);
            }
            estimator.observe(&note);
        });
        let renewed = self.returns.take_renewed();
        if renewed || self.estimator.version() != self.seen || self.ranks.len() < end {
            self.seen = self.estimator.version();
            let law = self.estimator.law();
            self.plans.resize(end, RankPlan::default());
            let blocks = |slot| fleet.member_of(slot)?.spec.kv_total_blocks;
            let blocks: u64 = (0..fleet.slot_end()).filter_map(blocks).sum();
            self.writes
                .set_capacity(blocks as f64 * f64::from(self.block_size));
            while ledger.next_changed().is_some() {}
            while self.estimator.next_changed().is_some() {}
            self.ranks.clear();
            for slot in 0..fleet.slot_end() {
                let load = ledger.timed_load(slot);
                let rank = self.rank_time(fleet, slot, law, &load);
                self.ranks.push(rank);
            }
            return;
        }
        while let Some(slot) = self.estimator.next_changed() {
            ledger.mark_changed(slot);
        }
        while let Some((slot, load)) = ledger.next_changed() {
            let rank = self.rank_time(fleet, slot, self.estimator.law(), &load);
            if let Some(place) = self.ranks.get_mut(slot as usize) {
                *place = rank;
            }
        }
    }

    fn rank_time(
        &self,
        fleet: &Fleet,
        slot: u32,
        law: StepLaw,
        load: &crate::ledger::TimedLoad,
    ) -> RankTime {
        let (prompts, steps) = self.estimator.factors(slot);
        let blocks = fleet.member_of(slot).and_then(|m| m.spec.kv_total_blocks);
        RankTime::new(
            law.scaled(prompts, steps),
            prompts,
            load,
            fleet.max_batched(slot),
            &CacheUse {
                block: f64::from(self.block_size),
                blocks: blocks.filter(|blocks| *blocks > 0),
                written: self.writes.written(slot),
                pressure: self.writes.pressure(slot),
                returns: self.returns.expected(slot),
            },
        )
    }

    fn prompt(&self, now: Time, timed: &TimedRequest<'_>) -> TimedPrompt {
        let request = timed.request;
        let output = timed.osl.map_or(self.estimator.output(), f64::from);
        let computes = self.work.prompt && request.weights.track_prefill_tokens;
        TimedPrompt::new(
            now.as_nanos(),
            request.prompt.isl_tokens,
            self.block_size,
            output,
            self.estimator.law(),
            (computes, self.work.answer),
        )
    }

    /// Chooses among `eligible`; what is planned counts. Call [`TimePolicy::sync`] before. Without `kept` only the
    /// winner is wanted.
    pub fn choose(
        &self,
        view: &mut FleetView<'_>,
        timed: &TimedRequest<'_>,
        eligible: &SlotSet,
        rng: &mut Rng,
        kept: Option<&mut Vec<Candidate>>,
    ) -> Option<(u32, WinReason)> {
        let mut prompt = self.prompt(view.now, timed);
        prompt.present = self.returns.present(view.now, prompt.stay());
        let asked = &timed.request.prompt;
        if let Some(prefix) = Prefix::of(asked.overlap, asked.sequence, 0.0) {
            prompt.count_copy(self.copies.waited(&prefix), prefix.blocks);
        }
        let request = timed.request;
        let context = ScoringContext {
            now: view.now,
            weights: &request.weights,
            prompt: &request.prompt,
            fleet: view.fleet,
        };
        let costs = TimedCosts {
            policy: self,
            prompt: &prompt,
            fleet: view.fleet,
        };
        view.scorer.choose_by(
            &context,
            (eligible, request.temperature),
            view.ledger,
            rng,
            kept,
            &costs,
        )
    }

    /// A request goes to `slot`, where so many blocks of it are cached or being computed: its prefix is copied there, or waited
    /// for. Call it before the request is booked.
    pub fn placed(
        &mut self,
        now: Time,
        fleet: &Fleet,
        (overlap, sequence): (&Overlap, &[SequenceHash]),
        (slot, blocks): (u32, f64),
    ) {
        let Some(prefix) = Prefix::of(overlap, sequence, blocks) else {
            return;
        };
        if blocks.ceil() < prefix.blocks {
            return self.copies.copied(&prefix);
        }
        let wait = |slot: u32| {
            let rank = self.ranks.get(slot as usize);
            rank.map_or(0.0, |rank| rank.expected_wait(now.as_nanos()))
        };
        let here = wait(slot);
        if here > 0.0 {
            let saved = |slot: u32| (here - wait(slot)).max(0.0);
            let (mut lacking, mut sum) = (0.0f64, 0.0);
            fleet.up().for_each(|slot| {
                lacking += 1.0;
                sum += saved(slot);
            });
            let found = overlap.ranks.iter();
            let holders = found.filter(|found| found.device >= prefix.blocks);
            for holder in holders.filter_map(|found| fleet.slot(found.rank)) {
                lacking -= 1.0;
                sum -= saved(holder);
            }
            self.copies.add(&prefix, sum / lacking.max(1.0));
        }
    }

    /// Whether a held request may go to a rank now.
    #[must_use]
    pub fn is_open(&self, slot: u32, now: Time) -> bool {
        let rank = self.ranks.get(slot as usize);
        rank.is_none_or(|rank| rank.is_open(now.as_nanos()))
    }

    /// Whether a held request had better not go to a rank yet, though that is open: a prompt waits there, and both would be
    /// computed in one step. `others` are held beside it, for each rank.
    #[must_use]
    pub fn is_crowded(
        &self,
        slot: u32,
        now: Time,
        timed: &TimedRequest<'_>,
        cached: u32,
        others: f64,
    ) -> bool {
        self.ranks.get(slot as usize).is_some_and(|rank| {
            let own = self.prompt(now, timed).own(rank, f64::from(cached));
            rank.is_crowded_by(own, others)
        })
    }

    /// Whether a prompt waits at a rank for another to be computed.
    #[must_use]
    pub fn has_prompt_behind(&self, slot: u32) -> bool {
        let rank = self.ranks.get(slot as usize);
        rank.is_some_and(|rank| rank.prompts_behind() > 0.0)
    }

    /// When a rank opens by time alone, if it is closed.
    #[must_use]
    pub fn opens_at(&self, slot: u32, now: Time) -> Option<Time> {
        let rank = self.ranks.get(slot as usize)?;
        rank.opens_at(now.as_nanos()).map(Time::from_nanos)
    }

    /// How long the prompts booked on a rank will take.
    #[must_use]
    pub fn expected_wait(&self, slot: u32, now: Time) -> Duration {
        let rank = self.ranks.get(slot as usize);
        let seconds = rank.map_or(0.0, |rank| rank.expected_wait(now.as_nanos()));
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }

    /// How long this prompt takes on a rank, for its booking; `None` if it is not computed there.
    #[must_use]
    pub fn own(
        &self,
        slot: u32,
        now: Time,
        timed: &TimedRequest<'_>,
        cached: u32,
    ) -> Option<Duration> {
        let prompt = self.prompt(now, timed);
        let own = prompt.own(self.ranks.get(slot as usize)?, f64::from(cached));
        (own > 0.0).then(|| Duration::try_from_secs_f64(own).unwrap_or_default())
    }

    /// How long a prompt takes on a rank of which only its size is known: another router placed it.
    #[must_use]
    pub fn others_prompt(&self, slot: u32, new: u32, cached: u32) -> Option<Duration> {
        let rank = self.ranks.get(slot as usize).filter(|_| new > 0)?;
        let seconds = rank.prompt(f64::from(new), f64::from(cached));
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Seconds of a prompt where `blocks` of it are cached and nothing else runs.
    #[must_use]
    pub fn alone(&self, now: Time, timed: &TimedRequest<'_>, blocks: f64, batch: u64) -> f64 {
        let prompt = self.prompt(now, timed);
        prompt.alone(prompt.cached(blocks), known_batch(batch))
    }

    /// Whether something is planned for a rank.
    #[must_use]
    pub fn has_plan(&self, slot: u32) -> bool {
        self.plans
            .get(slot as usize)
            .is_some_and(|p| p.requests > 0.0)
    }

    /// A request will go there, but not yet: others choose as if it were there.
    pub fn plan(&mut self, slot: u32, isl_tokens: u32, own: Option<Duration>) {
        if let Some(plan) = self.plans.get_mut(slot as usize) {
            if plan.requests == 0.0 {
                self.planned.push(slot);
            }
            plan.requests += 1.0;
            plan.tokens += f64::from(isl_tokens);
            plan.own += own.map_or(0.0, |own| own.as_secs_f64());
        }
    }

    /// Forgets all plans.
    pub fn drop_plans(&mut self) {
        for slot in self.planned.drain(..) {
            if let Some(plan) = self.plans.get_mut(slot as usize) {
                *plan = RankPlan::default();
            }
        }
    }
}

struct TimedCosts<'a> {
    policy: &'a TimePolicy,
    prompt: &'a TimedPrompt,
    fleet: &'a Fleet,
}

impl SlotCost for TimedCosts<'_> {
    #[inline(always)]
    fn cost(&self, slot: u32, blocks: SlotBlocks) -> f64 {
        let at = slot as usize;
        match (self.policy.ranks.get(at), self.policy.plans.get(at)) {
            (Some(rank), Some(plan)) => self.prompt.cost(rank, plan, blocks.held, blocks.active),
            _ => f64::INFINITY,
        }
    }

    fn candidate(&self, slot: u32, blocks: SlotBlocks, taint_factor: f64) -> Candidate {
        let at = slot as usize;
        let found = (self.policy.ranks.get(at), self.policy.plans.get(at));
        let (Some(rank), Some(plan)) = found else {
            return Candidate::default();
        };
        let held = (blocks.held, blocks.active);
        let parts = self.prompt.terms(rank, plan, held, taint_factor);
        let terms = CostTerms {
            cached_blocks: (self.prompt.isl - parts.new_tokens) / self.prompt.block,
            prefill_blocks: parts.new_tokens / self.prompt.block,
            taint_factor,
            cost: parts.cost,
            ..CostTerms::default()
        };
        Candidate {
            rank: self.fleet.rank(slot).unwrap_or_default(),
            terms,
            seconds: Some(parts.terms()),
            ..Candidate::default()
        }
    }
}
