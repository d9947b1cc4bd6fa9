//! How would the latest decisions have gone with other weights?
//!
//! The recorded candidates are scored again by the cost itself ([`Weights::terms`]), from what was known when each
//! decision was made. What a different choice would have changed for those after it is not followed: for that there is
//! the simulator.
//!
//! What always holds: with the weights that are in force no decision of the linear cost moves, unless its request brought
//! weights of its own. Only candidates that were kept can win; [`WhatIf::partial`] counts decisions that had more.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_placement::{Candidate, CostTerms, Weights};
use kvasir_types::{RequestId, Time, WorkerRank};

use crate::request_settings::RequestSettings;
use crate::{Decision, Reason, Router, RouterMode};

/// Weights that are changed; the others stay as they are set.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Deserialize, serde::Serialize),
    serde(default, deny_unknown_fields)
)]
pub struct WeightChange {
    /// `--router-kv-overlap-score-credit`.
    pub overlap_score_credit: Option<f64>,
    /// `--router-kv-overlap-score-credit-decay`.
    pub overlap_score_credit_decay: Option<f64>,
    /// `--router-prefill-load-scale`.
    pub prefill_load_scale: Option<f64>,
    /// `--router-decode-active-request-weight`.
    pub decode_active_request_weight: Option<f64>,
}

impl WeightChange {
    /// The first weight that is no finite number of at least 0, by name.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        let is_bad = |weight: Option<f64>| weight.is_some_and(|w| !w.is_finite() || w < 0.0);
        let named = [
            ("overlap_score_credit", self.overlap_score_credit),
            (
                "overlap_score_credit_decay",
                self.overlap_score_credit_decay,
            ),
            ("prefill_load_scale", self.prefill_load_scale),
            (
                "decode_active_request_weight",
                self.decode_active_request_weight,
            ),
        ];
        let bad = named.into_iter().find(|(_, weight)| is_bad(*weight));
        bad.map(|(name, _)| name)
    }

    fn over(&self, set: Weights) -> Weights {
        Weights {
            overlap_score_credit: self
                .overlap_score_credit
                .unwrap_or(set.overlap_score_credit),
            overlap_score_credit_decay: self
                .overlap_score_credit_decay
                .unwrap_or(set.overlap_score_credit_decay),
            prefill_load_scale: self.prefill_load_scale.unwrap_or(set.prefill_load_scale),
            decode_active_request_weight: self
                .decode_active_request_weight
                .unwrap_or(set.decode_active_request_weight),
            ..set
        }
    }
}

/// What the winners of some decisions come to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct WhatIfSum {
    /// Blocks of the prompts that the winners hold.
    pub cached_blocks: f64,
    /// Prompt blocks waiting at the winners, this prompt's uncached ones included.
    pub queued_prompt_blocks: f64,
    /// Blocks that running requests hold there, this one's included.
    pub decode_blocks: f64,
}

impl WhatIfSum {
    fn add(&mut self, isl_blocks: f64, candidate: &Candidate, terms: &CostTerms) {
        let waiting = terms.raw_prefill_blocks - isl_blocks;
        self.cached_blocks += candidate.terms.cached_blocks.min(isl_blocks);
        self.queued_prompt_blocks +=
            waiting.max(0.0) + (isl_blocks - candidate.terms.cached_blocks).max(0.0);
        self.decode_blocks += candidate.state.active_blocks + candidate.state.new_blocks;
    }
}

/// A decision that would have gone elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct MovedDecision {
    /// The request.
    pub id: RequestId,
    /// When it was decided.
    pub at: Time,
    /// Its model, where the router places requests of several.
    pub model: Option<Arc<str>>,
    /// Where it went.
    pub from: WorkerRank,
    /// Where it would have gone.
    pub to: WorkerRank,
    /// What it would have cost where it went, and where it would have gone.
    pub cost: (f64, f64),
    /// Blocks cached at either.
    pub cached_blocks: (f64, f64),
    /// Blocks of the prompt.
    pub request_blocks: u32,
}

/// Decisions that one rank got, and would have got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankShare {
    /// As it was.
    pub before: u32,
    /// With the changed weights.
    pub after: u32,
}

/// How the latest decisions would have gone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WhatIf {
    /// Decisions that were scored again.
    pub considered: u32,
    /// Those of the latest that no cost decided (pinned, by session, in another mode, refused), or one with weights that the
    /// request brought along.
    pub skipped: u32,
    /// Of those considered: decisions that had more candidates than are kept.
    pub partial: u32,
    /// Of those considered: decisions that would have gone elsewhere.
    pub moved: u32,
    /// Blocks of all prompts considered.
    pub prompt_blocks: f64,
    /// As it was.
    pub before: WhatIfSum,
    /// With the changed weights.
    pub after: WhatIfSum,
    /// Who got how many.
    pub ranks: BTreeMap<WorkerRank, RankShare>,
    /// The newest that moved, at most [`WhatIf::MOVES_MAX`].
    pub moves: Vec<MovedDecision>,
}

impl WhatIf {
    /// Moved decisions that are listed.
    pub const MOVES_MAX: usize = 50;

    fn add(&mut self, decision: &Decision, set: &Weights, weights: &Weights) -> Option<()> {
        let (winner, _) = decision.winner.filter(|(_, reason)| by_cost(*reason))?;
        let chosen = decision.chosen()?;
        // What the router's own weights do not come to was weighed by others: the answer to a prompt that comes from elsewhere, or
        // a request that overrides them.
        let is_own = |candidate: &Candidate| {
            let own = set.terms(decision.isl_tokens, &candidate.state).cost;
            (own - candidate.terms.cost).abs() <= 1e-6 * own.abs().max(1.0)
        };
        if chosen.seconds.is_none() && !decision.candidates.iter().all(is_own) {
            return None;
        }
        let terms = |candidate: &Candidate| weights.terms(decision.isl_tokens, &candidate.state);
        // Where it went stays the winner as long as nothing is cheaper.
        let (mut best, mut least) = (chosen, terms(chosen));
        for candidate in &decision.candidates {
            let now = terms(candidate);
            if now.cost < least.cost {
                (best, least) = (candidate, now);
            }
        }
        let blocks = f64::from(decision.isl_tokens) / f64::from(weights.block_size);
        self.considered += 1;
        self.prompt_blocks += blocks;
        self.partial += u32::from(decision.eligible as usize > decision.candidates.len());
        let stayed = terms(chosen);
        self.before.add(blocks, chosen, &stayed);
        self.after.add(blocks, best, &least);
        self.ranks.entry(winner).or_default().before += 1;
        self.ranks.entry(best.rank).or_default().after += 1;
        if best.rank != winner {
            self.moved += 1;
            if self.moves.len() < Self::MOVES_MAX {
                self.moves.push(MovedDecision {
                    id: decision.id,
                    at: decision.at,
                    model: decision.model.clone(),
                    from: winner,
                    to: best.rank,
                    cost: (stayed.cost, least.cost),
                    cached_blocks: (chosen.terms.cached_blocks, best.terms.cached_blocks),
                    request_blocks: decision.request_blocks,
                });
            }
        }
        Some(())
    }
}

/// Whether a cost decided.
fn by_cost(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::LowestCost | Reason::Tie { .. } | Reason::Sampled { .. }
    )
}

impl Router {
    /// How the newest `last` decisions would have gone with other weights of the linear cost; only those about `model`,
    /// if one is named.
    #[must_use]
    pub fn what_if(&self, change: &WeightChange, last: usize, model: Option<&str>) -> WhatIf {
        let set = RequestSettings::of(self.config(), &Default::default()).weights;
        let weights = change.over(set);
        let is_meant = |decision: &&Decision| match (model, &decision.model) {
            (Some(asked), Some(of)) => **of == *asked,
            _ => true,
        };
        let mut answer = WhatIf::default();
        for decision in self.decisions().filter(is_meant).take(last) {
            let scored = match decision.mode {
                RouterMode::Kv => answer.add(decision, &set, &weights),
                _ => None,
            };
            if scored.is_none() {
                answer.skipped += 1;
            }
        }
        answer
    }
}
