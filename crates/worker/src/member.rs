//! An endpoint of a process as a member of a fleet, announced piece by piece.
//!
//! Answers one question: how does a program announce what it has when it does not come all at once, as [`Membership`](crate::Membership) has it?
//! It takes calls, publishes what its cache holds or how loaded it is, and names its model, each when it wants to. All of it is
//! under one lease and goes with that.
//!
//! What always holds: what is announced can be asked already; a store that cannot be reached is an error at once and nothing is waited for.

use std::sync::Arc;

use kvasir_discovery::record::SourceRank;
use kvasir_discovery::{EndpointName, Instance, Lease, Record, RecordKey};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::{EndpointHandler, ServedEndpoint};
use kvasir_types::{Codec, KvEvent, WorkerId, WorkerRank};
use kvasir_wire::native::{ActiveLoad, Topic};

use crate::cache::{CacheQuery, RankCache};
use crate::channels::Channel;
use crate::{EventCarrier, JoinError, RequestServer, records};

/// An endpoint that this process has, under a lease.
#[derive(Clone)]
pub struct EndpointMember {
    /// Under which all is announced; its id is the worker's.
    pub lease: Arc<dyn Lease>,
    /// The endpoint.
    pub endpoint: EndpointName,
    /// Where its calls come in.
    pub server: RequestServer,
    /// How its events travel.
    pub carrier: EventCarrier,
    /// What it computes on, as other workers' records say it.
    pub device: Option<String>,
    /// In which form it takes requests.
    pub codec: Codec,
    /// The time.
    pub clock: Clock,
    /// Where its tasks run.
    pub tasks: Tasks,
}

impl EndpointMember {
    /// The worker's id.
    #[must_use]
    pub fn id(&self) -> WorkerId {
        WorkerId(self.lease.id())
    }

    /// Hands the endpoint's calls to `handler` and says so to everybody; until what it returns is dropped.
    pub async fn serve(
        &self,
        handler: Arc<dyn EndpointHandler>,
    ) -> Result<ServedEndpoint, JoinError> {
        let (served, instance) = self.take_calls(&self.endpoint, handler).await?;
        self.put(Record::Endpoint(instance)).await?;
        Ok(served)
    }

    /// Says again that the endpoint takes calls, after [`Self::withdraw`].
    pub async fn announce(&self) -> Result<(), JoinError> {
        self.put(Record::Endpoint(self.instance(&self.endpoint)))
            .await
    }

    /// Nobody is to find the endpoint any more; calls that come all the same are taken.
    pub async fn withdraw(&self) -> Result<(), JoinError> {
        let key = Record::Endpoint(self.instance(&self.endpoint)).key();
        self.remove(key).await
    }

    /// Names a model that the endpoint serves. `suffix` tells several of one endpoint apart.
    pub async fn announce_model(
        &self,
        card: serde_json::Value,
        suffix: Option<String>,
    ) -> Result<(), JoinError> {
        self.put(self.model(card, suffix)).await
    }

    /// The endpoint serves a model no more.
    pub async fn withdraw_model(&self, suffix: Option<String>) -> Result<(), JoinError> {
        let key = self.model(serde_json::Value::Null, suffix).key();
        self.remove(key).await
    }

    /// Opens the channel of a rank's cache events. If it `answers`, routers may ask what the cache holds.
    pub async fn publish_cache(
        &self,
        rank: WorkerRank,
        answers: bool,
    ) -> Result<CachePublisher, JoinError> {
        let channel = self.channel(Topic::KvEvents).await?;
        let (publisher, transport) = (channel.id(), channel.transport());
        let cache = Arc::new(match answers {
            true => RankCache::new(rank, channel, None),
            false => RankCache::unanswering(rank, channel),
        });
        let record = records::channel(&self.endpoint, Topic::KvEvents, publisher, transport);
        let mut keys = vec![record.key()];
        self.put(record).await?;
        let mut asked = None;
        if answers {
            let query = records::query_endpoint(&self.endpoint, publisher);
            let handler = Arc::new(CacheQuery(Arc::clone(&cache)));
            let (served, instance) = self.take_calls(&query, handler).await?;
            let record = Record::Endpoint(instance.clone());
            keys.push(record.key());
            self.put(record).await?;
            asked = Some((served, instance));
        }
        let named = SourceRank {
            worker_id: rank.worker.0,
            dp_rank: rank.rank.0,
        };
        let (served, target) = asked.unzip();
        let source = records::source(&self.endpoint, publisher, named, target);
        keys.push(source.key());
        self.put(source).await?;
        Ok(CachePublisher {
            cache,
            keys,
            member: self.clone(),
            _served: served,
        })
    }

    /// Opens the channel of load reports.
    pub async fn publish_load(&self) -> Result<LoadPublisher, JoinError> {
        let channel = self.channel(Topic::KvMetrics).await?;
        let (topic, id) = (channel.topic(), channel.id());
        self.put(records::channel(
            &self.endpoint,
            topic,
            id,
            channel.transport(),
        ))
        .await?;
        Ok(LoadPublisher { channel })
    }

    pub(crate) async fn channel(&self, topic: Topic) -> Result<Channel, JoinError> {
        let channel = Channel::open(topic, &self.carrier, self.clock, &self.tasks).await;
        channel.map_err(|cause| JoinError::Channel { topic, cause })
    }

    fn model(&self, card: serde_json::Value, suffix: Option<String>) -> Record {
        let mut record = records::model(self.lease.id(), &self.endpoint, card);
        if let Record::Model(entry) = &mut record {
            entry.model_suffix = suffix;
        }
        record
    }

    fn instance(&self, endpoint: &EndpointName) -> Instance {
        let worker = self.lease.id();
        let transport = self.server.transport(worker, endpoint);
        let device = self.device.as_deref();
        records::instance(worker, endpoint, transport, device, self.codec)
    }

    async fn take_calls(
        &self,
        endpoint: &EndpointName,
        handler: Arc<dyn EndpointHandler>,
    ) -> Result<(ServedEndpoint, Instance), JoinError> {
        let served = self.server.serve(self.lease.id(), endpoint, handler).await;
        let served = served.map_err(|cause| JoinError::Endpoint {
            endpoint: endpoint.clone(),
            cause,
        })?;
        Ok((served, self.instance(endpoint)))
    }

    pub(crate) async fn put(&self, record: Record) -> Result<(), JoinError> {
        Ok(self.lease.put(record).await?)
    }

    pub(crate) async fn remove(&self, key: RecordKey) -> Result<(), JoinError> {
        Ok(self.lease.remove(key).await?)
    }
}

/// Publishes what one rank's cache holds. Telling it never waits.
pub struct CachePublisher {
    cache: Arc<RankCache>,
    keys: Vec<RecordKey>,
    member: EndpointMember,
    _served: Option<ServedEndpoint>,
}

impl CachePublisher {
    /// The cache changed. It is told with the next [`Self::flush`], joined with what it continues.
    pub fn push(&self, event: KvEvent) {
        self.cache.push(event);
    }

    /// A change that an engine published itself, told on as it is and at once.
    pub fn relay(&self, event: KvEvent) {
        self.cache.relay(event);
    }

    /// Whatever waits goes out.
    pub fn flush(&self) {
        self.cache.flush();
    }

    /// Takes back what was announced of it.
    pub async fn withdraw(&self) -> Result<(), JoinError> {
        for key in self.keys.iter().rev() {
            self.member.remove(key.clone()).await?;
        }
        Ok(())
    }
}

/// Publishes how loaded ranks are.
pub struct LoadPublisher {
    channel: Channel,
}

impl LoadPublisher {
    /// Tells everybody who listens. Never waits.
    pub fn publish(&self, load: &ActiveLoad) {
        self.channel.publish_value(&load.to_value());
    }
}
