//! The brain as a plain object: workers in, events in, decisions with their terms out.
//!
//! Answers one question: where should this prompt go, for somebody who has a gateway of their own? No runtime, no planes, no threads:
//! each call is one step of `kvasir_router::Router` over one `kvasir_index::Index`, on the caller's thread.
//!
//! What always holds: with `now` given to every call the same calls give the same decisions; a request that is booked stays so until
//! `free`, its worker leaves, or nothing is heard of it for five minutes; names of requests are kept as long as their bookings.

pub(crate) mod requests;

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvasir_hash::{Scope, sequence_hashes};
use kvasir_index::{Index, Matches};
use kvasir_options::{RouterMode, RouterPolicy};
use kvasir_router::{Input, LoadReport, Lookup, Outcome, RouterConfig, WorkerSpec};
use kvasir_telemetry::Clock;
use kvasir_trust::TrustLevels;
use kvasir_types::{
    Device, DpRank, EngineHash, KvEvent, StoredBlock, Tier, Time, Token, WorkerId, WorkerRank,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::config::KvRouterConfig;
use crate::decision::Decision;
use crate::kv_router::load_row;
use crate::{errors, hashing, indexes, values};
use requests::{Ask, Brain, Limits};

/// A router without a server: `Router(block_size=16, config=None, *, mode="kv", policy="kv", seed=0)`.
#[pyclass(frozen, module = "kvasir")]
pub(crate) struct Router {
    brain: Mutex<Brain>,
    /// Beside the object: it wants to lie at addresses that Python does not give.
    index: Box<Index>,
    block_size: u32,
    clock: Clock,
    trust: TrustLevels,
}

impl Router {
    fn lock(&self) -> MutexGuard<'_, Brain> {
        self.brain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn time(&self, now: Option<f64>) -> PyResult<Time> {
        match now {
            None => Ok(self.clock.now()),
            Some(now) if now.is_finite() && now >= 0.0 => Ok(Time::from_secs_f64(now)),
            Some(_) => Err(PyValueError::new_err(
                "now is in seconds, finite and at least 0",
            )),
        }
    }

    /// One step that is about no request.
    fn tell(&self, now: Option<f64>, input: Input) -> PyResult<()> {
        let now = self.time(now)?;
        self.with_brain(now, |brain| brain.step(now, input));
        Ok(())
    }

    /// Does something with the brain, and then what it asks for: lookups of those who wait, records of those who waited.
    fn with_brain<T>(&self, now: Time, act: impl FnOnce(&mut Brain) -> T) -> T {
        let mut brain = self.lock();
        let value = act(&mut brain);
        for (id, lookup) in std::mem::take(&mut brain.to_refresh) {
            let overlap = Some(lookup.find(&self.index, &self.trust, &mut Matches::new()));
            brain.step(now, Input::Refreshed { id, overlap });
        }
        for (sent, lookup) in std::mem::take(&mut brain.to_record) {
            lookup.record(now, &sent, &self.index, &self.trust);
        }
        value
    }

    /// What a prompt is looked up by.
    fn lookup(
        &self,
        py: Python<'_>,
        tokens: &[Token],
        scope: &Scope<'_>,
        media: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Lookup> {
        let locals = match media {
            None => hashing::block_hashes(py, tokens, self.block_size, scope),
            Some(infos) => {
                hashing::media_hashes(tokens, self.block_size, scope, &hashing::media_of(infos)?)
            }
        };
        Ok(Lookup {
            sequence: sequence_hashes(&locals).into(),
            locals: locals.into(),
            predict_all: true,
            shared: Default::default(),
        })
    }
}

fn tier_named(name: &str) -> PyResult<Tier> {
    match name {
        "device" => Ok(Tier::Device),
        "host_pinned" | "host" => Ok(Tier::HostPinned),
        "disk" => Ok(Tier::Disk),
        "external" => Ok(Tier::External),
        other => Err(PyValueError::new_err(format!(
            "tier cannot be {other:?}: device, host_pinned, disk or external"
        ))),
    }
}

fn outcome_named(name: &str, output_tokens: u32) -> PyResult<Outcome> {
    Ok(match name {
        "completed" => Outcome::Completed { output_tokens },
        "cancelled" => Outcome::Cancelled,
        "unreachable" => Outcome::Unreachable,
        "overloaded" => Outcome::Overloaded,
        "failed" => Outcome::Failed,
        other => {
            return Err(PyValueError::new_err(format!(
                "outcome cannot be {other:?}: completed, cancelled, unreachable, overloaded or failed"
            )));
        }
    })
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (block_size=16, config=None, *, mode="kv", policy="kv", seed=0))]
    fn new(
        block_size: u32,
        config: Option<&KvRouterConfig>,
        mode: &str,
        policy: &str,
        seed: u64,
    ) -> PyResult<Self> {
        let block_size = values::positive("block_size", block_size)?;
        let mode = RouterMode::find(mode).ok_or_else(|| {
            let known: Vec<&str> = RouterMode::CHOICES
                .iter()
                .map(|choice| choice.name)
                .collect();
            PyValueError::new_err(format!("mode cannot be {mode:?}: {}", known.join(", ")))
        })?;
        let policy = RouterPolicy::find(policy).ok_or_else(|| {
            PyValueError::new_err(format!("policy cannot be {policy:?}: kv or time"))
        })?;
        let default = KvRouterConfig::default();
        let config = config.unwrap_or(&default);
        let classes = config.policies()?.map(|file| file.of_model(""));
        let brain = RouterConfig {
            router_policy_config: classes,
            ..config.brain(block_size, mode, policy, seed)
        };
        Ok(Self {
            brain: Mutex::new(Brain::new(brain)),
            index: Box::new(Index::with_options(&config.index())),
            block_size,
            clock: Clock::new(),
            trust: TrustLevels::default(),
        })
    }

    /// Tokens in a block.
    #[getter]
    fn block_size(&self) -> u32 {
        self.block_size
    }

    /// A worker is there, or what is known of it changed: its requests stay booked.
    #[pyo3(signature = (worker_id, *, dp_size=1, dp_start_rank=0, total_kv_blocks=None, max_num_batched_tokens=None,
        max_num_seqs=None, taints=None, loras=None, device=None, now=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "named arguments of a Python method"
    )]
    fn add_worker(
        &self,
        worker_id: u64,
        dp_size: u32,
        dp_start_rank: u32,
        total_kv_blocks: Option<u64>,
        max_num_batched_tokens: Option<u64>,
        max_num_seqs: Option<u64>,
        taints: Option<Vec<String>>,
        loras: Option<Vec<String>>,
        device: Option<&str>,
        now: Option<f64>,
    ) -> PyResult<()> {
        let now = self.time(now)?;
        if !(1..=WorkerSpec::RANKS_MAX).contains(&dp_size) {
            let text = format!("dp_size is from 1 to {}", WorkerSpec::RANKS_MAX);
            return Err(PyValueError::new_err(text));
        }
        let device = match device {
            None => Device::default(),
            Some(name) => Device::from_name(name).ok_or_else(|| {
                PyValueError::new_err(format!("device cannot be {name:?}: cpu, cuda, gpu, ..."))
            })?,
        };
        let shared = |names: Option<Vec<String>>| {
            let names = names.unwrap_or_default().into_iter();
            names.map(Into::into).collect()
        };
        let spec = WorkerSpec {
            first_rank: DpRank(dp_start_rank),
            ranks: dp_size,
            kv_total_blocks: total_kv_blocks,
            max_num_batched_tokens,
            max_num_seqs,
            device,
            taints: shared(taints),
            loras: shared(loras),
            ..WorkerSpec::new(WorkerId(worker_id))
        };
        self.with_brain(now, |brain| brain.join(now, spec));
        Ok(())
    }

    /// A worker is gone: its requests and what was known of its cache go with it.
    #[pyo3(signature = (worker_id, *, now=None))]
    fn remove_worker(&self, worker_id: u64, now: Option<f64>) -> PyResult<()> {
        let now = self.time(now)?;
        self.with_brain(now, |brain| brain.leave(now, WorkerId(worker_id)));
        self.index.remove_worker(WorkerId(worker_id));
        Ok(())
    }

    /// A worker gets nothing new; what runs there goes on.
    #[pyo3(signature = (worker_id, *, now=None))]
    fn drain_worker(&self, worker_id: u64, now: Option<f64>) -> PyResult<()> {
        self.tell(now, Input::Draining(WorkerId(worker_id)))
    }

    /// The ids of the workers.
    fn worker_ids(&self) -> Vec<u64> {
        self.lock().worker_ids()
    }

    /// A worker says how loaded one of its ranks is.
    #[pyo3(signature = (worker_id, *, dp_rank=0, active_decode_blocks=None, active_prefill_tokens=None, kv_used_blocks=None,
        waiting_requests=None, now=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "named arguments of a Python method"
    )]
    fn update_load(
        &self,
        worker_id: u64,
        dp_rank: u32,
        active_decode_blocks: Option<u64>,
        active_prefill_tokens: Option<u64>,
        kv_used_blocks: Option<u64>,
        waiting_requests: Option<u64>,
        now: Option<f64>,
    ) -> PyResult<()> {
        let asked = self.time(now)?;
        let report = LoadReport {
            rank: WorkerRank::new(worker_id, dp_rank),
            active_decode_blocks,
            active_prefill_tokens,
            kv_used_blocks,
            waiting: waiting_requests,
            asked,
        };
        self.tell(now, Input::Load(report))
    }

    /// Blocks appeared in a worker's cache: `block_hashes` are the engine's names for the blocks of `token_ids`, the first of which
    /// follows `parent_hash`. A last block that is not full is left out. Says whether the chain could be placed.
    #[pyo3(signature = (worker_id, token_ids, block_hashes, parent_hash=None, *, dp_rank=0, tier="device", lora_name=None,
        cache_namespace=None, is_eagle=false))]
    #[expect(
        clippy::too_many_arguments,
        reason = "named arguments of a Python method"
    )]
    fn stored(
        &self,
        py: Python<'_>,
        worker_id: u64,
        token_ids: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        parent_hash: Option<&Bound<'_, PyAny>>,
        dp_rank: u32,
        tier: &str,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
        is_eagle: bool,
    ) -> PyResult<bool> {
        let tokens = values::tokens(token_ids)?;
        let names = values::engine_hashes(block_hashes)?;
        let scope = hashing::scope(lora_name, cache_namespace, Some(is_eagle));
        let locals = hashing::block_hashes(py, &tokens, self.block_size, &scope);
        if names.len() < locals.len() {
            let text = format!(
                "{} full blocks of {} tokens and {} hashes: each full block has a hash",
                locals.len(),
                self.block_size,
                names.len()
            );
            return Err(PyValueError::new_err(text));
        }
        let parent = parent_hash.map(values::hash_bits).transpose()?;
        let blocks = names.into_iter().zip(locals);
        let event = KvEvent::Stored {
            tier: tier_named(tier)?,
            parent: parent.map(EngineHash),
            blocks: blocks
                .map(|(engine, local)| StoredBlock { engine, local })
                .collect(),
        };
        let rank = WorkerRank::new(worker_id, dp_rank);
        Ok(self.index.apply_once(rank, &event).is_ok())
    }

    /// Blocks left a worker's cache. Says whether all of them were known.
    #[pyo3(signature = (worker_id, block_hashes, *, dp_rank=0, tier="device"))]
    fn removed(
        &self,
        worker_id: u64,
        block_hashes: &Bound<'_, PyAny>,
        dp_rank: u32,
        tier: &str,
    ) -> PyResult<bool> {
        let event = KvEvent::Removed {
            tier: tier_named(tier)?,
            blocks: values::engine_hashes(block_hashes)?,
        };
        let rank = WorkerRank::new(worker_id, dp_rank);
        Ok(self.index.apply_once(rank, &event).is_ok())
    }

    /// A rank's cache is empty.
    #[pyo3(signature = (worker_id, *, dp_rank=0))]
    fn cleared(&self, worker_id: u64, dp_rank: u32) {
        let rank = WorkerRank::new(worker_id, dp_rank);
        // Clearing refuses nothing.
        let _ = self
            .index
            .apply_once(rank, &KvEvent::Cleared { tier: None });
    }

    /// Applies one event in the form that workers publish: JSON text or bytes, as `RadixTree.apply_event` takes it. Says whether it fitted.
    fn apply_event(&self, worker_id: u64, event: &Bound<'_, PyAny>) -> PyResult<bool> {
        let read = if let Ok(bytes) = event.cast::<PyBytes>() {
            indexes::read_event(worker_id, bytes.as_bytes())
        } else if let Ok(text) = event.cast::<PyString>() {
            indexes::read_event(worker_id, text.to_cow()?.as_bytes())
        } else {
            return Err(PyTypeError::new_err("an event is JSON in bytes or str"));
        };
        let event = read
            .map_err(|error| PyValueError::new_err(format!("the event cannot be read: {error}")))?;
        Ok(self.index.apply_once(event.rank, &event.event).is_ok())
    }

    /// All that the index holds, as events that would make it again: one JSON text each.
    fn dump_events(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| indexes::dump(&self.index))
    }

    /// Where a prompt should go.
    ///
    /// Without `request_id` it is a question: nothing changes. With one the request is booked, and the caller says
    /// `mark_prefill_complete` at its first token and `free` at its end. `worker_id` (and `dp_rank`) name the worker; it is tracked all
    /// the same. `overrides` has the keys of Dynamo's `router_config_override`. No worker is a `WorkerUnavailable`, a full queue a
    /// `RouterQueueLimitExceeded`.
    #[pyo3(signature = (token_ids, request_id=None, *, worker_id=None, dp_rank=None, overrides=None, lora_name=None,
        cache_namespace=None, block_mm_infos=None, required_taints=None, preferred_taints=None, allowed_worker_ids=None,
        priority=None, strict_priority=0, expected_output_tokens=None, policy_class=None, now=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "named arguments of a Python method"
    )]
    fn place(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        request_id: Option<String>,
        worker_id: Option<u64>,
        dp_rank: Option<u32>,
        overrides: Option<&Bound<'_, PyDict>>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
        block_mm_infos: Option<&Bound<'_, PyAny>>,
        required_taints: Option<Vec<String>>,
        preferred_taints: Option<&Bound<'_, PyDict>>,
        allowed_worker_ids: Option<Vec<u64>>,
        priority: Option<i32>,
        strict_priority: u32,
        expected_output_tokens: Option<u32>,
        policy_class: Option<&str>,
        now: Option<f64>,
    ) -> PyResult<Decision> {
        let now = self.time(now)?;
        let tokens = values::tokens(token_ids)?;
        let scope = hashing::scope(lora_name, cache_namespace, None);
        let lookup = self.lookup(py, &tokens, &scope, block_mm_infos)?;
        let limits = Limits {
            overrides,
            required_taints,
            preferred_taints,
        };
        let ask = Ask {
            request_id,
            worker_id,
            dp_rank,
            lora_name,
            allowed_worker_ids,
            priority,
            strict_priority,
            expected_output_tokens,
            policy_class,
            ..Ask::new(tokens.len(), limits)?
        };
        let name = ask.request_id.clone();
        self.index.expire(now);
        let overlap = lookup.find(&self.index, &self.trust, &mut Matches::new());
        let decided = self.with_brain(now, |brain| brain.place(now, ask, lookup.clone(), overlap));
        match decided {
            Ok((decision, sent)) => {
                if let Some(sent) = sent.filter(|sent| sent.booked) {
                    lookup.record(now, &sent, &self.index, &self.trust);
                }
                Ok(decision)
            }
            Err(kvasir_router::RouteError::DuplicateRequest) => {
                Err(errors::already_there(py, &name.unwrap_or_default()))
            }
            Err(error) => Err(errors::of_route(py, &error)),
        }
    }

    /// What each rank would have to do if a prompt went there: one dictionary per rank, as Dynamo's `get_potential_loads`.
    #[pyo3(signature = (token_ids, *, lora_name=None, cache_namespace=None, now=None))]
    fn potential_loads<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
        now: Option<f64>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let now = self.time(now)?;
        let tokens = values::tokens(token_ids)?;
        let scope = hashing::scope(lora_name, cache_namespace, None);
        let lookup = self.lookup(py, &tokens, &scope, None)?;
        let overlap = lookup.find(&self.index, &self.trust, &mut Matches::new());
        let prompt = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let loads = self.lock().loads(now, prompt, &overlap, &lookup.sequence);
        loads.iter().map(|load| load_row(py, load)).collect()
    }

    /// Blocks of a prompt by `(worker_id, dp_rank)`.
    #[pyo3(signature = (token_ids, *, lora_name=None, cache_namespace=None))]
    fn overlap_scores<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
    ) -> PyResult<indexes::OverlapScores> {
        let tokens = values::tokens(token_ids)?;
        let scope = hashing::scope(lora_name, cache_namespace, None);
        let lookup = self.lookup(py, &tokens, &scope, None)?;
        let mut matches = Matches::new();
        self.index.find(&lookup.locals, &mut matches);
        Ok(indexes::OverlapScores::of(&matches))
    }

    /// The first token of a request came: its prompt is no work any more.
    #[pyo3(signature = (request_id, *, now=None))]
    fn mark_prefill_complete(
        &self,
        py: Python<'_>,
        request_id: &str,
        now: Option<f64>,
    ) -> PyResult<()> {
        let now = self.time(now)?;
        let known = self.with_brain(now, |brain| brain.first_token(now, request_id));
        known
            .then_some(())
            .ok_or_else(|| errors::not_found(py, request_id))
    }

    /// So many tokens of a request came, in all; counts only with `router_track_output_blocks`.
    #[pyo3(signature = (request_id, generated, *, now=None))]
    fn mark_generated(
        &self,
        py: Python<'_>,
        request_id: &str,
        generated: u32,
        now: Option<f64>,
    ) -> PyResult<()> {
        let now = self.time(now)?;
        let known = self.with_brain(now, |brain| brain.generated(now, request_id, generated));
        known
            .then_some(())
            .ok_or_else(|| errors::not_found(py, request_id))
    }

    /// A request ended. `outcome` is completed, cancelled, unreachable, overloaded or failed; a worker that cannot be reached gets
    /// nothing for a while.
    #[pyo3(signature = (request_id, *, outcome="completed", output_tokens=0, now=None))]
    fn free(
        &self,
        py: Python<'_>,
        request_id: &str,
        outcome: &str,
        output_tokens: u32,
        now: Option<f64>,
    ) -> PyResult<()> {
        let now = self.time(now)?;
        let outcome = outcome_named(outcome, output_tokens)?;
        let known = self.with_brain(now, |brain| brain.free(now, request_id, outcome));
        known
            .then_some(())
            .ok_or_else(|| errors::not_found(py, request_id))
    }

    /// Lets time pass, and returns the decisions about requests that had to wait: placed, or refused with `error`.
    #[pyo3(signature = (*, now=None))]
    fn poll(&self, now: Option<f64>) -> PyResult<Vec<Decision>> {
        let now = self.time(now)?;
        self.index.expire(now);
        self.with_brain(now, |brain| brain.step(now, Input::Tick));
        Ok(self.lock().take_released())
    }

    /// Seconds until `poll` has something to do though nothing else happens; none for never.
    fn next_poll_seconds(&self) -> Option<f64> {
        let due = self.lock().next_deadline()?;
        Some((due - self.clock.now()).as_secs_f64())
    }

    /// Requests that are booked.
    #[getter]
    fn booked(&self) -> usize {
        self.lock().booked()
    }

    /// Requests that wait.
    #[getter]
    fn waiting(&self) -> usize {
        self.lock().waiting()
    }

    fn __repr__(&self) -> String {
        let brain = self.lock();
        format!(
            "Router(block_size={}, workers={}, booked={}, waiting={})",
            self.block_size,
            brain.worker_ids().len(),
            brain.booked(),
            brain.waiting()
        )
    }
}
