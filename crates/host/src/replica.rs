//! Replicas: other processes that route to the same workers.
//!
//! Answers one question: who is told what is booked here, and what of theirs counts here? [`Replicas`] is this process as one of
//! several. Its routers hand it what they book; it goes out on the event plane (`plane`), as Dynamo 1.6.1 sends it, or on links to named
//! peers. What peers say is told to the router of the worker that it is about.
//!
//! What always holds: nobody waits here: what finds no room is dropped and counted; what this process said itself is passed over; a
//! replica that is gone takes its bookings along.
//!
//! Elsewhere: what a booking counts (`kvasir-router`), bytes (`kvasir-wire`), sockets (`kvasir-transport`), who finds whom (discovery).

mod announce;
mod link;
mod plane;
mod translate;

pub use announce::{ReplicaAnnouncer, ReplicaCarrier};
pub use link::{
    PeerLinks, PeerOptions, PeerRow, PeerSecret, PeerStore, ReplicaFleet, SnapshotFuture,
    WorkerNote,
};
pub use plane::ReplicaChannels;
pub use translate::heard as peer_event;
pub(crate) use translate::request_id;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use kvasir_router::{Input, PeerEvent, ReplicaId};
use kvasir_types::{RequestId, Time, WorkerId, WorkerRank};
use kvasir_wire::native::{SequenceEvent, SessionBinding};
use tokio::sync::mpsc;

use crate::context::HostContext;
use crate::router_host::RouterHost;
use plane::PlaneCommand;

/// News that wait to be published; more are dropped and counted.
pub(crate) const NEWS_MAX: usize = 100_000;
/// Sessions that a replica tells one that asks.
const SESSIONS_MAX: usize = 100_000;

/// This process as one of several replicas. Clones are one.
#[derive(Clone, Debug)]
pub struct Replicas {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    id: ReplicaId,
    context: HostContext,
    members: Mutex<BTreeMap<WorkerId, SharedWorker>>,
    peers: Mutex<BTreeSet<ReplicaId>>,
    /// What replicas have said of what is under way, until all of it is said.
    recalls: Mutex<BTreeMap<RecallKey, Vec<RequestId>>>,
    /// When they were last asked.
    asked: Mutex<Time>,
    /// Publishers of this process.
    own: Mutex<BTreeSet<u64>>,
    plane: OnceLock<PlaneEnds>,
    /// Where links to named peers take news.
    links: OnceLock<mpsc::Sender<RoutedNews>>,
}

/// A replica, and the endpoint whose workers it speaks of.
type RecallKey = (u64, Arc<str>);

/// News, and the router that they are about.
pub(crate) type RoutedNews = (Arc<str>, ReplicaNews);

/// The ends of the event plane's task.
#[derive(Debug)]
struct PlaneEnds {
    news: mpsc::Sender<ReplicaNews>,
    commands: mpsc::Sender<PlaneCommand>,
}

/// A worker that replicas share.
#[derive(Clone, Debug)]
struct SharedWorker {
    /// The endpoint that it serves, where discovery has one.
    scope: Option<Arc<str>>,
    /// The routers that it is a member of.
    hosts: Vec<Weak<RouterHost>>,
}

/// Something that replicas are told: what a router did.
#[derive(Clone, Debug)]
pub(crate) enum ReplicaNews {
    Request(Box<PeerEvent>),
    Session {
        id: Arc<str>,
        target: WorkerRank,
        since: Time,
    },
}

impl ReplicaNews {
    const fn worker(&self) -> WorkerId {
        match self {
            Self::Request(event) => event.target.worker,
            Self::Session { target, .. } => target.worker,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Replicas {
    /// This process under an id that no other has: a random one.
    #[must_use]
    pub fn new(id: ReplicaId, context: &HostContext) -> Self {
        let shared = Shared {
            id,
            context: context.clone(),
            members: Mutex::default(),
            peers: Mutex::default(),
            recalls: Mutex::default(),
            asked: Mutex::new(Time::ZERO),
            own: Mutex::default(),
            plane: OnceLock::new(),
            links: OnceLock::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> ReplicaId {
        self.shared.id
    }

    /// Whether a publisher is of this process.
    pub(crate) fn is_own(&self, publisher: u64) -> bool {
        lock(&self.shared.own).contains(&publisher)
    }

    /// A worker is a member of a router here. `scope` is its endpoint, where discovery has one.
    pub fn join(&self, worker: WorkerId, host: &Arc<RouterHost>, scope: Option<&Arc<str>>) {
        host.share(self);
        let mut members = lock(&self.shared.members);
        let member = members.entry(worker).or_insert_with(|| SharedWorker {
            scope: None,
            hosts: Vec::new(),
        });
        member.scope = scope.cloned();
        member.hosts.retain(|known| known.strong_count() > 0);
        let weak = Arc::downgrade(host);
        let is_new = !member.hosts.iter().any(|known| known.ptr_eq(&weak));
        if is_new {
            member.hosts.push(weak);
        }
        drop(members);
        if is_new {
            self.command(PlaneCommand::Ask);
        }
    }

    /// A worker has left a router.
    pub fn leave(&self, worker: WorkerId, host: &Arc<RouterHost>) {
        let weak = Arc::downgrade(host);
        let mut members = lock(&self.shared.members);
        if let Some(member) = members.get_mut(&worker) {
            member.hosts.retain(|known| !known.ptr_eq(&weak));
            if member.hosts.is_empty() {
                members.remove(&worker);
            }
        }
    }

    /// A router did something.
    pub(crate) fn tell(&self, router: &Arc<str>, news: ReplicaNews) {
        if let Some(links) = self.shared.links.get()
            && links.try_send((Arc::clone(router), news.clone())).is_err()
        {
            self.count("dropped", 1);
        }
        if let Some(plane) = self.shared.plane.get()
            && plane.news.try_send(news).is_err()
        {
            self.count("dropped", 1);
        }
    }

    /// A replica says what became of a request, of this router if it says so; `recalled` if it was asked.
    pub(crate) fn hear(&self, event: &SequenceEvent, router: Option<&str>, recalled: bool) {
        let from = ReplicaId(event.router);
        if from == self.shared.id {
            return;
        }
        self.count("received", 1);
        self.meet(from);
        for host in self.hosts_of(event.rank.worker, router) {
            host.tell(Input::Peer {
                from,
                event: Box::new(translate::heard(event)),
                recalled,
            });
        }
    }

    /// A replica says where a session lives.
    pub(crate) fn hear_session(&self, binding: &SessionBinding, router: Option<&str>) {
        let from = ReplicaId(binding.writer);
        if from == self.shared.id {
            return;
        }
        self.count("received", 1);
        self.meet(from);
        let event = translate::heard_session(binding, &self.shared.context.clock);
        for host in self.hosts_of(binding.worker(), router) {
            host.tell(Input::Session(event.clone()));
        }
    }

    /// A replica is gone.
    pub(crate) fn lost(&self, replica: ReplicaId) {
        let mut peers = lock(&self.shared.peers);
        if peers.remove(&replica) {
            tracing::info!(replica = replica.0, "a replica is gone");
        }
        self.shared.context.metrics.replicas.set(peers.len() as f64);
        drop(peers);
        self.reset(replica);
    }

    /// What a replica had booked counts no more.
    fn reset(&self, replica: ReplicaId) {
        for host in self.hosts() {
            host.tell(Input::PeerGone(replica));
        }
    }

    /// A replica has spoken.
    fn meet(&self, replica: ReplicaId) {
        let mut peers = lock(&self.shared.peers);
        // The routers bound how many of them count.
        if peers.len() < kvasir_router::REPLICAS_MAX && peers.insert(replica) {
            self.shared.context.metrics.replicas.set(peers.len() as f64);
            tracing::info!(replica = replica.0, "a replica is there");
        }
    }

    fn count(&self, outcome: &str, events: usize) {
        let counter = &self.shared.context.metrics.replica_events_total;
        counter.with_label_values(&[outcome]).inc_by(events as u64);
    }

    fn hosts_of(&self, worker: WorkerId, router: Option<&str>) -> Vec<Arc<RouterHost>> {
        let members = lock(&self.shared.members);
        let member = members.get(&worker);
        let hosts = member.into_iter().flat_map(|member| &member.hosts);
        let named = |host: &Arc<RouterHost>| router.is_none_or(|name| **host.name() == *name);
        hosts.filter_map(Weak::upgrade).filter(named).collect()
    }

    /// All routers, each once.
    fn hosts(&self) -> Vec<Arc<RouterHost>> {
        let members = lock(&self.shared.members);
        let hosts = members.values().flat_map(|member| &member.hosts);
        let mut all: Vec<Arc<RouterHost>> = hosts.filter_map(Weak::upgrade).collect();
        all.sort_by_key(|host| Arc::as_ptr(host) as usize);
        all.dedup_by(|a, b| Arc::ptr_eq(a, b));
        all
    }

    /// The workers of an endpoint.
    fn workers_in(&self, scope: &str) -> Vec<WorkerId> {
        let members = lock(&self.shared.members);
        let is_in = |member: &SharedWorker| member.scope.as_deref() == Some(scope);
        let found = members.iter().filter(|(_, member)| is_in(member));
        found.map(|(worker, _)| *worker).collect()
    }

    fn scope_of(&self, worker: WorkerId) -> Option<Arc<str>> {
        lock(&self.shared.members).get(&worker)?.scope.clone()
    }

    /// What is under way here, and which sessions are bound.
    fn in_flight(&self) -> (Vec<SequenceEvent>, Vec<SessionBinding>) {
        let (mut requests, mut sessions) = (Vec::new(), Vec::new());
        for host in self.hosts() {
            let (booked, bound) = self.in_flight_of(&host);
            requests.extend(booked);
            sessions.extend(bound);
        }
        (requests, sessions)
    }

    /// The same of one router.
    fn in_flight_of(&self, host: &RouterHost) -> (Vec<SequenceEvent>, Vec<SessionBinding>) {
        let (id, clock) = (self.shared.id, &self.shared.context.clock);
        let (booked, bound) =
            host.ask(|router| (router.in_flight(), router.session_rows(SESSIONS_MAX)));
        let requests = booked.iter().map(|event| translate::told(event, id));
        let ours = bound.iter().filter(|row| !row.in_engine);
        let session = |row: &kvasir_router::SessionRow| {
            translate::told_session(&row.id, row.target, row.since, id, clock)
        };
        (requests.collect(), ours.map(session).collect())
    }

    fn command(&self, command: PlaneCommand) {
        if let Some(plane) = self.shared.plane.get() {
            // A question that finds no room is asked again; whoever asked us asks again.
            let _ = plane.commands.try_send(command);
        }
    }
}

#[cfg(test)]
mod tests;
