//! Cache events as a program reads them: those of an endpoint's workers, and those of one engine's own socket.
//!
//! What always holds: reading waits for nobody but the sender; a reader that is slow misses the newest events and holds up nobody; what
//! cannot be read is left out.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_discovery::EndpointName;
use kvasir_embed::ChannelListener;
use kvasir_host::{EventStream, Now};
use kvasir_index::ApplyError;
use kvasir_kv_events::{Cache, EventFormat, Sequencer, StreamOptions};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::zmq::{Endpoint as ZmqEndpoint, ZmqSource, ZmqSourceOptions};
use kvasir_types::{KvEvent, WorkerRank};
use kvasir_wire::native::{Encoding, Residency, RouterEvent, Topic, decode_router_events};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::Mutex as AsyncMutex;

use crate::planes::Runtime;
use crate::{process, values};

/// Events of an engine that wait for their reader.
const WAITING_MAX: usize = 100_000;
/// The first byte of a message that is written in JSON: a list, or one event.
const JSON: [u8; 2] = *b"[{";

/// Hears what the caches of an endpoint's workers hold: what `kvasir.llm.KvRecorder` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct CacheReader {
    listener: Arc<AsyncMutex<ChannelListener>>,
    tasks: Tasks,
}

#[pymethods]
impl CacheReader {
    #[new]
    fn new(py: Python<'_>, runtime: &Runtime, name: (String, String, String)) -> PyResult<Self> {
        let (namespace, component, endpoint) = name;
        let endpoint = EndpointName::new(&namespace, &component, &endpoint);
        let opened = ChannelListener::open(&runtime.planes, endpoint, Topic::KvEvents);
        let listener = process::wait(py, async { Ok(opened.await?) })?;
        Ok(Self {
            listener: Arc::new(AsyncMutex::new(listener)),
            tasks: Tasks::new(),
        })
    }

    /// The events of the next message as JSON, each with its worker; none came within `seconds` if the list is empty. None when it was
    /// shut down.
    fn recv(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<Vec<String>>> {
        let longest = Duration::try_from_secs_f64(seconds)
            .map_err(|error| PyValueError::new_err(format!("seconds: {error}")))?;
        let (listener, stopped) = (Arc::clone(&self.listener), self.tasks.clone());
        process::wait(py, async move {
            let heard = async {
                let mut listener = listener.lock().await;
                tokio::time::timeout(longest, listener.next()).await
            };
            tokio::select! {
                biased;
                () = stopped.draining() => Ok(None),
                heard = heard => Ok(match heard {
                    Ok(Some(bytes)) => Some(events_of(&bytes)),
                    Ok(None) => None,
                    Err(_) => Some(Vec::new()),
                }),
            }
        })
    }

    fn shutdown(&self) {
        self.tasks.stop();
    }
}

/// The events of a message, in JSON; none of one that cannot be read.
fn events_of(bytes: &[u8]) -> Vec<String> {
    let encoding = match bytes.first().is_some_and(|first| JSON.contains(first)) {
        true => Encoding::Json,
        false => Encoding::MessagePack,
    };
    let mut events = Vec::new();
    // Nothing is taken from a message that is broken.
    let _ = decode_router_events(encoding, bytes, &mut events);
    let json = |event: &RouterEvent| event.to_value().to_json().to_string();
    events.iter().map(json).collect()
}

/// Events that wait for their reader.
#[derive(Default)]
struct Waiting {
    events: Mutex<VecDeque<RouterEvent>>,
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, VecDeque<RouterEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, rank: WorkerRank, event: KvEvent) {
        let mut events = self.lock();
        if events.len() < WAITING_MAX {
            let id = events.back().map_or(0, |last| last.id + 1);
            events.push_back(RouterEvent {
                rank,
                id,
                residency: Some(Residency::Worker),
                position: None,
                event,
            });
        }
    }
}

impl Cache for Waiting {
    fn apply(&self, rank: WorkerRank, event: &KvEvent, _: bool) -> Result<(), ApplyError> {
        self.put(rank, event.clone());
        Ok(())
    }

    fn remove_rank(&self, rank: WorkerRank) {
        self.put(rank, KvEvent::Cleared { tier: None });
    }

    fn replace_rank(&self, rank: WorkerRank, events: &[RouterEvent]) -> Vec<(usize, ApplyError)> {
        self.remove_rank(rank);
        for event in events {
            self.put(rank, event.event.clone());
        }
        Vec::new()
    }
}

/// Hears one engine's own event socket: what `kvasir.llm.ZmqKvEventListener` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct EngineEvents {
    waiting: Arc<Waiting>,
    tasks: Tasks,
    _stream: EventStream,
}

#[pymethods]
impl EngineEvents {
    #[new]
    fn new(engine_socket: &str, engine_topic: String, block_size: u32) -> PyResult<Self> {
        let block_size = values::positive("kv_block_size", block_size)?;
        let bad = |error| PyValueError::new_err(format!("zmq_endpoint {engine_socket}: {error}"));
        let socket = engine_socket.parse::<ZmqEndpoint>().map_err(bad)?;
        let (handle, _) = process::runtime()?;
        let _entered = handle.enter();
        let tasks = Tasks::new();
        let mut options = ZmqSourceOptions::new(socket, None);
        options.topic = engine_topic;
        let source = ZmqSource::start(&tasks, options);
        let rank = WorkerRank::new(0, 0);
        let sequencer = Sequencer::new(
            EventFormat::EngineBatches { rank },
            StreamOptions::new(block_size),
        );
        let clock = Clock::new();
        let now: Arc<Now> = Arc::new(move || clock.now());
        let waiting = Arc::new(Waiting::default());
        let cache = Arc::clone(&waiting);
        let stream = EventStream::spawn(&tasks, source, sequencer, cache, now, Arc::new(()));
        Ok(Self {
            waiting,
            tasks,
            _stream: stream,
        })
    }

    /// What came since the last time, as JSON.
    fn take(&self) -> Vec<String> {
        let events = std::mem::take(&mut *self.waiting.lock());
        let json = |event: RouterEvent| {
            let value = event.to_value();
            let inner = value.get("event").unwrap_or(&value);
            inner.to_json().to_string()
        };
        events.into_iter().map(json).collect()
    }

    fn shutdown(&self) {
        self.tasks.stop();
    }
}

impl Drop for EngineEvents {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}
