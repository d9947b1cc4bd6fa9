//! The brain with the callers' names of requests: who asked for what, who waits, what was decided meanwhile.

use std::collections::HashMap;
use std::sync::Arc;

use kvasir_router::{
    Arrival, Constraints, Hints, Input, Lookup, Observation, Outcome, Output, Overlap, Overrides,
    Pin, Placement, PotentialLoad, RouteError, Router as Placer, RouterConfig, WorkerSpec,
};
use kvasir_types::{DpRank, RequestId, SequenceHash, Time, WorkerId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::decision::Decision;

/// Decisions about requests that waited which nobody has polled yet; the oldest go first.
const RELEASED_MAX: usize = 1 << 16;

/// What a caller asks.
pub(crate) struct Ask<'a> {
    pub(crate) prompt_tokens: u32,
    pub(crate) request_id: Option<String>,
    pub(crate) worker_id: Option<u64>,
    pub(crate) dp_rank: Option<u32>,
    pub(crate) overrides: Overrides,
    pub(crate) lora_name: Option<&'a str>,
    pub(crate) required_taints: Vec<String>,
    pub(crate) preferred_taints: Vec<(Arc<str>, f64)>,
    pub(crate) allowed_worker_ids: Option<Vec<u64>>,
    pub(crate) priority: Option<i32>,
    pub(crate) strict_priority: u32,
    pub(crate) expected_output_tokens: Option<u32>,
    pub(crate) policy_class: Option<&'a str>,
}

/// What several methods take to narrow a choice, as Python gives it.
pub(crate) struct Limits<'a, 'py> {
    pub(crate) overrides: Option<&'a Bound<'py, PyDict>>,
    pub(crate) required_taints: Option<Vec<String>>,
    pub(crate) preferred_taints: Option<&'a Bound<'py, PyDict>>,
}

impl Limits<'_, '_> {
    /// Lays what was given over what a request says of itself.
    pub(crate) fn lay_over(self, arrival: &mut Arrival) -> PyResult<()> {
        if let Some(own) = self.overrides {
            arrival.overrides = overrides(own)?;
        }
        if let Some(required) = self.required_taints {
            arrival.constraints.required_taints =
                required.iter().map(|t| t.as_str().into()).collect();
        }
        if let Some(preferred) = self.preferred_taints {
            arrival.constraints.preferred_taints = weights(preferred)?;
        }
        Ok(())
    }
}

impl Ask<'_> {
    /// A question about a prompt of so many tokens.
    pub(crate) fn new(tokens: usize, limits: Limits<'_, '_>) -> PyResult<Self> {
        let overrides = limits.overrides.map(overrides).transpose()?;
        let weights = limits.preferred_taints.map(weights).transpose()?;
        Ok(Self {
            prompt_tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            request_id: None,
            worker_id: None,
            dp_rank: None,
            overrides: overrides.unwrap_or_default(),
            lora_name: None,
            required_taints: limits.required_taints.unwrap_or_default(),
            preferred_taints: weights.unwrap_or_default(),
            allowed_worker_ids: None,
            priority: None,
            strict_priority: 0,
            expected_output_tokens: None,
            policy_class: None,
        })
    }

    pub(crate) fn arrival(&self, id: RequestId) -> Box<Arrival> {
        let allowed = self.allowed_worker_ids.as_ref();
        let mut arrival = Box::new(Arrival::new(id, self.prompt_tokens));
        arrival.pin = Pin {
            worker: self.worker_id.map(WorkerId),
            rank: self.dp_rank.map(DpRank),
        };
        arrival.constraints = Constraints {
            allowed: allowed.map(|ids| ids.iter().copied().map(WorkerId).collect()),
            required_taints: self
                .required_taints
                .iter()
                .map(|t| t.as_str().into())
                .collect(),
            preferred_taints: self.preferred_taints.clone(),
            lora: self.lora_name.map(Into::into),
            ..Constraints::default()
        };
        arrival.hints = Hints {
            priority: self.priority,
            strict_priority: self.strict_priority,
            osl: self.expected_output_tokens,
            ..Hints::default()
        };
        arrival.overrides = self.overrides;
        arrival.policy_class = self.policy_class.map(Into::into);
        arrival.query_only = self.request_id.is_none();
        arrival
    }
}

/// `router_config_override`: a key that there is not is a mistake.
fn overrides(of: &Bound<'_, PyDict>) -> PyResult<Overrides> {
    let mut own = Overrides::default();
    for (name, value) in of {
        let name: String = name.extract()?;
        match name.as_str() {
            "overlap_score_credit" => own.overlap_score_credit = value.extract()?,
            "prefill_load_scale" => own.prefill_load_scale = value.extract()?,
            "overlap_score_weight" => own.overlap_score_weight = value.extract()?,
            "router_temperature" => own.router_temperature = value.extract()?,
            "assume_kv_reuse" => own.assume_kv_reuse = value.extract()?,
            "track_prefill_tokens" => own.track_prefill_tokens = value.extract()?,
            "shared_cache_multiplier" => own.shared_cache_multiplier = value.extract()?,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "unknown override {name:?}: overlap_score_credit, prefill_load_scale, overlap_score_weight, \
                     router_temperature, assume_kv_reuse, track_prefill_tokens or shared_cache_multiplier"
                )));
            }
        }
    }
    Ok(own)
}

/// Preferred taints with their weights.
fn weights(of: &Bound<'_, PyDict>) -> PyResult<Vec<(Arc<str>, f64)>> {
    let pairs = of.iter().map(|(name, weight)| {
        let name: String = name.extract()?;
        Ok((name.into(), weight.extract()?))
    });
    pairs.collect()
}

/// A request under way.
#[derive(Debug)]
struct Named {
    name: String,
    /// Where it runs; none while it waits.
    on: Option<WorkerId>,
    /// How it is looked up, while it waits.
    lookup: Option<Lookup>,
}

/// The brain and the names of what it has booked.
pub(super) struct Brain {
    placer: Placer,
    ids: HashMap<String, RequestId>,
    named: HashMap<RequestId, Named>,
    last_id: u128,
    out: Vec<Output>,
    released: Vec<Decision>,
    /// Placed after they waited, to be recorded in the index.
    pub(super) to_record: Vec<(Placement, Lookup)>,
    /// To be looked up again.
    pub(super) to_refresh: Vec<(RequestId, Lookup)>,
}

impl Brain {
    pub(super) fn new(config: RouterConfig) -> Self {
        Self {
            placer: Placer::new(config),
            ids: HashMap::new(),
            named: HashMap::new(),
            last_id: 0,
            out: Vec::new(),
            released: Vec::new(),
            to_record: Vec::new(),
            to_refresh: Vec::new(),
        }
    }

    /// One step that is about no request of the caller's.
    pub(super) fn step(&mut self, now: Time, input: Input) {
        let mut out = std::mem::take(&mut self.out);
        self.placer.step(now, input, &mut out);
        for output in out.drain(..) {
            self.absorb(output);
        }
        self.out = out;
    }

    pub(super) fn join(&mut self, now: Time, spec: WorkerSpec) {
        let input = match self.placer.fleet().member(spec.id) {
            Some(_) => Input::Updated(spec),
            None => Input::Joined(spec),
        };
        self.step(now, input);
    }

    pub(super) fn leave(&mut self, now: Time, worker: WorkerId) {
        let there = self.named.iter().filter(|(_, of)| of.on == Some(worker));
        let gone: Vec<RequestId> = there.map(|(id, _)| *id).collect();
        for id in gone {
            self.forget(id);
        }
        self.step(now, Input::Left(worker));
    }

    /// What becomes of requests that are not the one that is asked about.
    fn absorb(&mut self, output: Output) {
        match output {
            Output::Send(sent) => {
                let why = self.placer.explain(sent.id);
                let Some(of) = self.named.get_mut(&sent.id) else {
                    return;
                };
                of.on = Some(sent.target.worker);
                let decision = Decision::of(Some(of.name.clone()), &sent, why);
                if let Some(lookup) = of.lookup.take() {
                    self.to_record.push((sent, lookup));
                }
                self.release(decision);
            }
            Output::Refuse { id, error } => {
                if let Some(name) = self.forget(id) {
                    self.release(Decision {
                        request_id: Some(name),
                        error: Some(error.to_string()),
                        ..Decision::default()
                    });
                }
            }
            Output::Refresh { id } => {
                let lookup = self.named.get(&id).and_then(|of| of.lookup.clone());
                self.to_refresh.extend(lookup.map(|lookup| (id, lookup)));
            }
            Output::Observe(Observation::Expired { id, .. }) => {
                self.forget(id);
            }
            Output::Queued { .. }
            | Output::CloseSession { .. }
            | Output::Tell(_)
            | Output::Observe(_) => {}
        }
    }

    fn release(&mut self, decision: Decision) {
        if self.released.len() >= RELEASED_MAX {
            self.released.remove(0);
        }
        self.released.push(decision);
    }

    fn forget(&mut self, id: RequestId) -> Option<String> {
        let of = self.named.remove(&id)?;
        self.ids.remove(&of.name);
        Some(of.name)
    }

    /// Decides about a request. What was sent comes with it, if it was.
    pub(super) fn place(
        &mut self,
        now: Time,
        ask: Ask<'_>,
        lookup: Lookup,
        overlap: Overlap,
    ) -> Result<(Decision, Option<Placement>), RouteError> {
        let booked = ask.request_id.as_ref().and_then(|name| self.ids.get(name));
        if booked.is_some() {
            return Err(RouteError::DuplicateRequest);
        }
        self.last_id += 1;
        let id = RequestId(self.last_id);
        let mut arrival = ask.arrival(id);
        lookup.arrive(&mut arrival, overlap);
        let mut out = std::mem::take(&mut self.out);
        self.placer.step(now, Input::Arrived(arrival), &mut out);
        let mut verdict = None;
        for output in out.drain(..) {
            match output {
                Output::Send(sent) if sent.id == id => verdict = Some(Ok(sent)),
                Output::Refuse { id: of, error } if of == id => verdict = Some(Err(error)),
                other => self.absorb(other),
            }
        }
        self.out = out;
        let sent = verdict.transpose()?;
        if let Some(name) = &ask.request_id {
            self.ids.insert(name.clone(), id);
            let of = Named {
                name: name.clone(),
                on: sent.as_ref().map(|sent| sent.target.worker),
                lookup: sent.is_none().then_some(lookup),
            };
            self.named.insert(id, of);
        }
        let decision = match &sent {
            Some(sent) => Decision::of(ask.request_id, sent, self.placer.explain(id)),
            None => Decision {
                request_id: ask.request_id,
                queued: true,
                prompt_tokens: ask.prompt_tokens,
                ..Decision::default()
            },
        };
        Ok((decision, sent))
    }

    pub(super) fn first_token(&mut self, now: Time, name: &str) -> bool {
        self.about(now, name, |id| Input::FirstToken { id })
    }

    pub(super) fn generated(&mut self, now: Time, name: &str, generated: u32) -> bool {
        self.about(now, name, |id| Input::Tokens { id, generated })
    }

    pub(super) fn free(&mut self, now: Time, name: &str, outcome: Outcome) -> bool {
        let Some(id) = self.ids.get(name).copied() else {
            return false;
        };
        self.forget(id);
        let on = None;
        self.step(now, Input::Finished { id, on, outcome });
        true
    }

    fn about(&mut self, now: Time, name: &str, input: impl FnOnce(RequestId) -> Input) -> bool {
        let id = self.ids.get(name).copied();
        if let Some(id) = id {
            self.step(now, input(id));
        }
        id.is_some()
    }

    pub(super) fn loads(
        &mut self,
        now: Time,
        prompt_tokens: u32,
        overlap: &Overlap,
        sequence: &[SequenceHash],
    ) -> Vec<PotentialLoad> {
        let mut loads = Vec::new();
        self.placer
            .potential_loads(now, prompt_tokens, overlap, sequence, &mut loads);
        loads
    }

    pub(super) fn take_released(&mut self) -> Vec<Decision> {
        std::mem::take(&mut self.released)
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.placer.next_deadline()
    }

    pub(super) fn worker_ids(&self) -> Vec<u64> {
        let mut ids: Vec<u64> = self.placer.fleet().members().map(|m| m.spec.id.0).collect();
        ids.sort_unstable();
        ids
    }

    pub(super) fn booked(&self) -> usize {
        self.placer.booked()
    }

    pub(super) fn waiting(&self) -> usize {
        self.placer.queued().0
    }
}
