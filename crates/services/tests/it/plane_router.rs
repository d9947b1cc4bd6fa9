//! The router on the request plane: real sockets, workers that are announced, callers that call, leave and are refused.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_discovery::{Card, EndpointName, MemStore, Store};
use kvasir_hash::Scope;
use kvasir_host::{
    EndpointFleet, EndpointFleetOptions, HostContext, IndexEndpoints, RemoteIndex, RouterSetup,
    endpoint_of,
};
use kvasir_index::{Approximate, IndexOptions};
use kvasir_msgpack::Value;
use kvasir_protocol::Payload;
use kvasir_router::{Arrival, Outcome, Pin};
use kvasir_services::PlaneRouter;
use kvasir_transport::nats::{NatsLink, NatsOptions};
use kvasir_transport::tcp::{EndpointServer, ServerOptions, TcpClient, TcpOptions};
use kvasir_transport::{
    CallContext, CallStream, EndpointClient, ResponseOptions, ResponseServer, ServedEndpoint,
    TokenSink,
};
use kvasir_types::{
    Codec, FinishReason, PlaneEndpoint, RequestId, TokenItem, TokenRequest, WorkerId,
};
use kvasir_worker::{
    ClearFuture, EndpointMember, EventCarrier, MemberOptions, Membership, RequestServer,
    TokenEngine,
};
use serde_json::json;

use crate::rig::{context, setup};

const SOON: Duration = Duration::from_secs(30);

/// Keeps requests until the test answers them; takes none if it is `full`.
#[derive(Default)]
struct Engine {
    held: Mutex<Vec<(TokenRequest, TokenSink)>>,
    answers: bool,
    full: bool,
}

fn tokens(tokens: &[u32], finish: Option<FinishReason>) -> TokenItem {
    TokenItem {
        tokens: tokens.to_vec(),
        finish,
        ..TokenItem::default()
    }
}

impl TokenEngine for Engine {
    fn submit(&self, request: TokenRequest, sink: TokenSink) {
        if self.answers {
            sink.push(tokens(&[7], None));
            sink.push(tokens(&[8], Some(FinishReason::Length)));
        } else {
            self.held.lock().unwrap().push((request, sink));
        }
    }

    fn clear_cache(&self) -> ClearFuture<'_> {
        Box::pin(std::future::ready(true))
    }

    fn requests_max(&self) -> Option<usize> {
        self.full.then_some(0)
    }
}

/// A router with its endpoints, and a client of it.
struct Rig {
    context: HostContext,
    store: Arc<MemStore>,
    server: RequestServer,
    client: Arc<dyn EndpointClient>,
    fleet: Arc<EndpointFleet>,
    endpoints: Vec<PlaneEndpoint>,
    _served: Vec<ServedEndpoint>,
    members: Vec<Membership>,
}

fn carrier() -> EventCarrier {
    EventCarrier::Zmq {
        host: "127.0.0.1".into(),
    }
}

async fn rig() -> Rig {
    rig_with(setup()).await
}

async fn rig_with(setup: RouterSetup) -> Rig {
    let (context, store) = (context(), Arc::new(MemStore::new()));
    let tasks = &context.tasks;
    let loopback: std::net::SocketAddr = ([127, 0, 0, 1], 0).into();
    let server = EndpointServer::bind(ServerOptions::new(loopback), tasks).await;
    let server = RequestServer::Tcp {
        server: server.unwrap(),
        host: "127.0.0.1".into(),
    };
    let home = ResponseOptions {
        bind: loopback,
        ..ResponseOptions::default()
    };
    let home = ResponseServer::start(home, tasks).await.unwrap();
    let client: Arc<dyn EndpointClient> =
        Arc::new(TcpClient::new(home, TcpOptions::default(), tasks));
    let nats = NatsOptions {
        servers: vec!["nats://127.0.0.1:9".to_owned()],
        ..NatsOptions::default()
    };
    let fleet = EndpointFleet::start(
        &context,
        EndpointFleetOptions {
            endpoint: EndpointName::new("dynamo", "backend", "generate"),
            block_size: 16,
            setup,
            store: Arc::clone(&store) as _,
            clients: [("tcp", Arc::clone(&client))].into(),
            nats: NatsLink::new(&nats, tasks).unwrap(),
            log: None,
            replicas: None,
            threads: None,
            seed: 7,
        },
    );
    let router = PlaneRouter::new(Arc::clone(&fleet), 2, 7);
    let lease = store.lease().await.unwrap();
    let (mut served, mut endpoints) = (Vec::new(), Vec::new());
    for (name, handler) in router.endpoints() {
        let endpoint = EndpointName::new("dynamo", "router", name);
        let member = EndpointMember {
            lease: Arc::clone(&lease),
            carrier: carrier(),
            server: server.clone(),
            device: None,
            codec: Codec::MessagePack,
            clock: context.clock,
            tasks: tasks.clone(),
            endpoint,
        };
        served.push(member.serve(handler).await.unwrap());
        endpoints.push(found(&*store, name).await);
    }
    Rig {
        store,
        server,
        client,
        fleet,
        endpoints,
        _served: served,
        members: Vec::new(),
        context,
    }
}

/// The endpoint of the router of this name.
async fn found(store: &dyn Store, name: &str) -> PlaneEndpoint {
    use kvasir_discovery::{Bucket, Change, Record};
    let mut watch = store.watch(&[Bucket::Instances]);
    loop {
        if let Change::Added(_, record) = watch.next().await
            && let Record::Endpoint(instance) = &*record
            && (instance.component.as_str(), instance.endpoint.as_str()) == ("router", name)
        {
            return endpoint_of(instance);
        }
    }
}

impl Rig {
    /// A worker joins; its id.
    async fn worker(&mut self, engine: &Arc<Engine>) -> u64 {
        let card = json!({"display_name": "m", "kv_cache_block_size": 16, "model_type": "Chat"});
        let options = MemberOptions {
            endpoint: EndpointName::new("dynamo", "backend", "generate"),
            card: Card::parse(&card).unwrap(),
            ranks: 1,
            device: None,
            codec: Codec::MessagePack,
            carrier: carrier(),
            log: None,
            outbox: None,
        };
        let (clock, tasks) = (self.context.clock, &self.context.tasks);
        let member = Membership::open(&*self.store, options, clock, tasks);
        let member = member.await.unwrap();
        let engine = Arc::clone(engine) as Arc<dyn TokenEngine>;
        member.announce(&self.server, engine).await.unwrap();
        let id = member.id().0;
        self.members.push(member);
        self.fleet.wait_for(self.members.len()).await;
        id
    }

    async fn open(&self, endpoint: usize, request: &serde_json::Value) -> CallStream {
        let json = Payload::new(Codec::Json, request.to_string().into());
        let payload = Payload::new(Codec::MessagePack, json.to_msgpack().unwrap());
        let context = CallContext::new(WorkerId(1), RequestId(99));
        let call = self
            .client
            .call(&self.endpoints[endpoint], payload, context);
        call.await.unwrap()
    }

    /// All items of an answer; what went wrong as `error`.
    async fn call(&self, endpoint: usize, request: serde_json::Value) -> Vec<serde_json::Value> {
        let reading = async {
            let mut stream = self.open(endpoint, &request).await;
            let mut items = Vec::new();
            while let Some(item) = stream.next().await {
                items.push(item.unwrap().value().unwrap().to_json());
            }
            items
        };
        tokio::time::timeout(SOON, reading).await.unwrap()
    }

    fn booked(&self) -> usize {
        self.fleet.model.host.ask(kvasir_router::Router::booked)
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(SOON, wait).await.is_ok(), "{what}");
}

const GENERATE: usize = 0;
const BEST: usize = 1;
const OVERLAP: usize = 2;

fn prompt() -> serde_json::Value {
    let tokens: Vec<u32> = (0..40).collect();
    json!({"token_ids": tokens, "stop_conditions": {"max_tokens": 5}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_is_the_workers_own_and_names_it_once() {
    let mut rig = rig().await;
    let engine = Arc::new(Engine {
        answers: true,
        ..Engine::default()
    });
    let id = rig.worker(&engine).await;
    let items = rig.call(GENERATE, prompt()).await;
    let all: Vec<_> = items
        .iter()
        .flat_map(|item| item["data"]["token_ids"].as_array().unwrap().clone())
        .collect();
    assert_eq!(all, [json!(7), json!(8)], "{items:?}");
    let named = json!({"prefill_worker_id": id, "prefill_dp_rank": 0, "decode_worker_id": id, "decode_dp_rank": 0});
    assert_eq!(items[0]["data"]["routing_data"]["worker_id"], named);
    let timing = &items[items.len() - 1]["data"]["routing_data"]["timing"];
    assert!(
        timing["total_time_ms"].as_f64() >= timing["ttft_ms"].as_f64(),
        "{timing}"
    );
    let mut others = items[1..].iter();
    assert!(others.all(|item| item["data"]["routing_data"]["worker_id"].is_null()));
    until("nothing stays booked", || rig.booked() == 0).await;
    let best = rig.call(BEST, prompt()["token_ids"].clone()).await;
    assert_eq!(best, [json!({"data": id})]);
    let found = rig.call(OVERLAP, prompt()).await;
    assert_eq!(found[0]["data"]["num_blocks"], 2);
    assert_eq!(found[0]["data"]["workers"][0]["worker_id"], id);
    assert_eq!(rig.booked(), 0, "questions book nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_is_an_error_item() {
    let mut rig = rig().await;
    let kind = async |rig: &Rig, endpoint, request| {
        let items = rig.call(endpoint, request).await;
        let [item] = &items[..] else {
            panic!("{items:?}")
        };
        assert_eq!(item["event"], "error", "{item}");
        item["error"]["error_type"].as_str().unwrap().to_owned()
    };
    assert_eq!(kind(&rig, GENERATE, prompt()).await, "Disconnected");
    let engine = Arc::new(Engine {
        answers: true,
        ..Engine::default()
    });
    rig.worker(&engine).await;
    let mut pinned = prompt();
    pinned["routing"] = json!({"backend_instance_id": 5});
    assert_eq!(kind(&rig, GENERATE, pinned).await, "InvalidArgument");
    for (endpoint, request) in [
        (GENERATE, json!({"token_ids": []})),
        (GENERATE, json!({"model": "m"})),
        (BEST, json!("x")),
        (BEST, json!([])),
        (OVERLAP, json!({})),
    ] {
        assert_eq!(
            kind(&rig, endpoint, request.clone()).await,
            "InvalidArgument",
            "{request}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_leaves_ends_the_work() {
    let mut rig = rig().await;
    let engine = Arc::new(Engine::default());
    rig.worker(&engine).await;
    let mut stream = rig.open(GENERATE, &prompt()).await;
    let held = || engine.held.lock().unwrap().pop();
    let mut request = None;
    until("the worker has it", || {
        request = request.take().or_else(held);
        request.is_some()
    })
    .await;
    let (_, sink) = request.unwrap();
    assert!(sink.push(tokens(&[7], None)));
    let first = tokio::time::timeout(SOON, stream.next()).await.unwrap();
    assert!(matches!(first, Some(Ok(_))));
    assert_eq!(rig.booked(), 1);
    drop(stream);
    until("the worker is told", || !sink.push(tokens(&[8], None))).await;
    until("its place is free", || rig.booked() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_full_is_passed_over() {
    let mut rig = rig().await;
    let full = Arc::new(Engine {
        full: true,
        ..Engine::default()
    });
    rig.worker(&full).await;
    let items = rig.call(GENERATE, prompt()).await;
    assert_eq!(
        items[0]["error"]["error_type"], "ResourceExhausted",
        "{items:?}"
    );
    let engine = Arc::new(Engine {
        answers: true,
        ..Engine::default()
    });
    let id = rig.worker(&engine).await;
    for _ in 0..4 {
        let items = rig.call(GENERATE, prompt()).await;
        let named = &items[0]["data"]["routing_data"]["worker_id"]["decode_worker_id"];
        assert_eq!(*named, id, "{items:?}");
    }
    until("nothing stays booked", || rig.booked() == 0).await;
    // A worker that ends under an answer is an error at the end of it.
    let slow = Arc::new(Engine::default());
    let slow_id = rig.worker(&slow).await;
    let mut pinned = prompt();
    pinned["routing"] = json!({"backend_instance_id": slow_id});
    let mut stream = rig.open(GENERATE, &pinned).await;
    until("the worker has it", || {
        !slow.held.lock().unwrap().is_empty()
    })
    .await;
    slow.held.lock().unwrap().clear();
    let last = tokio::time::timeout(SOON, stream.next()).await.unwrap();
    let item = last.unwrap().unwrap().value().unwrap();
    assert_eq!(
        item.get("error").and_then(|error| error.get("error_type")),
        Some(&Value::Text("Disconnected".into()))
    );
}

/// Routers that learn from their decisions.
fn learning() -> RouterSetup {
    let mut setup = setup();
    setup.config.router_kv_events = false;
    setup.index = IndexOptions {
        approximate: Some(Approximate {
            ttl: Duration::from_secs(120),
            max_blocks: 1 << 20,
            prune_target_ratio: 0.8,
        }),
        ..IndexOptions::default()
    };
    setup
}

/// A router that keeps no index tells one that does where prompts went, and asks it; without it nothing counts as cached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_elsewhere_is_told_and_asked() {
    let mut rig = rig_with(learning()).await;
    let engine = Arc::new(Engine::default());
    let first = rig.worker(&engine).await;
    rig.worker(&engine).await;
    let host = Arc::clone(&rig.fleet.model.host);
    let index = IndexEndpoints::new(&rig.context, true, move |_| Some(Arc::clone(&host)));
    let lease = rig.store.lease().await.unwrap();
    let mut served = Vec::new();
    for (name, handler) in index.endpoints() {
        let member = EndpointMember {
            lease: Arc::clone(&lease),
            carrier: carrier(),
            server: rig.server.clone(),
            device: None,
            codec: Codec::MessagePack,
            clock: rig.context.clock,
            tasks: rig.context.tasks.clone(),
            endpoint: EndpointName::new("dynamo", "backend", name),
        };
        served.push(member.serve(handler).await.unwrap());
    }
    let nats = NatsOptions {
        servers: vec!["nats://127.0.0.1:9".to_owned()],
        ..NatsOptions::default()
    };
    let asker = EndpointFleet::start(
        &rig.context,
        EndpointFleetOptions {
            endpoint: EndpointName::new("dynamo", "backend", "generate"),
            block_size: 16,
            setup: RouterSetup {
                remote_index: Some(RemoteIndex::new(&rig.context, 9)),
                ..learning()
            },
            store: Arc::clone(&rig.store) as _,
            clients: [("tcp", Arc::clone(&rig.client))].into(),
            nats: NatsLink::new(&nats, &rig.context.tasks).unwrap(),
            log: None,
            replicas: None,
            threads: None,
            seed: 9,
        },
    );
    asker.wait_for(2).await;
    let tokens: Vec<u32> = (0..40).collect();
    let blocks = asker.model.name_blocks_in(&tokens, &Scope::default());
    // Where it would go, how much of it is there, and whether that could be said.
    let ask = async |id: u128, pin: Option<u64>| {
        let mut arrival = Box::new(Arrival::new(RequestId(id), 40));
        arrival.query_only = pin.is_none();
        arrival.pin = Pin {
            worker: pin.map(WorkerId),
            rank: None,
        };
        let booking = asker.model.book(arrival, &blocks).await.unwrap();
        let (target, overlap) = (booking.target(), booking.placement().overlap_blocks);
        let explained = asker.model.host.ask(|router| {
            router
                .explain(RequestId(id))
                .map(|decision| decision.cache_unknown)
        });
        booking.finish(Outcome::Completed { output_tokens: 0 });
        (target.worker.0, overlap, explained)
    };
    let (mut id, mut found) = (1, (0, 0, None));
    while found.1 != 2 {
        assert!(id < 10_000, "{found:?}");
        // What is told before the index is found is lost.
        ask(id, Some(first)).await;
        found = ask(id + 1, None).await;
        id += 2;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(found.0, first);
    let stats = rig.fleet.model.host.index().stats();
    assert!(stats.entries > 0 && asker.model.host.index().stats().entries == 0);
    drop(served);
    let (_, overlap, unknown) = ask(id, Some(first)).await;
    assert_eq!((overlap, unknown), (0, Some(true)));
    let metrics = &rig.context.metrics.remote_index_queries_total;
    let count = |result: &str| metrics.with_label_values(&[result]).get();
    assert!(count("answered") > 0 && count("error") > 0);
}
