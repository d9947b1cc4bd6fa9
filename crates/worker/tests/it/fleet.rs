//! What a worker announces, what it answers, and what it takes back.

use std::sync::Arc;
use std::time::Duration;

use kvasir_discovery::{
    Bucket, Card, Change, EndpointName, EventTransport, MemStore, Record, RequestTransport, Store,
};
use kvasir_protocol::Payload;
use kvasir_tasks::Tasks;
use kvasir_telemetry::Clock;
use kvasir_transport::event_plane::{NatsEvents, NatsSource};
use kvasir_transport::http_rpc::{HttpClient, HttpServer};
use kvasir_transport::nats::{NatsClient, NatsLink, NatsOptions, NatsServer};
use kvasir_transport::tcp::{EndpointServer, ServerOptions, TcpClient, TcpOptions};
use kvasir_transport::{
    CallContext, EndpointClient, RequestPlane, ResponseOptions, ResponseServer, SourceEvent,
    TokenPlane, TokenSink, next_event,
};
use kvasir_types::{
    Codec, DpRank, EngineHash, FinishReason, KvEvent, LocalHash, PlaneEndpoint, RequestContext,
    RequestId, Sampling, StoredBlock, Tier, TokenItem, TokenRequest, WorkerRank,
};
use kvasir_wire::native::{Encoding, RecoveryReply, RecoveryRequest, Topic};
use kvasir_worker::{
    ClearFuture, EndpointMember, EventCarrier, MemberOptions, Membership, RequestServer,
    TokenEngine,
};
use serde_json::json;

const SOON: Duration = Duration::from_secs(30);

/// Answers with the prompt's first token.
struct Echo;

impl TokenEngine for Echo {
    fn submit(&self, request: TokenRequest, sink: TokenSink) {
        sink.push(TokenItem {
            tokens: request.tokens.iter().copied().take(1).collect(),
            finish: Some(FinishReason::Length),
            ..TokenItem::default()
        });
    }

    fn clear_cache(&self) -> ClearFuture<'_> {
        Box::pin(std::future::ready(true))
    }
}

/// A worker that is announced, and a client that can call it.
struct Rig {
    tasks: Tasks,
    store: MemStore,
    client: Arc<TcpClient>,
    membership: Membership,
}

fn loopback() -> std::net::SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn member_options(ranks: u32) -> MemberOptions {
    let card = json!({"display_name": "m", "kv_cache_block_size": 16, "model_type": "Chat"});
    MemberOptions {
        endpoint: EndpointName::new("dynamo", "backend", "generate"),
        card: Card::parse(&card).unwrap(),
        ranks,
        device: Some("cuda".into()),
        codec: Codec::MessagePack,
        carrier: EventCarrier::Zmq {
            host: "127.0.0.1".into(),
        },
        log: None,
        outbox: None,
    }
}

async fn rig(ranks: u32) -> Rig {
    let (tasks, store) = (Tasks::new(), MemStore::new());
    let server = EndpointServer::bind(ServerOptions::new(loopback()), &tasks);
    let server = RequestServer::Tcp {
        server: server.await.unwrap(),
        host: "127.0.0.1".into(),
    };
    let membership = Membership::open(&store, member_options(ranks), Clock::new(), &tasks);
    let membership = membership.await.unwrap();
    assert!(listed(&store).await.is_empty(), "nothing before it serves");
    let announced = membership.announce(&server, Arc::new(Echo));
    announced.await.unwrap();
    let home = home(&tasks).await;
    Rig {
        client: Arc::new(TcpClient::new(home, TcpOptions::default(), &tasks)),
        tasks,
        store,
        membership,
    }
}

/// All that a store holds.
async fn listed(store: &MemStore) -> Vec<Record> {
    let mut watch = store.watch(&Bucket::ALL);
    let mut records = Vec::new();
    loop {
        match tokio::time::timeout(SOON, watch.next()).await.unwrap() {
            Change::Added(_, record) => records.push((*record).clone()),
            Change::Synced => return records,
            other => panic!("{other:?}"),
        }
    }
}

fn endpoint_of(records: &[Record], name: &str) -> PlaneEndpoint {
    let found = records.iter().find_map(|record| match record {
        Record::Endpoint(instance) if instance.endpoint.starts_with(name) => Some(instance),
        _ => None,
    });
    let (plane, address) = match &found.unwrap().transport {
        RequestTransport::Tcp(address) => ("tcp", address),
        RequestTransport::NatsTcp(subject) => ("nats", subject),
        RequestTransport::Http(url) => ("http", url),
    };
    PlaneEndpoint {
        plane: plane.into(),
        address: address.as_str().into(),
        codec: Codec::MessagePack,
    }
}

fn request(id: u128) -> TokenRequest {
    TokenRequest {
        id: RequestId(id),
        model: "m".into(),
        tokens: [7, 8].into(),
        sampling: Sampling {
            max_tokens: 1,
            ..Sampling::default()
        },
        rank: DpRank(0),
        priority: 0,
        lora: None,
        salt: None,
        context: RequestContext::default(),
    }
}

fn stored(name: u64, parent: Option<u64>) -> KvEvent {
    KvEvent::Stored {
        tier: Tier::Device,
        parent: parent.map(EngineHash),
        blocks: vec![StoredBlock {
            engine: EngineHash(name),
            local: LocalHash(name + 100),
        }],
    }
}

/// A record's key; publishers, whose ids are random, are all called PUB.
fn key(record: &Record) -> String {
    let key = record.key().to_string();
    let publisher = match record {
        Record::EventChannel(channel) => Some(channel.instance_id),
        Record::EventSource(source) => Some(source.publisher_id),
        Record::Endpoint(instance) => {
            let id = instance.endpoint.strip_prefix("worker_kv_query_source_");
            id.map(|id| u64::from_str_radix(id, 16).unwrap())
        }
        Record::Model(_) => None,
    };
    match publisher {
        Some(publisher) => key.replace(&format!("{publisher:x}"), "PUB"),
        None => key,
    }
}

/// The keys of two ranks, as they were recorded: one endpoint and card, and per rank a channel, a source and a query.
#[tokio::test]
async fn a_worker_announces_what_was_recorded_and_takes_it_back() {
    let rig = rig(2).await;
    let records = listed(&rig.store).await;
    let id = rig.membership.id().0;
    let mut keys: Vec<String> = records.iter().map(key).collect();
    keys.sort();
    let topic = "namespace/dynamo/component/backend/endpoint/generate/topic";
    let instances = |name: &str| format!("v1/instances/dynamo/backend/{name}/{id:x}");
    let mut expected = vec![
        format!("v1/event_channels/{topic}/active_sequences_events/PUB"),
        format!("v1/event_channels/{topic}/forward-pass-metrics/PUB"),
        format!("v1/event_channels/{topic}/kv_metrics/PUB"),
        instances("clear_kv_blocks"),
        instances("generate"),
        format!("v1/mdc/dynamo/backend/generate/{id:x}"),
    ];
    for _ in 0..2 {
        expected.push(format!("v1/event_channels/{topic}/kv-events/PUB"));
        expected.push(format!("v1/event_sources/{topic}/kv-events/PUB"));
        expected.push(instances("worker_kv_query_source_PUB"));
    }
    expected.sort();
    assert_eq!(keys, expected);
    for record in &records {
        if let Record::EventChannel(channel) = record {
            let EventTransport::Zmq { endpoint } = &channel.transport else {
                panic!("not over ZeroMQ");
            };
            assert!(endpoint.starts_with("tcp://127.0.0.1:"), "{endpoint}");
            assert!(channel.instance_id < 1 << 53);
        }
        if let Record::EventSource(source) = record {
            let kv = source.kv().unwrap();
            let named = (kv.worker.worker_id, kv.publisher_id);
            assert_eq!(named, (id, source.publisher_id));
            assert!(kv.recovery_target.is_some());
        }
    }
    rig.membership.leave().await;
    assert!(listed(&rig.store).await.is_empty());
    // Who has not heard of it yet is still answered, until the worker is gone.
    let worker = rig.membership.id();
    let plane = TokenPlane::new(rig.client, endpoint_of(&records, "generate"));
    let mut stream = plane.send(worker, request(1)).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().tokens, [7]);
    drop(rig.membership);
    assert!(plane.send(worker, request(2)).await.is_err());
    rig.tasks.stop();
}

/// What was told can be asked for: everything, or from a number on.
#[tokio::test]
async fn a_rank_answers_for_its_events() {
    let rig = rig(1).await;
    let query = endpoint_of(&listed(&rig.store).await, "worker_kv_query_source_");
    let id = rig.membership.id();
    let ask = async |start: Option<u64>| {
        let mut bytes = Vec::new();
        let request = RecoveryRequest::new(WorkerRank::new(id.0, 0), start);
        request.encode(Encoding::MessagePack, &mut bytes);
        let payload = Payload::new(Codec::MessagePack, bytes.into());
        let context = CallContext::new(id, RequestId(9));
        let mut answer = rig.client.call(&query, payload, context).await.unwrap();
        let item = answer.next().await.unwrap().unwrap();
        RecoveryReply::decode(Encoding::MessagePack, &item.bytes).unwrap()
    };
    let empty = RecoveryReply::TreeDump {
        events: Vec::new(),
        last: 0,
    };
    assert_eq!(ask(None).await, empty);
    let reports = rig.membership.reports();
    for (name, parent) in [(1, None), (2, Some(1)), (3, None)] {
        reports.cache_event(DpRank(0), stored(name, parent));
    }
    reports.step_ended(DpRank(0));
    let RecoveryReply::Events { events, last } = ask(Some(1)).await else {
        panic!("events were asked for");
    };
    assert_eq!((events.len(), last), (2, 2), "one chain is one event");
    let RecoveryReply::TreeDump { last, .. } = ask(None).await else {
        panic!("the state was asked for");
    };
    assert_eq!(last, 2);
    reports.restarted(DpRank(0));
    assert_eq!(ask(None).await, empty, "it began anew");
    rig.tasks.stop();
}

/// Whoever asks for an empty cache is told how it went.
#[tokio::test]
async fn the_cache_is_emptied_on_request() {
    let rig = rig(1).await;
    let clear = endpoint_of(&listed(&rig.store).await, "clear_kv_blocks");
    let payload = Payload::new(Codec::MessagePack, vec![0x80].into());
    let context = CallContext::new(rig.membership.id(), RequestId(9));
    let mut answer = rig.client.call(&clear, payload, context).await.unwrap();
    let item = answer.next().await.unwrap().unwrap().value().unwrap();
    let status = item.get("data").and_then(|data| data.get("status"));
    assert_eq!(status.and_then(|status| status.text()), Some("success"));
    rig.tasks.stop();
}

/// A NATS server, for as long as it is held; none, and a line that says so, where there is no such program.
struct NatsProcess(std::process::Child, NatsOptions);

impl NatsProcess {
    #[expect(clippy::print_stdout, reason = "what is skipped is said")]
    fn start() -> Option<Self> {
        let free = std::net::TcpListener::bind(loopback()).unwrap();
        let port = free.local_addr().unwrap().port().to_string();
        drop(free);
        let mut command = std::process::Command::new("nats-server");
        command.args(["-a", "127.0.0.1", "-p", &port]);
        command.stderr(std::process::Stdio::null());
        match command.spawn() {
            Ok(process) => {
                let servers = vec![format!("nats://127.0.0.1:{port}")];
                let options = NatsOptions {
                    servers,
                    ..NatsOptions::default()
                };
                Some(Self(process, options))
            }
            Err(error) => {
                println!(
                    "SKIPPED: nats-server cannot be run ({error}): no worker on NATS is tested"
                );
                None
            }
        }
    }
}

impl Drop for NatsProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn home(tasks: &Tasks) -> ResponseServer {
    let home = ResponseOptions {
        bind: loopback(),
        ..ResponseOptions::default()
    };
    ResponseServer::start(home, tasks).await.unwrap()
}

/// A worker on NATS announces its subjects, is asked there, and its events are heard there.
#[tokio::test]
async fn a_worker_on_nats_is_asked_and_heard_there() {
    let Some(process) = NatsProcess::start() else {
        return;
    };
    let (tasks, store) = (Tasks::new(), MemStore::new());
    let (ours, theirs) = (
        NatsLink::new(&process.1, &tasks).unwrap(),
        NatsLink::new(&process.1, &tasks).unwrap(),
    );
    let mut options = member_options(1);
    let events = NatsEvents::new(&theirs, &tasks);
    options.carrier = EventCarrier::nats(events, &options.endpoint);
    let membership = Membership::open(&store, options, Clock::new(), &tasks);
    let membership = membership.await.unwrap();
    let server = RequestServer::Nats(NatsServer::new(theirs, 8, &tasks));
    let announced = membership.announce(&server, Arc::new(Echo));
    announced.await.unwrap();
    let (records, id) = (listed(&store).await, membership.id());
    let client = NatsClient::new(
        ours.clone(),
        home(&tasks).await,
        &TcpOptions::default(),
        &tasks,
    );
    let generate = endpoint_of(&records, "generate");
    let subject = format!("dynamo_backend.generate-{:x}", id.0);
    assert_eq!((&*generate.plane, &*generate.address), ("nats", &*subject));
    let plane = TokenPlane::new(Arc::new(client), generate);
    let mut stream = plane.send(id, request(1)).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().tokens, [7]);
    let channel = records.iter().find_map(|record| match record {
        Record::EventChannel(channel) if channel.topic == "kv-events" => Some(channel),
        _ => None,
    });
    let channel = channel.unwrap();
    let prefix = "namespace.dynamo.component.backend.endpoint.generate";
    let expected = EventTransport::Nats {
        subject_prefix: prefix.into(),
    };
    assert_eq!(channel.transport, expected);
    let subject = format!("{prefix}.kv-events");
    let listens = NatsEvents::new(&ours, &tasks);
    let mut source = listens.listen(&subject, Topic::KvEvents, channel.instance_id);
    let next = async |source: &mut NatsSource| {
        tokio::time::timeout(SOON, next_event(source))
            .await
            .unwrap()
    };
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    membership.reports().cache_event(DpRank(0), stored(1, None));
    membership.reports().step_ended(DpRank(0));
    assert!(matches!(next(&mut source).await, SourceEvent::Live(_)));
    tasks.stop();
}

/// A worker on HTTP announces a URL, and is asked there.
#[tokio::test]
async fn a_worker_on_http_is_asked_there() {
    let (tasks, store) = (Tasks::new(), MemStore::new());
    let membership = Membership::open(&store, member_options(1), Clock::new(), &tasks);
    let membership = membership.await.unwrap();
    let server = HttpServer::bind(ServerOptions::new(loopback()), &tasks);
    let server = RequestServer::Http {
        server: server.await.unwrap(),
        host: "127.0.0.1".into(),
    };
    let announced = membership.announce(&server, Arc::new(Echo));
    announced.await.unwrap();
    let (records, id) = (listed(&store).await, membership.id());
    let generate = endpoint_of(&records, "generate");
    let path = format!("/v1/rpc/{:x}/dynamo/backend/generate", id.0);
    assert!(generate.address.ends_with(&path), "{}", generate.address);
    let client = HttpClient::new(home(&tasks).await, &TcpOptions::default(), &tasks);
    let plane = TokenPlane::new(Arc::new(client), generate);
    let mut stream = plane.send(id, request(1)).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().tokens, [7]);
    tasks.stop();
}

/// A program announces its pieces one by one: each is there when it says so, can be asked, and goes alone.
#[tokio::test]
async fn a_member_is_announced_piece_by_piece() {
    let (tasks, store) = (Tasks::new(), MemStore::new());
    let server = EndpointServer::bind(ServerOptions::new(loopback()), &tasks);
    let options = member_options(1);
    let member = EndpointMember {
        lease: store.lease().await.unwrap(),
        endpoint: options.endpoint,
        server: RequestServer::Tcp {
            server: server.await.unwrap(),
            host: "127.0.0.1".into(),
        },
        carrier: options.carrier,
        device: None,
        codec: Codec::MessagePack,
        clock: Clock::new(),
        tasks: tasks.clone(),
    };
    member
        .announce_model(json!({"display_name": "m"}), None)
        .await
        .unwrap();
    let rank = WorkerRank::new(member.id().0, 1);
    let cache = member.publish_cache(rank, true).await.unwrap();
    let mute = member.publish_cache(WorkerRank::new(7, 0), false).await;
    let echo = |call: kvasir_transport::IncomingCall| -> kvasir_transport::HandlerFuture {
        Box::pin(async move {
            let mut reply = call.reply;
            if reply.start().await && reply.send(&call.payload).await {
                reply.finish().await;
            }
        })
    };
    let served = member.serve(Arc::new(echo)).await.unwrap();
    let records = listed(&store).await;
    let sources = records.iter().filter_map(|record| match record {
        Record::EventSource(source) => source.kv().ok(),
        _ => None,
    });
    let mut answers: Vec<_> = sources
        .map(|kv| (kv.worker.dp_rank, kv.recovery_target.is_some()))
        .collect();
    answers.sort_unstable();
    assert_eq!(answers, [(0, false), (1, true)]);
    let client = TcpClient::new(home(&tasks).await, TcpOptions::default(), &tasks);
    let generate = endpoint_of(&records, "generate");
    let asked = Payload::of_value(Codec::MessagePack, &kvasir_msgpack::Value::Uint(5));
    let context = CallContext::new(member.id(), RequestId(1));
    let mut call = client
        .call(&generate, asked.clone(), context)
        .await
        .unwrap();
    assert_eq!(call.next().await, Some(Ok(asked)));
    member.withdraw().await.unwrap();
    cache.withdraw().await.unwrap();
    member.withdraw_model(None).await.unwrap();
    drop((served, mute));
    let left = listed(&store).await;
    assert_eq!(
        left.len(),
        2,
        "the channel and the source of the other rank: {left:?}"
    );
    member.announce().await.unwrap();
    assert_eq!(listed(&store).await.len(), 3);
}
