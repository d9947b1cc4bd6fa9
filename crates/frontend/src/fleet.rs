//! The workers that serve: from the list of members to routers and models.
//!
//! Follows the list of members ([`Members`]). Each has one task that watches it as its transport asks for: an engine server is
//! probed ([`http_watcher`]), a worker on a request plane serves what its record says ([`plane_watcher`]). One that no source
//! has any more gets nothing new and leaves when what it has is done.

mod card_text;
mod context;
mod describe;
mod discovery;
mod event_addresses;
mod event_plane;
mod file;
mod health;
mod http_pool;
mod http_watcher;
pub(crate) mod members;
mod peers;
mod plane_watcher;
mod pods;
mod registration;
mod roster;
mod sessions;
mod silence;
mod subscribe;
mod token_probe;

pub(crate) use card_text::load_until_done as load_card_text;

pub use context::FleetContext;
pub use discovery::DiscoveryOptions;
pub use event_plane::EventPlaneSetup;
pub use file::{WorkersFile, WorkersFileError};
pub use http_pool::{HttpPool, HttpPoolError};
pub use peers::Peers;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_discovery::EndpointName;
use kvasir_host::{
    EventPlane, HicachePool, LoadedSnapshot, ReplicaAnnouncer, ReplicaCarrier, RouterSetup,
    SnapshotWriter,
};
use kvasir_tasks::{RuntimeThreads, Tasks};
use kvasir_text::ModelFolders;
use kvasir_transport::RequestPlane;
use kvasir_types::{HttpEndpoint, PlaneEndpoint, Transport, WorkerId, WorkerRecord};
use kvasir_upstream::{Bounds, Pool, WorkerTls};
use tokio::sync::watch;

use self::discovery::CardText;
use self::event_addresses::EventAddresses;
use self::http_watcher::HttpWatcher;
use self::plane_watcher::PlaneWatcher;
use self::roster::{Claims, RoutersOfPools};
use self::sessions::FleetSessions;
use crate::fleet::members::{Change, JoinOutcome, MemberState, Members, SourceName, WorkerSource};
use crate::models::links::WorkerLink;

/// Between two questions about load, unless a fleet is told otherwise.
const LOAD_EVERY: Duration = Duration::from_secs(2);
/// What a question to a worker may take, unless a fleet is told otherwise.
const QUESTION: Bounds = Bounds {
    timeout: Duration::from_secs(2),
    answer_bytes_max: 4 << 20,
};
/// What runs on a worker from which nothing comes for so long is given up, unless a fleet is told otherwise. A server that stalls
/// for some seconds finishes what it has.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Between two looks whether a worker on its way out still has something to do.
const DRAIN_LOOK: Duration = Duration::from_millis(50);
/// Tokens in a block where neither the engine nor its user says.
const BLOCK_SIZE: u32 = 16;
/// Tokens that an engine server computes in one step where neither it nor its user says: vLLM's own default on a large GPU.
const BATCH_ASSUMED: u64 = 8192;
/// Longest sequence where the engine does not say.
const CONTEXT_LENGTH: u32 = u32::MAX;

/// The way to a worker on a request plane, by its id and its place there; an error says why there is none.
pub type ConnectPlane =
    dyn Fn(WorkerId, &PlaneEndpoint) -> Result<Arc<dyn RequestPlane>, String> + Send + Sync;

/// Workers that are watched. Clones are one fleet.
#[derive(Clone)]
pub struct Fleet {
    context: FleetContext,
    /// How the routers of new models are made.
    setup: Arc<RouterSetup>,
    /// Tokenizers and templates of models.
    folders: Arc<ModelFolders>,
    /// Those of models that were discovered, by name.
    card_texts: Arc<Mutex<BTreeMap<Arc<str>, CardText>>>,
    /// Whether workers' cache events are listened to.
    events: bool,
    /// Where; on the caller's runtime if nowhere else.
    event_threads: Option<Arc<RuntimeThreads>>,
    /// What token workers publish.
    event_plane: Option<EventPlane>,
    /// Other replicas, where this one is in step with them.
    replicas: Option<ReplicaAnnouncer>,
    /// Between two questions about load.
    every: Duration,
    /// What a question may take.
    question: Bounds,
    /// A worker may be silent for so long.
    silence_max: Duration,
    /// Which workers are believed to be who they are.
    tls: WorkerTls,
    /// The request planes of this process, by name.
    planes: BTreeMap<&'static str, Arc<ConnectPlane>>,
    /// What each watcher is to do; it takes itself out when it has ended.
    watchers: Arc<Mutex<BTreeMap<WorkerId, watch::Sender<Goal>>>>,
    /// What `--worker` names.
    flags: Arc<WorkerSource>,
    /// What an earlier process kept.
    snapshot: Arc<LoadedSnapshot>,
    /// Who claims which model; held while one is made: two workers that come at once share it.
    claims: Arc<Mutex<Claims>>,
    /// Who listens to which event address.
    event_addresses: Arc<EventAddresses>,
    /// Where workers take news of sessions.
    sessions: Arc<FleetSessions>,
    /// A store that SGLang workers share.
    hicache: Option<Arc<HicachePool>>,
    /// The endpoints of workers that discovery found.
    endpoints: Arc<watch::Sender<BTreeSet<EndpointName>>>,
}

/// What is to become of a worker.
#[derive(Clone, Debug)]
enum Goal {
    /// It is to serve.
    Serve(Arc<WorkerRecord>),
    /// It is to end what it has and go.
    Drain,
    /// It is to go, and what runs there is cut off.
    Cut,
}

/// The goals of one worker; the last one counts.
type Goals = watch::Receiver<Goal>;

/// Why a watcher ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WatchEnd {
    /// Its worker is gone.
    Gone,
    /// Its worker is reached in another way now.
    OtherTransport,
}

impl Fleet {
    /// A fleet without workers; [`Self::start`] lets it follow the list of members.
    #[must_use]
    pub fn new(context: FleetContext, setup: RouterSetup) -> Self {
        let flags = SourceName::new("flag", "--worker");
        let clock = context.host.clock;
        let seed = clock.unix_nanos(clock.now()) ^ u64::from(std::process::id()) << 32;
        Self {
            sessions: FleetSessions::new(&context.models, seed),
            flags: Arc::new(context.members.source(flags)),
            context,
            setup: Arc::new(setup),
            folders: Arc::default(),
            card_texts: Arc::default(),
            events: true,
            event_threads: None,
            event_plane: None,
            replicas: None,
            every: LOAD_EVERY,
            question: QUESTION,
            silence_max: SILENCE_MAX,
            tls: WorkerTls::default(),
            planes: BTreeMap::new(),
            watchers: Arc::default(),
            snapshot: Arc::default(),
            claims: Arc::default(),
            event_addresses: Arc::default(),
            hicache: None,
            endpoints: Arc::new(watch::Sender::default()),
        }
    }

    /// The same, with the tokenizers and templates of these folders (`--model-path`).
    #[must_use]
    pub fn with_model_folders(self, folders: ModelFolders) -> Self {
        Self {
            folders: Arc::new(folders),
            ..self
        }
    }

    /// The same, telling this pool how workers that are discovered name their pages (`--shared-cache-type hicache`).
    #[must_use]
    pub fn with_hicache(self, pool: Arc<HicachePool>) -> Self {
        Self {
            hicache: Some(pool),
            ..self
        }
    }

    /// The endpoints of workers that discovery finds, from now on.
    #[must_use]
    pub fn endpoints(&self) -> watch::Receiver<BTreeSet<EndpointName>> {
        self.endpoints.subscribe()
    }

    /// The same, without subscribing to cache events (`--no-router-kv-events`).
    #[must_use]
    pub fn without_events(self) -> Self {
        Self {
            events: false,
            ..self
        }
    }

    /// The same, applying cache events on these threads (`--router-event-threads`).
    #[must_use]
    pub fn with_event_threads(self, threads: RuntimeThreads) -> Self {
        Self {
            event_threads: Some(Arc::new(threads)),
            ..self
        }
    }

    /// The same, in step with other replicas, on the event plane if there is a carrier (`--router-replica-sync`); to be called before
    /// [`Self::with_event_plane`].
    #[must_use]
    pub fn with_replicas(self, carrier: Option<ReplicaCarrier>, sessions: bool) -> Self {
        let replicas = ReplicaAnnouncer::new(&self.context.host, carrier, sessions);
        Self {
            replicas: Some(replicas),
            ..self
        }
    }

    /// The same, asking each worker so often how busy it is, and at a fifth of that what it is.
    #[must_use]
    pub fn asking_every(self, every: Duration) -> Self {
        Self { every, ..self }
    }

    /// The same, giving each answer so long to come.
    #[must_use]
    pub fn waiting(self, timeout: Duration) -> Self {
        let question = Bounds {
            timeout,
            ..self.question
        };
        Self { question, ..self }
    }

    /// The same, giving up what runs on a worker when nothing came from it for so long.
    #[must_use]
    pub fn giving_up_after(self, silence_max: Duration) -> Self {
        Self {
            silence_max,
            ..self
        }
    }

    /// The same, believing others (`--worker-tls-ca-path`).
    #[must_use]
    pub fn with_tls(self, tls: WorkerTls) -> Self {
        Self { tls, ..self }
    }

    /// The same, with a request plane on which workers may be.
    #[must_use]
    pub fn with_plane(mut self, name: &'static str, connect: Arc<ConnectPlane>) -> Self {
        self.planes.insert(name, connect);
        self
    }

    /// The same, with the index that an earlier process kept.
    #[must_use]
    pub fn with_snapshot(self, snapshot: LoadedSnapshot) -> Self {
        Self {
            snapshot: Arc::new(snapshot),
            ..self
        }
    }

    /// Keeps the index for a later process, in the file at `path`.
    #[must_use]
    pub fn snapshot_writer(&self, path: PathBuf) -> Arc<SnapshotWriter> {
        let routers = RoutersOfPools(
            Arc::clone(&self.context.models),
            Arc::clone(&self.context.prefill_pools),
        );
        SnapshotWriter::new(
            &self.context.host,
            Arc::new(routers),
            Arc::clone(&self.snapshot),
            path,
        )
    }

    /// Follows the list of members from now on.
    pub fn start(&self) {
        let mut changes = self.members().follow();
        self.snapshot.wait_for_models(self.tasks());
        let (fleet, tasks) = (self.clone(), self.tasks().clone());
        self.tasks().spawn(async move {
            loop {
                // In this order: sources that end with the process change nothing any more.
                let change = tokio::select! {
                    biased;
                    () = tasks.draining() => return,
                    change = changes.next() => change,
                };
                match change {
                    Some(change) => fleet.follow(change),
                    None => return,
                }
            }
        });
    }

    /// Adds a worker, as `--worker` does; false if it is there already.
    pub fn watch(&self, worker: WorkerRecord) -> bool {
        self.flags.join(worker) == Ok(JoinOutcome::New)
    }

    /// Lets go of a worker: it gets nothing new, what runs there goes on. False if it is not there.
    pub fn forget(&self, worker: WorkerId) -> bool {
        let leaving = |m: members::Member| m.state == MemberState::Draining;
        let known = self.members().get(worker).is_some_and(|m| !leaving(m));
        known && self.members().remove(worker, false) == Ok(true)
    }

    /// Who is to serve, whether it answers or not.
    #[must_use]
    pub fn workers(&self) -> Vec<Arc<WorkerRecord>> {
        let all = self.members().list().into_iter().map(|(_, member)| member);
        let stay = all.filter(|member| member.state != MemberState::Draining);
        stay.map(|member| member.record).collect()
    }

    fn members(&self) -> &Members {
        &self.context.members
    }

    fn tasks(&self) -> &Tasks {
        &self.context.host.tasks
    }

    /// Makes one change true.
    fn follow(&self, change: Change) {
        let (worker, goal) = match change {
            Change::Joined(record) | Change::Updated(record) => (record.id, Goal::Serve(record)),
            Change::Left { worker, force } => match force {
                true => (worker, Goal::Cut),
                false => (worker, Goal::Drain),
            },
        };
        let mut watchers = self.watchers();
        if let Some(watcher) = watchers.get(&worker) {
            watcher.send_replace(goal);
            return;
        }
        if !matches!(goal, Goal::Serve(_)) {
            return self.members().gone(worker);
        }
        let (sender, goals) = watch::channel(goal);
        watchers.insert(worker, sender);
        let (fleet, tasks) = (self.clone(), self.tasks().clone());
        self.tasks().spawn(async move {
            tokio::select! {
                () = fleet.watch_worker(worker, goals) => {}
                () = tasks.draining() => {}
            }
        });
    }

    /// Watches a worker until it is gone, however it is reached.
    async fn watch_worker(&self, worker: WorkerId, mut goals: Goals) {
        loop {
            let goal = goals.borrow_and_update().clone();
            let end = match goal {
                Goal::Serve(record) => self.serve(&record, &mut goals).await,
                Goal::Drain | Goal::Cut => WatchEnd::Gone,
            };
            if end == WatchEnd::Gone && self.is_done(worker, &goals) {
                return;
            }
        }
    }

    async fn serve(&self, record: &Arc<WorkerRecord>, goals: &mut Goals) -> WatchEnd {
        match &record.transport {
            Transport::Http(endpoint) => {
                return HttpWatcher::new(record, endpoint, self).run(goals).await;
            }
            Transport::Plane(endpoint) => {
                if let Some(link) = self.connect(record.id, endpoint) {
                    return PlaneWatcher::new(record, link, self).run(goals).await;
                }
                let unreachable = MemberState::Unreachable;
                self.members().report(record.id, unreachable);
            }
        }
        let _ = goals.changed().await;
        WatchEnd::OtherTransport
    }

    /// The way to a worker on a request plane, if there is one.
    fn connect(&self, worker: WorkerId, endpoint: &PlaneEndpoint) -> Option<WorkerLink> {
        let connected = match self.planes.get(&*endpoint.plane) {
            Some(connect) => connect(worker, endpoint),
            None => Err("this process has no such request plane".into()),
        };
        match connected {
            Ok(plane) => Some(WorkerLink::Plane {
                endpoint: endpoint.clone(),
                plane,
            }),
            Err(error) => {
                tracing::error!(worker = %endpoint, error, "worker cannot be reached");
                None
            }
        }
    }

    /// Takes a watcher out that has nothing left to do, unless it was given something meanwhile.
    fn is_done(&self, worker: WorkerId, goals: &watch::Receiver<Goal>) -> bool {
        let mut watchers = self.watchers();
        if goals.has_changed().unwrap_or(false) {
            return false;
        }
        watchers.remove(&worker);
        self.members().gone(worker);
        true
    }

    fn pool(&self, endpoint: &HttpEndpoint) -> Pool {
        let via = self.context.via.clone();
        Pool::with_via(endpoint.clone(), self.tls.clone(), Some(via))
    }

    pub(super) fn snapshot(&self) -> &LoadedSnapshot {
        &self.snapshot
    }

    fn card_texts(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, CardText>> {
        let texts = self.card_texts.lock();
        texts.unwrap_or_else(PoisonError::into_inner)
    }

    fn watchers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, watch::Sender<Goal>>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
