//! What token workers publish: found in a store, told to the event plane.
//!
//! Answers one question: which event channels and sources does a store announce? What is listened to, and for whom, is the event
//! plane's business (`kvasir_host`: `EventPlane`).
//!
//! What always holds: a store that is lost takes no channel away; a record that says nothing we can use is passed over and said
//! once.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_discovery::Store;
use kvasir_host::{EndpointRecovery, EventLogOptions, EventPlane, EventPlaneOptions};
use kvasir_transport::EndpointClient;
use kvasir_transport::nats::NatsLink;

use super::Fleet;

/// How token workers' events are listened to.
pub struct EventPlaneSetup {
    /// How workers are asked what their caches hold, by the request plane's name.
    pub clients: BTreeMap<&'static str, Arc<dyn EndpointClient>>,
    /// The connection to NATS, for channels that are there.
    pub nats: NatsLink,
    /// How cache events are read that are kept in JetStream, if they are.
    pub log: Option<EventLogOptions>,
}

impl Fleet {
    /// The same, listening to what token workers publish; to be called after [`Self::with_event_threads`].
    #[must_use]
    pub fn with_event_plane(self, setup: EventPlaneSetup) -> Self {
        let clock = self.context.host.clock;
        let seed = clock.unix_nanos(clock.now()) ^ u64::from(std::process::id()) << 32;
        self.sessions.connect(&setup.clients);
        if let Some(remote) = &self.setup.remote_index {
            remote.connect(&setup.clients);
        }
        let options = EventPlaneOptions {
            recovery: Arc::new(EndpointRecovery::new(setup.clients, seed)),
            nats: setup.nats,
            log: setup.log,
            replicas: self.replicas.as_ref().map(|known| known.replicas().clone()),
            threads: self.event_threads.clone(),
            seed,
        };
        let plane = EventPlane::start(&self.context.host, options);
        Self {
            event_plane: Some(plane),
            ..self
        }
    }

    /// Listens to the channels and sources that a store announces in namespaces that are `wanted`, from now on.
    pub fn follow_events(
        &self,
        store: &Arc<dyn Store>,
        wanted: impl Fn(&str) -> bool + Clone + Send + 'static,
    ) {
        self.follow_sessions(store, wanted.clone());
        if let Some(remote) = &self.setup.remote_index {
            remote.follow(store, wanted.clone());
        }
        if let Some(replicas) = &self.replicas {
            replicas.announce_in(store, self.tasks());
        }
        let Some(plane) = self.event_plane.clone() else {
            return;
        };
        let watch = store.watch(plane.buckets());
        let follow = plane.follow(watch, move |record| wanted(record.namespace()));
        self.tasks().background().spawn(follow);
    }
}

#[cfg(test)]
mod tests {
    use kvasir_discovery::{Bucket, Change, Record};
    use kvasir_host::{
        HostContext, HostOptions, PlaneChange, PlaneWorker, RouterHost, endpoint_of, plane_change,
    };
    use kvasir_tasks::Tasks;
    use kvasir_transport::event_plane::ChannelAddress;
    use kvasir_transport::nats::NatsOptions;
    use kvasir_transport::tcp::{TcpClient, TcpOptions};
    use kvasir_transport::{RequestPlane, ResponseOptions, ResponseServer, TokenPlane};
    use kvasir_types::{
        Codec, PlaneEndpoint, RequestContext, RequestId, Sampling, TokenRequest, WorkerId,
        WorkerRank,
    };
    use kvasir_wire::native::Topic;

    use super::*;

    /// Every event record of a real worker, as it was found in its store.
    #[test]
    fn records_of_real_workers_are_understood() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../testdata/dynamo-discovery/file-dp2.json"
        );
        let text = std::fs::read_to_string(path).unwrap();
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut found = Vec::new();
        collect(&all, &mut found);
        let changes: Vec<PlaneChange> = found.iter().filter_map(plane_change).collect();
        let mut ranks = Vec::new();
        let mut topics = Vec::new();
        for change in &changes {
            match change {
                PlaneChange::Channel(channel) => {
                    assert!(matches!(channel.address, ChannelAddress::Zmq(_)));
                    topics.push(channel.topic);
                }
                PlaneChange::Source(source) => {
                    let recovery = source.recovery.as_ref().unwrap();
                    assert_eq!(
                        (&*recovery.plane, recovery.codec),
                        ("tcp", Codec::MessagePack)
                    );
                    assert!(recovery.address.contains("worker_kv_query_source_"));
                    assert_ne!(source.rank.worker, WorkerId(0));
                    ranks.push(source.rank.rank.0);
                }
                other => panic!("{other:?}"),
            }
        }
        ranks.sort_unstable();
        topics.sort_unstable();
        assert_eq!(ranks, [0, 1]);
        let kv_events = topics.iter().filter(|topic| **topic == Topic::KvEvents);
        assert_eq!(kv_events.count(), 2, "{topics:?}");
        assert!(topics.contains(&Topic::KvMetrics) && topics.contains(&Topic::ActiveSequences));
    }

    /// Every value in a tree that is a record of events.
    fn collect(value: &serde_json::Value, out: &mut Vec<Record>) {
        let bytes = value.to_string();
        for bucket in [Bucket::EventChannels, Bucket::EventSources] {
            out.extend(Record::parse(bucket, bytes.as_bytes()));
        }
        match value {
            serde_json::Value::Object(members) => {
                members.values().for_each(|value| collect(value, out));
            }
            serde_json::Value::Array(items) => items.iter().for_each(|value| collect(value, out)),
            _ => {}
        }
    }

    /// A real worker's cache, and what a router that starts later knows of it. Needs `KVASIR_TEST_DYNAMO_KV`, the folder of the
    /// worker's file discovery.
    #[tokio::test]
    async fn the_cache_of_a_real_worker_is_known() {
        #[expect(clippy::disallowed_methods, reason = "where the test's worker is")]
        let Ok(folder) = std::env::var("KVASIR_TEST_DYNAMO_KV") else {
            println!("skipped: KVASIR_TEST_DYNAMO_KV is not set");
            return;
        };
        let real = RealWorker::find(&folder).await;
        let first = real.listen();
        let is_judged = || first.views().get(real.rank).is_some();
        real.until("listened to", is_judged).await;
        real.generate(1).await;
        real.until("its cache known from events", || {
            first.index().stats().entries > 5
        })
        .await;
        real.generate(2).await;
        let entries = || first.index().stats().entries;
        real.until("a second prompt", || entries() > 10).await;
        let known = entries();
        let later = real.listen();
        let started = tokio::time::Instant::now();
        real.until("the whole state", || later.index().stats().entries >= known)
            .await;
        println!(
            "{known} blocks by events; by the whole state after {:?}",
            started.elapsed()
        );
    }

    struct RealWorker {
        context: HostContext,
        store: Arc<dyn Store>,
        client: Arc<dyn EndpointClient>,
        endpoint: PlaneEndpoint,
        rank: WorkerRank,
    }

    impl RealWorker {
        async fn find(folder: &str) -> Self {
            let context = HostContext {
                clock: kvasir_telemetry::Clock::new(),
                metrics: kvasir_telemetry::Metrics::new(&Default::default()).unwrap(),
                tasks: Tasks::new(),
            };
            let store: Arc<dyn Store> =
                Arc::new(kvasir_discovery::FileStore::new(folder, &context.tasks));
            let mut watch = store.watch(&[Bucket::Instances]);
            let instance = loop {
                if let Change::Added(_, record) = watch.next().await
                    && let Record::Endpoint(instance) = &*record
                    && instance.endpoint == "generate"
                {
                    break instance.clone();
                }
            };
            let home = ResponseOptions {
                bind: ([127, 0, 0, 1], 0).into(),
                ..ResponseOptions::default()
            };
            let home = ResponseServer::start(home, &context.tasks).await.unwrap();
            let client = TcpClient::new(home, TcpOptions::default(), &context.tasks);
            Self {
                client: Arc::new(client),
                endpoint: endpoint_of(&instance),
                rank: WorkerRank::new(instance.instance_id, 0),
                store,
                context,
            }
        }

        /// A router that knows of the worker and listens to it from now on.
        fn listen(&self) -> Arc<RouterHost> {
            let config = kvasir_router::RouterConfig {
                router_mode: kvasir_router::RouterMode::Kv,
                ..Default::default()
            };
            let options = HostOptions::new(config, Default::default());
            let host = RouterHost::start(&Arc::from("m"), options, &self.context);
            let clients = BTreeMap::from([("tcp", Arc::clone(&self.client))]);
            let nats = NatsOptions {
                servers: vec!["nats://127.0.0.1:42299".to_owned()],
                ..NatsOptions::default()
            };
            let options = EventPlaneOptions {
                recovery: Arc::new(EndpointRecovery::new(clients, 7)),
                nats: NatsLink::new(&nats, &self.context.tasks).unwrap(),
                log: None,
                replicas: None,
                threads: None,
                seed: 7,
            };
            let plane = EventPlane::start(&self.context, options);
            plane.join(PlaneWorker {
                id: self.rank.worker,
                host: Arc::clone(&host),
                ranks: vec![self.rank],
                url: "real".to_owned(),
                events: true,
            });
            let watch = self
                .store
                .watch(&[Bucket::EventChannels, Bucket::EventSources]);
            self.context.tasks.spawn(plane.follow(watch, |_| true));
            host
        }

        async fn generate(&self, number: u32) {
            let plane = TokenPlane::new(Arc::clone(&self.client), self.endpoint.clone());
            let request = TokenRequest {
                id: RequestId(u128::from(number) << 64 | 9),
                model: "m".into(),
                tokens: (0..100).map(|token| token + 1000 * number).collect(),
                sampling: Sampling {
                    max_tokens: 20,
                    ..Sampling::default()
                },
                rank: self.rank.rank,
                priority: 0,
                lora: None,
                salt: None,
                context: RequestContext::default(),
            };
            let mut stream = plane.send(self.rank.worker, request).await.unwrap();
            while let Some(item) = stream.next().await {
                item.unwrap();
            }
        }

        async fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
            let wait = async {
                while !holds() {
                    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                }
            };
            let waited = tokio::time::timeout(std::time::Duration::from_secs(20), wait).await;
            assert!(waited.is_ok(), "{what}");
        }
    }
}
