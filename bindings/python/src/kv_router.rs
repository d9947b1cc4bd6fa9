//! Routing from Python, over the host that the server runs.
//!
//! Answers one question: which worker should this prompt go to, and can it be sent there? What `kvasir.llm.KvRouter` is made from.
//!
//! What always holds: a booking ends with its answer, with `free`, or when nobody has spoken of it for as long as the router's own
//! bookings live; an answer that nobody reads any more ends its call and its booking.

use std::sync::Arc;

use kvasir_discovery::EndpointName;
use kvasir_embed::{HeldBookings, ProcessFleet, Sharing};
use kvasir_hash::sequence_hashes;
use kvasir_host::{EndpointAnswer, EndpointJob, PromptBlocks, RouterSetup};
use kvasir_index::{Match, Matches};
use kvasir_msgpack::Value;
use kvasir_options::RouterMode;
use kvasir_protocol::{GenerateRequest, Payload};
use kvasir_router::{Arrival, Outcome, PotentialLoad, RouterConfig};
use kvasir_services::request_arrival;
use kvasir_types::{Codec, DpRank, Token, WorkerId};
use kvasir_wire::native::RouterEvent;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::client::new_id;
use crate::config::KvRouterConfig;
use crate::errors::{self, Failure};
use crate::indexes::{self, OverlapScores};
use crate::planes::Runtime;
use crate::router::requests::{Ask, Limits};
use crate::stream::{Answer, Shared, StreamItem};
use crate::{hashing, process, trees, values};

/// Other workers that are asked if one does not begin to answer.
const RETRIES: u32 = 2;

/// Worker, rank, and blocks in device memory, after those in host memory, after those further away.
type OverlapRow = (u64, u32, u32, u32, u32);

/// The router of one endpoint's workers.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct EndpointRouter {
    fleet: Arc<ProcessFleet>,
    held: Arc<HeldBookings>,
}

impl EndpointRouter {
    fn blocks(
        &self,
        py: Python<'_>,
        tokens: &[Token],
        lora: Option<&str>,
        salt: Option<&str>,
        media: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PromptBlocks> {
        let (scope, model) = (hashing::scope(lora, salt, None), &self.fleet.model);
        if let Some(infos) = media {
            let media = hashing::media_of(infos)?;
            let locals = hashing::media_hashes(tokens, model.block_size, &scope, &media);
            let sequence = sequence_hashes(&locals);
            return Ok(model.host.named_blocks(locals.into(), sequence.into()));
        }
        Ok(match tokens.len() < 1 << 15 {
            true => model.name_blocks_in(tokens, &scope),
            false => py.detach(|| model.name_blocks_in(tokens, &scope)),
        })
    }
}

/// Hands on tokens.
async fn pump(mut answer: EndpointAnswer, to: &Shared) -> Option<Failure> {
    loop {
        let item = match answer.next().await {
            Some(Ok(item)) => item,
            Some(Err(error)) => return Some(error.into()),
            None => return None,
        };
        match item.value() {
            Ok(item) => to.put(StreamItem::Value(data_of(item))).await,
            Err(error) => return Some(Failure::Named("Unknown", error.to_string())),
        }
    }
}

/// The data of an item; a remark has none.
fn data_of(item: Value) -> Value {
    let Value::Map(members) = item else {
        return item;
    };
    let data = members.into_iter().find(|(name, _)| name == "data");
    data.map_or(Value::Nil, |(_, value)| value)
}

#[pymethods]
impl EndpointRouter {
    #[new]
    #[pyo3(signature = (runtime, name, block_size, config, busy, session_ttl_secs=None, measured=None))]
    #[expect(clippy::too_many_arguments, reason = "called by kvasir.llm alone")]
    fn new(
        py: Python<'_>,
        runtime: &Runtime,
        name: (String, String, String),
        block_size: u32,
        config: &KvRouterConfig,
        busy: (Option<f64>, Option<u64>, Option<f64>),
        session_ttl_secs: Option<u64>,
        measured: Option<(String, String)>,
    ) -> PyResult<Self> {
        let block_size = values::positive("block_size", block_size)?;
        let (namespace, component, endpoint) = name;
        let endpoint = EndpointName::new(&namespace, &component, &endpoint);
        let planes = &runtime.planes;
        let clock = planes.context.clock;
        let seed = clock.unix_nanos(clock.now()) ^ u64::from(std::process::id()) << 32;
        let base = config.brain(block_size, RouterMode::Kv, config.decode_policy(), seed);
        let brain = RouterConfig {
            active_decode_blocks_threshold: busy.0,
            active_prefill_tokens_threshold: busy.1,
            active_prefill_tokens_threshold_frac: busy.2,
            router_session_affinity_ttl_secs: session_ttl_secs,
            ..config.with_profile(base, measured)?
        };
        let setup = RouterSetup {
            policies: config.policies()?,
            ..RouterSetup::new(brain, config.index())
        };
        let sharing = Sharing {
            sessions: session_ttl_secs.is_some(),
            ..config.sharing()
        };
        let opened = ProcessFleet::open(planes, endpoint, block_size, setup, sharing);
        Ok(Self {
            fleet: process::wait(py, async { Ok(opened.await?) })?,
            held: Arc::new(HeldBookings::new(clock)),
        })
    }

    /// The ids of the workers that are there.
    fn worker_ids(&self) -> Vec<u64> {
        self.fleet.worker_ids()
    }

    /// Waits until so many workers are there.
    fn wait_for_workers<'py>(&self, py: Python<'py>, count: usize) -> PyResult<Bound<'py, PyAny>> {
        let fleet = Arc::clone(&self.fleet);
        let work = async move {
            fleet.wait_for(count).await;
            Ok(fleet.worker_ids())
        };
        process::awaitable(py, work, |py, ids| Ok(ids.into_pyobject(py)?.unbind()))
    }

    /// Requests that are booked.
    #[getter]
    fn booked(&self) -> usize {
        self.fleet.model.host.ask(kvasir_router::Router::booked)
    }

    /// Blocks that the index holds.
    #[getter]
    fn blocks_known(&self) -> u64 {
        self.fleet.model.host.index().stats().entries
    }

    /// Sends a request, which is Dynamo's `PreprocessedRequest` as a dictionary, to the best worker, or to the one named.
    #[pyo3(signature = (request, router_config_override=None, worker_id=None, dp_rank=None, required_taints=None,
        preferred_taints=None, response_buffer_size=100, block_mm_infos=None, routing_token_ids=None))]
    #[expect(clippy::too_many_arguments, reason = "called by kvasir.llm alone")]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyDict>,
        router_config_override: Option<&Bound<'py, PyDict>>,
        worker_id: Option<u64>,
        dp_rank: Option<u32>,
        required_taints: Option<Vec<String>>,
        preferred_taints: Option<&Bound<'py, PyDict>>,
        response_buffer_size: usize,
        block_mm_infos: Option<&Bound<'py, PyAny>>,
        routing_token_ids: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let value = trees::from_python(request.as_any())?;
        let payload = Payload::of_value(Codec::MessagePack, &value);
        let mut request = GenerateRequest::decode(&payload).map_err(|error| {
            errors::named(
                py,
                "InvalidArgument",
                format!("the request cannot be sent: {error}"),
            )
        })?;
        let is_there = |id: WorkerId| self.fleet.address(id).is_some();
        let named = worker_id.map(WorkerId);
        if let Some(id) = named.filter(|id| !is_there(*id)) {
            let text = format!(
                "InvalidRequest: nvext.backend_instance_id={id} does not identify a known worker"
            );
            return Err(errors::named(py, "InvalidArgument", text));
        }
        let asked = request_arrival(&mut request, new_id(), is_there);
        let mut arrival = asked.map_err(|error| Failure::from(error).into_error(py))?;
        let limits = Limits {
            overrides: router_config_override,
            required_taints,
            preferred_taints,
        };
        limits.lay_over(&mut arrival)?;
        arrival.pin.worker = named.or(arrival.pin.worker);
        let rank = dp_rank.map(DpRank).or(arrival.pin.rank);
        arrival.pin.rank = rank.filter(|_| arrival.pin.worker.is_some());
        let routing = request.routing.clone().unwrap_or_default();
        let (lora, salt) = (routing.lora_name.as_deref(), routing.cache_salt.as_deref());
        // Where images stand in a prompt, it is looked up by other tokens than are sent.
        let looked_up = routing_token_ids.map(values::tokens).transpose()?;
        let tokens = looked_up.as_deref().unwrap_or(&request.token_ids);
        let blocks = self.blocks(py, tokens, lora, salt, block_mm_infos)?;
        let mut job = EndpointJob {
            arrival,
            blocks,
            request,
            metadata: Vec::new(),
            retries: RETRIES,
        };
        let (handle, tasks) = process::runtime()?;
        let fleet = Arc::clone(self.fleet.workers());
        let work = async move {
            let answer = fleet.send(&mut job).await?;
            let shared = Shared::new(response_buffer_size);
            let to = Arc::clone(&shared);
            let reading = async move {
                let failed = pump(answer, &to).await;
                to.end(failed);
            };
            let task = tasks.spawn_on(&handle, reading).abort_handle();
            Ok(Answer::new(shared, task, false))
        };
        process::awaitable(py, work, |py, answer| Ok(Py::new(py, answer)?.into_any()))
    }

    /// `(worker_id, dp_rank, overlap_blocks)`; books if there is a request id, which may wait.
    #[pyo3(signature = (token_ids, router_config_override=None, request_id=None, lora_name=None, required_taints=None,
        preferred_taints=None, strict_priority=0, policy_class=None, cache_namespace=None, block_mm_infos=None, update_indexer=false))]
    #[expect(clippy::too_many_arguments, reason = "called by kvasir.llm alone")]
    fn best_worker<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        router_config_override: Option<&Bound<'py, PyDict>>,
        request_id: Option<String>,
        lora_name: Option<&str>,
        required_taints: Option<Vec<String>>,
        preferred_taints: Option<&Bound<'py, PyDict>>,
        strict_priority: u32,
        policy_class: Option<&str>,
        cache_namespace: Option<&str>,
        block_mm_infos: Option<&Bound<'py, PyAny>>,
        update_indexer: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let tokens = values::tokens(token_ids)?;
        let blocks = self.blocks(py, &tokens, lora_name, cache_namespace, block_mm_infos)?;
        if let Some(name) = request_id.as_ref().filter(|name| self.held.holds(name)) {
            return Err(errors::already_there(py, name));
        }
        let limits = Limits {
            overrides: router_config_override,
            required_taints,
            preferred_taints,
        };
        let ask = Ask {
            request_id: request_id.clone(),
            lora_name,
            strict_priority,
            policy_class,
            ..Ask::new(tokens.len(), limits)?
        };
        let mut arrival = ask.arrival(new_id());
        // What is sent is remembered as cached, where workers do not tell; it is booked for that long.
        arrival.query_only &= !update_indexer;
        let (fleet, held) = (Arc::clone(&self.fleet), Arc::clone(&self.held));
        let work = async move {
            let booking = fleet.model.book(arrival, &blocks).await?;
            let (target, overlap) = (booking.target(), booking.placement().overlap_blocks);
            match request_id {
                Some(name) => held.insert(name, booking),
                None => booking.finish(Outcome::Completed { output_tokens: 0 }),
            }
            Ok((target.worker.0, target.rank.0, overlap))
        };
        process::awaitable_at_once(py, work, |py, found| {
            Ok(found.into_pyobject(py)?.into_any().unbind())
        })
    }

    /// Seconds of a question about a prompt in the median of so many, without Python: what `best_worker` is measured against.
    fn measure_best_worker(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        rounds: usize,
    ) -> PyResult<f64> {
        let tokens = values::tokens(token_ids)?;
        let (model, clock) = (&self.fleet.model, self.fleet.planes.context.clock);
        process::wait(py, async {
            let mut taken = Vec::new();
            for _ in 0..rounds.max(1) {
                let start = clock.now();
                let blocks = model.name_blocks_in(&tokens, &hashing::scope(None, None, None));
                let isl = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                let mut arrival = Box::new(Arrival::new(new_id(), isl));
                arrival.query_only = true;
                drop(model.book(arrival, &blocks).await?);
                taken.push(clock.now() - start);
            }
            taken.sort_unstable();
            let middle = taken.get(taken.len() / 2);
            Ok(middle.map_or(0.0, |taken| taken.as_secs_f64()))
        })
    }

    /// What each rank would have to do if a prompt went there.
    #[pyo3(signature = (token_ids, lora_name=None, cache_namespace=None, block_mm_infos=None))]
    fn potential_loads<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
        block_mm_infos: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let tokens = values::tokens(token_ids)?;
        if tokens.is_empty() {
            return Err(PyValueError::new_err("the prompt has no tokens"));
        }
        let blocks = self.blocks(py, &tokens, lora_name, cache_namespace, block_mm_infos)?;
        let prompt = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let loads = self.fleet.model.potential_loads(prompt, &blocks);
        loads.iter().map(|load| load_row(py, load)).collect()
    }

    /// How many leading blocks of a prompt each rank holds: worker, rank, in device memory, after those in host memory, after those further
    /// away.
    #[pyo3(signature = (token_ids, lora_name=None, cache_namespace=None, block_mm_infos=None))]
    fn overlaps(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
        block_mm_infos: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<OverlapRow>> {
        let tokens = values::tokens(token_ids)?;
        let blocks = self.blocks(py, &tokens, lora_name, cache_namespace, block_mm_infos)?;
        let found = self.fleet.model.overlaps(&blocks).sorted();
        let row = |found: Match| {
            let rank = found.rank;
            (
                rank.worker.0,
                rank.rank.0,
                found.device,
                found.host,
                found.disk,
            )
        };
        Ok(found.into_iter().map(row).collect())
    }

    /// How many leading blocks each rank holds of a prompt whose blocks are named already.
    fn find_matches(&self, sequence: &Bound<'_, PyAny>) -> PyResult<OverlapScores> {
        let locals = values::local_hashes(sequence)?;
        let mut matches = Matches::new();
        self.fleet.model.host.index().find(&locals, &mut matches);
        Ok(OverlapScores::of(&matches))
    }

    /// Applies one router event, written in JSON, as if its worker had published it.
    fn apply_event(&self, event: &[u8]) -> PyResult<()> {
        let read = RouterEvent::from_json(event)
            .map_err(|error| PyValueError::new_err(format!("no router event: {error}")))?;
        // A block whose parent is not there, or that is not there to be removed, is no mistake of the caller's.
        let index = self.fleet.model.host.index();
        let _ = index.apply_once(read.rank, &read.event);
        Ok(())
    }

    /// The first token of a booked request came.
    fn mark_prefill_complete(&self, py: Python<'_>, request_id: &str) -> PyResult<()> {
        let known = self.held.first_token(request_id);
        known
            .then_some(())
            .ok_or_else(|| errors::not_found(py, request_id))
    }

    /// A booked request ended.
    fn free(&self, py: Python<'_>, request_id: &str) -> PyResult<()> {
        let known = self
            .held
            .finish(request_id, Outcome::Completed { output_tokens: 0 });
        known
            .then_some(())
            .ok_or_else(|| errors::not_found(py, request_id))
    }

    /// All that the index holds, as a JSON array of router events.
    fn dump_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let index = Arc::clone(self.fleet.model.host.index());
        let work = async move {
            let dumped = tokio::task::spawn_blocking(move || indexes::dump(&index)).await;
            dumped.map_err(|error| Failure::Plain(error.to_string()))
        };
        process::awaitable(py, work, |py, events| {
            let all = format!("[{}]", events.join(","));
            Ok(all.into_pyobject(py)?.into_any().unbind())
        })
    }
}

/// One row of potential loads, as Dynamo has it.
pub(crate) fn load_row<'py>(py: Python<'py>, load: &PotentialLoad) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    row.set_item("worker_id", load.rank.worker.0)?;
    row.set_item("dp_rank", load.rank.rank.0)?;
    row.set_item("potential_prefill_tokens", load.potential_prefill_tokens)?;
    row.set_item("potential_decode_blocks", load.potential_decode_blocks)?;
    row.set_item("active_requests", load.active_requests)?;
    Ok(row)
}
