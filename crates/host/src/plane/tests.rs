//! Workers that publish over real sockets, and a router that comes late, misses some, and listens to their load.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvasir_index::Matches;
use kvasir_kv_events::publisher::RankPublisher;
use kvasir_router::{Arrival, Input, Lookup, ThresholdUpdate, WorkerSpec};
use kvasir_tasks::Tasks;
use kvasir_transport::SourceFault;
use kvasir_transport::event_plane::{PlanePublisher, PlanePublisherOptions};
#[cfg(feature = "nats")]
use kvasir_transport::nats::NatsOptions;
use kvasir_types::{EngineHash, KvEvent, LocalHash, RequestId, StoredBlock, Tier};
use kvasir_wire::native::{
    ActiveLoad, Encoding, RecoveryReply, RecoveryRequest, SequenceChange, SequenceEvent,
    encode_router_events,
};

use super::*;
use crate::testing;

const RANK: WorkerRank = WorkerRank {
    worker: WorkerId(9),
    rank: kvasir_types::DpRank(0),
};
const PUBLISHER: u64 = 77;

/// A worker with one rank, as far as the event plane knows it.
struct Worker {
    cache: Mutex<RankPublisher>,
    chain: AtomicUsize,
    asked: AtomicUsize,
    silent: AtomicBool,
    events: PlanePublisher,
}

impl Worker {
    async fn start(tasks: &Tasks) -> Arc<Self> {
        Arc::new(Self {
            cache: Mutex::new(RankPublisher::new(RANK)),
            chain: AtomicUsize::new(0),
            asked: AtomicUsize::new(0),
            silent: AtomicBool::new(false),
            events: publisher(tasks, Topic::KvEvents).await,
        })
    }

    /// Stores the next block of its one chain; says so unless it is to be lost on the way.
    fn store(&self, lost: bool) {
        let name = self.chain.fetch_add(1, Ordering::Relaxed) as u64 + 1;
        let stored = KvEvent::Stored {
            tier: Tier::Device,
            parent: (name > 1).then(|| EngineHash(name - 1)),
            blocks: vec![StoredBlock {
                engine: EngineHash(name),
                local: LocalHash(name),
            }],
        };
        let mut out = Vec::new();
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.push(stored, &mut out);
        cache.flush(&mut out);
        drop(cache);
        let mut payload = Vec::new();
        encode_router_events(Encoding::MessagePack, &out, &mut payload);
        if !lost {
            self.events.publish(payload, 1);
        }
    }

    fn channel(&self) -> PlaneChange {
        channel_of(&self.events)
    }

    fn source(&self) -> PlaneChange {
        PlaneChange::Source(PlaneSource {
            publisher: PUBLISHER,
            rank: RANK,
            recovery: Some(endpoint()),
        })
    }
}

fn member(host: &Arc<RouterHost>) -> PlaneWorker {
    PlaneWorker {
        id: RANK.worker,
        host: Arc::clone(host),
        ranks: vec![RANK],
        url: "tcp:worker".to_owned(),
        events: true,
    }
}

fn endpoint() -> PlaneEndpoint {
    PlaneEndpoint {
        plane: "tcp".into(),
        address: "worker".into(),
        codec: kvasir_types::Codec::MessagePack,
    }
}

async fn publisher(tasks: &Tasks, topic: Topic) -> PlanePublisher {
    let options = PlanePublisherOptions {
        publisher: PUBLISHER,
        topic,
        host: "127.0.0.1".to_owned(),
    };
    PlanePublisher::bind_zmq(tasks, options).await.unwrap()
}

fn channel_of(publisher: &PlanePublisher) -> PlaneChange {
    PlaneChange::Channel(PlaneChannel {
        publisher: publisher.publisher(),
        topic: publisher.topic(),
        address: publisher.address(),
    })
}

impl RecoveryClient for Worker {
    fn ask<'a>(&'a self, asked: &'a PlaneEndpoint, request: RecoveryRequest) -> RecoveryFuture<'a> {
        assert_eq!(*asked, endpoint());
        self.asked.fetch_add(1, Ordering::Relaxed);
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let answer: Result<RecoveryReply, SourceFault> = match self.silent.load(Ordering::Relaxed) {
            true => Err(SourceFault::Silent),
            false => Ok(cache.answer(&request)),
        };
        Box::pin(std::future::ready(answer))
    }
}

/// A link that nobody here needs.
#[cfg(feature = "nats")]
fn no_nats(tasks: &Tasks) -> NatsLink {
    let options = NatsOptions {
        servers: vec!["nats://127.0.0.1:1".to_owned()],
        ..NatsOptions::default()
    };
    NatsLink::new(&options, tasks).unwrap()
}

fn plane(context: &HostContext, worker: &Arc<Worker>) -> EventPlane {
    let recovery: Arc<dyn RecoveryClient> = Arc::clone(worker) as _;
    let options = EventPlaneOptions {
        recovery,
        #[cfg(feature = "nats")]
        nats: no_nats(&context.tasks),
        #[cfg(feature = "nats")]
        log: None,
        replicas: None,
        threads: None,
        seed: 1,
    };
    EventPlane::start(context, options)
}

fn depth(host: &RouterHost) -> u32 {
    let locals: Vec<LocalHash> = (1..=100).map(LocalHash).collect();
    let mut matches = Matches::new();
    host.index().find(&locals, &mut matches);
    matches.get(RANK).map_or(0, |m| m.device)
}

/// Waits until something holds; a test that would wait for ever fails.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(30), wait).await;
    assert!(waited.is_ok(), "{what}");
}

/// What was there before we came is asked for, what comes is heard, what is lost is asked for, and all goes with the worker.
#[tokio::test]
async fn a_workers_cache_is_known_from_the_start_through_losses_to_its_end() {
    let context = testing::context();
    let (host, worker) = (testing::host(&context), Worker::start(&context.tasks).await);
    (0..5).for_each(|_| worker.store(false));
    let plane = plane(&context, &worker);
    // In any order: nothing happens before all three are known.
    plane.tell(worker.source()).await;
    plane.join(member(&host));
    assert_eq!(worker.asked.load(Ordering::Relaxed), 0);
    plane.tell(worker.channel()).await;
    until("the whole state", || depth(&host) == 5).await;
    until("a listener", || worker.events.subscribers() == Some(1)).await;
    worker.store(false);
    until("a live event", || depth(&host) == 6).await;
    worker.store(true);
    worker.store(false);
    until("a gap filled", || depth(&host) == 8).await;
    // The same said again changes nothing.
    let asked = worker.asked.load(Ordering::Relaxed);
    plane.tell(worker.source()).await;
    plane.tell(worker.channel()).await;
    worker.store(false);
    until("a live event after that", || depth(&host) == 9).await;
    assert_eq!(worker.asked.load(Ordering::Relaxed), asked);
    let publisher = PUBLISHER;
    plane.tell(PlaneChange::SourceGone { publisher }).await;
    until("its blocks gone with its source", || depth(&host) == 0).await;
    plane.tell(worker.source()).await;
    until("and back with it", || depth(&host) == 9).await;
    // Gone and back before anybody looked: another stay, asked for anew.
    plane.leave(RANK.worker);
    host.leave(RANK.worker);
    plane.join(member(&host));
    until("its next stay", || depth(&host) == 9).await;
    plane.leave(RANK.worker);
    host.leave(RANK.worker);
    until("nothing left of it", || depth(&host) == 0).await;
    until("nobody listens", || worker.events.subscribers() == Some(0)).await;
}

/// A worker that cannot be asked is heard all the same.
#[tokio::test]
async fn a_worker_that_does_not_answer_is_heard() {
    let context = testing::context();
    let (host, worker) = (testing::host(&context), Worker::start(&context.tasks).await);
    let plane = plane(&context, &worker);
    plane.tell(worker.channel()).await;
    plane.join(member(&host));
    let source = PlaneSource {
        publisher: PUBLISHER,
        rank: RANK,
        recovery: None,
    };
    plane.tell(PlaneChange::Source(source)).await;
    until("a listener", || worker.events.subscribers() == Some(1)).await;
    worker.store(false);
    until("a live event", || depth(&host) == 1).await;
    assert_eq!(worker.asked.load(Ordering::Relaxed), 0);
}

/// Load that a worker publishes makes it busy, and free again; with all workers busy requests are refused.
#[tokio::test]
async fn published_load_drives_busy_thresholds() {
    let context = testing::context();
    let (host, worker) = (testing::host(&context), Worker::start(&context.tasks).await);
    host.tell(Input::Joined(WorkerSpec {
        kv_total_blocks: Some(100),
        ..WorkerSpec::new(RANK.worker)
    }));
    host.tell(Input::Thresholds(ThresholdUpdate {
        active_decode_blocks: Some(Some(0.5)),
        ..ThresholdUpdate::default()
    }));
    let loads = publisher(&context.tasks, Topic::KvMetrics).await;
    let plane = plane(&context, &worker);
    plane.join(member(&host));
    plane.tell(channel_of(&loads)).await;
    until("a listener", || loads.subscribers() == Some(1)).await;
    let arrival = Arrival::new(RequestId(1), 10);
    let report = |used| {
        let load = ActiveLoad {
            rank: RANK,
            active_decode_blocks: None,
            active_prefill_tokens: None,
            used_blocks: Some(used),
        };
        let mut payload = Vec::new();
        load.to_value().to_msgpack(&mut payload);
        loads.publish(payload, 1);
    };
    report(60);
    until("busy", || host.refuses(&arrival)).await;
    report(40);
    until("free again", || !host.refuses(&arrival)).await;
    // What cannot be read is passed over.
    loads.publish(b"?".to_vec(), 1);
    report(60);
    until("busy again", || host.refuses(&arrival)).await;
}

/// A worker's word that a prompt is computed takes it off what is booked; a router's word about others does not.
#[tokio::test]
async fn a_prompt_that_its_worker_computed_is_booked_no_longer() {
    let context = testing::context();
    let (host, worker) = (testing::host(&context), Worker::start(&context.tasks).await);
    host.tell(Input::Joined(WorkerSpec::new(RANK.worker)));
    let sequences = publisher(&context.tasks, Topic::ActiveSequences).await;
    let plane = plane(&context, &worker);
    plane.join(member(&host));
    plane.tell(channel_of(&sequences)).await;
    until("a listener", || sequences.subscribers() == Some(1)).await;
    let lookup = Lookup {
        locals: Arc::from([]),
        sequence: Arc::from([]),
        predict_all: false,
        shared: Arc::default(),
    };
    let arrival = Box::new(Arrival::new(RequestId(5), 640));
    let booking = host.route(arrival, &lookup).await;
    let booked = || {
        let load = host.ask(|router| router.load(RANK));
        load.map_or(0, |load| load.prefill_tokens)
    };
    assert!(booking.is_ok() && booked() > 0);
    let completed = |router: u64| {
        let event = SequenceEvent {
            request: RequestId(5).to_string(),
            rank: RANK,
            router,
            lora: None,
            change: SequenceChange::PrefillCompleted,
        };
        let mut payload = Vec::new();
        SequenceEvent::batch_to_value(&[event]).to_msgpack(&mut payload);
        sequences.publish(payload, 1);
    };
    completed(RANK.worker.0 + 1);
    completed(RANK.worker.0);
    until("its prompt", || booked() == 0).await;
}
