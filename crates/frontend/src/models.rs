//! A model as clients see it: how its workers are reached, and how a prompt of it becomes tokens.

pub(crate) mod prompt;
pub(crate) mod text_counts;
pub(crate) mod tokenize;

use std::ops::Deref;
use std::sync::Arc;

use kvasir_host::{Booking, ENDPOINT, Model, ModelEntry, PromptBlocks};
use kvasir_openai::Health;
use kvasir_router::{Arrival, RouteError, WorkerSpec};
use kvasir_text::TextModel;
use kvasir_transport::RequestPlane;
use kvasir_types::WorkerId;
use kvasir_upstream::Upstreams;
use serde_json::value::RawValue;

use crate::observe::meter::ModelMeters;
use crate::observe::token_source::TokenSource;
use tokenize::TokenSources;

/// The served models by name.
pub type Models = kvasir_host::Models<ServedModel>;

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

/// One served model: a model as it is routed, with what its clients need beside.
pub struct ServedModel {
    model: Model,
    /// How its workers are reached.
    pub backend: Backend,
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
    /// Serves `model` by workers that are reached through `backend`.
    #[must_use]
    pub fn new(model: Model, backend: Backend) -> Arc<Self> {
        let metrics = &model.host.context().metrics;
        let meters = ModelMeters::new(metrics, &model.name, &model.placements);
        Arc::new(Self {
            model,
            backend,
            meters,
        })
    }

    /// Chooses a worker and books it; waits while the router holds the request back.
    pub(crate) async fn book(
        &self,
        mut arrival: Arrival,
        blocks: &PromptBlocks,
    ) -> Result<Booking, RouteError> {
        arrival.model = self.asked_for();
        self.model.book(arrival, blocks).await
    }

    /// What the router has to know of a request's model: engines behind HTTP may serve others beside it.
    fn asked_for(&self) -> Option<Arc<str>> {
        match &self.backend {
            Backend::Tokens { .. } => None,
            Backend::OpenAi { .. } => Some(Arc::clone(&self.name)),
        }
    }

    /// Where a worker is, if it is reached over HTTP.
    pub(crate) fn url_of(&self, worker: WorkerId) -> Option<String> {
        match &self.backend {
            Backend::Tokens { .. } => None,
            Backend::OpenAi { workers, .. } => Some(workers.get(worker)?.endpoint().to_string()),
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
        let workers = self.specs();
        let [namespace, component, endpoint] = ENDPOINT;
        let name = format!("dyn://{namespace}.{component}.{endpoint}");
        if !workers.is_empty() && !health.endpoints.contains(&name) {
            health.endpoints.push(name);
        }
        for WorkerSpec { id, .. } in workers {
            let transport = match self.url_of(id) {
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
}
