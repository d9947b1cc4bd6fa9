//! What an engine tells of itself while it runs.
//!
//! Answers one question: what happened to the cache and the load of each rank, and who hears of it? Nothing here waits.

use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::jetstream::LogPublisher;
use kvasir_types::{DpRank, KvEvent, RequestId, WorkerId, WorkerRank};
use kvasir_wire::native::{
    QueuedWork, RouterEvent, ScheduledWork, SequenceChange, SequenceEvent, Topic,
};

use crate::cache::RankCache;
use crate::channels::Channel;
use crate::load::LoadBoard;
use crate::names::RequestNames;
use crate::passes::PassBoard;
use crate::{EventCarrier, JoinError};

/// Stands between a rank and its channel: for tests and mock engines whose events go astray on command.
pub trait CacheOutbox: Send + Sync + 'static {
    /// What goes out, one message each, in place of `events`. Called in order; must not wait.
    fn pass(&self, rank: WorkerRank, events: Vec<RouterEvent>) -> Vec<Vec<RouterEvent>>;
}

/// The channels of one worker, and what its engine tells them.
pub struct Reports {
    worker: WorkerId,
    /// By rank.
    caches: Vec<Arc<RankCache>>,
    load: Arc<LoadBoard>,
    sequences: Channel,
    passes: Arc<PassBoard>,
    names: Arc<RequestNames>,
}

impl Reports {
    /// Opens the channels of a worker with so many ranks.
    pub(crate) async fn open(
        worker: WorkerId,
        ranks: u32,
        carrier: &EventCarrier,
        log: Option<&LogPublisher>,
        outbox: Option<&Arc<dyn CacheOutbox>>,
        clock: Clock,
        tasks: &Tasks,
    ) -> Result<Self, JoinError> {
        let names = (0..ranks.max(1)).map(|rank| WorkerRank {
            worker,
            rank: DpRank(rank),
        });
        let open = async |topic: Topic| {
            let channel = Channel::open(topic, carrier, clock, tasks).await;
            channel.map_err(|cause| JoinError::Channel { topic, cause })
        };
        let sequences = open(Topic::ActiveSequences).await?;
        let mut caches = Vec::new();
        for rank in names.clone() {
            let outbox = outbox.cloned();
            caches.push(Arc::new(match log {
                Some(log) => RankCache::logged(rank, log.clone(), outbox),
                None => RankCache::new(rank, open(Topic::KvEvents).await?, outbox),
            }));
        }
        let load = open(Topic::KvMetrics).await?;
        let passes = open(Topic::ForwardPass).await?;
        Ok(Self {
            worker,
            caches,
            load: LoadBoard::start(load, names.clone(), tasks),
            sequences,
            passes: PassBoard::start(passes, names, tasks),
            names: Arc::default(),
        })
    }

    pub(crate) fn caches(&self) -> &[Arc<RankCache>] {
        &self.caches
    }

    pub(crate) const fn sequences(&self) -> &Channel {
        &self.sequences
    }

    /// The channels that all ranks share and that no frontend needs before it serves.
    pub(crate) fn shared_channels(&self) -> [&Channel; 2] {
        [self.passes.channel(), self.load.channel()]
    }

    pub(crate) const fn names(&self) -> &Arc<RequestNames> {
        &self.names
    }

    /// A rank's cache changed. It is told with the next [`Self::step_ended`], joined with what it continues.
    pub fn cache_event(&self, rank: DpRank, event: KvEvent) {
        if let Some(cache) = self.caches.get(rank.0 as usize) {
            cache.push(event);
        }
    }

    /// The step that the last cache events came from is over: whatever waits goes out.
    pub fn step_ended(&self, rank: DpRank) {
        if let Some(cache) = self.caches.get(rank.0 as usize) {
            cache.flush();
        }
    }

    /// A rank's engine began anew behind the same addresses: an empty cache, events from 1 again, not a word to anybody.
    pub fn restarted(&self, rank: DpRank) {
        if let Some(cache) = self.caches.get(rank.0 as usize) {
            cache.restart();
        }
    }

    /// A rank's running requests hold so many blocks.
    pub fn used_blocks(&self, rank: DpRank, blocks: u64) {
        self.load.set(rank.0, blocks);
    }

    /// The first token of a request was made: routers count its prompt as work no more.
    pub fn first_token(&self, rank: DpRank, request: RequestId) {
        let Some(name) = self.names.name(request) else {
            return; // It came through another door, or its caller has left.
        };
        let event = SequenceEvent {
            request: name.as_ref().to_owned(),
            rank: WorkerRank {
                worker: self.worker,
                rank,
            },
            router: self.worker.0,
            lora: None,
            change: SequenceChange::PrefillCompleted,
        };
        let value = match self.sequences.is_bare() {
            true => event.to_value(),
            false => SequenceEvent::batch_to_value(&[event]),
        };
        self.sequences.publish_value(&value);
    }

    /// What a rank computed in a step of this length, and what waits behind it. A rank that makes no steps gives a sign of
    /// life by itself.
    pub fn forward_pass(
        &self,
        rank: DpRank,
        wall_time: Duration,
        scheduled: ScheduledWork,
        queued: QueuedWork,
    ) {
        self.passes.step(rank.0, wall_time, scheduled, queued);
    }
}
