//! The workers of one endpoint behind one router: who is there, what their caches hold, how they are called.
//!
//! Answers one question: how does a router without a frontend know its workers, and send to them? Instances and cards of the endpoint
//! are followed in a store; [`EndpointFleet::send`] books a worker for a prompt, calls it and hands on its answer.
//!
//! What always holds: a worker is asked for nothing before its record was found, and for nothing new when it is gone; a booking ends
//! with its answer, however that ends; several fleets in one process share nothing but the planes.
//!
//! Elsewhere: which store and planes there are (`kvasir-planes`), who asks (`kvasir-services`, the bindings).

mod answer;

pub use answer::{EndpointAnswer, EndpointError, EndpointJob};

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kvasir_discovery::{
    Bucket, Card, Change, EndpointName, Instance, Record, RecordKey, Store, Watch,
};
use kvasir_router::WorkerSpec;
use kvasir_tasks::RuntimeThreads;
use kvasir_transport::EndpointClient;
#[cfg(feature = "nats")]
use kvasir_transport::nats::NatsLink;
use kvasir_types::{Device, DpRank, PlaneEndpoint, TransportKind, WorkerId};
use tokio::sync::Notify;

use crate::context::HostContext;
#[cfg(feature = "nats")]
use crate::event_log::EventLogOptions;
use crate::model::{Model, ModelSpec};
use crate::plane::{EndpointRecovery, EventPlane, EventPlaneOptions, PlaneWorker, endpoint_of};
use crate::replica::ReplicaAnnouncer;
use crate::setup::RouterSetup;

/// Whose workers a fleet has, and how they are found and reached.
pub struct EndpointFleetOptions {
    /// Whose workers.
    pub endpoint: EndpointName,
    /// Tokens in a block.
    pub block_size: u32,
    /// How the router is made.
    pub setup: RouterSetup,
    /// Where workers are found.
    pub store: Arc<dyn Store>,
    /// Who calls them, by the name of their request plane.
    pub clients: BTreeMap<&'static str, Arc<dyn EndpointClient>>,
    /// The connection to NATS, for event channels that are there.
    #[cfg(feature = "nats")]
    pub nats: NatsLink,
    /// How cache events are read that are kept in JetStream, if they are.
    #[cfg(feature = "nats")]
    pub log: Option<EventLogOptions>,
    /// Other replicas, where this one is in step with them.
    pub replicas: Option<ReplicaAnnouncer>,
    /// Where event streams run; the caller's runtime if there are none.
    pub threads: Option<Arc<RuntimeThreads>>,
    /// What jitter comes from, and the names of questions to workers.
    pub seed: u64,
}

/// Workers of an endpoint, and the router that chooses among them.
pub struct EndpointFleet {
    /// The router, its index and its ledger. The endpoint is its name.
    pub model: Model,
    clients: BTreeMap<&'static str, Arc<dyn EndpointClient>>,
    workers: Mutex<BTreeMap<WorkerId, PlaneEndpoint>>,
    /// What their cards call the models that they serve.
    models: Mutex<BTreeSet<String>>,
    replicas: Option<ReplicaAnnouncer>,
    changed: Notify,
}

impl fmt::Debug for EndpointFleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointFleet")
            .field("endpoint", &self.model.name)
            .field("workers", &self.worker_ids())
            .finish_non_exhaustive()
    }
}

impl EndpointFleet {
    /// Follows an endpoint's workers, as long as the tasks of `context` run and somebody holds the fleet.
    #[must_use]
    pub fn start(context: &HostContext, options: EndpointFleetOptions) -> Arc<Self> {
        let endpoint = options.endpoint;
        let spec = ModelSpec {
            name: endpoint.to_string().into(),
            block_size: options.block_size,
            context_length: 0,
            parent: None,
            migration_limit: 0,
        };
        let recovery = EndpointRecovery::new(options.clients.clone(), options.seed);
        let replicas = options.replicas;
        let plane = EventPlane::start(
            context,
            EventPlaneOptions {
                recovery: Arc::new(recovery),
                #[cfg(feature = "nats")]
                nats: options.nats,
                #[cfg(feature = "nats")]
                log: options.log,
                replicas: replicas.as_ref().map(|own| own.replicas().clone()),
                threads: options.threads,
                seed: options.seed,
            },
        );
        let fleet = Arc::new(Self {
            model: options.setup.make(&spec, None, context),
            clients: options.clients,
            workers: Mutex::default(),
            models: Mutex::default(),
            replicas,
            changed: Notify::new(),
        });
        let (store, tasks) = (options.store, context.tasks.background());
        if let Some(remote) = fleet.model.host.remote_index() {
            let namespace = endpoint.namespace.clone();
            remote.connect(&fleet.clients);
            remote.follow(&store, move |of| of == namespace);
        }
        if let Some(replicas) = &fleet.replicas {
            replicas.announce_in(&store, &context.tasks);
        }
        let namespace = endpoint.namespace.clone();
        let events = store.watch(plane.buckets());
        let heard = plane
            .clone()
            .follow(events, move |record| record.namespace() == namespace);
        tasks.spawn(heard);
        let follower = Follower {
            fleet: Arc::downgrade(&fleet),
            plane,
            events: options.setup.config.router_kv_events && options.setup.remote_index.is_none(),
            endpoint,
            instances: BTreeMap::new(),
            cards: BTreeMap::new(),
        };
        tasks.spawn(follower.run(store.watch(&[Bucket::Instances, Bucket::Models])));
        fleet
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, PlaneEndpoint>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a worker takes calls.
    #[must_use]
    pub fn address(&self, worker: WorkerId) -> Option<PlaneEndpoint> {
        self.lock().get(&worker).cloned()
    }

    /// Whether its workers serve a model of this name; any, as long as no card says one.
    #[must_use]
    pub fn serves(&self, model: &str) -> bool {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.is_empty() || models.contains(model)
    }

    /// The ids of those that are there.
    #[must_use]
    pub fn worker_ids(&self) -> Vec<u64> {
        self.lock().keys().map(|id| id.0).collect()
    }

    /// Brings the gauges of the router up to date.
    pub fn measure(&self) {
        let host = &self.model.host;
        host.measure(host.context().clock.now());
    }

    /// Waits until so many workers are there.
    pub async fn wait_for(&self, count: usize) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.lock().len() >= count {
                return;
            }
            changed.await;
        }
    }
}

/// Follows one endpoint in a store.
struct Follower {
    fleet: Weak<EndpointFleet>,
    plane: EventPlane,
    /// Cache events are wanted.
    events: bool,
    endpoint: EndpointName,
    instances: BTreeMap<RecordKey, Instance>,
    cards: BTreeMap<RecordKey, (u64, Card)>,
}

impl Follower {
    async fn run(mut self, mut watch: Watch) {
        loop {
            let changed = match watch.next().await {
                Change::Added(key, record) | Change::Updated(key, record) => self.put(key, &record),
                Change::Removed(key) => self.remove(&key),
                Change::Synced | Change::Lost(_) | Change::Restored => None,
            };
            let Some(fleet) = self.fleet.upgrade() else {
                return;
            };
            if let Some(worker) = changed {
                self.name_models(&fleet);
                self.bring(&fleet, worker);
                fleet.changed.notify_waiters();
            }
        }
    }

    fn put(&mut self, key: RecordKey, record: &Record) -> Option<u64> {
        match record {
            Record::Endpoint(instance) if instance.name() == self.endpoint => {
                let id = instance.instance_id;
                self.instances.insert(key, instance.clone());
                Some(id)
            }
            Record::Model(entry) if entry.name() == self.endpoint => {
                let card = Card::parse(&entry.card_json).ok()?;
                self.cards.insert(key, (entry.instance_id, card));
                Some(entry.instance_id)
            }
            _ => None,
        }
    }

    fn remove(&mut self, key: &RecordKey) -> Option<u64> {
        let instance = self.instances.remove(key).map(|gone| gone.instance_id);
        instance.or_else(|| self.cards.remove(key).map(|(id, _)| id))
    }

    fn name_models(&self, fleet: &EndpointFleet) {
        let own = self.cards.values().filter(|(_, card)| card.lora.is_none());
        let names: BTreeSet<String> = own.map(|(_, card)| card.name.clone()).collect();
        if let Some(name) = names.first() {
            fleet.model.host.set_remote_name(name);
        }
        *fleet.models.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// Tells the router what is known of a worker now.
    fn bring(&self, fleet: &EndpointFleet, id: u64) {
        let worker = WorkerId(id);
        let mut instances = self.instances.values();
        let Some(instance) = instances.find(|known| known.instance_id == id) else {
            if fleet.lock().remove(&worker).is_some() {
                self.plane.leave(worker);
                if let Some(replicas) = &fleet.replicas {
                    replicas.leave(worker, &fleet.model.host);
                }
                fleet.model.leave(worker);
            }
            return;
        };
        let cards = self.cards.values().filter(|(of, _)| *of == id);
        let spec = spec_of(instance, cards.map(|(_, card)| card));
        let address = endpoint_of(instance);
        let ranks = spec.rank_iter().collect();
        {
            // Whoever sees one of the two sees the other: a worker that was waited for can be booked, and one that is booked be called.
            let mut workers = fleet.lock();
            workers.insert(worker, address.clone());
            fleet.model.join(spec);
        }
        if let Some(replicas) = &fleet.replicas {
            let endpoint = |id: u64| (WorkerId(id), self.endpoint.clone());
            replicas.found(fleet.worker_ids().into_iter().map(endpoint).collect());
            replicas.join(worker, &fleet.model.host);
        }
        self.plane.join(PlaneWorker {
            id: worker,
            host: Arc::clone(&fleet.model.host),
            ranks,
            url: address.to_string(),
            events: self.events,
        });
    }
}

/// What the router is to know of a worker, by its record and its cards.
fn spec_of<'a>(instance: &Instance, cards: impl Iterator<Item = &'a Card>) -> WorkerSpec {
    let device = instance.device_type.as_deref().and_then(Device::from_name);
    let mut spec = WorkerSpec {
        transport: TransportKind::Plane,
        device: device.unwrap_or_default(),
        ..WorkerSpec::new(WorkerId(instance.instance_id))
    };
    for card in cards {
        let runtime = &card.runtime;
        if let Some(lora) = &card.lora {
            spec.loras.push(lora.as_str().into());
            continue;
        }
        spec.first_rank = DpRank(runtime.data_parallel_start_rank);
        spec.ranks = runtime.data_parallel_size;
        spec.kv_total_blocks = runtime.total_kv_blocks;
        spec.max_num_batched_tokens = runtime.max_num_batched_tokens;
        spec.max_num_seqs = runtime.max_num_seqs;
        spec.taints = runtime
            .taints
            .iter()
            .map(|taint| taint.as_str().into())
            .collect();
    }
    spec
}
