//! What a Python engine tells routers: what its cache holds, and how loaded it is.
//!
//! What always holds: telling waits for nobody as long as fewer than [`QUEUE_MAX`] batches wait to be told; a list of events is checked as a
//! whole before any of it is told, and events are told in the order of the calls.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_discovery::EndpointName;
use kvasir_embed::ProcessPlanes;
use kvasir_hash::next_sequence_hash;
use kvasir_host::{EventStream, Now};
use kvasir_index::ApplyError;
use kvasir_kv_events::{Cache, EventFormat, Sequencer, StreamOptions};
use kvasir_transport::zmq::{Endpoint as ZmqEndpoint, ZmqSource, ZmqSourceOptions};
use kvasir_types::{EngineHash, KvEvent, LocalHash, StoredBlock, Tier, WorkerRank};
use kvasir_wire::native::{ActiveLoad, RouterEvent};
use kvasir_worker::{CachePublisher, LoadPublisher};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::planes::Runtime;
use crate::{hashing, process, values};

/// Batches of events that wait to be told. Who tells more waits for room, without the GIL.
const QUEUE_MAX: usize = 1024;

/// Publishes the cache events of one rank: what `kvasir.llm.KvEventPublisher` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct CacheEvents {
    open: Mutex<Option<OpenPublisher>>,
    /// Relays an engine's own socket.
    relay: Mutex<Option<EventStream>>,
    planes: Arc<ProcessPlanes>,
    block_size: u32,
}

/// The publisher, until it is shut down, and the queue to the task that tells it: to number, count and index events takes longer than to
/// read them, and need not hold up Python.
struct OpenPublisher {
    publisher: Arc<CachePublisher>,
    queue: mpsc::Sender<Vec<KvEvent>>,
    /// Completes when all that was queued was told.
    told: oneshot::Receiver<()>,
}

/// Tells batches until nobody can send any more.
async fn tell_all(
    publisher: Arc<CachePublisher>,
    mut queue: mpsc::Receiver<Vec<KvEvent>>,
    told: oneshot::Sender<()>,
) {
    while let Some(events) = queue.recv().await {
        for event in events {
            publisher.push(event);
        }
        publisher.flush();
    }
    let _ = told.send(());
}

/// An engine's events, told on under the rank's own numbers.
struct Relay(Arc<CachePublisher>);

impl Cache for Relay {
    fn apply(&self, _: WorkerRank, event: &KvEvent, _: bool) -> Result<(), ApplyError> {
        self.0.relay(event.clone());
        Ok(())
    }

    fn remove_rank(&self, _: WorkerRank) {
        self.0.relay(KvEvent::Cleared { tier: None });
    }

    fn replace_rank(&self, rank: WorkerRank, events: &[RouterEvent]) -> Vec<(usize, ApplyError)> {
        self.remove_rank(rank);
        for event in events {
            self.0.relay(event.event.clone());
        }
        Vec::new()
    }
}

impl CacheEvents {
    fn lock(&self) -> MutexGuard<'_, Option<OpenPublisher>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, py: Python<'_>, events: Vec<KvEvent>) -> PyResult<()> {
        let closed = || PyRuntimeError::new_err("the publisher was shut down");
        let queue = self.lock().as_ref().map(|open| open.queue.clone());
        let queue = queue.ok_or_else(closed)?;
        match queue.try_send(events) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(events)) => {
                let sent = process::wait(py, async { Ok(queue.send(events).await) })?;
                sent.map_err(|_| closed())
            }
            Err(TrySendError::Closed(_)) => Err(closed()),
        }
    }

    /// The event of one stored chain; none if no block of it is full.
    fn stored(&self, chain: &Chain<'_, '_>) -> PyResult<Option<KvEvent>> {
        let tokens = values::tokens(chain.token_ids)?;
        let sizes = values::sizes(chain.num_block_tokens)?;
        let names = values::engine_hashes(chain.block_hashes)?;
        if sizes.len() != names.len() {
            let text = format!(
                "num_block_tokens has {} entries and block_hashes {}: one of each for a block",
                sizes.len(),
                names.len()
            );
            return Err(PyValueError::new_err(text));
        }
        // A block that is not full ends what can be shared.
        let full = sizes
            .iter()
            .take_while(|size| **size == self.block_size)
            .count();
        let scope = hashing::scope(chain.lora_name, chain.cache_salt, chain.is_eagle);
        let locals = match chain.block_mm_infos {
            None => hashing::block_hashes(chain.token_ids.py(), &tokens, self.block_size, &scope),
            Some(infos) => {
                hashing::media_hashes(&tokens, self.block_size, &scope, &hashing::media_of(infos)?)
            }
        };
        if locals.len() < full {
            let text = format!(
                "{full} blocks of {} tokens are said to be full, and there are {} tokens",
                self.block_size,
                tokens.len()
            );
            return Err(PyValueError::new_err(text));
        }
        let parent = chain.parent_hash.map(values::hash_bits).transpose()?;
        let blocks = names.into_iter().zip(locals).take(full);
        let blocks: Vec<StoredBlock> = blocks
            .map(|(engine, local)| StoredBlock { engine, local })
            .collect();
        Ok((!blocks.is_empty()).then_some(KvEvent::Stored {
            tier: Tier::Device,
            parent: parent.map(EngineHash),
            blocks,
        }))
    }
}

/// One stored chain, as Python gives it.
struct Chain<'a, 'py> {
    token_ids: &'a Bound<'py, PyAny>,
    num_block_tokens: &'a Bound<'py, PyAny>,
    block_hashes: &'a Bound<'py, PyAny>,
    parent_hash: Option<&'a Bound<'py, PyAny>>,
    block_mm_infos: Option<&'a Bound<'py, PyAny>>,
    lora_name: Option<&'a str>,
    is_eagle: Option<bool>,
    cache_salt: Option<&'a str>,
}

/// What a member of `publish_batch` has under a name, if not None.
fn member<'py>(event: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    let value = event.get_item(name)?;
    Ok(value.filter(|value| !value.is_none()))
}

fn needed<'py>(event: &Bound<'py, PyDict>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    member(event, name)?.ok_or_else(|| PyValueError::new_err(format!("an event needs {name}")))
}

#[pymethods]
impl CacheEvents {
    /// Opens the channel of a rank. `engine_socket` is an engine's own, which is told on.
    #[new]
    #[pyo3(signature = (runtime, name, worker_id, block_size, dp_rank, answers, engine_socket=None, engine_topic=None))]
    #[expect(clippy::too_many_arguments, reason = "called by kvasir.llm alone")]
    fn new(
        py: Python<'_>,
        runtime: &Runtime,
        name: (String, String, String),
        worker_id: Option<u64>,
        block_size: u32,
        dp_rank: u32,
        answers: bool,
        engine_socket: Option<&str>,
        engine_topic: Option<String>,
    ) -> PyResult<Self> {
        let block_size = values::positive("kv_block_size", block_size)?;
        let planes = Arc::clone(&runtime.planes);
        let socket = engine_socket.map(|text| {
            text.parse::<ZmqEndpoint>()
                .map_err(|error| PyValueError::new_err(format!("zmq_endpoint {text}: {error}")))
        });
        let socket = socket.transpose()?;
        let (namespace, component, endpoint) = name;
        let endpoint = EndpointName::new(&namespace, &component, &endpoint);
        let (publisher, rank) = process::wait(py, async {
            let member = planes.member(&endpoint).await?;
            let rank = WorkerRank::new(worker_id.unwrap_or(member.id().0), dp_rank);
            Ok((member.publish_cache(rank, answers).await?, rank))
        })?;
        let publisher = Arc::new(publisher);
        let (queue, queued) = mpsc::channel(QUEUE_MAX);
        let (all, told) = oneshot::channel();
        let (handle, _) = process::runtime()?;
        let _entered = handle.enter();
        let relay = socket.map(|socket| {
            let tasks = planes.context.tasks.background();
            let mut options = ZmqSourceOptions::new(socket, None);
            options.topic = engine_topic.unwrap_or_default();
            let source = ZmqSource::start(&tasks, options);
            let format = EventFormat::EngineBatches { rank };
            let sequencer = Sequencer::new(format, StreamOptions::new(block_size));
            let clock = planes.context.clock;
            let now: Arc<Now> = Arc::new(move || clock.now());
            let cache = Arc::new(Relay(Arc::clone(&publisher)));
            EventStream::spawn(&tasks, source, sequencer, cache, now, Arc::new(()))
        });
        let telling = tell_all(Arc::clone(&publisher), queued, all);
        planes.context.tasks.background().spawn(telling);
        Ok(Self {
            open: Mutex::new(Some(OpenPublisher {
                publisher,
                queue,
                told,
            })),
            relay: Mutex::new(relay),
            planes,
            block_size,
        })
    }

    /// Blocks were stored.
    #[pyo3(signature = (token_ids, num_block_tokens, block_hashes, parent_hash=None, block_mm_infos=None, lora_name=None,
        is_eagle=None, cache_salt=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "named arguments of a Python method"
    )]
    fn publish_stored(
        &self,
        token_ids: &Bound<'_, PyAny>,
        num_block_tokens: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        parent_hash: Option<&Bound<'_, PyAny>>,
        block_mm_infos: Option<&Bound<'_, PyAny>>,
        lora_name: Option<&str>,
        is_eagle: Option<bool>,
        cache_salt: Option<&str>,
    ) -> PyResult<()> {
        let event = self.stored(&Chain {
            token_ids,
            num_block_tokens,
            block_hashes,
            parent_hash,
            block_mm_infos,
            lora_name,
            is_eagle,
            cache_salt,
        })?;
        self.tell(token_ids.py(), event.into_iter().collect())
    }

    /// Blocks were removed.
    fn publish_removed(&self, block_hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = values::engine_hashes(block_hashes)?;
        let tier = Tier::Device;
        self.tell(block_hashes.py(), vec![KvEvent::Removed { tier, blocks }])
    }

    /// The cache is empty.
    fn publish_cleared(&self, py: Python<'_>) -> PyResult<()> {
        self.tell(py, vec![KvEvent::Cleared { tier: None }])
    }

    /// Several events in order, checked as a whole before any is told: `{"type": "stored", ...}` and `{"type": "removed", ...}`.
    fn publish_batch(&self, events: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut checked = Vec::new();
        for event in events.try_iter()? {
            let event = event?;
            let event = event.cast::<PyDict>()?;
            let kind: String = needed(event, "type")?.extract()?;
            match kind.as_str() {
                "stored" => {
                    let lora: Option<String> = match member(event, "lora_name")? {
                        Some(name) => Some(name.extract()?),
                        None => None,
                    };
                    let salt: Option<String> = match member(event, "cache_salt")? {
                        Some(salt) => Some(salt.extract()?),
                        None => None,
                    };
                    let eagle = member(event, "is_eagle")?.map(|flag| flag.extract());
                    let event = self.stored(&Chain {
                        token_ids: &needed(event, "token_ids")?,
                        num_block_tokens: &needed(event, "num_block_tokens")?,
                        block_hashes: &needed(event, "block_hashes")?,
                        parent_hash: member(event, "parent_hash")?.as_ref(),
                        block_mm_infos: member(event, "block_mm_infos")?.as_ref(),
                        lora_name: lora.as_deref(),
                        is_eagle: eagle.transpose()?,
                        cache_salt: salt.as_deref(),
                    })?;
                    checked.extend(event);
                }
                "removed" => checked.push(KvEvent::Removed {
                    tier: Tier::Device,
                    blocks: values::engine_hashes(&needed(event, "block_hashes")?)?,
                }),
                other => {
                    let text = format!("an event's type cannot be {other:?}: stored or removed");
                    return Err(PyValueError::new_err(text));
                }
            }
        }
        self.tell(events.py(), checked)
    }

    /// Tells nothing more, and takes back what was announced.
    fn shutdown(&self, py: Python<'_>) {
        let relay = self
            .relay
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(open) = self.lock().take() else {
            return;
        };
        drop(relay);
        let OpenPublisher {
            publisher,
            queue,
            told,
        } = open;
        drop(queue);
        let planes = Arc::clone(&self.planes);
        // A store that is away forgets by itself.
        let _ = process::wait(py, async move {
            if !planes.context.tasks.is_draining() {
                let _ = told.await;
                let _ = publisher.withdraw().await;
            }
            Ok(())
        });
    }
}

/// A chain's local hashes, as a prefix name: for engines that have no names of their own for blocks.
#[pyfunction]
pub(crate) fn chain_hashes(
    block_hashes: &Bound<'_, PyAny>,
    parent_hash: Option<u64>,
) -> PyResult<Vec<u64>> {
    let mut parent = parent_hash.map(kvasir_types::SequenceHash);
    let mut names = Vec::new();
    for LocalHash(local) in values::local_hashes(block_hashes)? {
        let name = next_sequence_hash(parent, LocalHash(local));
        names.push(name.0);
        parent = Some(name);
    }
    Ok(names)
}

/// Publishes load: what `kvasir.llm.WorkerMetricsPublisher` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct LoadReports {
    publisher: LoadPublisher,
    worker: u64,
}

#[pymethods]
impl LoadReports {
    /// Tells how loaded a rank is.
    #[pyo3(signature = (dp_rank=None, active_decode_blocks=None, kv_used_blocks=None))]
    fn publish(
        &self,
        dp_rank: Option<u32>,
        active_decode_blocks: Option<u64>,
        kv_used_blocks: Option<u64>,
    ) {
        self.publisher.publish(&ActiveLoad {
            rank: WorkerRank::new(self.worker, dp_rank.unwrap_or(0)),
            active_decode_blocks,
            active_prefill_tokens: None,
            used_blocks: kv_used_blocks,
        });
    }
}

/// Opens the channel of load reports of an endpoint.
#[pyfunction]
pub(crate) fn open_load<'py>(
    py: Python<'py>,
    runtime: &Runtime,
    name: (String, String, String),
) -> PyResult<Bound<'py, PyAny>> {
    let planes = Arc::clone(&runtime.planes);
    let (namespace, component, endpoint) = name;
    let endpoint = EndpointName::new(&namespace, &component, &endpoint);
    let work = async move {
        let member = planes.member(&endpoint).await?;
        let publisher = member.publish_load().await?;
        Ok(LoadReports {
            publisher,
            worker: member.id().0,
        })
    };
    process::awaitable(py, work, |py, reports| Ok(Py::new(py, reports)?.into_any()))
}
