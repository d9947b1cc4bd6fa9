//! A model as clients see it: how its workers are reached, and how a prompt of it becomes tokens.

pub(crate) mod answer_formats;
pub(crate) mod links;
pub(crate) mod prompt;
pub(crate) mod text_counts;
pub(crate) mod tokenize;

use std::ops::Deref;
use std::sync::Arc;

use kvasir_host::{Booking, ENDPOINT, Model, ModelEntry, PromptBlocks};
use kvasir_openai::Health;
use kvasir_router::{Arrival, RouteError, WorkerSpec};
use kvasir_telemetry::PREFILL_POOL;
use kvasir_text::TextModel;
use kvasir_types::{TransportKind, WorkerId};
use serde_json::json;
use serde_json::value::RawValue;

use crate::observe::meter::ModelMeters;
use links::{Links, Transports, WorkerLink};
use tokenize::TokenSources;

/// The served models by name.
pub type Models = kvasir_host::Models<ServedModel>;

/// What the pool of a model's prefill workers is called.
pub(crate) fn prefill_pool_name(model: &str) -> String {
    [model, PREFILL_POOL].concat()
}

/// The model whose prefill workers are called so.
pub(crate) fn model_of_prefill_pool(pool: &str) -> &str {
    pool.strip_suffix(PREFILL_POOL).unwrap_or(pool)
}

/// One served model: a model as it is routed, with what its clients need beside.
pub struct ServedModel {
    model: Model,
    /// How its prompts become tokens.
    tokens: TokenSources,
    /// How each of its workers is reached.
    links: Links,
    /// What is counted of its clients' requests.
    pub meters: Arc<ModelMeters>,
}

impl Deref for ServedModel {
    type Target = Model;

    fn deref(&self) -> &Model {
        &self.model
    }
}

impl ModelEntry for ServedModel {
    fn model(&self) -> &Model {
        &self.model
    }

    /// A request that ends holds only what it counts in.
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.meters) > 1
    }
}

impl ServedModel {
    /// Serves `model`, whose prompts become tokens by `tokens`, and whose first worker is expected to be reached over
    /// `transport`.
    #[must_use]
    pub fn new(model: Model, tokens: TokenSources, transport: TransportKind) -> Arc<Self> {
        let metrics = &model.host.context().metrics;
        let meters = ModelMeters::new(metrics, &model.name, &model.placements);
        Arc::new(Self {
            model,
            tokens,
            links: Links::new(transport),
            meters,
        })
    }

    /// A worker is there that serves this model alone, or its facts changed.
    pub fn join(&self, mut spec: WorkerSpec, link: WorkerLink) {
        spec.transport = link.kind();
        let known = self.admit(&spec, link);
        self.model.enter_router(spec, known.as_ref());
    }

    /// A worker serves it, or its facts changed; what was known of it before. The router is told apart.
    pub(crate) fn admit(&self, spec: &WorkerSpec, link: WorkerLink) -> Option<WorkerSpec> {
        self.links.insert(spec.id, link);
        self.model.admit(spec)
    }

    /// A worker that serves this model alone is gone.
    pub fn leave(&self, worker: WorkerId) {
        self.model.leave(worker);
        self.links.remove(worker);
    }

    /// A worker serves it no more. The router is told apart.
    pub(crate) fn dismiss(&self, worker: WorkerId) {
        self.model.dismiss(worker);
        self.links.remove(worker);
    }

    /// Whether its workers compute prompts for those of another.
    pub(crate) fn is_prefill_pool(&self) -> bool {
        self.name.ends_with(PREFILL_POOL)
    }

    /// How its workers are reached.
    pub(crate) fn links(&self) -> &Links {
        &self.links
    }

    /// Which transports its workers have.
    pub(crate) fn transports(&self) -> Transports {
        self.links.transports()
    }

    /// How its prompts become tokens.
    pub(crate) fn tokens(&self) -> &TokenSources {
        &self.tokens
    }

    /// Chooses a worker and books it; waits while the router holds the request back.
    pub(crate) async fn book(
        &self,
        mut arrival: Box<Arrival>,
        blocks: &PromptBlocks,
    ) -> Result<Booking, RouteError> {
        arrival.model = Some(Arc::clone(&self.name));
        self.model.book(arrival, blocks).await
    }

    /// Where a worker is, if it is reached over HTTP.
    pub(crate) fn url_of(&self, worker: WorkerId) -> Option<String> {
        Some(self.links.http(worker)?.endpoint().to_string())
    }

    /// Its template and tokenizer, where they are known.
    #[must_use]
    pub fn text(&self) -> Option<&Arc<TextModel>> {
        self.tokens.text()
    }

    /// What its prompts become tokens by, as a word.
    pub(crate) fn tokens_from(&self) -> &'static str {
        self.tokens.best().name()
    }

    /// Adds its workers to the health page.
    pub(crate) fn describe(&self, health: &mut Health) {
        let workers = self.specs();
        let [namespace, component, endpoint] = ENDPOINT;
        let name = format!("dyn://{namespace}.{component}.{endpoint}");
        if !workers.is_empty() && !health.endpoints.contains(&name) {
            health.endpoints.push(name);
        }
        for WorkerSpec { id, .. } in workers {
            let transport = match self.links.get(id) {
                Some(WorkerLink::Http(pool)) => json!({ "http": pool.endpoint().to_string() }),
                Some(WorkerLink::Plane { endpoint, .. }) => {
                    json!({ &*endpoint.plane: &*endpoint.address })
                }
                // It went in the meantime.
                None => continue,
            };
            let instance = json!({
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
}
