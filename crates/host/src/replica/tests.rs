//! Replicas over real sockets: what one books is seen by the other, late ones learn what is under way, lost ones are forgotten.

use std::time::Duration;

use kvasir_index::IndexOptions;
use kvasir_router::{
    Arrival, Input, Lookup, Outcome, RouterConfig, RouterMode, SessionAction, SessionRequest,
    WorkerSpec,
};
use kvasir_transport::SourceFault;
use kvasir_transport::event_plane::PlanePublisherOptions;
#[cfg(feature = "nats")]
use kvasir_transport::nats::{NatsLink, NatsOptions};
use kvasir_types::{PlaneEndpoint, RequestId, SequenceHash};
use kvasir_wire::native::{RecoveryRequest, Topic};

use super::*;
use crate::plane::{
    EventPlane, EventPlaneOptions, PlaneChange, PlaneChannel, RecoveryClient, RecoveryFuture,
};
use crate::{Booking, HostOptions, testing};
use kvasir_transport::event_plane::PlanePublisher;

const WORKER: WorkerId = WorkerId(9);
const SCOPE: &str = "ns/backend/generate";

struct Nobody;

impl RecoveryClient for Nobody {
    fn ask<'a>(&'a self, _: &'a PlaneEndpoint, _: RecoveryRequest) -> RecoveryFuture<'a> {
        Box::pin(std::future::ready(Err(SourceFault::NoReplay)))
    }
}

/// One process.
struct Process {
    context: HostContext,
    host: Arc<RouterHost>,
    replicas: Replicas,
    plane: EventPlane,
    /// What it would write into a store.
    channels: Vec<PlaneChannel>,
}

impl Process {
    async fn start(id: u64) -> Self {
        let context = testing::context();
        let config = RouterConfig {
            router_mode: RouterMode::Kv,
            router_replica_sync: true,
            router_session_affinity_ttl_secs: Some(60),
            ..RouterConfig::default()
        };
        let options = HostOptions::new(config, IndexOptions::default());
        let host = RouterHost::start(&Arc::from("m"), options, &context);
        let replicas = Replicas::new(ReplicaId(id), &context);
        replicas.start_plane();
        let options = EventPlaneOptions {
            recovery: Arc::new(Nobody),
            #[cfg(feature = "nats")]
            nats: {
                let servers = vec!["nats://127.0.0.1:1".to_owned()];
                let options = NatsOptions {
                    servers,
                    ..NatsOptions::default()
                };
                NatsLink::new(&options, &context.tasks).unwrap()
            },
            #[cfg(feature = "nats")]
            log: None,
            replicas: Some(replicas.clone()),
            threads: None,
            seed: id,
        };
        let plane = EventPlane::start(&context, options);
        host.tell(Input::Joined(WorkerSpec::new(WORKER)));
        replicas.join(WORKER, &host, Some(&Arc::from(SCOPE)));
        let open = async |topic, publisher| {
            let options = PlanePublisherOptions {
                publisher,
                topic,
                host: "127.0.0.1".to_owned(),
            };
            let tasks = &context.tasks;
            PlanePublisher::bind_zmq(tasks, options).await.unwrap()
        };
        let channels = ReplicaChannels {
            sequences: open(Topic::ActiveSequences, id * 10).await,
            sessions: Some(open(Topic::SessionAffinity, id * 10 + 1).await),
            replicas: open(Topic::Replicas, id * 10 + 2).await,
        };
        let all = [
            &channels.sequences,
            channels.sessions.as_ref().unwrap(),
            &channels.replicas,
        ];
        let described = all.map(|channel| PlaneChannel {
            publisher: channel.publisher(),
            topic: channel.topic(),
            address: channel.address(),
        });
        replicas.publish_on(&Arc::from(SCOPE), channels).await;
        Self {
            context,
            host,
            replicas,
            plane,
            channels: described.to_vec(),
        }
    }

    /// Discovery tells it of another.
    async fn find(&self, other: &Self) {
        for channel in &other.channels {
            self.plane.tell(PlaneChange::Channel(channel.clone())).await;
        }
    }

    async fn miss(&self, other: &Self) {
        for channel in &other.channels {
            let gone = PlaneChange::ChannelGone {
                publisher: channel.publisher,
                topic: channel.topic,
            };
            self.plane.tell(gone).await;
        }
    }

    async fn book(&self, id: u128, session: Option<&str>) -> Booking {
        let lookup = Lookup {
            locals: Arc::from([]),
            sequence: (0..4)
                .map(|block| SequenceHash(id as u64 * 100 + block))
                .collect(),
            predict_all: false,
            shared: Arc::default(),
        };
        let arrival = Arrival {
            sequence: Arc::clone(&lookup.sequence),
            session: session.map(|id| SessionRequest {
                id: id.into(),
                action: SessionAction::Header,
            }),
            ..Arrival::new(RequestId(id), 64)
        };
        self.host.route(Box::new(arrival), &lookup).await.unwrap()
    }

    /// Prompt tokens, blocks, and requests on the worker.
    fn load(&self) -> (u64, u64, u32) {
        let rank = WorkerRank::new(WORKER.0, 0);
        let load = self.host.ask(|router| router.load(rank)).unwrap();
        (load.prefill_tokens, load.active_blocks, load.requests)
    }

    async fn until_load(&self, wanted: (u64, u64, u32)) {
        until(&format!("{wanted:?}"), || self.load() == wanted).await;
    }

    fn counted(&self, outcome: &str) -> u64 {
        let counter = &self.context.metrics.replica_events_total;
        counter.with_label_values(&[outcome]).get()
    }
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), wait).await;
    assert!(waited.is_ok(), "{what}");
}

/// Two that hear each other, which a first booking shows.
async fn pair() -> (Process, Process) {
    let (a, b) = (Process::start(1).await, Process::start(2).await);
    a.find(&b).await;
    b.find(&a).await;
    let here = a.book(1, None).await;
    b.until_load((64, 4, 1)).await;
    here.finish(Outcome::Cancelled);
    b.until_load((0, 0, 0)).await;
    let there = b.book(2, None).await;
    a.until_load((64, 4, 1)).await;
    drop(there);
    a.until_load((0, 0, 0)).await;
    (a, b)
}

#[tokio::test]
async fn what_one_books_the_other_sees_from_booking_to_end() {
    let (a, b) = pair().await;
    let booking = a.book(7, None).await;
    b.until_load((64, 4, 1)).await;
    booking.first_token();
    b.until_load((0, 4, 1)).await;
    drop(booking);
    b.until_load((0, 0, 0)).await;
    assert_eq!(b.context.metrics.replicas.get(), 1.0);
    // What it says itself comes back to it from nowhere.
    assert_eq!(a.load(), (0, 0, 0));
    let sent = a.counted("sent");
    assert!(sent >= 3 && a.counted("dropped") == 0, "{sent}");
}

#[tokio::test]
async fn one_that_comes_late_learns_what_is_under_way() {
    let a = Process::start(1).await;
    let _waits = a.book(1, None).await;
    let runs = a.book(2, Some("s")).await;
    runs.first_token();
    let b = Process::start(2).await;
    a.find(&b).await;
    b.find(&a).await;
    b.until_load((64, 8, 2)).await;
    until("the session", || {
        b.host.ask(|router| router.sessions()) == 1
    })
    .await;
    drop(runs);
    b.until_load((64, 4, 1)).await;
}

/// An end that is lost on the way is made good by the next answer.
#[tokio::test]
async fn an_end_that_was_lost_is_noticed_when_others_are_asked() {
    let (a, b) = pair().await;
    let stuck = PeerEvent {
        id: RequestId(77),
        target: WorkerRank::new(WORKER.0, 0),
        change: kvasir_router::PeerChange::Add {
            sequence: Arc::from([]),
            prefill_tokens: 5,
            prefill_duration: None,
            osl: None,
        },
    };
    b.replicas
        .hear(&translate::told(&stuck, a.replicas.id()), None, false);
    assert_eq!(b.load().2, 1);
    b.replicas.ask();
    b.until_load((0, 0, 0)).await;
}

#[tokio::test]
async fn a_replica_that_discovery_misses_takes_its_load_along() {
    let (a, b) = pair().await;
    let _booked = a.book(7, None).await;
    b.until_load((64, 4, 1)).await;
    b.miss(&a).await;
    b.until_load((0, 0, 0)).await;
    until("nobody", || b.context.metrics.replicas.get() == 0.0).await;
}

#[tokio::test]
async fn sessions_that_one_binds_the_other_follows() {
    let (a, b) = pair().await;
    let booking = a.book(7, Some("s")).await;
    booking.first_token();
    until("the session", || {
        b.host.ask(|router| router.sessions()) == 1
    })
    .await;
}

/// News that nobody takes: the newest are dropped, and counted.
#[tokio::test]
async fn news_that_find_no_room_are_dropped_and_counted() {
    let a = Process::start(1).await;
    let event = PeerEvent {
        id: RequestId(1),
        target: WorkerRank::new(WORKER.0, 0),
        change: kvasir_router::PeerChange::Free,
    };
    // The task that takes them has no turn meanwhile.
    for _ in 0..NEWS_MAX + 7 {
        a.replicas
            .tell(a.host.name(), ReplicaNews::Request(Box::new(event.clone())));
    }
    assert_eq!(a.counted("dropped"), 7);
}
