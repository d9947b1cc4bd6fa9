//! One model as it is routed: its name, its workers, and the router of those.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvasir_router::{Input, WorkerSpec};
use kvasir_telemetry::GaugeVec;
use kvasir_types::{Time, WorkerId};

use crate::meters::PlacementMeters;
use crate::router_host::RouterHost;
use crate::view::EventSockets;

/// What is known of a model when the first worker says that it serves it.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Its name.
    pub name: Arc<str>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Longest sequence, prompt and answer together.
    pub context_length: u32,
    /// The model that it is an adapter of.
    pub parent: Option<Arc<str>>,
    /// How often an answer may go on at another worker, as its first worker says.
    pub migration_limit: u32,
}

/// One model: the name that clients use, who serves it, and the router of those.
#[derive(Debug)]
pub struct Model {
    /// The name that clients use.
    pub name: Arc<str>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Longest sequence, prompt and answer together.
    pub context_length: u32,
    /// The adapter that it is, if it is not a model of its own: blocks are cached under its name.
    pub lora: Option<Arc<str>>,
    /// How often an answer may go on at another worker, as its first worker says.
    pub migration_limit: u32,
    /// When it was first served, in seconds since 1970.
    pub created: u64,
    /// The router of its workers; shared by all models that the same engines serve.
    pub host: Arc<RouterHost>,
    /// What is counted of its placements.
    pub placements: Arc<PlacementMeters>,
    /// Who its workers are.
    workers: RwLock<BTreeMap<WorkerId, WorkerSpec>>,
}

impl Model {
    /// A model without workers, whose requests go through `host`.
    #[must_use]
    pub fn new(spec: &ModelSpec, host: Arc<RouterHost>) -> Self {
        let clock = host.context().clock;
        Self {
            name: Arc::clone(&spec.name),
            block_size: host.block_size(),
            context_length: spec.context_length,
            lora: spec.parent.is_some().then(|| Arc::clone(&spec.name)),
            migration_limit: spec.migration_limit,
            created: clock.unix_secs(clock.now()),
            placements: PlacementMeters::new(host.meters(), &spec.name),
            host,
            workers: RwLock::default(),
        }
    }

    /// A worker is there that serves this model alone, or its facts changed.
    pub fn join(&self, spec: WorkerSpec) {
        let known = self.admit(&spec);
        self.enter_router(spec, known.as_ref());
    }

    /// A worker serves it, or its facts changed; what was known of it before. The router is told apart.
    pub fn admit(&self, spec: &WorkerSpec) -> Option<WorkerSpec> {
        self.describe(spec);
        let known = self.write().insert(spec.id, spec.clone());
        if known.is_none() {
            let url = self.host.views().urls().field(spec.id);
            tracing::info!(worker = %spec.id, url, model = %self.name, "worker joined");
        }
        known
    }

    /// The router may send to a worker; `known` is what it was told of it before.
    pub fn enter_router(&self, spec: WorkerSpec, known: Option<&WorkerSpec>) {
        let meters = self.host.meters();
        let kept = |rank| spec.rank_iter().any(|ours| ours == rank);
        let gone = known.into_iter().flat_map(WorkerSpec::rank_iter);
        gone.filter(|rank| !kept(*rank))
            .for_each(|rank| meters.rank_left(rank));
        for rank in spec.rank_iter() {
            meters.rank_joined(rank);
        }
        self.host.tell(match known {
            Some(_) => Input::Updated(spec),
            None => Input::Joined(spec),
        });
    }

    /// Whether a worker has to be told which of its ranks is to answer.
    #[must_use]
    pub fn has_ranks(&self, worker: WorkerId) -> bool {
        self.read()
            .get(&worker)
            .is_some_and(|spec| spec.rank_iter().nth(1).is_some())
    }

    /// What is known of a worker.
    #[must_use]
    pub fn spec_of(&self, worker: WorkerId) -> Option<WorkerSpec> {
        self.read().get(&worker).cloned()
    }

    /// How many ranks a worker has; 0 if it is not there.
    #[must_use]
    pub fn ranks_of(&self, worker: WorkerId) -> u32 {
        let workers = self.read();
        workers.get(&worker).map_or(0, WorkerSpec::rank_count)
    }

    /// Sets the gauges of the model from what a worker of it says; the first one's word stays.
    fn describe(&self, spec: &WorkerSpec) {
        let (metrics, model) = (&self.host.context().metrics, [&*self.name]);
        metrics.model_ready.with_label_values(&model).set(1.0);
        metrics
            .model_kv_cache_block_size
            .with_label_values(&model)
            .set(self.block_size.into());
        metrics
            .model_context_length
            .with_label_values(&model)
            .set(self.context_length.into());
        let first = |gauge: &GaugeVec, value: Option<u64>| {
            let gauge = gauge.with_label_values(&model);
            if gauge.get() == 0.0 {
                gauge.set(value.unwrap_or(0) as f64);
            }
        };
        first(&metrics.model_total_kv_blocks, spec.kv_total_blocks);
        first(
            &metrics.model_max_num_batched_tokens,
            spec.max_num_batched_tokens,
        );
        first(&metrics.model_max_num_seqs, spec.max_num_seqs);
    }

    /// A worker that serves this model alone is gone.
    pub fn leave(&self, worker: WorkerId) {
        if let Some(spec) = self.dismiss(worker) {
            self.leave_router(&spec);
        }
    }

    /// A worker serves it no more; what was known of it. The router is told apart.
    pub fn dismiss(&self, worker: WorkerId) -> Option<WorkerSpec> {
        let mut workers = self.write();
        let spec = workers.remove(&worker)?;
        if workers.is_empty() {
            let ready = &self.host.context().metrics.model_ready;
            ready.with_label_values(&[&*self.name]).set(0.0);
        }
        drop(workers);
        let url = self.host.views().urls().field(worker);
        tracing::info!(%worker, url, model = %self.name, "worker left");
        Some(spec)
    }

    /// A worker is gone: its bookings and what was known of its cache go with it.
    pub fn leave_router(&self, spec: &WorkerSpec) {
        for rank in spec.rank_iter() {
            self.host.meters().rank_left(rank);
        }
        self.host.leave(spec.id);
    }

    /// Its workers, by id.
    #[must_use]
    pub fn specs(&self) -> Vec<WorkerSpec> {
        self.read().values().cloned().collect()
    }

    /// Whether anybody serves it.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.read().is_empty()
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<WorkerId, WorkerSpec>> {
        self.workers.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<WorkerId, WorkerSpec>> {
        self.workers.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RouterHost {
    /// Brings the gauges of the router up to date: workers, queue, index; what the event sockets are like.
    pub(crate) fn measure(&self, now: Time) -> EventSockets {
        let (metrics, meters) = (&self.context().metrics, self.meters());
        let router = &**self.name();
        let sockets = self.views().measure(meters);
        let (index, model) = (self.index().stats(), [router]);
        metrics
            .index_bytes
            .with_label_values(&model)
            .set(index.bytes as f64);
        metrics
            .index_entries
            .with_label_values(&model)
            .set(index.entries as f64);
        let forgotten = (index.evicted + index.pruned) as f64;
        metrics
            .index_forgotten
            .with_label_values(&model)
            .set(forgotten);
        self.ask(|brain| {
            meters.catch_up(brain.received(), index.repeated);
            if let Some((_, stats)) = brain.shadow() {
                meters.shadow(stats);
            }
            for (class, waiting) in brain.queue_stats() {
                let labels = [router, meters.labels.worker_type, class];
                let set = |gauge: &GaugeVec, value: u64| {
                    gauge.with_label_values(&labels).set(value as f64);
                };
                set(&metrics.router_queue_pending_requests, waiting.requests);
                set(
                    &metrics.router_queue_pending_isl_tokens,
                    waiting.raw_isl_tokens,
                );
                set(
                    &metrics.router_queue_pending_cached_tokens,
                    waiting.cached_tokens,
                );
            }
        });
        let mut loads = Vec::new();
        self.loads(now, &mut loads);
        for load in &loads {
            let blocks = load.potential_decode_blocks as f64;
            let tokens = load.potential_prefill_tokens as f64;
            meters.load(load.rank, blocks, tokens);
        }
        sockets
    }
}
