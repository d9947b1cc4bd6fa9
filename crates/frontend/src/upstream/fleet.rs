//! Watching OpenAI workers: what each serves, whether it answers, how busy it is.
//!
//! Each address has one task that asks gently and for ever. A worker that answers joins the models that it
//! serves; one that does not answer several times in a row leaves them and is asked again later.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::HOST;
use http::{Request, StatusCode, Uri};
use http_body_util::Full;
use kvasir_router::{Input, LoadReport, WorkerSpec};
use kvasir_trust::Doubt;
use kvasir_types::{DpRank, WorkerId, WorkerRank};
use tokio::sync::Notify;

use super::facts::{EngineModel, Facts, read_load};
use super::listen::{Ears, sources};
use super::{Pool, UpstreamError, WorkerAddress};
use crate::App;
use crate::models::{Backend, ServedModel};

/// Between two questions about load.
const LOAD_EVERY: Duration = Duration::from_secs(2);
/// Questions about load between two about everything else.
const LOADS_PER_PROBE: u32 = 5;
/// A worker has this long to answer a question.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);
/// Failures in a row after which a worker leaves.
const FAILURES_MAX: u32 = 3;
/// Longest answer to a question that is read.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// Tokens in a block where neither the engine nor its user says.
const BLOCK_SIZE: u32 = 16;
/// Longest sequence where the engine does not say.
const CONTEXT_LENGTH: u32 = u32::MAX;

/// A model that a worker serves and that we do not, yet.
#[derive(Clone, Debug)]
pub struct NewModel {
    /// Its name.
    pub name: Arc<str>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Longest prompt and answer together.
    pub context_length: u32,
}

/// Makes what is needed to serve a model; an error says why it cannot be served.
pub type MakeModel = dyn Fn(&NewModel) -> Result<Arc<ServedModel>, String> + Send + Sync;

/// Workers that are watched. Clones are one fleet.
#[derive(Clone)]
pub struct Fleet {
    app: Arc<App>,
    make_model: Arc<MakeModel>,
    /// Whether workers' cache events are listened to.
    events: bool,
    watched: Arc<Mutex<BTreeMap<WorkerId, Watched>>>,
    /// Held while a model is made: two workers that come at once share one.
    making: Arc<Mutex<()>>,
}

/// A worker that is watched.
struct Watched {
    address: WorkerAddress,
    /// Tells its watcher to let go.
    forget: Arc<Notify>,
}

impl Fleet {
    /// A fleet without workers.
    #[must_use]
    pub fn new(app: Arc<App>, make_model: Arc<MakeModel>) -> Self {
        Self {
            app,
            make_model,
            events: true,
            watched: Arc::default(),
            making: Arc::default(),
        }
    }

    /// The same, without listening to cache events (`--no-router-kv-events`).
    #[must_use]
    pub fn without_events(self) -> Self {
        Self {
            events: false,
            ..self
        }
    }

    /// Watches one more worker; false if it is watched already.
    pub fn watch(&self, address: WorkerAddress) -> bool {
        let forget = Arc::new(Notify::new());
        let watched = Watched {
            address: address.clone(),
            forget: Arc::clone(&forget),
        };
        match self.watched().entry(address.id()) {
            Entry::Occupied(_) => return false,
            Entry::Vacant(place) => place.insert(watched),
        };
        let pool = Pool::new(address);
        let mut watcher = Watcher {
            id: pool.address().id(),
            pool,
            fleet: self.clone(),
            serves: BTreeMap::new(),
            ears: Ears::default(),
            failures: 0,
        };
        let tasks = self.app.tasks().clone();
        self.app.tasks().spawn(async move {
            tokio::select! {
                () = watcher.run() => {}
                () = forget.notified() => watcher.leave(|_| true),
                () = tasks.draining() => {}
            }
        });
        true
    }

    /// Lets go of a worker: it gets nothing new, what runs there goes on. False if it is not watched.
    pub fn forget(&self, worker: WorkerId) -> bool {
        let watched = self.watched().remove(&worker);
        if let Some(watched) = &watched {
            watched.forget.notify_one();
        }
        watched.is_some()
    }

    /// Who is watched, whether it answers or not.
    #[must_use]
    pub fn addresses(&self) -> Vec<WorkerAddress> {
        self.watched().values().map(|w| w.address.clone()).collect()
    }

    fn watched(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The model of that name, made if it is new.
    fn model(&self, new: &NewModel) -> Option<Arc<ServedModel>> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(model) = self.app.models().get(&new.name) {
            return Some(model);
        }
        match (self.make_model)(new) {
            Ok(model) => {
                self.app.models().insert(Arc::clone(&model));
                Some(model)
            }
            Err(error) => {
                tracing::error!(model = %new.name, error, "model cannot be served");
                None
            }
        }
    }
}

/// Watches one worker.
struct Watcher {
    id: WorkerId,
    pool: Pool,
    fleet: Fleet,
    /// What the worker is a member of, and as what.
    serves: BTreeMap<Arc<str>, (Arc<ServedModel>, WorkerSpec)>,
    /// Who listens to its cache events.
    ears: Ears,
    failures: u32,
}

impl Watcher {
    async fn run(&mut self) {
        loop {
            match self.probe().await {
                Ok(facts) => {
                    self.failures = 0;
                    self.ears.settle().await;
                    self.join(&facts);
                }
                Err(error) => self.failed(&error),
            }
            for _ in 0..LOADS_PER_PROBE {
                tokio::time::sleep(LOAD_EVERY).await;
                self.pool.sweep();
                if self.serves.is_empty() {
                    break;
                }
                if let Ok(page) = self.get("/metrics").await {
                    self.report_load(&String::from_utf8_lossy(&page));
                }
            }
        }
    }

    /// Asks everything. Only `/v1/models` must be answered.
    async fn probe(&self) -> Result<Facts, UpstreamError> {
        let mut facts = Facts::default();
        facts.read_models(&self.get("/v1/models").await?);
        if let Ok(body) = self.get("/version").await {
            facts.read_version(&body);
        }
        if let Ok(page) = self.get("/metrics").await {
            facts.read_metrics(&String::from_utf8_lossy(&page));
        }
        if let Ok(body) = self.get("/kv_event_sources").await {
            facts.read_event_sources(&body);
        }
        Ok(facts)
    }

    fn failed(&mut self, error: &UpstreamError) {
        self.failures = self.failures.saturating_add(1);
        if self.failures == 1 {
            tracing::warn!(worker = %self.pool.address(), %error, "worker does not answer");
        }
        if self.failures >= FAILURES_MAX {
            self.leave(|_| true);
        }
    }

    fn join(&mut self, facts: &Facts) {
        let served: Vec<&EngineModel> = facts.models.iter().collect();
        self.leave(|name| !served.iter().any(|m| *m.name == **name));
        for model in served {
            self.join_model(model, facts);
        }
    }

    fn join_model(&mut self, model: &EngineModel, facts: &Facts) {
        let address = self.pool.address();
        let block_size = address
            .block_size
            .or(facts.block_size)
            .unwrap_or(BLOCK_SIZE);
        let new = NewModel {
            name: model.name.as_str().into(),
            block_size,
            context_length: model.max_model_len.unwrap_or(CONTEXT_LENGTH),
        };
        let Some(served) = self.fleet.model(&new) else {
            return;
        };
        let Backend::OpenAi { workers, .. } = &served.backend else {
            return;
        };
        let spec = WorkerSpec {
            ranks: address.data_parallel_size.or(facts.ranks).unwrap_or(1),
            kv_total_blocks: address.kv_blocks.or(facts.kv_blocks),
            max_num_batched_tokens: address.max_num_batched_tokens,
            ..WorkerSpec::new(self.id)
        };
        let sources = match self.fleet.events {
            true => sources(address, facts, spec.ranks),
            false => BTreeMap::new(),
        };
        for rank in spec.rank_iter() {
            let bar = match sources.contains_key(&rank.rank.0) {
                _ if !self.fleet.events => Some(Doubt::Forced),
                _ if served.block_size != block_size => Some(Doubt::BlockSize),
                true => None,
                false => Some(Doubt::NoEvents),
            };
            let pictures = served.host.pictures();
            pictures.join(&self.fleet.app, &served, rank, bar, None);
        }
        self.ears
            .attend(&self.fleet.app, &served, self.id, &sources);
        if self
            .serves
            .get(&new.name)
            .is_some_and(|(_, known)| *known == spec)
        {
            return;
        }
        workers.insert(self.id, self.pool.clone());
        served.join(spec.clone(), self.fleet.app.metrics());
        self.serves.insert(new.name, (served, spec));
    }

    fn leave(&mut self, gone: impl Fn(&Arc<str>) -> bool) {
        let (id, metrics) = (self.id, self.fleet.app.metrics());
        self.serves.retain(|name, (model, _)| {
            if !gone(name) {
                return true;
            }
            self.ears.turn_away(name);
            model.leave(id, metrics);
            if let Backend::OpenAi { workers, .. } = &model.backend {
                workers.remove(id);
            }
            false
        });
    }

    fn report_load(&self, page: &str) {
        for (rank, load) in read_load(page) {
            for (model, spec) in self.serves.values() {
                let used = load.kv_usage.zip(spec.kv_total_blocks);
                model.host.tell(Input::Load(LoadReport {
                    rank: WorkerRank {
                        worker: self.id,
                        rank: DpRank(rank),
                    },
                    kv_used_blocks: used.map(|(share, total)| (share * total as f64) as u64),
                    ..LoadReport::default()
                }));
            }
        }
    }

    async fn get(&self, path: &str) -> Result<Bytes, UpstreamError> {
        let uri = format!("{}{path}", self.pool.address().prefix);
        let uri: Uri = uri.parse().map_err(|_| UpstreamError::Gone)?;
        let make = || {
            let mut request = Request::new(Full::default());
            *request.uri_mut() = uri.clone();
            request.headers_mut().insert(HOST, self.pool.authority());
            request
        };
        let answer = async {
            let response = self.pool.send(make).await?;
            if response.status() != StatusCode::OK {
                return Err(UpstreamError::Status(response.status()));
            }
            response.into_body().collect(ANSWER_BYTES_MAX).await
        };
        let answered = tokio::time::timeout(ANSWER_PATIENCE, answer).await;
        answered.unwrap_or(Err(UpstreamError::AnswerTimeout))
    }
}
