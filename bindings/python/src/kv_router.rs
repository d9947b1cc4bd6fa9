//! Routing from Python, over the host that the server runs.
//!
//! Answers one question: which worker should this prompt go to, and can it be sent there? What `kvasir.llm.KvRouter` is made from.
//!
//! What always holds: a booking ends with its answer, with `free`, or when nobody has spoken of it for as long as the router's own
//! bookings live; an answer that nobody reads any more ends its call and its booking.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_discovery::EndpointName;
use kvasir_hash::Scope;
use kvasir_host::{Booking, PromptBlocks};
use kvasir_index::{Match, Matches};
use kvasir_msgpack::Value;
use kvasir_options::router;
use kvasir_protocol::{GenerateRequest, Payload, RoutingHints};
use kvasir_router::{Arrival, Outcome, PotentialLoad, Thresholds};
use kvasir_transport::{CallContext, CallStream, PlaneError};
use kvasir_types::{Codec, Time, Token, WorkerId, WorkerRank};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::client::new_id;
use crate::config::KvRouterConfig;
use crate::errors::{self, Failure};
use crate::fleet::Fleet;
use crate::indexes::{self, OverlapScores};
use crate::planes::Runtime;
use crate::router::requests::{Ask, overrides, weights};
use crate::stream::{Answer, Shared, StreamItem, error_of};
use crate::{process, trees, values};

/// Workers that a request is sent to before it is given up.
const ATTEMPTS_MAX: usize = 3;

/// Worker, rank, and blocks in device memory, after those in host memory, after those further away.
type OverlapRow = (u64, u32, u32, u32, u32);

/// A booking that the caller frees itself.
struct Held {
    booking: Booking,
    /// When it was last spoken of.
    heard: Time,
}

/// The router of one endpoint's workers.
#[pyclass(frozen, module = "kvasir._core")]
pub(crate) struct EndpointRouter {
    fleet: Arc<Fleet>,
    held: Arc<Mutex<HashMap<String, Held>>>,
}

impl EndpointRouter {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Time {
        self.fleet.planes.context.clock.now()
    }

    fn blocks(
        &self,
        py: Python<'_>,
        tokens: &[Token],
        lora: Option<&str>,
        salt: Option<&str>,
    ) -> PromptBlocks {
        let scope = Scope {
            lora: lora.unwrap_or_default(),
            salt: salt.unwrap_or_default(),
            eagle: false,
        };
        match tokens.len() < 1 << 15 {
            true => self.fleet.model.name_blocks_in(tokens, &scope),
            false => py.detach(|| self.fleet.model.name_blocks_in(tokens, &scope)),
        }
    }

    fn not_found(py: Python<'_>, request: &str) -> PyErr {
        errors::not_found(py, request)
    }
}

/// Lets go of bookings of which nothing was heard for as long as the router keeps them.
fn sweep(held: &mut HashMap<String, Held>, now: Time) {
    let longest = Duration::from_secs_f64(router::ROUTER_ACTIVE_REQUEST_EXPIRY_SECS.default);
    held.retain(|_, held| now - held.heard < longest);
}

/// A prompt on its way: what is asked of the router, and what its worker is sent.
struct Job {
    fleet: Arc<Fleet>,
    arrival: Box<Arrival>,
    blocks: PromptBlocks,
    request: GenerateRequest,
}

impl Job {
    /// Finds a worker that takes it.
    async fn send(mut self) -> Result<(Booking, CallStream), Failure> {
        let fleet = Arc::clone(&self.fleet);
        let (clients, _) = fleet.planes.clients().await?;
        for attempt in 1.. {
            let booking = fleet.model.book(self.arrival.clone(), &self.blocks).await?;
            let target = booking.target();
            let Some(endpoint) = fleet.address(target.worker) else {
                booking.finish(Outcome::Unreachable);
                return Err(PlaneError::Gone(target.worker).into());
            };
            let Some(client) = clients.get(&*endpoint.plane) else {
                let text = format!("no request plane is called {}", endpoint.plane);
                return Err(Failure::Named("CannotConnect", text));
            };
            self.aim(target);
            let payload = self.request.encode(endpoint.codec);
            let context = CallContext::new(target.worker, self.arrival.id);
            match client.call(&endpoint, payload, context).await {
                Ok(call) => return Ok((booking, call)),
                Err(error) => {
                    let elsewhere = booking_outcome(&error);
                    booking.finish(elsewhere);
                    let is_pinned = self.arrival.pin.worker.is_some();
                    if attempt >= ATTEMPTS_MAX || is_pinned || !is_elsewhere(&error) {
                        return Err(error.into());
                    }
                    self.arrival.failed.push(target.worker);
                    self.arrival.last_failure = Some(elsewhere);
                }
            }
        }
        Err(Failure::Plain("no attempt was made".into()))
    }

    /// Tells the worker which of its ranks is meant.
    fn aim(&mut self, target: WorkerRank) {
        let routing = self
            .request
            .routing
            .get_or_insert_with(RoutingHints::default);
        routing.dp_rank = Some(target.rank.0);
    }
}

/// Whether another worker may take a request that failed so.
const fn is_elsewhere(error: &PlaneError) -> bool {
    matches!(
        error,
        PlaneError::Gone(_)
            | PlaneError::Connect { .. }
            | PlaneError::Refused { .. }
            | PlaneError::Overloaded(_)
            | PlaneError::Timeout { .. }
    )
}

const fn booking_outcome(error: &PlaneError) -> Outcome {
    match error {
        PlaneError::Overloaded(_) => Outcome::Overloaded,
        PlaneError::Rejected(_) | PlaneError::Engine(_) | PlaneError::NotStarted { .. } => {
            Outcome::Failed
        }
        PlaneError::Local(_) => Outcome::NotSent,
        _ => Outcome::Unreachable,
    }
}

/// Hands on tokens, and tells the router of them.
async fn pump(booking: Booking, mut call: CallStream, to: &Shared) -> Option<Failure> {
    let (mut generated, mut is_first) = (0u32, true);
    loop {
        let payload = match call.next().await {
            Some(Ok(payload)) => payload,
            Some(Err(error)) => {
                booking.finish(booking_outcome(&error));
                return Some(match error {
                    PlaneError::Disconnected(worker) => Failure::Named(
                        "StreamIncomplete",
                        format!(
                            "Stream ended before generation completed: worker {worker} is gone"
                        ),
                    ),
                    error => error.into(),
                });
            }
            None => {
                booking.finish(Outcome::Completed {
                    output_tokens: generated,
                });
                return None;
            }
        };
        let item = match payload.value() {
            Ok(item) => item,
            Err(error) => return Some(Failure::Named("Unknown", error.to_string())),
        };
        let data = match take_data(item) {
            Some(data) => data,
            None => {
                let failure = error_of(&payload);
                booking.finish(Outcome::Failed);
                return Some(failure);
            }
        };
        let tokens = data
            .get("token_ids")
            .and_then(Value::list)
            .map_or(0, <[Value]>::len);
        if tokens > 0 {
            if generated == 0 {
                booking.first_token();
            }
            generated = generated.saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
            booking.tokens(generated);
        }
        let data = match std::mem::take(&mut is_first) {
            true => with_worker(data, booking.target()),
            false => data,
        };
        to.put(StreamItem::Value(data)).await;
    }
}

/// The data of an item; none if it says what went wrong.
fn take_data(item: Value) -> Option<Value> {
    let Value::Map(members) = item else {
        return Some(item);
    };
    let says_error = |name: &str, value: &Value| match name {
        "error" => *value != Value::Nil,
        "event" => value.text() == Some("error"),
        _ => false,
    };
    if members.iter().any(|(name, value)| says_error(name, value)) {
        return None;
    }
    let data = members.into_iter().find(|(name, _)| name == "data");
    Some(data.map_or(Value::Nil, |(_, value)| value))
}

/// The first item says who answers.
fn with_worker(data: Value, target: WorkerRank) -> Value {
    let Value::Map(mut members) = data else {
        return data;
    };
    let named = Value::Map(vec![
        ("decode_worker_id".into(), Value::Uint(target.worker.0)),
        ("decode_dp_rank".into(), Value::Uint(target.rank.0.into())),
    ]);
    members.retain(|(name, _)| name != "routing_data");
    members.push((
        "routing_data".into(),
        Value::Map(vec![("worker_id".into(), named)]),
    ));
    Value::Map(members)
}

#[pymethods]
impl EndpointRouter {
    #[new]
    fn new(
        py: Python<'_>,
        runtime: &Runtime,
        name: (String, String, String),
        block_size: u32,
        config: &KvRouterConfig,
        busy: (Option<f64>, Option<u64>, Option<f64>),
    ) -> PyResult<Self> {
        let block_size = values::positive("block_size", block_size)?;
        let (namespace, component, endpoint) = name;
        let endpoint = EndpointName::new(&namespace, &component, &endpoint);
        let thresholds = Thresholds {
            active_decode_blocks: busy.0,
            active_prefill_tokens: busy.1,
            active_prefill_tokens_frac: busy.2,
        };
        let opened = Fleet::open(&runtime.planes, endpoint, block_size, config, &thresholds);
        Ok(Self {
            fleet: process::wait(py, opened)?,
            held: Arc::default(),
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
        preferred_taints=None, response_buffer_size=100))]
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
    ) -> PyResult<Bound<'py, PyAny>> {
        let value = trees::from_python(request.as_any())?;
        let payload = Payload::of_value(Codec::MessagePack, &value);
        let request = GenerateRequest::decode(&payload).map_err(|error| {
            errors::named(
                py,
                "InvalidArgument",
                format!("the request cannot be sent: {error}"),
            )
        })?;
        let routing = request.routing.clone().unwrap_or_default();
        let worker_id = worker_id
            .or(routing.backend_instance_id)
            .or(routing.decode_worker_id);
        let lora = routing.lora_name.as_deref();
        let blocks = self.blocks(py, &request.token_ids, lora, routing.cache_salt.as_deref());
        let ask = Ask {
            prompt_tokens: u32::try_from(request.token_ids.len()).unwrap_or(u32::MAX),
            request_id: Some(String::new()),
            worker_id,
            dp_rank: dp_rank.or(routing.dp_rank).filter(|_| worker_id.is_some()),
            overrides: router_config_override
                .map(overrides)
                .transpose()?
                .unwrap_or_default(),
            lora_name: lora,
            required_taints: required_taints.unwrap_or_default(),
            preferred_taints: preferred_taints
                .map(weights)
                .transpose()?
                .unwrap_or_default(),
            allowed_worker_ids: None,
            priority: routing.priority,
            strict_priority: routing.strict_priority.unwrap_or(0),
            expected_output_tokens: routing.expected_output_tokens,
            policy_class: None,
        };
        let job = Job {
            fleet: Arc::clone(&self.fleet),
            arrival: ask.arrival(new_id()),
            blocks,
            request,
        };
        if let Some(id) = worker_id.filter(|id| self.fleet.address(WorkerId(*id)).is_none()) {
            let text = format!(
                "InvalidRequest: nvext.backend_instance_id={id} does not identify a known worker"
            );
            return Err(errors::named(py, "InvalidArgument", text));
        }
        let (handle, tasks) = process::runtime()?;
        let work = async move {
            let (booking, call) = job.send().await?;
            let shared = Shared::new(response_buffer_size);
            let to = Arc::clone(&shared);
            let reading = async move {
                let failed = pump(booking, call, &to).await;
                to.end(failed);
            };
            let task = tasks.spawn_on(&handle, reading).abort_handle();
            Ok(Answer::new(shared, task, false))
        };
        process::awaitable(py, work, |py, answer| Ok(Py::new(py, answer)?.into_any()))
    }

    /// `(worker_id, dp_rank, overlap_blocks)`; books if there is a request id, which may wait.
    #[pyo3(signature = (token_ids, router_config_override=None, request_id=None, lora_name=None, required_taints=None,
        preferred_taints=None, strict_priority=0, policy_class=None, cache_namespace=None))]
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
    ) -> PyResult<Bound<'py, PyAny>> {
        let tokens = values::tokens(token_ids)?;
        let blocks = self.blocks(py, &tokens, lora_name, cache_namespace);
        if let Some(name) = &request_id {
            let now = self.now();
            let mut held = self.lock();
            sweep(&mut held, now);
            if held.contains_key(name) {
                return Err(errors::already_there(py, name));
            }
        }
        let ask = Ask {
            prompt_tokens: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            request_id: request_id.clone(),
            worker_id: None,
            dp_rank: None,
            overrides: router_config_override
                .map(overrides)
                .transpose()?
                .unwrap_or_default(),
            lora_name,
            required_taints: required_taints.unwrap_or_default(),
            preferred_taints: preferred_taints
                .map(weights)
                .transpose()?
                .unwrap_or_default(),
            allowed_worker_ids: None,
            priority: None,
            strict_priority,
            expected_output_tokens: None,
            policy_class,
        };
        let arrival = ask.arrival(new_id());
        let (fleet, held) = (Arc::clone(&self.fleet), Arc::clone(&self.held));
        let work = async move {
            let booking = fleet.model.book(arrival, &blocks).await?;
            let (target, overlap) = (booking.target(), booking.placement().overlap_blocks);
            if let Some(name) = request_id {
                let heard = fleet.planes.context.clock.now();
                let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
                held.insert(name, Held { booking, heard });
            }
            Ok((target.worker.0, target.rank.0, overlap))
        };
        process::awaitable_at_once(py, work, |py, found| {
            Ok(found.into_pyobject(py)?.into_any().unbind())
        })
    }

    /// What each rank would have to do if a prompt went there.
    #[pyo3(signature = (token_ids, lora_name=None, cache_namespace=None))]
    fn potential_loads<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let tokens = values::tokens(token_ids)?;
        if tokens.is_empty() {
            return Err(PyValueError::new_err("the prompt has no tokens"));
        }
        let blocks = self.blocks(py, &tokens, lora_name, cache_namespace);
        let prompt = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let loads = self.fleet.model.potential_loads(prompt, &blocks);
        loads.iter().map(|load| load_row(py, load)).collect()
    }

    /// How many leading blocks of a prompt each rank holds: worker, rank, in device memory, after those in host memory, after those further
    /// away.
    #[pyo3(signature = (token_ids, lora_name=None, cache_namespace=None))]
    fn overlaps(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        lora_name: Option<&str>,
        cache_namespace: Option<&str>,
    ) -> PyResult<Vec<OverlapRow>> {
        let tokens = values::tokens(token_ids)?;
        let blocks = self.blocks(py, &tokens, lora_name, cache_namespace);
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

    /// The first token of a booked request came.
    fn mark_prefill_complete(&self, py: Python<'_>, request_id: &str) -> PyResult<()> {
        let now = self.now();
        let mut all = self.lock();
        let held = all
            .get_mut(request_id)
            .ok_or_else(|| Self::not_found(py, request_id))?;
        held.heard = now;
        held.booking.first_token();
        Ok(())
    }

    /// A booked request ended.
    fn free(&self, py: Python<'_>, request_id: &str) -> PyResult<()> {
        let held = self.lock().remove(request_id);
        let held = held.ok_or_else(|| Self::not_found(py, request_id))?;
        held.booking.finish(Outcome::Completed { output_tokens: 0 });
        Ok(())
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
