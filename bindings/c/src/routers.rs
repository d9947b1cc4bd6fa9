//! Which worker a request should go to: the routers behind one handle.
//!
//! A router of the workers that generate, and one of the workers that compute prompts as soon as there are any. Bodies are read as the
//! server reads them, with the tokenizer and the template that the model's card names.
//!
//! What always holds: a question changes nothing; a booking ends with `free_request`, with the handle, or when nobody has spoken of it for as
//! long as the router's own bookings live.

use std::collections::BTreeMap;
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_discovery::{
    Bucket, Card, Change, EndpointName, PodIdentity, Record, RecordKey, WorkerType,
};
use kvasir_embed::{
    EmbedError, HeldBookings, ProcessFleet, ProcessPlanes, Sharing, runtime, say_log_lines,
    settings_of,
};
use kvasir_frontend::RequestReader;
use kvasir_hash::Scope;
use kvasir_host::RouterSetup;
use kvasir_router::{Arrival, Outcome, Overrides, Pin, RouteError, RouterMode};
use kvasir_setup::router_setup;
use kvasir_tasks::Tasks;
use kvasir_types::{DpRank, RequestId, WorkerId, WorkerRank};
use serde_json::Value;

/// Longest wait for the first worker and its model's files.
const INIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest wait for a prefill worker, where one is required.
const DISAGG_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest time that a booking may take.
const BOOKING_TIMEOUT: Duration = Duration::from_secs(30);
/// A rank that the caller leaves open.
const RANK_UNSET: u32 = u32::MAX;

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum RouterFailure {
    InvalidHandle,
    InvalidParam(String),
    InitFailed(String),
    QueryFailed(String),
    DisaggEnforced(String),
    Timeout(String),
    Backpressure(String),
}

impl From<EmbedError> for RouterFailure {
    fn from(error: EmbedError) -> Self {
        Self::InitFailed(error.to_string())
    }
}

impl From<RouteError> for RouterFailure {
    fn from(error: RouteError) -> Self {
        let text = error.to_string();
        match error {
            RouteError::QueueLimit { .. }
            | RouteError::QueueTooSlow { .. }
            | RouteError::AllEligibleWorkersOverloaded { .. }
            | RouteError::PinnedWorkerOverloaded(_) => Self::Backpressure(text),
            RouteError::EmptyPrompt | RouteError::DuplicateRequest => Self::InvalidParam(text),
            _ => Self::QueryFailed(text),
        }
    }
}

/// A name for a question or a booking that nobody else has.
fn new_id() -> RequestId {
    // The standard library seeds its hashers from the system; nothing more is needed here.
    let draw = || u128::from(RandomState::new().build_hasher().finish());
    RequestId(draw() << 64 | draw())
}

/// Waits on this thread, which is the caller's.
fn wait<T>(work: impl Future<Output = Result<T, RouterFailure>>) -> Result<T, RouterFailure> {
    let (handle, _) = runtime()?;
    handle.block_on(work)
}

/// Which worker, and what it is to be sent.
pub(crate) struct Routed {
    pub(crate) target: WorkerRank,
    pub(crate) tokens: Vec<u32>,
    pub(crate) cache_namespace: Vec<u8>,
}

/// The prompt of a booking.
pub(crate) struct BookedPrompt<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) target: (u64, u32),
    pub(crate) cache_namespace: &'a str,
}

/// The routers of one model.
pub(crate) struct Routers {
    reader: RequestReader,
    decode: Arc<ProcessFleet>,
    prefill: Arc<OnceLock<Arc<ProcessFleet>>>,
    held: HeldBookings,
    enforce_disagg: bool,
    eagle: bool,
    tasks: Tasks,
}

impl Drop for Routers {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

impl Routers {
    /// Waits for a worker of the model in a namespace, loads its files, and follows its workers from then on.
    pub(crate) fn open(
        namespace: &str,
        component: Option<&str>,
        enforce_disagg: bool,
    ) -> Result<Self, RouterFailure> {
        let (handle, _) = runtime()?;
        let settings = settings_of("frontend", &[]).map_err(EmbedError::from)?;
        say_log_lines(&settings);
        let setup = router_setup(&settings);
        let mut setup = setup.map_err(|error| RouterFailure::InitFailed(error.to_string()))?;
        setup.config.router_mode = RouterMode::Kv;
        // Whoever asks sends the request itself: nothing here could hold it back.
        setup.config.overload_protection = false;
        let _entered = handle.enter();
        let planes = Arc::new(ProcessPlanes::open(settings)?);
        let opening = Box::pin(Self::follow(
            &planes,
            namespace,
            component,
            enforce_disagg,
            &setup,
        ));
        wait(async {
            let opened = tokio::time::timeout(INIT_TIMEOUT, opening).await;
            opened.unwrap_or_else(|_| {
                Err(RouterFailure::Timeout(format!(
                    "no worker of a model in namespace {namespace} in {} s: are workers up, and is DYN_DISCOVERY_BACKEND theirs?",
                    INIT_TIMEOUT.as_secs()
                )))
            })
        })
    }

    async fn follow(
        planes: &Arc<ProcessPlanes>,
        namespace: &str,
        component: Option<&str>,
        enforce_disagg: bool,
        setup: &RouterSetup,
    ) -> Result<Self, RouterFailure> {
        let (endpoint, card) = find_model(planes, |endpoint, card| {
            let role = card.role();
            let generates = !matches!(role, WorkerType::Prefill | WorkerType::Encode);
            let of_component = component.is_none_or(|name| endpoint.component == name);
            generates && of_component && endpoint.namespace.starts_with(namespace)
        })
        .await;
        let block_size = card.kv_cache_block_size.max(1);
        let reader = RequestReader::of_card(&card).await;
        let sharing = Sharing::of(planes.settings());
        let decode =
            ProcessFleet::open(planes, endpoint.clone(), block_size, setup.clone(), sharing)
                .await?;
        decode.wait_for(1).await;
        let routers = Self {
            reader,
            decode,
            prefill: Arc::default(),
            held: HeldBookings::new(planes.context.clock),
            enforce_disagg,
            eagle: card.runtime.enable_eagle,
            tasks: Tasks::new(),
        };
        let namespace = endpoint.namespace;
        routers.look_for_prefill(planes, namespace, block_size, setup.for_prefill());
        if enforce_disagg {
            let found = tokio::time::timeout(DISAGG_TIMEOUT, routers.wait_for_prefill());
            found.await.map_err(|_| no_prefill())?;
        }
        Ok(routers)
    }

    /// Workers that compute prompts are used as soon as there are any.
    fn look_for_prefill(
        &self,
        planes: &Arc<ProcessPlanes>,
        namespace: String,
        block_size: u32,
        setup: RouterSetup,
    ) {
        let (planes, found) = (Arc::clone(planes), Arc::clone(&self.prefill));
        self.tasks.background().spawn(async move {
            let (endpoint, _) = find_model(&planes, |endpoint, card| {
                card.role() == WorkerType::Prefill && endpoint.namespace == namespace
            })
            .await;
            let sharing = Sharing::of(planes.settings());
            match ProcessFleet::open(&planes, endpoint, block_size, setup, sharing).await {
                Ok(fleet) => drop(found.set(fleet)),
                Err(error) => tracing::error!(%error, "prefill workers are not followed"),
            }
        });
    }

    async fn wait_for_prefill(&self) {
        const LOOK: Duration = Duration::from_millis(50);
        while !self.is_disaggregated() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Whether prompts can be computed apart.
    fn is_disaggregated(&self) -> bool {
        let fleet = self.prefill.get();
        fleet.is_some_and(|fleet| !fleet.worker_ids().is_empty())
    }

    /// The best worker for the prompt of a request.
    pub(crate) fn route_prefill(&self, body: &str, pods: &str) -> Result<Routed, RouterFailure> {
        match self.prefill.get().filter(|_| self.is_disaggregated()) {
            Some(fleet) => self.route(fleet, body, pods, Overrides::default()),
            None if self.enforce_disagg => Err(no_prefill()),
            None => Err(RouterFailure::QueryFailed(
                "there are no prefill workers".into(),
            )),
        }
    }

    /// The best worker for the answer of a request; for all of it, unless its prompt is computed elsewhere.
    pub(crate) fn route_decode(
        &self,
        body: &str,
        pods: &str,
        is_disaggregated: bool,
    ) -> Result<Routed, RouterFailure> {
        if self.enforce_disagg && !is_disaggregated {
            return Err(no_prefill());
        }
        let overrides = match is_disaggregated {
            true => transferred(),
            false => Overrides::default(),
        };
        self.route(&self.decode, body, pods, overrides)
    }

    fn route(
        &self,
        fleet: &ProcessFleet,
        body: &str,
        pods: &str,
        overrides: Overrides,
    ) -> Result<Routed, RouterFailure> {
        let clock = fleet.planes.context.clock;
        let now = clock.unix_secs(clock.now());
        let read = self.reader.read(new_id(), body.as_bytes(), now);
        let read = read.map_err(|error| {
            RouterFailure::InvalidParam(format!("request_json: {}", error.message))
        })?;
        let mut arrival = read.arrival;
        arrival.query_only = true;
        arrival.session = None;
        arrival.constraints.allowed = allowed(pods)?;
        arrival.overrides = over(arrival.overrides, overrides);
        let namespace = read.cache_namespace.unwrap_or_default();
        let blocks = fleet
            .model
            .name_blocks_in(&read.tokens, &self.scope(&namespace));
        let booking = wait(async { Ok(fleet.model.book(arrival, &blocks).await?) })?;
        Ok(Routed {
            target: booking.target(),
            tokens: read.tokens.to_vec(),
            cache_namespace: namespace.into_bytes(),
        })
    }

    fn scope<'a>(&self, salt: &'a str) -> Scope<'a> {
        Scope {
            salt,
            eagle: self.eagle,
            ..Scope::default()
        }
    }

    /// Books a request at the worker that it is sent to.
    pub(crate) fn add_request(
        &self,
        name: &str,
        prompt: &BookedPrompt<'_>,
    ) -> Result<(), RouterFailure> {
        if self.held.holds(name) {
            let text = format!(
                "Request {name} already exists: free it first, or give this one an id of its own"
            );
            return Err(RouterFailure::InvalidParam(text));
        }
        let (worker, rank) = prompt.target;
        let isl = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        let mut arrival = Box::new(Arrival::new(new_id(), isl));
        arrival.pin = Pin {
            worker: Some(WorkerId(worker)),
            rank: (rank != RANK_UNSET).then_some(DpRank(rank)),
        };
        if self.is_disaggregated() {
            arrival.overrides = transferred();
        }
        let scope = self.scope(prompt.cache_namespace);
        let blocks = self.decode.model.name_blocks_in(prompt.tokens, &scope);
        let booking = wait(async {
            let booked = self.decode.model.book(arrival, &blocks);
            match tokio::time::timeout(BOOKING_TIMEOUT, booked).await {
                Ok(booked) => Ok(booked?),
                Err(_) => Err(RouterFailure::Timeout(format!(
                    "request {name} waits for {} s already",
                    BOOKING_TIMEOUT.as_secs()
                ))),
            }
        })?;
        self.held.insert(name.to_owned(), booking);
        Ok(())
    }

    /// The first token of a booked request came. Whether it is booked.
    pub(crate) fn mark_prefill_complete(&self, name: &str) -> bool {
        self.held.first_token(name)
    }

    /// A booked request ended. Whether it was booked.
    pub(crate) fn free_request(&self, name: &str) -> bool {
        let outcome = Outcome::Completed { output_tokens: 0 };
        self.held.finish(name, outcome)
    }
}

fn no_prefill() -> RouterFailure {
    RouterFailure::DisaggEnforced(
        "prompts are to be computed apart (enforce_disagg) and there are no prefill workers in the namespace".into(),
    )
}

/// What counts at a worker that gets a prompt's cache from another: load alone.
fn transferred() -> Overrides {
    Overrides {
        overlap_score_credit: Some(0.0),
        assume_kv_reuse: Some(false),
        track_prefill_tokens: Some(false),
        ..Overrides::default()
    }
}

/// A request's own settings, with some laid over them.
fn over(own: Overrides, laid: Overrides) -> Overrides {
    Overrides {
        overlap_score_credit: laid.overlap_score_credit.or(own.overlap_score_credit),
        assume_kv_reuse: laid.assume_kv_reuse.or(own.assume_kv_reuse),
        track_prefill_tokens: laid.track_prefill_tokens.or(own.track_prefill_tokens),
        ..own
    }
}

/// Waits until a store has a model that suits, and its card with it. Of several the one whose endpoint comes first.
async fn find_model(
    planes: &ProcessPlanes,
    suits: impl Fn(&EndpointName, &Card) -> bool,
) -> (EndpointName, Card) {
    let mut watch = planes.store.watch(&[Bucket::Models]);
    let mut found: BTreeMap<RecordKey, (EndpointName, Card)> = BTreeMap::new();
    let mut is_synced = false;
    loop {
        match watch.next().await {
            Change::Added(key, record) | Change::Updated(key, record) => {
                if let Record::Model(entry) = &*record
                    && let Ok(card) = Card::parse(&entry.card_json)
                    && card.lora.is_none()
                    && suits(&entry.name(), &card)
                {
                    found.insert(key, (entry.name(), card));
                }
            }
            Change::Removed(key) => drop(found.remove(&key)),
            Change::Synced => is_synced = true,
            Change::Lost(_) | Change::Restored => {}
        }
        if is_synced && let Some((_, model)) = found.pop_first() {
            return model;
        }
    }
}

/// The workers in the pods that a gateway allows: none where it names none. A pod's worker follows from its name, unless the pod says
/// `workerId`.
fn allowed(pods: &str) -> Result<Option<Vec<WorkerId>>, RouterFailure> {
    if pods.trim().is_empty() {
        return Ok(None);
    }
    let bad = |text: String| RouterFailure::InvalidParam(format!("pods_json: {text}"));
    let pods: Vec<Value> =
        serde_json::from_str(pods).map_err(|error| bad(format!("{error}; a list of pods")))?;
    let worker = |pod: &Value| {
        let pod = pod.get("pod").unwrap_or(pod);
        if let Some(id) = pod.get("workerId") {
            return id.as_u64().map(WorkerId);
        }
        let name = pod.get("podName")?.as_str()?.to_owned();
        let uid = String::new();
        Some(WorkerId(PodIdentity { name, uid }.instance_id()))
    };
    let workers: Vec<WorkerId> = pods.iter().filter_map(worker).collect();
    Ok((!workers.is_empty()).then_some(workers))
}
