//! Which models are served, by whom, and how a prompt of each becomes tokens.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

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
use crate::meter::{ENDPOINT, ModelMeters};
use crate::picture::Sockets;
use crate::text_counts::TextCounts;
use crate::tokens::{TokenSource, TokenSources};

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

/// One served model: its router, its index, its workers.
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
    /// Its router.
    pub host: Arc<RouterHost>,
    /// How its workers are reached.
    pub backend: Backend,
    /// Where its workers' cache events go.
    pub events: EventPool,
    /// Whether decisions are recorded for workers whose cache events are believed, too
    /// (`--router-predicted-ttl-secs`); for the others they always are.
    pub predict_heard: bool,
    /// What is counted of it.
    pub meters: Arc<ModelMeters>,
    /// Who its workers are.
    pub workers: RwLock<BTreeMap<WorkerId, WorkerSpec>>,
}

impl ServedModel {
    /// A worker is there, or its facts changed.
    pub fn join(&self, spec: WorkerSpec, metrics: &Metrics) {
        for rank in spec.rank_iter() {
            self.meters.rank_joined(rank);
        }
        self.describe_to(metrics, &spec);
        let mut workers = self.workers.write().unwrap_or_else(PoisonError::into_inner);
        let known = workers.insert(spec.id, spec.clone()).is_some();
        drop(workers);
        tracing::info!(worker = %spec.id, model = %self.name, "worker joined");
        self.host.tell(if known {
            Input::Updated(spec)
        } else {
            Input::Joined(spec)
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

    /// A worker is gone: its bookings and its cache picture go with it.
    pub fn leave(&self, worker: WorkerId, metrics: &Metrics) {
        let mut workers = self.workers.write().unwrap_or_else(PoisonError::into_inner);
        let Some(spec) = workers.remove(&worker) else {
            return;
        };
        let none_left = workers.is_empty();
        drop(workers);
        for rank in spec.rank_iter() {
            self.meters.rank_left(rank);
        }
        if none_left {
            metrics
                .model_ready
                .with_label_values(&[&*self.name])
                .set(0.0);
        }
        tracing::info!(%worker, model = %self.name, "worker left");
        self.host.tell(Input::Left(worker));
        self.host.pictures().leave(worker);
        self.events.worker_gone(worker);
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

    /// Brings the gauges of its workers, its queue and its index up to date; what its event sockets are like.
    fn measure(&self, metrics: &Metrics, now: Time) -> Sockets {
        let sockets = self.host.pictures().measure(&self.meters);
        let (index, model) = (self.host.index().stats(), [&*self.name]);
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
        self.host.ask(|router| {
            self.meters.catch_up(router.received(), index.repeated);
            for (class, waiting) in router.queue_stats() {
                let labels = [&*self.name, "decode", class];
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
}

impl Models {
    /// Brings gauges and counters up to date.
    pub(crate) fn measure(&self, metrics: &Metrics, now: Time) {
        let models = self.all();
        let mut sockets = Sockets::default();
        for model in &models {
            let of_model = model.measure(metrics, now);
            if model.meters.by_cache() {
                sockets.connected += of_model.connected;
                sockets.away += of_model.away;
            }
        }
        let sources = &metrics.router_kv_zmq_ingress_sources;
        for (state, count) in [
            ("active", sockets.connected),
            ("preconnected", sockets.away),
        ] {
            sources.with_label_values(&[state]).set(count as f64);
        }
        self.text.add(&models, metrics);
    }

    /// Serves one more; a model of the same name is replaced.
    pub fn insert(&self, model: Arc<ServedModel>) {
        let mut by_name = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        by_name.insert(Arc::clone(&model.name), model);
    }

    /// The model of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<ServedModel>> {
        self.by_name
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }

    /// Whether there is more than one.
    pub(crate) fn has_several(&self) -> bool {
        let by_name = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        by_name.len() > 1
    }

    /// The only one, if there is one and no other.
    pub(crate) fn only(&self) -> Option<Arc<ServedModel>> {
        let by_name = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        let mut models = by_name.values();
        let first = models.next();
        first.filter(|_| models.next().is_none()).cloned()
    }

    /// All of them, by name.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ServedModel>> {
        self.by_name
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect()
    }
}
