//! A worker's place in a fleet.
//!
//! Answers one question: what is announced when, and what is taken back? A lease gives the worker its id; its channels are
//! open before anything says where they are; a frontend that finds the endpoint can call it.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvasir_discovery::record::SourceRank;
use kvasir_discovery::{Card, EndpointName, Instance, Lease, Record, Store, StoreError};
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::jetstream::LogPublisher;
use kvasir_transport::{EndpointHandler, ServedEndpoint};
use kvasir_types::{Codec, WorkerId};
use kvasir_wire::native::Topic;

use crate::cache::CacheQuery;
use crate::channels::Channel;
use crate::generate::{ClearBlocks, Generate};
use crate::{CacheOutbox, EventCarrier, Reports, RequestServer, TokenEngine, records};

/// The endpoint that empties the cache.
const CLEAR_ENDPOINT: &str = "clear_kv_blocks";
/// Between two tries to reach a store.
const STORE_PAUSE: Duration = Duration::from_secs(1);

/// Who joins.
#[derive(Clone)]
pub struct MemberOptions {
    /// The endpoint that takes requests for tokens.
    pub endpoint: EndpointName,
    /// The model that it serves.
    pub card: Card,
    /// Data-parallel ranks, from 0; each has a cache of its own.
    pub ranks: u32,
    /// What it computes on, as other workers' records say it.
    pub device: Option<String>,
    /// In which form it takes requests.
    pub codec: Codec,
    /// How its events travel.
    pub carrier: EventCarrier,
    /// The stream that its cache events are kept in, if they are; then they have no channel, and the worker is not asked for them.
    pub log: Option<LogPublisher>,
    /// Stands before its cache events; none for workers that do nothing wrong.
    pub outbox: Option<Arc<dyn CacheOutbox>>,
}

/// Why a worker could not join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The store refuses, for good.
    #[error("discovery: {0}")]
    Store(#[from] StoreError),
    /// An endpoint could not be served.
    #[error("requests for {endpoint} cannot be taken: {cause}")]
    Endpoint {
        /// Which.
        endpoint: EndpointName,
        /// What stood in the way.
        cause: io::Error,
    },
    /// A channel of the event plane could not be opened.
    #[error("the channel of {topic} cannot be opened: {cause}")]
    Channel {
        /// What was to be published there.
        topic: Topic,
        /// What stood in the way.
        cause: io::Error,
    },
}

/// A worker's place in a fleet. Dropped without [`Self::leave`], its records expire as those of a process that died.
pub struct Membership {
    lease: Arc<dyn Lease>,
    options: MemberOptions,
    reports: Arc<Reports>,
    served: Mutex<Vec<ServedEndpoint>>,
}

impl Membership {
    /// Gets an id from the store, which is waited for, and opens the worker's channels. Nothing is announced yet.
    pub async fn open(
        store: &dyn Store,
        options: MemberOptions,
        clock: Clock,
        tasks: &Tasks,
    ) -> Result<Self, JoinError> {
        let lease = insist(async || store.lease().await).await?;
        let reports = Reports::open(
            WorkerId(lease.id()),
            options.ranks,
            &options.carrier,
            options.log.as_ref(),
            options.outbox.as_ref(),
            clock,
            tasks,
        );
        Ok(Self {
            reports: Arc::new(reports.await?),
            lease,
            options,
            served: Mutex::default(),
        })
    }

    /// The worker's id.
    #[must_use]
    pub fn id(&self) -> WorkerId {
        WorkerId(self.lease.id())
    }

    /// Where the engine tells what happens to it.
    #[must_use]
    pub const fn reports(&self) -> &Arc<Reports> {
        &self.reports
    }

    /// Serves requests with `engine` and says so to everybody.
    pub async fn announce(
        &self,
        server: &RequestServer,
        engine: Arc<dyn TokenEngine>,
    ) -> Result<(), JoinError> {
        let (worker, endpoint) = (self.id(), &self.options.endpoint);
        let names = Arc::clone(self.reports.names());
        let generate = Arc::new(Generate::new(worker, Arc::clone(&engine), names));
        let generate = self.serve(server, endpoint, generate).await?;
        self.put(self.channel(self.reports.sequences())).await?;
        let card = self.options.card.to_json();
        self.put(records::model(worker.0, endpoint, card)).await?;
        self.put(Record::Endpoint(generate)).await?;
        let ranks = 0..self.options.ranks.max(1);
        for (cache, dp_rank) in self.reports.caches().iter().zip(ranks) {
            let Some(channel) = cache.channel() else {
                continue;
            };
            let publisher = channel.id();
            let query = records::query_endpoint(endpoint, publisher);
            let handler = Arc::new(CacheQuery(Arc::clone(cache)));
            let query = self.serve(server, &query, handler).await?;
            let rank = SourceRank {
                worker_id: worker.0,
                dp_rank,
            };
            let source = records::source(endpoint, publisher, rank, Some(query.clone()));
            self.put(self.channel(channel)).await?;
            self.put(Record::Endpoint(query)).await?;
            self.put(source).await?;
        }
        for channel in self.reports.shared_channels() {
            self.put(self.channel(channel)).await?;
        }
        let clear = records::sibling(endpoint, CLEAR_ENDPOINT);
        let clear = self
            .serve(server, &clear, Arc::new(ClearBlocks(engine)))
            .await?;
        self.put(Record::Endpoint(clear)).await
    }

    /// Takes back all that was announced, at once. Requests are still answered, those too that somebody sends who has not
    /// heard of it yet: until this is dropped.
    pub async fn leave(&self) {
        if let Err(error) = self.lease.revoke().await {
            tracing::warn!(worker = %self.id(), %error, "the worker's records stay until they expire");
        }
    }

    async fn serve(
        &self,
        server: &RequestServer,
        endpoint: &EndpointName,
        handler: Arc<dyn EndpointHandler>,
    ) -> Result<Instance, JoinError> {
        let (worker, options) = (self.lease.id(), &self.options);
        let served = server.serve(worker, endpoint, handler).await;
        let served = served.map_err(|cause| JoinError::Endpoint {
            endpoint: endpoint.clone(),
            cause,
        })?;
        self.served
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(served);
        let transport = server.transport(worker, endpoint);
        let device = options.device.as_deref();
        let codec = options.codec;
        Ok(records::instance(
            worker, endpoint, transport, device, codec,
        ))
    }

    fn channel(&self, channel: &Channel) -> Record {
        let endpoint = &self.options.endpoint;
        records::channel(endpoint, channel.topic(), channel.id(), channel.transport())
    }

    async fn put(&self, record: Record) -> Result<(), JoinError> {
        Ok(insist(async || self.lease.put(record.clone()).await).await?)
    }
}

/// Asks a store again until it can be reached; says so once.
async fn insist<T>(ask: impl AsyncFn() -> Result<T, StoreError>) -> Result<T, StoreError> {
    let mut has_told = false;
    loop {
        match ask().await {
            Err(error @ StoreError::Unreachable { .. }) => {
                if !std::mem::replace(&mut has_told, true) {
                    tracing::warn!(%error, "waiting for the discovery store: start it, or see --discovery-backend and --etcd-endpoints, --file-kv or --kubeconfig");
                }
                tokio::time::sleep(STORE_PAUSE).await;
            }
            done => return done,
        }
    }
}
