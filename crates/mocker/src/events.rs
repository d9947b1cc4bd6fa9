//! A mock engine's event sockets: real ZeroMQ in vLLM's wire, with replay and with faults on command.
//!
//! Answers one question: how does what an engine's cache goes through reach a router that knows nothing of
//! this process? One PUB and one ROUTER socket per rank, at consecutive ports as vLLM has them; one batch per
//! step that changed something; the last [`EventOptions::buffer_steps`] batches for replay.
//!
//! Invariants: batches are numbered from 0 in the order of the steps; publishing never waits for a reader;
//! a fault changes what is told, never what the cache holds.

mod log;

pub use log::{Fault, FaultError};

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use kvasir_engine::{CacheEvent, Load};
use kvasir_tasks::Tasks;
use kvasir_transport::zmq::{Endpoint, ZmqLimits, ZmqPublisher, ZmqReplayServer};
use kvasir_types::{EngineHash, KvEvent, RequestId, TokenRequest, WorkerRank};
use kvasir_wire::engine::Dialect;
use kvasir_wire::frame::Frame;

use crate::Observer;
use log::{Log, Scope};

/// Requests whose adapter or salt is remembered until their blocks are told; the oldest go first.
const SCOPES_MAX: usize = 1 << 16;

/// Where and how events are published.
#[derive(Clone)]
pub struct EventOptions {
    /// Rank 0's PUB socket; rank `r` is `r` ports further. Port 0 takes free ones.
    pub events: Endpoint,
    /// Rank 0's replay socket, likewise; none if absent.
    pub replay: Option<Endpoint>,
    /// First part of every message.
    pub topic: String,
    /// Wire shape, of an older or a newer engine.
    pub dialect: Dialect,
    /// Tokens per block.
    pub block_size: u32,
    /// Ranks.
    pub ranks: u32,
    /// Batches kept for replay.
    pub buffer_steps: usize,
    /// Seconds of the Unix clock, for the batches' time.
    pub unix_time: Arc<dyn Fn() -> f64 + Send + Sync>,
}

impl EventOptions {
    /// vLLM's own defaults, for one rank.
    #[must_use]
    pub fn new(
        events: Endpoint,
        replay: Option<Endpoint>,
        block_size: u32,
        unix_time: Arc<dyn Fn() -> f64 + Send + Sync>,
    ) -> Self {
        Self {
            events,
            replay,
            topic: String::new(),
            dialect: Dialect::Vllm24,
            block_size,
            ranks: 1,
            buffer_steps: 10_000,
            unix_time,
        }
    }
}

/// One rank's sockets.
struct RankSockets {
    publisher: ZmqPublisher,
    replay: Option<ZmqReplayServer>,
    log: Arc<Mutex<Log>>,
}

/// The event sockets of a worker, as an [`Observer`] of its ranks.
pub struct EventSockets {
    ranks: Vec<RankSockets>,
    topic: Bytes,
    scopes: Mutex<Scopes>,
    tasks: Tasks,
}

impl fmt::Debug for EventSockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = self.ranks.len();
        f.debug_struct("EventSockets")
            .field("ranks", &ranks)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Scopes {
    known: HashMap<RequestId, Scope>,
    order: VecDeque<RequestId>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EventSockets {
    /// Binds the sockets of every rank.
    pub async fn bind(tasks: &Tasks, options: &EventOptions) -> io::Result<Self> {
        let mut ranks = Vec::new();
        for rank in 0..options.ranks.max(1) {
            let log = Arc::new(Mutex::new(Log::new(options, rank)));
            let limits = ZmqLimits::default();
            let at = at_rank(&options.events, rank)?;
            let publisher = ZmqPublisher::bind(tasks, &at, limits.clone()).await?;
            let replay = match &options.replay {
                None => None,
                Some(first) => {
                    let (at, store) = (at_rank(first, rank)?, Arc::clone(&log));
                    let store = Arc::new(log::Replay(store));
                    Some(ZmqReplayServer::bind(tasks, &at, limits, store).await?)
                }
            };
            ranks.push(RankSockets {
                publisher,
                replay,
                log,
            });
        }
        Ok(Self {
            ranks,
            topic: Bytes::from(options.topic.clone().into_bytes()),
            scopes: Mutex::default(),
            tasks: tasks.clone(),
        })
    }

    /// Where a rank's events and replays are.
    #[must_use]
    pub fn addresses(&self, rank: u32) -> Option<(SocketAddr, Option<SocketAddr>)> {
        let sockets = self.ranks.get(rank as usize)?;
        let replay = sockets.replay.as_ref().map(ZmqReplayServer::address);
        Some((sockets.publisher.address(), replay))
    }

    /// First part of every message.
    #[must_use]
    pub fn topic(&self) -> &[u8] {
        &self.topic
    }

    /// Ranks that have sockets.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Subscribers of a rank.
    #[must_use]
    pub fn subscribers(&self, rank: u32) -> usize {
        let sockets = self.ranks.get(rank as usize);
        sockets.map_or(0, |s| s.publisher.subscribers())
    }

    /// Batches that a rank numbered since it began.
    #[must_use]
    pub fn published(&self, rank: u32) -> u64 {
        let sockets = self.ranks.get(rank as usize);
        sockets.map_or(0, |s| lock(&s.log).published())
    }

    /// The blocks that a rank's cache holds, whatever its events told; sorted.
    #[must_use]
    pub fn held(&self, rank: u32) -> Vec<EngineHash> {
        let sockets = self.ranks.get(rank as usize);
        sockets.map_or_else(Vec::new, |s| lock(&s.log).held())
    }

    /// Makes something go wrong at every rank.
    pub fn inject(&self, fault: Fault) {
        for sockets in &self.ranks {
            let frames = lock(&sockets.log).inject(fault);
            self.send(sockets, frames);
            if fault == Fault::RestartEmpty {
                sockets.publisher.disconnect_all();
            }
        }
    }

    fn send(&self, sockets: &RankSockets, frames: Vec<log::Outgoing>) {
        for outgoing in frames {
            let parts = self.parts(&outgoing.frame);
            match outgoing.after {
                None => drop(sockets.publisher.publish(&parts)),
                Some(log::Later { pause, life }) => {
                    let publish = sockets.publisher.later(parts.to_vec());
                    let log = Arc::clone(&sockets.log);
                    self.tasks.spawn(async move {
                        tokio::time::sleep(pause).await;
                        let log = lock(&log);
                        if log.life() == life {
                            publish();
                        }
                    });
                }
            }
        }
    }

    fn parts(&self, frame: &Frame<Bytes>) -> [Bytes; 3] {
        let sequence = Bytes::copy_from_slice(&frame.sequence.to_be_bytes());
        [self.topic.clone(), sequence, frame.payload.clone()]
    }

    fn scope(&self, event: &CacheEvent) -> Scope {
        let known = event
            .request
            .and_then(|id| lock(&self.scopes).known.get(&id).cloned());
        known.unwrap_or_default()
    }
}

fn at_rank(first: &Endpoint, rank: u32) -> io::Result<Endpoint> {
    if first.port() == 0 {
        return Ok(first.clone());
    }
    let port = u32::from(first.port()) + rank;
    let port = u16::try_from(port).map_err(|_| {
        let reason = format!("rank {rank} would need port {port}: choose a lower one than {first}");
        io::Error::new(io::ErrorKind::InvalidInput, reason)
    })?;
    Ok(first.with_port(port))
}

impl Observer for EventSockets {
    fn admitted(&self, _: WorkerRank, request: &TokenRequest) {
        if request.lora.is_none() && request.salt.is_none() {
            return;
        }
        let mut scopes = lock(&self.scopes);
        if scopes.order.len() >= SCOPES_MAX
            && let Some(oldest) = scopes.order.pop_front()
        {
            scopes.known.remove(&oldest);
        }
        let scope = Scope {
            lora: request.lora.clone(),
            salt: request.salt.clone(),
        };
        scopes.order.push_back(request.id);
        scopes.known.insert(request.id, scope);
    }

    fn cache_event(&self, rank: WorkerRank, _: u64, event: &CacheEvent) {
        let Some(sockets) = self.ranks.get(rank.rank.0 as usize) else {
            return;
        };
        let scope = match &event.event {
            KvEvent::Stored { .. } => self.scope(event),
            KvEvent::Removed { .. } | KvEvent::Cleared { .. } => Scope::default(),
        };
        lock(&sockets.log).note(event, scope);
    }

    fn step_ended(&self, rank: WorkerRank) {
        let Some(sockets) = self.ranks.get(rank.rank.0 as usize) else {
            return;
        };
        let frames = lock(&sockets.log).publish();
        self.send(sockets, frames);
    }

    fn load(&self, _: WorkerRank, _: &Load) {}

    fn restarted(&self, rank: WorkerRank) {
        if let Some(sockets) = self.ranks.get(rank.rank.0 as usize) {
            lock(&sockets.log).restart();
            sockets.publisher.disconnect_all();
        }
    }
}
