//! Other replicas: announced to them, and told what is booked here.
//!
//! Answers one question: on which channels does this process speak to replicas that route to the same workers? For each endpoint whose
//! workers were found it opens channels, writes them into the store that the workers were found in, and takes them back when the
//! last request has ended.
//!
//! Elsewhere: what is said there, and what of it counts ([`Replicas`]).

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_discovery::{
    EndpointName, EventChannel, EventScope, EventTransport, Lease, Record, Store,
};
use kvasir_router::ReplicaId;
use kvasir_tasks::Tasks;
#[cfg(feature = "nats")]
use kvasir_transport::event_plane::NatsEvents;
use kvasir_transport::event_plane::{ChannelAddress, PlanePublisher, PlanePublisherOptions};
use kvasir_types::WorkerId;
#[cfg(feature = "nats")]
use kvasir_wire::native;
use kvasir_wire::native::Topic;
use tokio::sync::Notify;

use super::{ReplicaChannels, Replicas};
use crate::context::HostContext;
use crate::router_host::RouterHost;

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
    #[cfg(feature = "nats")]
    Nats(NatsEvents),
}

/// This process as a replica that others find. Clones are one.
#[derive(Clone, Debug)]
pub struct ReplicaAnnouncer {
    replicas: Replicas,
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

impl ReplicaAnnouncer {
    /// In step with others, on the event plane if there is a carrier. `sessions`: they are bound by header, and so told.
    #[must_use]
    pub fn new(context: &HostContext, carrier: Option<ReplicaCarrier>, sessions: bool) -> Self {
        let replicas = Replicas::new(ReplicaId(random()), context);
        if carrier.is_some() {
            replicas.start_plane();
        }
        Self {
            replicas,
            carrier,
            sessions,
            endpoints: Arc::default(),
            changed: Arc::default(),
        }
    }

    /// What others are told, and what of theirs counts.
    #[must_use]
    pub const fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    /// Opens and announces channels for the endpoints of workers that are found, from now on; takes them back when `tasks` drain.
    /// Nothing without a carrier.
    pub fn announce_in(&self, store: &Arc<dyn Store>, tasks: &Tasks) {
        if self.carrier.is_none() {
            return;
        }
        let (own, store, drained) = (self.clone(), Arc::clone(store), tasks.clone());
        tasks.spawn(async move {
            let mut lease = None;
            tokio::select! {
                biased;
                () = drained.draining() => {}
                () = own.announce(&*store, &drained, &mut lease) => {}
            }
            // Requests have ended by now: nobody is told of load that goes on.
            if let Some(lease) = lease
                && let Err(error) = lease.revoke().await
            {
                tracing::warn!(%error, "what was announced to replicas stays until it expires");
            }
        });
    }

    fn endpoints(&self) -> MutexGuard<'_, BTreeMap<WorkerId, EndpointName>> {
        self.endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// These workers were found, each at its endpoint.
    pub fn found(&self, found: BTreeMap<WorkerId, EndpointName>) {
        let mut endpoints = self.endpoints();
        if *endpoints != found {
            *endpoints = found;
            self.changed.notify_one();
        }
    }

    /// A worker is a member of a router.
    pub fn join(&self, worker: WorkerId, host: &Arc<RouterHost>) {
        let endpoint = self.endpoints().get(&worker).map(EndpointName::to_string);
        let scope = endpoint.map(Arc::from);
        self.replicas.join(worker, host, scope.as_ref());
    }

    /// It is not any more.
    pub fn leave(&self, worker: WorkerId, host: &Arc<RouterHost>) {
        self.replicas.leave(worker, host);
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
        #[cfg(not(feature = "nats"))]
        let _ = endpoint;
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
                #[cfg(feature = "nats")]
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
