//! Calls to endpoints of others: who serves an endpoint, and one call to one of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_discovery::{Bucket, Card, Change, EndpointName, Instance, Record, RequestTransport};
use kvasir_embed::ProcessPlanes;
use kvasir_host::endpoint_of;
use kvasir_options::router;
use kvasir_protocol::Payload;
use kvasir_transport::{CallContext, CallStream, PlaneError};
use kvasir_types::{Device, PlaneEndpoint, RequestId, Rng, WorkerId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use crate::context::Cancellation;
use crate::errors::Failure;
use crate::planes::Runtime;
use crate::process;
use crate::stream::{Answer, Shared, StreamItem};
use crate::trees;

/// Items of an answer that wait for their reader.
pub(crate) const ITEMS_MAX: usize = 100;

/// Who serves one endpoint, followed.
#[derive(Default)]
pub(crate) struct Instances {
    by_id: Mutex<BTreeMap<u64, Instance>>,
    /// Calls of this client that run, by instance; those without any are not listed.
    running: Mutex<BTreeMap<u64, u64>>,
    changed: Notify,
}

/// A call that runs, until it is dropped.
struct RunningCall {
    id: u64,
    of: Arc<Instances>,
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        let mut running = self.of.running();
        let left = running.get(&self.id).map_or(0, |count| count - 1);
        match left {
            0 => running.remove(&self.id),
            left => running.insert(self.id, left),
        };
    }
}

impl Instances {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Instance>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call until what is returned is dropped.
    fn begin(self: &Arc<Self>, id: u64) -> RunningCall {
        *self.running().entry(id).or_default() += 1;
        RunningCall {
            id,
            of: Arc::clone(self),
        }
    }

    async fn follow(self: Arc<Self>, planes: Arc<ProcessPlanes>, endpoint: EndpointName) {
        let mut watch = planes.store.watch(&[Bucket::Instances]);
        drop(planes);
        let mut keys = BTreeMap::new();
        loop {
            match watch.next().await {
                Change::Added(key, record) | Change::Updated(key, record) => {
                    if let Record::Endpoint(instance) = &*record
                        && instance.name() == endpoint
                    {
                        keys.insert(key, instance.instance_id);
                        let mut all = self.lock();
                        all.insert(instance.instance_id, instance.clone());
                    }
                }
                Change::Removed(key) => {
                    if let Some(id) = keys.remove(&key) {
                        self.lock().remove(&id);
                    }
                }
                Change::Synced | Change::Lost(_) | Change::Restored => {}
            }
            self.changed.notify_waiters();
        }
    }
}

/// Draws ids and instances.
pub(crate) fn draw() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // The standard library seeds its hashers from the system; nothing more is needed here.
    RandomState::new().build_hasher().finish()
}

/// A name for a call that nobody else has.
pub(crate) fn new_id() -> RequestId {
    RequestId(u128::from(draw()) << 64 | u128::from(draw()))
}

/// The name that a caller gave, if it is a UUID; else one of its own.
pub(crate) fn id_of(name: Option<&str>) -> RequestId {
    name.and_then(RequestId::parse).unwrap_or_else(new_id)
}

/// Bytes of a name that a program gives a call.
const NAME_BYTES_MAX: usize = 512;

/// Calls an endpoint's instances.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct Caller {
    planes: Arc<ProcessPlanes>,
    endpoint: EndpointName,
    instances: Arc<Instances>,
    next: AtomicUsize,
    seed: AtomicU64,
    task: AbortHandle,
}

/// One call, ready to be made.
pub(crate) struct OpenCall {
    pub(crate) endpoint: PlaneEndpoint,
    pub(crate) payload: Payload,
    pub(crate) context: CallContext,
}

impl OpenCall {
    /// Makes it.
    pub(crate) async fn open(self, planes: &ProcessPlanes) -> Result<CallStream, Failure> {
        let (clients, _) = planes.clients().await?;
        let plane = &*self.endpoint.plane;
        let client = clients.get(plane).ok_or_else(|| {
            Failure::Named(
                "CannotConnect",
                format!("no request plane is called {plane}"),
            )
        })?;
        Ok(client
            .call(&self.endpoint, self.payload, self.context)
            .await?)
    }
}

impl Caller {
    fn chosen(&self, mode: &str, id: Option<u64>) -> Result<Instance, Failure> {
        let all = self.instances.lock();
        if let Some(id) = id {
            let found = all.get(&id).cloned();
            return found.ok_or_else(|| {
                Failure::Plain(format!(
                    "Unavailable: instance_id={id} not found for endpoint {}",
                    self.endpoint
                ))
            });
        }
        if all.is_empty() {
            let text = format!("no instance of endpoint {} is there", self.endpoint);
            return Err(Failure::Named("WorkerUnavailable", text));
        }
        let mut rng = Rng::new(self.seed.fetch_add(1, Ordering::Relaxed));
        let any = |rng: &mut Rng| rng.below(all.len() as u64) as usize;
        let at = match mode {
            "round_robin" => self.next.fetch_add(1, Ordering::Relaxed) % all.len(),
            "least_loaded" => self.least_busy(all.values(), &mut rng),
            "device_aware_weighted" => self.by_device(&all, &mut rng),
            "power_of_two" => {
                let two = [any(&mut rng), any(&mut rng)];
                let busy = self.instances.running();
                let calls = |at: &usize| {
                    let id = all.keys().nth(*at);
                    id.and_then(|id| busy.get(id)).copied().unwrap_or(0)
                };
                two.into_iter().min_by_key(calls).unwrap_or_default()
            }
            _ => any(&mut rng),
        };
        let found = all.values().nth(at).cloned();
        found.ok_or_else(|| Failure::Plain("no instance".into()))
    }

    /// Which of these has the fewest calls of this client, by its place among all; chance decides among equals.
    fn least_busy<'a>(&self, of: impl Iterator<Item = &'a Instance>, rng: &mut Rng) -> usize {
        self.least(of.enumerate(), rng)
    }

    fn least<'a>(&self, of: impl Iterator<Item = (usize, &'a Instance)>, rng: &mut Rng) -> usize {
        let running = self.instances.running();
        let calls = |instance: &Instance| running.get(&instance.instance_id).copied();
        let found = of.min_by_key(|(_, instance)| (calls(instance).unwrap_or(0), rng.next_u64()));
        found.map_or(0, |(at, _)| at)
    }

    /// CPUs and GPUs in proportion to their worth, as the router chooses: a CPU only while the GPUs have so much more.
    fn by_device(&self, all: &BTreeMap<u64, Instance>, rng: &mut Rng) -> usize {
        let (mut cpus, mut gpus) = ((0u64, 0u64), (0u64, 0u64));
        {
            let running = self.instances.running();
            for (id, instance) in all {
                let group = if is_cpu(instance) {
                    &mut cpus
                } else {
                    &mut gpus
                };
                group.0 += 1;
                group.1 += running.get(id).copied().unwrap_or(0);
            }
        }
        if cpus.0 == 0 || gpus.0 == 0 {
            return self.least_busy(all.values(), rng);
        }
        let worth = u64::from(router::ENCODER_CUDA_TO_CPU_RATIO.default.max(1)) * gpus.0;
        let cpu = cpus.1 < gpus.1 * cpus.0 / worth;
        let group = all.values().enumerate();
        self.least(group.filter(|(_, one)| is_cpu(one) == cpu), rng)
    }
}

fn is_cpu(instance: &Instance) -> bool {
    let device = instance.device_type.as_deref().and_then(Device::from_name);
    device == Some(Device::Cpu)
}

/// Waits until the cards of so many instances of an endpoint say a text of their engine's; their ids.
async fn told_by(
    planes: Arc<ProcessPlanes>,
    endpoint: EndpointName,
    (key, value): (String, String),
    count: usize,
) -> Vec<u64> {
    let mut watch = planes.store.watch(&[Bucket::Models]);
    let mut found = BTreeMap::new();
    loop {
        match watch.next().await {
            Change::Added(at, record) | Change::Updated(at, record) => {
                let Record::Model(entry) = &*record else {
                    continue;
                };
                let card = Card::parse(&entry.card_json).ok();
                let told = card
                    .as_ref()
                    .and_then(|card| card.runtime_data(&key)?.as_str());
                match entry.name() == endpoint && told == Some(&*value) {
                    true => found.insert(at, entry.instance_id),
                    false => found.remove(&at),
                };
            }
            Change::Removed(at) => drop(found.remove(&at)),
            Change::Synced | Change::Lost(_) | Change::Restored => {}
        }
        let mut ids: Vec<u64> = found.values().copied().collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.len() >= count {
            return ids;
        }
    }
}

/// Hands on what a worker sends, until its end or until the request is stopped.
async fn pump(mut call: CallStream, stopped: CancellationToken, to: &Shared) -> Option<Failure> {
    loop {
        let item = tokio::select! {
            item = call.next() => item,
            () = stopped.cancelled() => return None,
        };
        match item {
            Some(Ok(item)) => to.put(StreamItem::Wire(item)).await,
            Some(Err(PlaneError::Disconnected(worker))) => {
                let text =
                    format!("Stream ended before generation completed: worker {worker} is gone");
                return Some(Failure::Named("StreamIncomplete", text));
            }
            Some(Err(error)) => return Some(error.into()),
            None => return None,
        }
    }
}

#[pymethods]
impl Caller {
    /// Follows the instances of an endpoint from now on.
    #[new]
    fn new(runtime: &Runtime, namespace: &str, component: &str, endpoint: &str) -> PyResult<Self> {
        let (handle, _) = process::runtime()?;
        let endpoint = EndpointName::new(namespace, component, endpoint);
        let instances = Arc::new(Instances::default());
        let follow = Arc::clone(&instances).follow(Arc::clone(&runtime.planes), endpoint.clone());
        let tasks = runtime.planes.context.tasks.background();
        let task = tasks.spawn_on(&handle, follow).abort_handle();
        Ok(Self {
            planes: Arc::clone(&runtime.planes),
            endpoint,
            instances,
            next: AtomicUsize::new(0),
            seed: AtomicU64::new(draw()),
            task,
        })
    }

    /// The ids of those that are there.
    fn instance_ids(&self) -> Vec<u64> {
        self.instances.lock().keys().copied().collect()
    }

    /// Those that are there: id, plane, address, device.
    fn instances(&self) -> Vec<(u64, &'static str, String, Option<String>)> {
        let all = self.instances.lock();
        let row = |instance: &Instance| {
            let (kind, address) = match &instance.transport {
                RequestTransport::Tcp(address) => ("tcp", address),
                RequestTransport::NatsTcp(address) => ("nats_tcp", address),
                RequestTransport::Http(address) => ("http", address),
            };
            (
                instance.instance_id,
                kind,
                address.clone(),
                instance.device_type.clone(),
            )
        };
        all.values().map(row).collect()
    }

    /// Waits until so many are there; their ids.
    fn wait_for_instances<'py>(
        &self,
        py: Python<'py>,
        count: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let instances = Arc::clone(&self.instances);
        let work = async move {
            loop {
                let changed = instances.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                let ids: Vec<u64> = instances.lock().keys().copied().collect();
                if ids.len() >= count {
                    return Ok(ids);
                }
                changed.await;
            }
        };
        process::awaitable(py, work, |py, ids| Ok(ids.into_pyobject(py)?.unbind()))
    }

    /// Waits until the cards of so many instances have this text of their engine's under this key; their ids.
    fn wait_by_runtime_data<'py>(
        &self,
        py: Python<'py>,
        key: String,
        value: String,
        count: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (planes, endpoint) = (Arc::clone(&self.planes), self.endpoint.clone());
        let work = async move { Ok(told_by(planes, endpoint, (key, value), count).await) };
        process::awaitable(py, work, |py, ids| Ok(ids.into_pyobject(py)?.unbind()))
    }

    /// Calls one instance: `mode` is random, round_robin, least_loaded, power_of_two or device_aware_weighted; an id names it. The answer
    /// has begun when this is done.
    #[pyo3(signature = (request, mode, instance_id, annotated, context_id, metadata, cancellation))]
    #[expect(clippy::too_many_arguments, reason = "called by kvasir.runtime alone")]
    fn call<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
        mode: &str,
        instance_id: Option<u64>,
        annotated: bool,
        context_id: Option<&str>,
        metadata: Vec<(String, String)>,
        cancellation: &Cancellation,
    ) -> PyResult<Bound<'py, PyAny>> {
        if context_id.is_some_and(|name| name.len() > NAME_BYTES_MAX) {
            let text = format!("the id of a context has at most {NAME_BYTES_MAX} bytes");
            return Err(PyValueError::new_err(text));
        }
        let value = trees::from_python(request)?;
        let instance = self
            .chosen(mode, instance_id)
            .map_err(|failure| failure.into_error(py))?;
        let endpoint = endpoint_of(&instance);
        let pairs = metadata.into_iter();
        let open = OpenCall {
            payload: Payload::of_value(endpoint.codec, &value),
            endpoint,
            context: CallContext {
                worker: WorkerId(instance.instance_id),
                id: id_of(context_id),
                name: context_id.map(Into::into),
                metadata: pairs
                    .map(|(name, text)| (name.into(), text.into()))
                    .collect(),
            },
        };
        let (planes, stopped) = (Arc::clone(&self.planes), cancellation.token.clone());
        let running = self.instances.begin(instance.instance_id);
        let (handle, tasks) = process::runtime()?;
        let work = async move {
            let call = tokio::select! {
                call = open.open(&planes) => call?,
                () = stopped.cancelled() => return Err(Failure::Named("Cancelled", "the request was stopped".into())),
            };
            let shared = Shared::new(ITEMS_MAX);
            let to = Arc::clone(&shared);
            let reading = async move {
                let failed = pump(call, stopped, &to).await;
                drop(running);
                to.end(failed);
            };
            let task = tasks.spawn_on(&handle, reading).abort_handle();
            Ok(Answer::new(shared, task, annotated))
        };
        process::awaitable(py, work, |py, answer| Ok(Py::new(py, answer)?.into_any()))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.task.abort();
    }
}
