//! The latest decisions and what became of them, as the page lists them.
//!
//! What always holds: at most [`SHOWN_MAX`] are remembered as shown, so that their ends can follow; of a busy second the
//! newest [`NEW_MAX`] are shown and the others counted.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kvasir_router::{DecidingTerm, Decision, Reason};
use kvasir_types::{RequestId, Time};
use serde_json::{Value, json};

use crate::App;
use crate::models::{ServedModel, model_of_prefill_pool};
use crate::observe::outcomes::RequestOutcome;

/// Decisions that a page begins with, and whose ends are told.
pub(super) const SHOWN_MAX: usize = 200;
/// The role of a decision about a worker that computes a prompt for another.
const PREFILL: &str = "prefill";
/// New decisions in one event.
pub(super) const NEW_MAX: usize = 40;

/// What has been shown.
#[derive(Debug, Default)]
pub(super) struct LatestDecisions {
    /// The newest decision of each router that has been looked at, by the router's name.
    seen: HashMap<String, (Time, RequestId)>,
    /// Oldest first, with the end where it is known.
    shown: VecDeque<(RequestId, Value)>,
    /// Requests that had ended when last looked.
    ended: u64,
}

impl LatestDecisions {
    /// Forgets what was shown: the next look begins with the newest [`SHOWN_MAX`].
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    /// Decisions since the last look, oldest first, and how many are left out.
    pub(super) fn decided(&mut self, app: &App) -> (Vec<Value>, usize) {
        let most = match self.shown.is_empty() {
            true => SHOWN_MAX,
            false => NEW_MAX,
        };
        let (mut decisions, mut count) = (Vec::new(), 0);
        let mut routers = app.models().of_routers();
        routers.extend(app.prefill_pools().of_routers());
        // Of each router so many that the newest of all are among them, unless there are many routers.
        let of_each = (4 * most / routers.len().max(1)).clamp(1, most);
        for model in routers {
            let seen = self.seen.get(&**model.host.name()).copied();
            // The router waits meanwhile: nothing but copies is made.
            let newest = model.host.ask(|router| {
                let is_new = |d: &&Decision| Some((d.at, d.id)) != seen;
                let mut newest = None;
                for (at, decision) in router.decisions().take_while(is_new).enumerate() {
                    newest.get_or_insert((decision.at, decision.id));
                    count += 1;
                    if at < of_each {
                        decisions.push((Arc::clone(&model), decision.clone()));
                    }
                }
                newest
            });
            if let Some(newest) = newest {
                self.seen.insert(model.host.name().to_string(), newest);
            }
        }
        decisions.sort_by_key(|(_, decision)| decision.at);
        decisions.drain(..decisions.len().saturating_sub(most));
        let made = |(model, decision): &(Arc<ServedModel>, Decision)| {
            (decision.id, row(app, model, decision))
        };
        let rows: Vec<(RequestId, Value)> = decisions.iter().map(made).collect();
        let skipped = count - rows.len();
        self.shown.extend(rows.iter().cloned());
        while self.shown.len() > SHOWN_MAX {
            self.shown.pop_front();
        }
        let rows = rows.into_iter().map(|(_, row)| row).collect();
        (rows, skipped)
    }

    /// What became of those that are shown, since the last look. `each` sees every request that has ended since.
    pub(super) fn ended(&mut self, app: &App, mut each: impl FnMut(&RequestOutcome)) -> Vec<Value> {
        // The last worker that was asked for the answer, and the last that was asked for the prompt, where that is another.
        let mut by_id: HashMap<RequestId, [Option<usize>; 2]> = HashMap::new();
        for (at, (id, row)) in self.shown.iter().enumerate() {
            let leg = usize::from(row["role"] == PREFILL);
            by_id.entry(*id).or_default()[leg] = Some(at);
        }
        let mut found = Vec::new();
        let outcomes = app.observer().outcomes();
        self.ended = outcomes.since(self.ended, |ended| {
            each(ended);
            if let Some(at) = by_id.get(&ended.id) {
                found.push((*at, ended.clone()));
            }
        });
        let mut rows = Vec::new();
        for (at, ended) in found {
            let outcome = ended.to_json();
            for at in at.into_iter().flatten() {
                if let Some((_, row)) = self.shown.get_mut(at) {
                    row["outcome"] = outcome.clone();
                }
            }
            rows.push(json!({ "id": ended.id.to_string(), "outcome": outcome }));
        }
        rows
    }

    /// All that are shown, oldest first.
    pub(super) fn all(&self) -> Vec<&Value> {
        self.shown.iter().map(|(_, row)| row).collect()
    }
}

/// A decision in a line.
fn row(app: &App, of_router: &ServedModel, decision: &Decision) -> Value {
    let model = decision.model.as_deref().unwrap_or(&of_router.name);
    let is_prefill = of_router.is_prefill_pool();
    let chosen = decision.chosen();
    let seconds = chosen.is_some_and(|chosen| chosen.seconds.is_some());
    json!({
        "id": decision.id.to_string(),
        "at": app.clock().unix_millis(decision.at),
        "model": model_of_prefill_pool(model),
        "role": is_prefill.then_some(PREFILL),
        "worker": decision.winner.map(|(rank, _)| rank.to_string()),
        "reason": decision.winner.map(|(_, reason)| reason_name(reason)),
        "deciding": decision.deciding_term().map(DecidingTerm::name),
        "cost": chosen.map(|chosen| chosen.terms.cost),
        "runner_up": decision.runner_up().map(|other| other.terms.cost),
        "seconds": seconds,
        "tokens": decision.isl_tokens,
        "blocks": decision.request_blocks,
        "cached_blocks": chosen.map(|chosen| chosen.terms.cached_blocks),
        "predicted": decision.predicted.total(),
        "eligible": decision.eligible,
        "excluded": decision.excluded.count,
        "queued_ms": decision.queued.as_millis() as u64,
        "failed_before": decision.failed_before,
        "resumed": decision.resumed,
        "error": decision.error.as_ref().map(ToString::to_string),
        "outcome": null,
    })
}

fn reason_name(reason: Reason) -> &'static str {
    match reason {
        Reason::LowestCost => "lowest cost",
        Reason::Tie { .. } => "tie",
        Reason::Sampled { .. } => "drawn",
        Reason::Pinned => "pinned",
        Reason::Session => "session",
        Reason::LastResort => "last resort",
        Reason::Rule => "rule",
    }
}
