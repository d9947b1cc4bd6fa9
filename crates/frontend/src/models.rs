//! Which models are served, by whom, and how a prompt of each becomes tokens.

pub(crate) mod prompt;
mod text_counts;
pub(crate) mod tokenize;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
};

use kvasir_openai::Health;
use kvasir_router::{Input, WorkerSpec};
use kvasir_telemetry::{GaugeVec, Metrics};
use kvasir_text::TextModel;
use kvasir_transport::RequestPlane;
use kvasir_types::{Time, WorkerId};
use kvasir_upstream::Upstreams;
use serde_json::value::RawValue;

use crate::events::EventPool;
use crate::host::RouterHost;
use crate::observe::meter::{ENDPOINT, ModelMeters};
use crate::observe::token_source::TokenSource;
use crate::picture::Sockets;
use text_counts::TextCounts;
use tokenize::TokenSources;

/// How a model's workers are reached, and what that needs to know of its text.
pub enum Backend {
    /// Tokens in, tokens out.
    Tokens {
        /// The way to them.
        plane: Arc<dyn RequestPlane>,
        /// Template and tokenizer.
        text: Arc<TextModel>,
    },
    /// Unmodified engines behind HTTP.
    OpenAi {
        /// The way to them.
        workers: Upstreams,
        /// How prompts become tokens, to know what is cached.
        tokens: TokenSources,
    },
}

/// One served model: the name that clients use, who serves it, and the router of those.
pub struct ServedModel {
    /// The name that clients use.
    pub name: Arc<str>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Longest sequence, prompt and answer together.
    pub context_length: u32,
    /// The adapter that it is, if it is not a model of its own: blocks are cached under its name.
    pub lora: Option<Arc<str>>,
    /// When it was first served, in seconds since 1970.
    pub created: u64,
    /// The router of its workers; shared by all models that the same engines serve.
    pub host: Arc<RouterHost>,
    /// How its workers are reached.
    pub backend: Backend,
    /// Where the cache events of workers in this process go.
    pub events: Option<EventPool>,
    /// Whether decisions are recorded for workers whose cache events are believed, too
    /// (`--router-predicted-ttl-secs`); for the others they always are.
    pub predict_heard: bool,
    /// What is counted of it.
    pub meters: Arc<ModelMeters>,
    /// Who its workers are.
    pub workers: RwLock<BTreeMap<WorkerId, WorkerSpec>>,
}

impl ServedModel {
    /// A worker is there that serves this model alone, or its facts changed.
    pub fn join(&self, spec: WorkerSpec, metrics: &Metrics) {
        let known = self.admit(&spec, metrics);
        self.enter_router(spec, known.as_ref());
    }

    /// A worker serves it, or its facts changed; what was known of it before. The router is told apart.
    pub(crate) fn admit(&self, spec: &WorkerSpec, metrics: &Metrics) -> Option<WorkerSpec> {
        self.describe_to(metrics, spec);
        let mut workers = self.workers.write().unwrap_or_else(PoisonError::into_inner);
        let known = workers.insert(spec.id, spec.clone());
        drop(workers);
        if known.is_none() {
            tracing::info!(worker = %spec.id, model = %self.name, "worker joined");
        }
        known
    }

    /// The router may send to a worker; `known` is what it was told of it before.
    pub(crate) fn enter_router(&self, spec: WorkerSpec, known: Option<&WorkerSpec>) {
        let kept = |rank| spec.rank_iter().any(|ours| ours == rank);
        let gone = known.into_iter().flat_map(WorkerSpec::rank_iter);
        gone.filter(|rank| !kept(*rank))
            .for_each(|rank| self.meters.rank_left(rank));
        for rank in spec.rank_iter() {
            self.meters.rank_joined(rank);
        }
        self.host.tell(match known {
            Some(_) => Input::Updated(spec),
            None => Input::Joined(spec),
        });
    }

    /// Whether a worker has to be told which of its ranks is to answer.
    pub(crate) fn has_ranks(&self, worker: WorkerId) -> bool {
        let workers = self.workers.read().unwrap_or_else(PoisonError::into_inner);
        workers
            .get(&worker)
            .is_some_and(|spec| spec.rank_iter().nth(1).is_some())
    }

    /// Sets the gauges of the model from what a worker of it says; the first one's word stays.
    fn describe_to(&self, metrics: &Metrics, spec: &WorkerSpec) {
        let model = [&*self.name];
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
    pub fn leave(&self, worker: WorkerId, metrics: &Metrics) {
        if let Some(spec) = self.dismiss(worker, metrics) {
            self.leave_router(&spec);
        }
    }

    /// A worker serves it no more; what was known of it. The router is told apart.
    pub(crate) fn dismiss(&self, worker: WorkerId, metrics: &Metrics) -> Option<WorkerSpec> {
        let mut workers = self.workers.write().unwrap_or_else(PoisonError::into_inner);
        let spec = workers.remove(&worker)?;
        if workers.is_empty() {
            metrics
                .model_ready
                .with_label_values(&[&*self.name])
                .set(0.0);
        }
        drop(workers);
        tracing::info!(%worker, model = %self.name, "worker left");
        Some(spec)
    }

    /// A worker is gone: its bookings and its cache picture go with it.
    pub(crate) fn leave_router(&self, spec: &WorkerSpec) {
        for rank in spec.rank_iter() {
            self.meters.rank_left(rank);
        }
        self.host.tell(Input::Left(spec.id));
        self.host.pictures().leave(spec.id);
        match &self.events {
            Some(events) => events.worker_gone(spec.id),
            None => self.host.index().remove_worker(spec.id),
        }
    }

    /// What the router has to know of a request's model: engines behind HTTP may serve others beside it.
    pub(crate) fn asked_for(&self) -> Option<Arc<str>> {
        match &self.backend {
            Backend::Tokens { .. } => None,
            Backend::OpenAi { .. } => Some(Arc::clone(&self.name)),
        }
    }

    /// Its workers, by id.
    pub(crate) fn specs(&self) -> Vec<WorkerSpec> {
        self.workers
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect()
    }

    /// Where a worker is, if it is reached over HTTP.
    pub(crate) fn url_of(&self, worker: WorkerId) -> Option<String> {
        match &self.backend {
            Backend::Tokens { .. } => None,
            Backend::OpenAi { workers, .. } => Some(workers.get(worker)?.address().to_string()),
        }
    }

    /// Its template and tokenizer, where they are known.
    #[must_use]
    pub fn text(&self) -> Option<&Arc<TextModel>> {
        match &self.backend {
            Backend::Tokens { text, .. } => Some(text),
            Backend::OpenAi { tokens, .. } => tokens.text(),
        }
    }

    /// What its prompts become tokens by, as a word.
    pub(crate) fn tokens_from(&self) -> &'static str {
        match &self.backend {
            Backend::Tokens { .. } => TokenSource::Folder.name(),
            Backend::OpenAi { tokens, .. } => tokens.best().name(),
        }
    }

    /// Adds its workers to the health page.
    pub(crate) fn describe(&self, health: &mut Health) {
        let workers = self.workers.read().unwrap_or_else(PoisonError::into_inner);
        let [namespace, component, endpoint] = ENDPOINT;
        let name = format!("dyn://{namespace}.{component}.{endpoint}");
        if !workers.is_empty() && !health.endpoints.contains(&name) {
            health.endpoints.push(name);
        }
        for id in workers.keys() {
            let transport = match self.url_of(*id) {
                Some(url) => serde_json::json!({ "http": url }),
                None => serde_json::json!({ "memory": &*self.name }),
            };
            let instance = serde_json::json!({
                "component": component,
                "endpoint": endpoint,
                "namespace": namespace,
                "instance_id": id.0,
                "transport": transport,
            });
            health
                .instances
                .extend(RawValue::from_string(instance.to_string()).ok());
        }
    }

    /// Brings the gauges of its router up to date: workers, queue, index; what the event sockets are like.
    fn measure(&self, metrics: &Metrics, now: Time) -> Sockets {
        let router = &**self.host.name();
        let sockets = self.host.pictures().measure(router, &self.meters);
        let (index, model) = (self.host.index().stats(), [router]);
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
        self.host.ask(|brain| {
            self.meters
                .catch_up(router, brain.received(), index.repeated);
            for (class, waiting) in brain.queue_stats() {
                let labels = [router, "decode", class];
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
        self.host.loads(now, &mut loads);
        for load in &loads {
            let blocks = load.potential_decode_blocks as f64;
            let tokens = load.potential_prefill_tokens as f64;
            self.meters.ranks.load(load.rank, blocks, tokens);
        }
        sockets
    }

    /// Whether anybody serves it.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self
            .workers
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty()
    }
}

/// The served models by name.
#[derive(Default)]
pub struct Models {
    by_name: RwLock<BTreeMap<Arc<str>, Arc<ServedModel>>>,
    text: TextCounts,
    /// Held while series are made for a model, or taken out after it: not while its index is filled.
    aside: Mutex<Aside>,
}

/// Models that have series and are not served.
#[derive(Default)]
struct Aside {
    /// Served soon: those of the same name that go meanwhile leave their series to them.
    coming: Vec<Arc<ServedModel>>,
    /// Served no more, until the last of their requests has ended.
    retired: Vec<Arc<ServedModel>>,
}

impl Models {
    /// Models that are served at once; each has series and a tokenizer's state.
    pub const MAX: usize = 4096;

    /// Brings gauges and counters up to date.
    pub(crate) fn measure(&self, metrics: &Metrics, now: Time) {
        let mut sockets = Sockets::default();
        for model in self.of_routers() {
            let of_router = model.measure(metrics, now);
            if model.meters.by_cache() {
                sockets.connected += of_router.connected;
                sockets.away += of_router.away;
            }
        }
        let sources = &metrics.router_kv_zmq_ingress_sources;
        for (state, count) in [
            ("active", sockets.connected),
            ("preconnected", sockets.away),
        ] {
            sources.with_label_values(&[state]).set(count as f64);
        }
        self.text.add(&self.all(), metrics);
        // Whoever holds it sweeps, or a later page does: a thread that serves does not wait for that.
        match self.aside.try_lock() {
            Ok(mut aside) => self.sweep(&mut aside, metrics),
            Err(TryLockError::Poisoned(aside)) => self.sweep(&mut aside.into_inner(), metrics),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// Serves one more; a model of the same name is replaced.
    pub fn insert(&self, model: Arc<ServedModel>) {
        self.write().insert(Arc::clone(&model.name), model);
    }

    /// Makes one, fills it, which may take long, and serves it: until then nobody asks anything of it.
    pub(crate) fn make<E>(
        &self,
        make: impl FnOnce() -> Result<Arc<ServedModel>, E>,
        fill: impl FnOnce(&ServedModel),
    ) -> Result<Arc<ServedModel>, E> {
        let mut aside = self.aside();
        let model = make()?;
        aside.coming.push(Arc::clone(&model));
        drop(aside);
        fill(&model);
        self.insert(Arc::clone(&model));
        let mut aside = self.aside();
        aside.coming.retain(|coming| !Arc::ptr_eq(coming, &model));
        Ok(model)
    }

    /// Serves a model no more. Whoever takes it out has it retired.
    pub(crate) fn take(&self, name: &str) -> Option<Arc<ServedModel>> {
        self.write().remove(name)
    }

    /// These were taken out: their series go with the last of their requests.
    pub(crate) fn retire(&self, taken: Vec<Arc<ServedModel>>, metrics: &Metrics) {
        let mut aside = self.aside();
        aside.retired.extend(taken);
        self.sweep(&mut aside, metrics);
    }

    /// Lets go of models that nobody uses any more, and of the series under names that are no longer in use.
    fn sweep(&self, aside: &mut Aside, metrics: &Metrics) {
        let unused = |model: &mut Arc<ServedModel>| {
            Arc::strong_count(model) == 1 && Arc::strong_count(&model.meters) == 1
        };
        let mut gone: BTreeSet<Arc<str>> = BTreeSet::new();
        for model in aside.retired.extract_if(.., unused) {
            gone.extend(names(&model).map(Arc::clone));
        }
        if gone.is_empty() {
            return;
        }
        let here = self.read();
        let with_series = here.values().chain(&aside.coming).chain(&aside.retired);
        for name in with_series.flat_map(|model| names(model)) {
            gone.remove(name);
        }
        drop(here);
        metrics.forget_models(&gone);
    }

    /// The model of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<ServedModel>> {
        self.read().get(name).cloned()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.read().len()
    }

    /// Whether there is more than one.
    pub(crate) fn has_several(&self) -> bool {
        self.len() > 1
    }

    /// The only one, if there is one and no other.
    pub(crate) fn only(&self) -> Option<Arc<ServedModel>> {
        let by_name = self.read();
        let mut models = by_name.values();
        let first = models.next();
        first.filter(|_| models.next().is_none()).cloned()
    }

    /// All of them, by name.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ServedModel>> {
        self.read().values().cloned().collect()
    }

    /// One of each router: the one whose name the router has, if that is served.
    pub(crate) fn of_routers(&self) -> Vec<Arc<ServedModel>> {
        let mut all = self.all();
        all.sort_by_key(|model| (Arc::as_ptr(&model.host), model.name != *model.host.name()));
        all.dedup_by(|later, first| Arc::ptr_eq(&later.host, &first.host));
        all.sort_by(|one, other| one.host.name().cmp(other.host.name()));
        all
    }

    /// One of those whose router has this name.
    pub(crate) fn of_router(&self, name: &str) -> Option<Arc<ServedModel>> {
        let named = |model: &&Arc<ServedModel>| **model.host.name() == *name;
        self.read().values().find(named).cloned()
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<Arc<str>, Arc<ServedModel>>> {
        self.by_name.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<Arc<str>, Arc<ServedModel>>> {
        self.by_name.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn aside(&self) -> MutexGuard<'_, Aside> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What its series are under: its own name and its router's.
fn names(model: &ServedModel) -> [&Arc<str>; 2] {
    [&model.name, model.host.name()]
}
