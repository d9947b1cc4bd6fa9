//! The event plane of a process: what its workers publish, to the routers that they belong to.
//!
//! Answers one question: who listens to which channel, and whom does it tell? Discovery says which channels and sources there are,
//! membership which workers there are and whose; [`EventPlane`] listens to what concerns them. Cache events of a rank become a stream like an
//! engine's, with the worker's own index to ask ([`RecoveryClient`]), and are judged as those are. Published load drives busy thresholds; a prompt
//! that a worker says is computed is booked no longer. What other replicas say goes to [`Replicas`], where there are any.
//!
//! What always holds: a rank's stream is opened when its worker, its source and its channel are all known, and closed with the first of them that
//! goes; a rank is subscribed again only when its earlier stream has ended; what is held here is bounded by what discovery and membership hold.
//!
//! Elsewhere: discovery's backends, how a question travels (`kvasir-transport`), what is asked (`kvasir-kv-events`).

mod asking;
mod carriers;
mod endpoint_recovery;
mod members;
mod records;
mod topics;

pub use asking::{RecoveryClient, RecoveryFuture};
pub use endpoint_recovery::EndpointRecovery;
pub use records::{endpoint_of, plane_change};

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_discovery::Bucket;
use kvasir_kv_events::StreamOptions;
use kvasir_tasks::RuntimeThreads;
use kvasir_transport::event_plane::ChannelAddress;
#[cfg(feature = "nats")]
use kvasir_transport::jetstream::JetStream;
#[cfg(feature = "nats")]
use kvasir_transport::nats::NatsLink;
use kvasir_trust::Cause;
use kvasir_types::{PlaneEndpoint, WorkerId, WorkerRank};
#[cfg(feature = "nats")]
use kvasir_wire::native::LogNames;
use kvasir_wire::native::Topic;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::context::HostContext;
#[cfg(feature = "nats")]
use crate::event_log::{EventLog, EventLogOptions};
use crate::events::Subscriptions;
use crate::replica::Replicas;
use crate::router_host::RouterHost;
use asking::AskingSource;
use carriers::Carriers;
use members::{Member, WorkerRouters};
use topics::{Audience, Listener};

/// Changes that wait; who brings more waits.
const CHANGES_MAX: usize = 1024;

/// Where a publisher publishes a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneChannel {
    /// The publisher's id, which is not a worker's.
    pub publisher: u64,
    /// What it publishes.
    pub topic: Topic,
    /// Where.
    pub address: ChannelAddress,
}

/// Whose cache a publisher's events describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneSource {
    /// The publisher; its channel has the same id.
    pub publisher: u64,
    /// The rank.
    pub rank: WorkerRank,
    /// Who answers what its cache holds, if anybody does.
    pub recovery: Option<PlaneEndpoint>,
}

/// What changed.
#[derive(Clone, Debug)]
pub enum PlaneChange {
    /// A channel is there, or has another address.
    Channel(PlaneChannel),
    /// A channel is gone.
    ChannelGone {
        /// Whose.
        publisher: u64,
        /// Of which topic.
        topic: Topic,
    },
    /// A source is there, or is another.
    Source(PlaneSource),
    /// A source is gone.
    SourceGone {
        /// Whose.
        publisher: u64,
    },
    /// A worker is of this component; asked for where cache events may be kept in JetStream.
    Component {
        /// Which.
        worker: WorkerId,
        /// The component's namespace.
        namespace: String,
        /// The component.
        component: String,
    },
    /// A worker has an endpoint less.
    ComponentGone {
        /// Which.
        worker: WorkerId,
    },
}

/// A worker, as a member of a router.
#[derive(Clone, Debug)]
pub struct PlaneWorker {
    /// Who it is.
    pub id: WorkerId,
    /// Whose member.
    pub host: Arc<RouterHost>,
    /// Its ranks.
    pub ranks: Vec<WorkerRank>,
    /// Where it is, for people.
    pub url: String,
    /// Whether its cache events are wanted; its load always is.
    pub events: bool,
}

/// Tells the event plane what changed. Clones are one; the plane ends with the last of them.
#[derive(Clone, Debug)]
pub struct EventPlane {
    changes: mpsc::Sender<PlaneChange>,
    workers: WorkerRouters,
    reads_log: bool,
}

/// How an event plane listens.
pub struct EventPlaneOptions {
    /// Who asks workers what their caches hold.
    pub recovery: Arc<dyn RecoveryClient>,
    /// The connection to NATS, for channels that are there.
    #[cfg(feature = "nats")]
    pub nats: NatsLink,
    /// How cache events are read that are kept in JetStream, if they are: of workers that announce no channel of their own.
    #[cfg(feature = "nats")]
    pub log: Option<EventLogOptions>,
    /// Other replicas, where what they say counts.
    pub replicas: Option<Replicas>,
    /// Where streams run; the caller's runtime if there are none.
    pub threads: Option<Arc<RuntimeThreads>>,
    /// What jitter comes from.
    pub seed: u64,
}

impl EventPlane {
    /// Begins to listen to whatever it will be told of.
    #[must_use]
    pub fn start(context: &HostContext, options: EventPlaneOptions) -> Self {
        let (changes, received) = mpsc::channel(CHANGES_MAX);
        let workers = WorkerRouters::default();
        #[cfg(feature = "nats")]
        let reads_log = options.log.is_some();
        #[cfg(not(feature = "nats"))]
        let reads_log = false;
        let plane = Plane {
            context: context.clone(),
            carriers: Carriers::new(&options, &context.tasks),
            options,
            channels: BTreeMap::new(),
            sources: BTreeMap::new(),
            workers: workers.clone(),
            #[cfg(feature = "nats")]
            components: BTreeMap::new(),
            #[cfg(feature = "nats")]
            logs: BTreeMap::new(),
            streams: Subscriptions::default(),
            listeners: BTreeMap::new(),
        };
        context.tasks.background().spawn(plane.run(received));
        Self {
            changes,
            workers,
            reads_log,
        }
    }

    /// Of which records of a store it is to be told.
    #[must_use]
    pub const fn buckets(&self) -> &'static [Bucket] {
        match self.reads_log {
            true => &[
                Bucket::EventChannels,
                Bucket::EventSources,
                Bucket::Instances,
            ],
            false => &[Bucket::EventChannels, Bucket::EventSources],
        }
    }

    /// A worker is a member of a router from now on, or something about it changed.
    pub fn join(&self, worker: PlaneWorker) {
        self.workers.join(worker);
    }

    /// A worker has left its router.
    pub fn leave(&self, worker: WorkerId) {
        self.workers.leave(worker);
    }

    /// Something changed. Waits while others are being taken in.
    pub async fn tell(&self, change: PlaneChange) {
        let _ = self.changes.send(change).await;
    }
}

/// Where the events of an open stream come from, and for which stay of its worker.
#[derive(Debug, PartialEq, Eq)]
struct StreamOrigin {
    stay: u64,
    place: EventPlace,
}

#[derive(Debug, PartialEq, Eq)]
enum EventPlace {
    /// A channel that the worker announced.
    Channel {
        publisher: u64,
        address: ChannelAddress,
        recovery: Option<PlaneEndpoint>,
    },
    /// The stream of its component.
    #[cfg(feature = "nats")]
    Log(LogNames),
}

struct Plane {
    context: HostContext,
    options: EventPlaneOptions,
    carriers: Carriers,
    channels: BTreeMap<(Topic, u64), ChannelAddress>,
    /// By publisher.
    sources: BTreeMap<u64, PlaneSource>,
    workers: WorkerRouters,
    /// Of which component each worker is, and by how many endpoints that is known.
    #[cfg(feature = "nats")]
    components: BTreeMap<WorkerId, (LogNames, u32)>,
    /// By stream.
    #[cfg(feature = "nats")]
    logs: BTreeMap<String, EventLog>,
    streams: Subscriptions<WorkerRank, StreamOrigin>,
    /// Of topics that are not cache events.
    listeners: BTreeMap<(Topic, u64), Listener>,
}

impl Plane {
    async fn run(mut self, mut changes: mpsc::Receiver<PlaneChange>) {
        loop {
            let workers = self.workers.clone();
            tokio::select! {
                change = changes.recv() => match change {
                    Some(change) => self.take(change).await,
                    None => break,
                },
                changed = workers.changed() => {
                    for worker in changed {
                        self.follow_worker(worker).await;
                    }
                }
            }
        }
        self.streams.close(|_, _| true);
        self.streams.settle().await;
    }

    async fn take(&mut self, change: PlaneChange) {
        match change {
            PlaneChange::Channel(channel) => {
                let key = (channel.topic, channel.publisher);
                self.channels.insert(key, channel.address.clone());
                match channel.topic {
                    Topic::KvEvents => self.follow_publisher(channel.publisher).await,
                    _ => self.listen(channel),
                }
            }
            PlaneChange::ChannelGone { publisher, topic } => {
                self.channels.remove(&(topic, publisher));
                self.listeners.remove(&(topic, publisher));
                if topic == Topic::KvEvents {
                    self.follow_publisher(publisher).await;
                }
            }
            PlaneChange::Source(source) => {
                let (publisher, rank) = (source.publisher, source.rank);
                let before = self.sources.insert(publisher, source);
                let before = before.map(|source| source.rank).filter(|b| *b != rank);
                for rank in before.into_iter().chain([rank]) {
                    self.follow(rank).await;
                }
            }
            PlaneChange::SourceGone { publisher } => {
                if let Some(gone) = self.sources.remove(&publisher) {
                    self.follow(gone.rank).await;
                }
            }
            #[cfg(feature = "nats")]
            PlaneChange::Component {
                worker,
                namespace,
                component,
            } => {
                let names = LogNames::of(&namespace, &component);
                let known = self.components.entry(worker).or_insert((names, 0));
                known.1 += 1;
                if known.1 == 1 {
                    self.follow_worker(worker).await;
                }
            }
            #[cfg(feature = "nats")]
            PlaneChange::ComponentGone { worker } => {
                if let Some(known) = self.components.get_mut(&worker) {
                    known.1 -= 1;
                    if known.1 == 0 {
                        self.components.remove(&worker);
                        self.follow_worker(worker).await;
                    }
                }
            }
            #[cfg(not(feature = "nats"))]
            PlaneChange::Component { .. } | PlaneChange::ComponentGone { .. } => {}
        }
    }

    async fn follow_publisher(&mut self, publisher: u64) {
        if let Some(rank) = self.sources.get(&publisher).map(|source| source.rank) {
            self.follow(rank).await;
        }
    }

    async fn follow_worker(&mut self, worker: WorkerId) {
        let sources = self.sources.values().map(|source| source.rank);
        let member = self.workers.get(worker);
        let members = member.iter().flat_map(|member| member.ranks.clone());
        let of_worker = sources.filter(|rank| rank.worker == worker);
        let mut ranks: Vec<WorkerRank> = of_worker.chain(members).collect();
        ranks.sort_unstable();
        ranks.dedup();
        for rank in ranks {
            self.follow(rank).await;
        }
    }

    /// Where a rank's events come from, as far as is known. Of several publishers the last one counts.
    fn origin(&self, rank: WorkerRank, stay: u64) -> Option<StreamOrigin> {
        let of_rank = |source: &&PlaneSource| source.rank == rank;
        let sources = self.sources.values().filter(of_rank);
        let mut origins = sources.filter_map(|source| {
            let address = self.channels.get(&(Topic::KvEvents, source.publisher))?;
            let place = EventPlace::Channel {
                publisher: source.publisher,
                address: address.clone(),
                recovery: source.recovery.clone(),
            };
            Some(StreamOrigin { stay, place })
        });
        let announced = origins.next_back();
        #[cfg(feature = "nats")]
        let announced = announced.or_else(|| {
            self.options.log.as_ref()?;
            let (names, _) = self.components.get(&rank.worker)?;
            let place = EventPlace::Log(names.clone());
            Some(StreamOrigin { stay, place })
        });
        announced
    }

    /// Opens, closes or changes a rank's stream, so that it is what it should be.
    async fn follow(&mut self, rank: WorkerRank) {
        let member = self.workers.get(rank.worker);
        let wanted = member.as_ref().filter(|member| member.events);
        let wanted = wanted.and_then(|member| self.origin(rank, member.stay));
        if self.streams.origin(&rank) == wanted.as_ref() && wanted.is_some() {
            return;
        }
        self.streams.close(|open, _| *open == rank);
        self.streams.settle().await;
        let Some(member) = member else {
            return;
        };
        match wanted {
            Some(origin) => self.open(&member, rank, origin),
            // What another index says of it counts, and nobody here judges that.
            None if member.host.remote_index().is_some() => {}
            None => {
                let cause = match member.events {
                    // It was heard before, or may be later.
                    true => Cause::NoEvents,
                    false => Cause::Forced,
                };
                member.host.judge(rank, &member.url, Some(cause), None);
            }
        }
    }

    fn open(&mut self, member: &Member, rank: WorkerRank, origin: StreamOrigin) {
        let (publisher, address, recovery) = match &origin.place {
            EventPlace::Channel {
                publisher,
                address,
                recovery,
            } => (*publisher, address.clone(), recovery.clone()),
            #[cfg(feature = "nats")]
            EventPlace::Log(names) => {
                let names = names.clone();
                return self.open_log(member, rank, origin, &names);
            }
        };
        let host = &member.host;
        let tasks = self.context.tasks.background();
        let carriers = &self.carriers;
        let seed = self.options.seed ^ rank.worker.0 ^ u64::from(rank.rank.0) << 32;
        let options = StreamOptions {
            replay: recovery.is_some(),
            ..StreamOptions::router_events(host.block_size(), seed)
        };
        let client = Arc::clone(&self.options.recovery);
        let start = || {
            // On the stream's own thread: what is read wakes no other.
            let listening = carriers.listen(&tasks, &address, Topic::KvEvents, publisher);
            let source = match listening {
                Ok(source) => source,
                Err(error) => {
                    host.judge(rank, &member.url, Some(Cause::NoEvents), None);
                    tracing::warn!(%rank, %address, error, "cannot listen to this event channel");
                    return None;
                }
            };
            host.judge(rank, &member.url, None, None);
            tracing::info!(%rank, router = %host.name(), events = %address,
                recovery = recovery.is_some(), "subscribed to cache events");
            host.subscribe_router_events(rank, &address.to_string(), options, |tasks| {
                AskingSource::new(tasks, source, client, recovery)
            })
        };
        let threads = self.options.threads.as_deref();
        self.streams.open(rank, origin, threads, start);
    }

    /// Reads a rank's events from the stream of its component.
    #[cfg(feature = "nats")]
    fn open_log(
        &mut self,
        member: &Member,
        rank: WorkerRank,
        origin: StreamOrigin,
        names: &LogNames,
    ) {
        let Some(options) = &self.options.log else {
            return;
        };
        let log = self.logs.entry(names.stream.clone()).or_insert_with(|| {
            let jetstream = JetStream::new(self.options.nats.clone());
            EventLog::start(jetstream, names.clone(), options.clone(), &self.context)
        });
        let host = &member.host;
        host.judge(rank, &member.url, None, None);
        let address = format!("jetstream {}", names.stream);
        tracing::info!(%rank, router = %host.name(), events = address, "subscribed to cache events");
        let source = log.listen(rank);
        let options = StreamOptions::log(host.block_size());
        let start = || host.subscribe_router_events(rank, &address, options, |_| source);
        let threads = self.options.threads.as_deref();
        self.streams.open(rank, origin, threads, start);
        if let Some(stream) = self.streams.handle(&rank) {
            log.opened(rank, Arc::clone(host.index()), stream);
        }
    }

    /// Listens to load and bookings, and to what replicas say where there are any; other topics concern nobody here.
    fn listen(&mut self, channel: PlaneChannel) {
        let (topic, key) = (channel.topic, (channel.topic, channel.publisher));
        let open = self.listeners.get(&key);
        let concerns = match topic {
            Topic::KvMetrics | Topic::ActiveSequences => true,
            Topic::SessionAffinity | Topic::Replicas => self.options.replicas.is_some(),
            Topic::KvEvents | Topic::ForwardPass => false,
        };
        let is_own = |replicas: &Replicas| replicas.is_own(channel.publisher);
        if !concerns
            || self.options.replicas.as_ref().is_some_and(is_own)
            || open.is_some_and(|open| open.address == channel.address)
        {
            return;
        }
        let tasks = self.context.tasks.background();
        let carriers = &self.carriers;
        let threads = self.options.threads.as_deref();
        let slot = threads.and_then(RuntimeThreads::slot);
        let runtime = slot.as_ref().map(|slot| slot.handle.clone());
        let _entered = runtime.as_ref().map(Handle::enter);
        let listening = carriers.listen(&tasks, &channel.address, topic, channel.publisher);
        let source = match listening {
            Ok(source) => source,
            Err(error) => {
                return tracing::warn!(address = %channel.address, error, "cannot listen to this event channel");
            }
        };
        let audience = Audience {
            workers: self.workers.clone(),
            replicas: self.options.replicas.clone(),
            clock: self.context.clock,
        };
        let listener = Listener::start(&tasks, channel, source, audience, slot);
        self.listeners.insert(key, listener);
    }
}

#[cfg(test)]
mod tests;
