//! Other replicas: announced to them, and told what is booked here.
//!
//! Answers one question: on which channels does this process speak to replicas that route to the same workers? For each endpoint whose
//! workers were found it opens channels, writes them into the store that the workers were found in, and takes them back when the
//! last request has ended.
//!
//! Elsewhere: what is said there, and what of it counts (`kvasir_host`: `Replicas`).

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_discovery::{
    EndpointName, EventChannel, EventScope, EventTransport, FoundWorker, Lease, Record, Store,
};
use kvasir_host::{ReplicaChannels, Replicas, RouterHost};
use kvasir_router::ReplicaId;
use kvasir_tasks::Tasks;
use kvasir_transport::event_plane::{
    ChannelAddress, NatsEvents, PlanePublisher, PlanePublisherOptions,
};
use kvasir_types::WorkerId;
use kvasir_wire::native::{self, Topic};
use tokio::sync::Notify;

use super::Fleet;

/// Between two tries to announce a channel.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);

/// How this process speaks to other replicas.
#[derive(Clone, Debug)]
pub enum ReplicaCarrier {
    /// Each channel is a PUB socket of this process.
    Zmq {
        /// The host by which replicas reach it.
        host: String,
    },
    /// Channels are subjects.
    Nats(NatsEvents),
}

/// The replicas of a fleet. Clones are one.
#[derive(Clone)]
pub(super) struct FleetReplicas {
    pub(super) replicas: Replicas,
    /// None without an event plane.
    carrier: Option<ReplicaCarrier>,
    /// Whether sessions are bound by header, and so told.
    sessions: bool,
    /// The endpoints of workers that were found.
    endpoints: Arc<Mutex<BTreeMap<WorkerId, EndpointName>>>,
    /// There are others.
    changed: Arc<Notify>,
}

/// A random number; the standard library seeds its hashers from the system, and nothing more is needed here.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

impl Fleet {
    /// The same, in step with other replicas, on the event plane if there is a carrier (`--router-replica-sync`); to be called before
    /// [`Self::with_event_plane`].
    #[must_use]
    pub fn with_replicas(self, carrier: Option<ReplicaCarrier>, sessions: bool) -> Self {
        let replicas = Replicas::new(ReplicaId(random()), &self.context.host);
        if carrier.is_some() {
            replicas.start_plane();
        }
        Self {
            replicas: Some(FleetReplicas {
                replicas,
                carrier,
                sessions,
                endpoints: Arc::default(),
                changed: Arc::default(),
            }),
            ..self
        }
    }

    /// Opens and announces channels for the endpoints of workers that are found, from now on.
    pub(super) fn announce_replica(&self, store: &Arc<dyn Store>) {
        let on_plane = |known: &&FleetReplicas| known.carrier.is_some();
        let Some(replicas) = self.replicas.as_ref().filter(on_plane).cloned() else {
            return;
        };
        let (store, tasks) = (Arc::clone(store), self.tasks().clone());
        self.tasks().spawn(async move {
            let mut lease = None;
            tokio::select! {
                biased;
                () = tasks.draining() => {}
                () = replicas.announce(&*store, &tasks, &mut lease) => {}
            }
            // Requests have ended by now: nobody is told of load that goes on.
            if let Some(lease) = lease
                && let Err(error) = lease.revoke().await
            {
                tracing::warn!(%error, "what was announced to replicas stays until it expires");
            }
        });
    }
}

impl FleetReplicas {
    fn endpoints(&self) -> MutexGuard<'_, BTreeMap<WorkerId, EndpointName>> {
        self.endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// These workers were found.
    pub(super) fn found<'w>(&self, workers: impl Iterator<Item = &'w FoundWorker>) {
        let found = workers.map(|worker| (worker.record.id, worker.endpoint.clone()));
        let found: BTreeMap<_, _> = found.collect();
        let mut endpoints = self.endpoints();
        if *endpoints != found {
            *endpoints = found;
            self.changed.notify_one();
        }
    }

    /// A worker is a member of a router.
    pub(super) fn join(&self, worker: WorkerId, host: &Arc<RouterHost>) {
        let endpoint = self.endpoints().get(&worker).map(EndpointName::to_string);
        let scope = endpoint.map(Arc::from);
        self.replicas.join(worker, host, scope.as_ref());
    }

    /// Opens the channels of each endpoint that is new, for ever.
    async fn announce(&self, store: &dyn Store, tasks: &Tasks, lease: &mut Option<Arc<dyn Lease>>) {
        let mut open = BTreeSet::new();
        loop {
            let wanted: BTreeSet<EndpointName> = self.endpoints().values().cloned().collect();
            for endpoint in wanted.difference(&open.clone()) {
                self.open(endpoint, store, tasks, lease).await;
                open.insert(endpoint.clone());
            }
            self.changed.notified().await;
        }
    }

    /// Opens the channels of an endpoint and announces them; tries until that is done.
    async fn open(
        &self,
        endpoint: &EndpointName,
        store: &dyn Store,
        tasks: &Tasks,
        lease: &mut Option<Arc<dyn Lease>>,
    ) {
        let mut said = false;
        let channels = loop {
            match self.channels(endpoint, tasks).await {
                Ok(channels) => break channels,
                Err(error) => say(&mut said, &error),
            }
            tokio::time::sleep(ANNOUNCE_EVERY).await;
        };
        let all = [
            Some(&channels.sequences),
            channels.sessions.as_ref(),
            Some(&channels.replicas),
        ];
        let all = all.into_iter().flatten();
        let records: Vec<Record> = all.map(|channel| record_of(endpoint, channel)).collect();
        let scope = Arc::from(endpoint.to_string());
        self.replicas.publish_on(&scope, channels).await;
        for record in records {
            while let Err(error) = put(store, lease, &record).await {
                say(&mut said, &error);
                tokio::time::sleep(ANNOUNCE_EVERY).await;
            }
        }
        tracing::info!(%endpoint, replica = self.replicas.id().0, "in step with other replicas");
    }

    async fn channels(
        &self,
        endpoint: &EndpointName,
        tasks: &Tasks,
    ) -> io::Result<ReplicaChannels> {
        let open = async |topic: Topic| {
            let mut options = PlanePublisherOptions {
                // Exact as a number of JavaScript.
                publisher: (random() >> 11).max(1),
                topic,
                host: String::new(),
            };
            match &self.carrier {
                None => Err(io::ErrorKind::Unsupported.into()),
                Some(ReplicaCarrier::Zmq { host }) => {
                    options.host.clone_from(host);
                    PlanePublisher::bind_zmq(&tasks.background(), options).await
                }
                Some(ReplicaCarrier::Nats(events)) => {
                    let EndpointName {
                        namespace,
                        component,
                        endpoint,
                    } = endpoint;
                    let scope = native::EventScope::endpoint(namespace, component, endpoint);
                    let prefix = scope.subject_prefix();
                    Ok(PlanePublisher::on_nats(events, &prefix, &options))
                }
            }
        };
        Ok(ReplicaChannels {
            sequences: open(Topic::ActiveSequences).await?,
            sessions: match self.sessions {
                true => Some(open(Topic::SessionAffinity).await?),
                false => None,
            },
            replicas: open(Topic::Replicas).await?,
        })
    }
}

fn say(said: &mut bool, error: &dyn std::fmt::Display) {
    if !std::mem::replace(said, true) {
        tracing::error!(%error, "this replica cannot be announced to the others, which do not see its load; it is tried until it can");
    }
}

async fn put(
    store: &dyn Store,
    lease: &mut Option<Arc<dyn Lease>>,
    record: &Record,
) -> Result<(), kvasir_discovery::StoreError> {
    let lease = match lease {
        Some(lease) => lease,
        None => lease.insert(store.lease().await?),
    };
    lease.put(record.clone()).await
}

fn record_of(endpoint: &EndpointName, channel: &PlanePublisher) -> Record {
    let topic = channel.topic().name();
    let transport = match channel.address() {
        ChannelAddress::Zmq(endpoint) => EventTransport::Zmq { endpoint },
        ChannelAddress::Nats(subject) => {
            let prefix = subject.strip_suffix(topic).unwrap_or(&subject);
            EventTransport::Nats {
                subject_prefix: prefix.trim_end_matches('.').to_owned(),
            }
        }
    };
    Record::EventChannel(EventChannel {
        scope: EventScope::of(endpoint.clone()),
        topic: topic.to_owned(),
        instance_id: channel.publisher(),
        transport,
    })
}
