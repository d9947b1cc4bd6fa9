//! A decision of the brain, as Python reads it: who was chosen, among whom, and by which terms.

use kvasir_router::{Decision as BrainDecision, ExclusionReason, Placement, Reason};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// One rank that could have been chosen, with the terms of its cost, all in blocks. The cheapest eight are kept.
#[pyclass(frozen, get_all, eq, from_py_object, module = "kvasir")]
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Candidate {
    /// The worker.
    worker_id: u64,
    /// Its data-parallel rank.
    dp_rank: u32,
    /// The sum; lower is better. In seconds where the policy is `time`.
    cost: f64,
    /// Prompt that waits there plus this one, cached blocks included.
    raw_prefill_blocks: f64,
    /// Taken off that because it is cached.
    credit_blocks: f64,
    /// What is left to compute.
    prefill_blocks: f64,
    /// What the rank would hold for its running requests.
    decode_blocks: f64,
    /// The price of the requests that run there.
    request_cost: f64,
    /// What preferred taints multiply the sum by.
    taint_factor: f64,
    /// Blocks of this prompt that it has.
    cached_blocks: f64,
    /// Seconds until its turn, for its own prompt, that others lose, of its tokens, of what leaves the cache; none unless the policy is `time`.
    seconds: Option<(f32, f32, f32, f32, f32)>,
}

#[pymethods]
impl Candidate {
    /// All fields by name.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        all.set_item("worker_id", self.worker_id)?;
        all.set_item("dp_rank", self.dp_rank)?;
        let terms = [
            ("cost", self.cost),
            ("raw_prefill_blocks", self.raw_prefill_blocks),
            ("credit_blocks", self.credit_blocks),
            ("prefill_blocks", self.prefill_blocks),
            ("decode_blocks", self.decode_blocks),
            ("request_cost", self.request_cost),
            ("taint_factor", self.taint_factor),
            ("cached_blocks", self.cached_blocks),
        ];
        for (name, value) in terms {
            all.set_item(name, value)?;
        }
        all.set_item("seconds", self.seconds)?;
        Ok(all)
    }

    fn __repr__(&self) -> String {
        format!(
            "Candidate(worker_id={}, dp_rank={}, cost={}, prefill_blocks={}, decode_blocks={}, cached_blocks={})",
            self.worker_id,
            self.dp_rank,
            self.cost,
            self.prefill_blocks,
            self.decode_blocks,
            self.cached_blocks
        )
    }
}

impl Candidate {
    fn of(candidate: &kvasir_router::Candidate) -> Self {
        let terms = candidate.terms;
        let seconds = |time: kvasir_router::TimeTerms| {
            (time.wait, time.own, time.delay, time.decode, time.evict)
        };
        Self {
            worker_id: candidate.rank.worker.0,
            dp_rank: candidate.rank.rank.0,
            cost: terms.cost,
            raw_prefill_blocks: terms.raw_prefill_blocks,
            credit_blocks: terms.credit_blocks,
            prefill_blocks: terms.prefill_blocks,
            decode_blocks: terms.decode_blocks,
            request_cost: terms.request_cost,
            taint_factor: terms.taint_factor,
            cached_blocks: terms.cached_blocks,
            seconds: candidate.seconds.map(seconds),
        }
    }
}

/// Where a request goes, and why.
///
/// A request that has to wait has `queued` set and no worker; `Router.poll()` brings its decision later.
#[pyclass(frozen, get_all, eq, from_py_object, module = "kvasir")]
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Decision {
    /// The caller's name for the request; none for a question.
    pub(crate) request_id: Option<String>,
    /// The worker; none while it waits, or if there is none.
    pub(crate) worker_id: Option<u64>,
    /// Its data-parallel rank.
    pub(crate) dp_rank: Option<u32>,
    /// Blocks of the prompt that the worker has, rounded.
    pub(crate) overlap_blocks: u32,
    /// Tokens of the prompt that it need not compute.
    pub(crate) cached_tokens: u32,
    /// Whether it is booked, so that `free` must follow.
    pub(crate) booked: bool,
    /// Whether it waits.
    pub(crate) queued: bool,
    /// How long it waited.
    pub(crate) queued_seconds: f64,
    /// Why it got no worker after it had waited.
    pub(crate) error: Option<String>,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u32,
    /// Ranks that could have been chosen.
    pub(crate) eligible: u32,
    /// Why this one: lowest_cost, tie, sampled, pinned, session, last_resort or rule.
    pub(crate) reason: Option<&'static str>,
    /// The winner's cost as Dynamo logs it.
    pub(crate) formula: Option<String>,
    /// The cheapest ranks, cheapest first.
    pub(crate) candidates: Vec<Candidate>,
    /// Ranks that were left out, with the reason; at most eight.
    pub(crate) excluded: Vec<(u64, u32, &'static str)>,
}

#[pymethods]
impl Decision {
    /// All fields by name, candidates as dictionaries.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        all.set_item("request_id", self.request_id.as_deref())?;
        all.set_item("worker_id", self.worker_id)?;
        all.set_item("dp_rank", self.dp_rank)?;
        all.set_item("overlap_blocks", self.overlap_blocks)?;
        all.set_item("cached_tokens", self.cached_tokens)?;
        all.set_item("booked", self.booked)?;
        all.set_item("queued", self.queued)?;
        all.set_item("queued_seconds", self.queued_seconds)?;
        all.set_item("error", self.error.as_deref())?;
        all.set_item("prompt_tokens", self.prompt_tokens)?;
        all.set_item("eligible", self.eligible)?;
        all.set_item("reason", self.reason)?;
        all.set_item("formula", self.formula.as_deref())?;
        let candidates: PyResult<Vec<_>> = self.candidates.iter().map(|c| c.to_dict(py)).collect();
        all.set_item("candidates", candidates?)?;
        all.set_item("excluded", self.excluded.clone())?;
        Ok(all)
    }

    fn __repr__(&self) -> String {
        let shown = |worker: Option<u64>| worker.map_or("None".to_owned(), |id| id.to_string());
        format!(
            "Decision(worker_id={}, dp_rank={:?}, overlap_blocks={}, reason={:?}, queued={})",
            shown(self.worker_id),
            self.dp_rank.unwrap_or(0),
            self.overlap_blocks,
            self.reason.unwrap_or(""),
            self.queued
        )
    }
}

impl Decision {
    /// What was decided, with the terms that the brain remembers.
    pub(crate) fn of(
        request_id: Option<String>,
        sent: &Placement,
        why: Option<&BrainDecision>,
    ) -> Self {
        let mut decision = Self {
            request_id,
            worker_id: Some(sent.target.worker.0),
            dp_rank: Some(sent.target.rank.0),
            overlap_blocks: sent.overlap_blocks,
            cached_tokens: sent.cached_tokens,
            booked: sent.booked,
            queued_seconds: sent.queued.as_secs_f64(),
            ..Self::default()
        };
        if let Some(why) = why {
            decision.explain(why);
        }
        decision
    }

    fn explain(&mut self, why: &BrainDecision) {
        self.prompt_tokens = why.isl_tokens;
        self.eligible = why.eligible;
        self.reason = why.winner.map(|(_, reason)| reason_name(reason));
        self.formula = why.formula().map(|formula| formula.to_string());
        self.candidates = why.candidates.iter().map(Candidate::of).collect();
        let excluded = why.excluded.named.iter();
        self.excluded = excluded
            .map(|(rank, reason)| (rank.worker.0, rank.rank.0, exclusion_name(*reason)))
            .collect();
    }
}

const fn reason_name(reason: Reason) -> &'static str {
    match reason {
        Reason::LowestCost => "lowest_cost",
        Reason::Tie { .. } => "tie",
        Reason::Sampled { .. } => "sampled",
        Reason::Pinned => "pinned",
        Reason::Session => "session",
        Reason::LastResort => "last_resort",
        Reason::Rule => "rule",
    }
}

const fn exclusion_name(reason: ExclusionReason) -> &'static str {
    match reason {
        ExclusionReason::Model => "model",
        ExclusionReason::Transport => "transport",
        ExclusionReason::NotAllowed => "not_allowed",
        ExclusionReason::Taint => "taint",
        ExclusionReason::Rank => "rank",
        ExclusionReason::Down => "down",
        ExclusionReason::Draining => "draining",
        ExclusionReason::Busy => "busy",
        ExclusionReason::Lora => "lora",
        ExclusionReason::Failed => "failed",
    }
}
