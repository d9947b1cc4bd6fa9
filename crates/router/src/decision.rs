//! Why a request went where it went.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{Candidate, CostTerms, TimeTerms};
use kvasir_types::{RequestId, Time, WorkerRank};

use crate::{PredictedTokens, RouteError, RouterMode, ShadowChoice};

/// One decision with everything that led to it. Bounded: the cheapest [`Decision::CANDIDATES_MAX`]
/// candidates are kept, the winner always among them.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Decision {
    /// The request.
    #[cfg_attr(feature = "serde", serde(serialize_with = "as_text"))]
    pub id: RequestId,
    /// The model that it asked for, where the router places requests of several.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub model: Option<Arc<str>>,
    /// How many workers had failed the request before.
    pub failed_before: u32,
    /// The last of them had begun to answer, and this one was to go on from there.
    pub resumed: bool,
    /// Nobody could say what workers hold of the prompt: the index of another router did not answer.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "std::ops::Not::not"))]
    pub cache_unknown: bool,
    /// When it was made.
    #[cfg_attr(feature = "serde", serde(serialize_with = "as_nanos"))]
    pub at: Time,
    /// How long the request had waited.
    pub queued: Duration,
    /// The mode that made it.
    pub mode: RouterMode,
    /// Prompt tokens.
    pub isl_tokens: u32,
    /// Prompt blocks, the last one perhaps not full.
    pub request_blocks: u32,
    /// Weight of the prefill term for this request.
    pub prefill_load_scale: f64,
    /// 0 takes the cheapest.
    pub temperature: f64,
    /// How many ranks were eligible.
    pub eligible: u32,
    /// The cheapest of them, cheapest first; in modes without a cost, only the winner.
    pub candidates: Vec<Candidate>,
    /// How many ranks were left out, and the first of them with the reason.
    pub excluded: Exclusion,
    /// What the winner should find cached of the prompt, by where that is known from.
    pub predicted: PredictedTokens,
    /// What a shadow policy would have done, where there is one and it was asked.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub shadow: Option<ShadowChoice>,
    /// Who won and why; `None` if nobody did.
    pub winner: Option<(WorkerRank, Reason)>,
    /// Why nobody did.
    #[cfg_attr(feature = "serde", serde(serialize_with = "as_message"))]
    pub error: Option<RouteError>,
}

/// Why the winner won.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "snake_case")
)]
pub enum Reason {
    /// Its cost was lowest.
    LowestCost,
    /// Its cost was lowest together with others'; drawn among them.
    Tie {
        /// How many shared the lowest cost.
        among: u32,
    },
    /// Drawn with this probability because the temperature is above 0.
    Sampled {
        /// Its share.
        probability: f64,
    },
    /// The request named it.
    Pinned,
    /// Its session lives there.
    Session,
    /// Every eligible worker is ejected or has failed this request; it was the least bad.
    LastResort,
    /// The mode's own rule: its turn, its draw, fewest in flight.
    Rule,
}

/// The part of the cost by which a winner won.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidingTerm {
    /// It holds more of the prompt than the next.
    Cache,
    /// Less prompt work waits there, though it holds no more.
    Prompt,
    /// What runs there weighs less.
    Decode,
    /// Fewer requests run there.
    Requests,
    /// The prompt's turn comes sooner.
    Wait,
    /// The prompt delays others less.
    Delay,
    /// Less that is wanted again leaves its cache.
    Evict,
}

impl DecidingTerm {
    /// As pages and programs are told.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Prompt => "prompt",
            Self::Decode => "decode",
            Self::Requests => "requests",
            Self::Wait => "wait",
            Self::Delay => "delay",
            Self::Evict => "evict",
        }
    }
}

/// Why ranks were left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "snake_case")
)]
pub enum ExclusionReason {
    /// Serves other models.
    Model,
    /// Is not reached the way that the request must go.
    Transport,
    /// Not in the request's allow-list.
    NotAllowed,
    /// Lacks a required taint.
    Taint,
    /// Not the rank that the request names, of any worker.
    Rank,
    /// Hidden after a fault.
    Down,
    /// On its way out.
    Draining,
    /// Over a busy threshold, or given as much as the overload protection allows.
    Busy,
    /// Does not have the adapter while others do.
    Lora,
    /// Failed this request already.
    Failed,
}

/// How many ranks were left out, by reason, and the first few of them.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Exclusion {
    /// How many in all.
    pub count: u32,
    /// The first [`Exclusion::NAMED_MAX`] of them.
    pub named: Vec<(WorkerRank, ExclusionReason)>,
}

impl Exclusion {
    /// How many are named.
    pub const NAMED_MAX: usize = 8;
}

impl Decision {
    /// How many candidates are kept with their terms.
    pub const CANDIDATES_MAX: usize = kvasir_placement::CANDIDATES_KEPT;

    /// The winner's terms.
    #[must_use]
    pub fn chosen(&self) -> Option<&Candidate> {
        let (rank, _) = self.winner?;
        self.candidates.iter().find(|c| c.rank == rank)
    }

    /// The cheapest that was not chosen.
    #[must_use]
    pub fn runner_up(&self) -> Option<&Candidate> {
        let winner = self.winner.map(|(rank, _)| rank);
        self.candidates.iter().find(|c| Some(c.rank) != winner)
    }

    /// The part of the cost by which the winner was cheaper than the next: the one that differs most. None where no cost decided.
    #[must_use]
    pub fn deciding_term(&self) -> Option<DecidingTerm> {
        let (_, Reason::LowestCost) = self.winner? else {
            return None;
        };
        let (ours, theirs) = (self.chosen()?, self.runner_up()?);
        let holds_more = ours.terms.cached_blocks > theirs.terms.cached_blocks;
        let prompt = match holds_more {
            true => DecidingTerm::Cache,
            false => DecidingTerm::Prompt,
        };
        let gains: Vec<(DecidingTerm, f64)> = match (&ours.seconds, &theirs.seconds) {
            (Some(ours), Some(theirs)) => {
                let gain = |of: fn(&TimeTerms) -> f32| f64::from(of(theirs) - of(ours));
                vec![
                    (prompt, gain(|time| time.own)),
                    (DecidingTerm::Wait, gain(|time| time.wait)),
                    (DecidingTerm::Delay, gain(|time| time.delay)),
                    (DecidingTerm::Decode, gain(|time| time.decode)),
                    (DecidingTerm::Evict, gain(|time| time.evict)),
                ]
            }
            _ => {
                let scale = self.prefill_load_scale;
                let gain = |of: &dyn Fn(&CostTerms) -> f64| {
                    of(&theirs.terms) * theirs.terms.taint_factor
                        - of(&ours.terms) * ours.terms.taint_factor
                };
                vec![
                    (prompt, gain(&|terms| scale * terms.prefill_blocks)),
                    (DecidingTerm::Decode, gain(&|terms| terms.decode_blocks)),
                    (DecidingTerm::Requests, gain(&|terms| terms.request_cost)),
                ]
            }
        };
        let most = gains.into_iter().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
        (most.1 > 0.0).then_some(most.0)
    }

    /// Dynamo's log line for the winner, e.g.
    /// `Formula for worker_1: 125.3 = 1.0 * 100.5 + 25.0 (cached_blocks: 15)`.
    #[must_use]
    pub fn formula(&self) -> Option<Formula> {
        self.chosen().map(|c| Formula {
            candidate: *c,
            scale: self.prefill_load_scale,
        })
    }

    /// The log line for every candidate kept.
    pub fn formulas(&self) -> impl Iterator<Item = Formula> {
        self.candidates.iter().map(|c| Formula {
            candidate: *c,
            scale: self.prefill_load_scale,
        })
    }
}

/// A candidate's cost as Dynamo prints it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Formula {
    candidate: Candidate,
    scale: f64,
}

impl fmt::Display for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Candidate {
            rank,
            terms,
            seconds,
            ..
        } = &self.candidate;
        if let Some(time) = seconds {
            return write!(
                f,
                "Time for worker_{}: {:.4} s = wait {:.4} + prompt {:.4} + delay {:.4} + decode {:.4} + evict {:.4} \
                 (cached_blocks: {:.0})",
                rank.worker,
                terms.cost,
                time.wait,
                time.own,
                time.delay,
                time.decode,
                time.evict,
                terms.cached_blocks
            );
        }
        write!(
            f,
            "Formula for worker_{}: {:.1} = {:.1} * {:.1} + {:.1} (cached_blocks: {:.0})",
            rank.worker,
            terms.cost,
            self.scale,
            terms.prefill_blocks,
            terms.decode_blocks,
            terms.cached_blocks
        )
    }
}

#[cfg(feature = "serde")]
fn as_text<S: serde::Serializer>(id: &RequestId, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(id)
}

#[cfg(feature = "serde")]
fn as_message<S: serde::Serializer>(error: &Option<RouteError>, s: S) -> Result<S::Ok, S::Error> {
    match error {
        Some(error) => s.collect_str(error),
        None => s.serialize_none(),
    }
}

#[cfg(feature = "serde")]
fn as_nanos<S: serde::Serializer>(at: &Time, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_u64(at.as_nanos())
}
