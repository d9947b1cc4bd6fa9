//! The workers of one endpoint behind one router: who is there, what their caches hold, how they are called.
//!
//! Answers one question: how does a router inside a program know its workers? Instances and cards of the endpoint are followed in the
//! store; the router, the index, trust and bookings are the server's own (`kvasir-host`).
//!
//! What always holds: several routers in one process share nothing but the planes; a router that is dropped stops listening, and nobody
//! else notices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_discovery::{Bucket, Card, Change, EndpointName, Instance, Record, RecordKey, Watch};
use kvasir_host::{
    EndpointRecovery, EventPlane, EventPlaneOptions, HostContext, Model, ModelSpec, PlaneWorker,
    RouterSetup, endpoint_of,
};
use kvasir_router::WorkerSpec;
use kvasir_tasks::Tasks;
use kvasir_types::{Device, DpRank, PlaneEndpoint, TransportKind, WorkerId};
use tokio::sync::Notify;

use crate::{EmbedError, ProcessPlanes};

/// Workers of an endpoint, and the router that chooses among them.
pub struct EndpointFleet {
    /// The router, its index, and what is booked.
    pub model: Model,
    /// The planes that its workers are found and called by.
    pub planes: Arc<ProcessPlanes>,
    workers: Mutex<BTreeMap<WorkerId, PlaneEndpoint>>,
    changed: Notify,
    /// Those of this router alone.
    tasks: Tasks,
}

impl EndpointFleet {
    /// Follows an endpoint's workers from now on.
    pub async fn open(
        planes: &Arc<ProcessPlanes>,
        endpoint: EndpointName,
        block_size: u32,
        setup: &RouterSetup,
    ) -> Result<Arc<Self>, EmbedError> {
        let tasks = Tasks::new();
        let context = HostContext {
            tasks: tasks.clone(),
            ..planes.context.clone()
        };
        let (clients, nats) = planes.clients().await?;
        let seed = setup.config.router_seed;
        let spec = ModelSpec {
            name: endpoint.to_string().into(),
            block_size,
            context_length: 0,
            parent: None,
            migration_limit: 0,
        };
        let options = EventPlaneOptions {
            recovery: Arc::new(EndpointRecovery::new(clients.clone(), seed)),
            nats: nats.clone(),
            log: None,
            threads: None,
            seed,
            replicas: None,
        };
        let plane = EventPlane::start(&context, options);
        let fleet = Arc::new(Self {
            model: setup.make(&spec, None, &context),
            planes: Arc::clone(planes),
            workers: Mutex::default(),
            changed: Notify::new(),
            tasks: tasks.clone(),
        });
        let namespace = endpoint.namespace.clone();
        let events = planes
            .store
            .watch(&[Bucket::EventChannels, Bucket::EventSources]);
        let heard = plane
            .clone()
            .follow(events, move |record| record.namespace() == namespace);
        tasks.background().spawn(heard);
        let watch = planes.store.watch(&[Bucket::Instances, Bucket::Models]);
        let follower = Follower {
            fleet: Arc::downgrade(&fleet),
            plane,
            events: setup.config.router_kv_events,
            endpoint,
            instances: BTreeMap::new(),
            cards: BTreeMap::new(),
        };
        tasks.background().spawn(follower.run(watch));
        Ok(fleet)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, PlaneEndpoint>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a worker takes calls.
    #[must_use]
    pub fn address(&self, worker: WorkerId) -> Option<PlaneEndpoint> {
        self.lock().get(&worker).cloned()
    }

    /// The ids of those that are there.
    #[must_use]
    pub fn worker_ids(&self) -> Vec<u64> {
        self.lock().keys().map(|id| id.0).collect()
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

impl Drop for EndpointFleet {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// Follows one endpoint in a store.
struct Follower {
    fleet: std::sync::Weak<EndpointFleet>,
    plane: EventPlane,
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

    /// Tells the router what is known of a worker now.
    fn bring(&self, fleet: &EndpointFleet, id: u64) {
        let worker = WorkerId(id);
        let Some(instance) = self
            .instances
            .values()
            .find(|known| known.instance_id == id)
        else {
            if fleet.lock().remove(&worker).is_some() {
                self.plane.leave(worker);
                fleet.model.leave(worker);
            }
            return;
        };
        let cards = self.cards.values().filter(|(of, _)| *of == id);
        let spec = spec_of(instance, cards.map(|(_, card)| card));
        let address = endpoint_of(instance);
        let ranks = spec.rank_iter().collect();
        fleet.model.join(spec);
        self.plane.join(PlaneWorker {
            id: worker,
            host: Arc::clone(&fleet.model.host),
            ranks,
            url: address.to_string(),
            events: self.events,
        });
        fleet.lock().insert(worker, address);
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
