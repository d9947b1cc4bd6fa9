//! What engines compute step by step, told and heard: Dynamo's forward-pass metrics.
//!
//! What always holds: telling waits for nobody; a rank of which nothing was told gives a sign of life each second; a reader waits without the
//! GIL.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_discovery::{Bucket, Change, EndpointName, Record};
use kvasir_embed::{ChannelListener, ProcessPlanes};
use kvasir_msgpack::Value;
use kvasir_tasks::Tasks;
use kvasir_transport::zmq::{Endpoint as ZmqEndpoint, ZmqSource, ZmqSourceOptions};
use kvasir_transport::{SourceEvent, next_event};
use kvasir_types::WorkerRank;
use kvasir_wire::native::{ForwardPass, QueuedWork, ScheduledWork, Topic};
use kvasir_worker::{PassChannel, PassPublisher};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tokio::sync::Mutex as AsyncMutex;

use crate::planes::Runtime;
use crate::{process, values};

/// Ranks of one worker at most.
const RANKS_MAX: u32 = 4096;

fn endpoint_of(name: (String, String, String)) -> EndpointName {
    let (namespace, component, endpoint) = name;
    EndpointName::new(&namespace, &component, &endpoint)
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells what the ranks of a worker compute: what `kvasir.llm.FpmDirectPublisher` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct PassReports {
    publisher: Mutex<Option<Arc<PassPublisher>>>,
    ranks: u32,
}

#[pymethods]
impl PassReports {
    #[new]
    fn new(
        py: Python<'_>,
        runtime: &Runtime,
        name: (String, String, String),
        worker_id: u64,
        ranks: u32,
    ) -> PyResult<Self> {
        if !(1..=RANKS_MAX).contains(&values::positive("dp_size", ranks)?) {
            let text = format!("dp_size is from 1 to {RANKS_MAX}");
            return Err(PyValueError::new_err(text));
        }
        let (planes, endpoint) = (Arc::clone(&runtime.planes), endpoint_of(name));
        let publisher = process::wait(py, async {
            let member = planes.member(&endpoint).await?;
            let ranks = (0..ranks).map(|rank| WorkerRank::new(worker_id, rank));
            Ok(member.publish_passes(ranks).await?)
        })?;
        Ok(Self {
            publisher: Mutex::new(Some(Arc::new(publisher))),
            ranks,
        })
    }

    /// A rank made a step. Each pair is requests and their tokens: prompts, then answers; `scheduled` has the tokens before the prompts', too.
    fn publish(
        &self,
        dp_rank: u32,
        scheduled: (u64, u64, u64, u64, u64),
        queued: (u64, u64, u64, u64),
        wall_time_secs: f64,
    ) -> PyResult<()> {
        let publisher = locked(&self.publisher).clone();
        let publisher =
            publisher.ok_or_else(|| PyRuntimeError::new_err("the publisher was shut down"))?;
        if dp_rank >= self.ranks {
            let text = format!("dp_rank is from 0 to {}", self.ranks - 1);
            return Err(PyValueError::new_err(text));
        }
        let wall_time = Duration::try_from_secs_f64(wall_time_secs)
            .map_err(|_| PyValueError::new_err("wall_time_secs is finite and at least 0"))?;
        let work = |prefills, prefill_tokens, decodes, decode_kv_tokens| QueuedWork {
            prefill_requests: prefills,
            prefill_tokens,
            decode_requests: decodes,
            decode_kv_tokens,
            ..QueuedWork::default()
        };
        let scheduled = ScheduledWork {
            work: work(scheduled.0, scheduled.1, scheduled.3, scheduled.4),
            prefill_kv_tokens: scheduled.2,
        };
        let queued = work(queued.0, queued.1, queued.2, queued.3);
        publisher.step(dp_rank, wall_time, scheduled, queued);
        Ok(())
    }

    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        let Some(publisher) = locked(&self.publisher).take() else {
            return Ok(());
        };
        process::wait(py, async {
            // A store that is away forgets by itself.
            let _ = publisher.withdraw().await;
            Ok(())
        })
    }
}

/// Passes on what an engine's own socket says: what `kvasir.llm.FpmEventRelay` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct PassRelay {
    channel: Arc<PassChannel>,
    tasks: Tasks,
}

#[pymethods]
impl PassRelay {
    #[new]
    fn new(
        py: Python<'_>,
        runtime: &Runtime,
        name: (String, String, String),
        engine_socket: &str,
    ) -> PyResult<Self> {
        let bad = |error| PyValueError::new_err(format!("zmq_endpoint {engine_socket}: {error}"));
        let socket = engine_socket.parse::<ZmqEndpoint>().map_err(bad)?;
        let (planes, endpoint) = (Arc::clone(&runtime.planes), endpoint_of(name));
        let channel = process::wait(py, async {
            let member = planes.member(&endpoint).await?;
            Ok(Arc::new(member.open_passes().await?))
        })?;
        let (handle, _) = process::runtime()?;
        let _entered = handle.enter();
        let tasks = Tasks::new();
        let mut source = ZmqSource::start(&tasks, ZmqSourceOptions::new(socket, None));
        let to = Arc::clone(&channel);
        tasks.background().spawn(async move {
            loop {
                if let SourceEvent::Live(frame) = next_event(&mut source).await {
                    to.publish(frame.payload.to_vec());
                }
            }
        });
        Ok(Self { channel, tasks })
    }

    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        self.tasks.stop();
        process::wait(py, async {
            // A store that is away forgets by itself.
            let _ = self.channel.withdraw().await;
            Ok(())
        })
    }
}

impl Drop for PassRelay {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// The newest report of each rank, and the cards of the workers that are there.
#[derive(Default)]
struct Tracked {
    newest: BTreeMap<(u64, u32), Vec<u8>>,
    cards: BTreeMap<u64, String>,
}

/// Hears what the workers of an endpoint compute: what `kvasir.llm.FpmEventSubscriber` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct PassReader {
    planes: Arc<ProcessPlanes>,
    endpoint: EndpointName,
    listener: Arc<AsyncMutex<Option<ChannelListener>>>,
    tracked: Arc<Mutex<Tracked>>,
    tasks: Tasks,
}

#[pymethods]
impl PassReader {
    #[new]
    fn new(py: Python<'_>, runtime: &Runtime, name: (String, String, String)) -> PyResult<Self> {
        let (planes, endpoint) = (Arc::clone(&runtime.planes), endpoint_of(name));
        let opened = ChannelListener::open(&planes, endpoint.clone(), Topic::ForwardPass);
        let listener = process::wait(py, async { Ok(opened.await?) })?;
        Ok(Self {
            listener: Arc::new(AsyncMutex::new(Some(listener))),
            tracked: Arc::default(),
            tasks: Tasks::new(),
            planes,
            endpoint,
        })
    }

    /// The next report as bytes; waits for it. None when it was shut down.
    fn recv<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (listener, stopped) = (Arc::clone(&self.listener), self.tasks.clone());
        let received = process::wait(py, async move {
            tokio::select! {
                biased;
                () = stopped.draining() => Ok(None),
                received = async {
                    match &mut *listener.lock().await {
                        Some(listener) => listener.next().await,
                        None => None,
                    }
                } => Ok(received),
            }
        })?;
        Ok(received.map(|bytes| PyBytes::new(py, &bytes)))
    }

    /// Keeps the newest report of each rank from now on.
    fn track(&self) -> PyResult<()> {
        let (handle, _) = process::runtime()?;
        let _entered = handle.enter();
        let (listener, tracked) = (Arc::clone(&self.listener), Arc::clone(&self.tracked));
        self.tasks.background().spawn(async move {
            let Some(mut listener) = listener.lock().await.take() else {
                return;
            };
            while let Some(bytes) = listener.next().await {
                let read = Value::from_msgpack(&bytes).ok();
                if let Some(pass) = read.and_then(|value| ForwardPass::from_value(&value).ok()) {
                    let rank = (pass.rank.worker.0, pass.rank.rank.0);
                    locked(&tracked).newest.insert(rank, bytes);
                }
            }
        });
        let mut watch = self.planes.store.watch(&[Bucket::Models]);
        let (tracked, endpoint) = (Arc::clone(&self.tracked), self.endpoint.clone());
        self.tasks.background().spawn(async move {
            let mut keys = BTreeMap::new();
            loop {
                match watch.next().await {
                    Change::Added(key, record) | Change::Updated(key, record) => {
                        if let Record::Model(entry) = &*record
                            && entry.name() == endpoint
                        {
                            let card = entry.card_json.to_string();
                            locked(&tracked).cards.insert(entry.instance_id, card);
                            keys.insert(key, entry.instance_id);
                        }
                    }
                    Change::Removed(key) => {
                        if let Some(worker) = keys.remove(&key) {
                            let mut tracked = locked(&tracked);
                            tracked.cards.remove(&worker);
                            tracked.newest.retain(|(of, _), _| *of != worker);
                        }
                    }
                    Change::Synced | Change::Lost(_) | Change::Restored => {}
                }
            }
        });
        Ok(())
    }

    /// The newest report of each rank of a worker that is there, by `(worker_id, dp_rank)`.
    fn recent<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        let tracked = locked(&self.tracked);
        let there = |(worker, _): &(u64, u32)| tracked.cards.contains_key(worker);
        for (rank, bytes) in tracked.newest.iter().filter(|(rank, _)| there(rank)) {
            found.set_item((rank.0.to_string(), rank.1), PyBytes::new(py, bytes))?;
        }
        Ok(found)
    }

    /// The cards of the workers that are there, as JSON, by their ids.
    fn cards(&self) -> BTreeMap<String, String> {
        let tracked = locked(&self.tracked);
        let cards = tracked.cards.iter();
        cards
            .map(|(worker, card)| (worker.to_string(), card.clone()))
            .collect()
    }

    fn shutdown(&self) {
        self.tasks.stop();
    }
}

impl Drop for PassReader {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}
