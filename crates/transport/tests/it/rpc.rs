//! Request planes: our clients with our own workers.

use std::sync::Arc;
use std::time::Duration;

use kvasir_tasks::{RuntimeThreads, Tasks};
use kvasir_transport::tcp::{
    EndpointServer, ServerOptions, TcpClient, TcpOptions, client_tls, server_tls,
};
use kvasir_transport::{
    EndpointHandler, PlaneError, RequestPlane, ResponseOptions, ResponseServer, ServedEndpoint,
    TokenEndpoint, TokenPlane, TokenSink,
};
use kvasir_types::{
    Codec, DpRank, FinishReason, PlaneEndpoint, RequestContext, RequestId, Sampling, TokenItem,
    TokenRequest, WorkerId,
};
use tokio::sync::mpsc;

use crate::wires::Wire;

pub(crate) const W: WorkerId = WorkerId(0x1f);
pub(crate) const PATH: &str = "1f/dynamo/backend/generate";
/// Far longer than anything here takes.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn loopback() -> std::net::SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

pub(crate) async fn home(tasks: &Tasks) -> ResponseServer {
    let options = ResponseOptions {
        bind: loopback(),
        ..ResponseOptions::default()
    };
    ResponseServer::start(options, tasks).await.unwrap()
}

pub(crate) fn endpoint(address: impl std::fmt::Display, codec: Codec) -> PlaneEndpoint {
    PlaneEndpoint {
        plane: "tcp".into(),
        address: format!("{address}/{PATH}").into(),
        codec,
    }
}

pub(crate) fn request(max_tokens: u32) -> TokenRequest {
    TokenRequest {
        id: RequestId(0x3f2504e04f8941d39a0c0305e82c3301),
        model: "m".into(),
        tokens: (0..100).collect(),
        sampling: Sampling {
            max_tokens,
            ..Sampling::default()
        },
        rank: DpRank(1),
        priority: 0,
        lora: None,
        salt: Some("s".into()),
        context: RequestContext {
            metadata: vec![("team".into(), "blue".into())],
            ..RequestContext::default()
        },
    }
}

/// A worker of this process that hands requests to the test, and a plane that reaches it.
pub(crate) struct Pair {
    pub(crate) tasks: Tasks,
    pub(crate) home: ResponseServer,
    pub(crate) plane: TokenPlane,
    pub(crate) served: Option<ServedEndpoint>,
    pub(crate) calls: Calls,
}

impl Pair {
    /// On `wire`, with the usual settings.
    pub(crate) async fn on(wire: &Wire, codec: Codec, capacity: usize) -> Self {
        let (tasks, (generate, calls)) = (Tasks::new(), generate());
        let (served, address) = wire.serve(capacity, generate, &tasks).await;
        let home = home(&tasks).await;
        let client = wire.client(home.clone(), TcpOptions::default(), &tasks);
        Self {
            tasks,
            home,
            plane: TokenPlane::new(client, wire.endpoint(&address, codec)),
            served: Some(served),
            calls,
        }
    }

    /// Over TCP.
    pub(crate) async fn start(codec: Codec, capacity: usize) -> (Self, TcpClient) {
        let options = TcpOptions::default();
        Self::with(codec, capacity, options, ServerOptions::new(loopback())).await
    }

    pub(crate) async fn with(
        codec: Codec,
        capacity: usize,
        options: TcpOptions,
        mut server: ServerOptions,
    ) -> (Self, TcpClient) {
        let (tasks, (generate, calls)) = (Tasks::new(), generate());
        server.capacity = capacity;
        let server = EndpointServer::bind(server, &tasks).await.unwrap();
        let served = server.serve(PATH, generate);
        let home = home(&tasks).await;
        let client = TcpClient::new(home.clone(), options, &tasks);
        let endpoint = endpoint(server.local_addr(), codec);
        let pair = Self {
            tasks,
            home,
            plane: TokenPlane::new(Arc::new(client.clone()), endpoint),
            served: Some(served),
            calls,
        };
        (pair, client)
    }
}

pub(crate) type Calls = mpsc::UnboundedReceiver<(TokenRequest, TokenSink)>;

/// An endpoint that hands requests to the test.
pub(crate) fn generate() -> (Arc<dyn EndpointHandler>, Calls) {
    let (sender, calls) = mpsc::unbounded_channel();
    let generate = TokenEndpoint::new(W, move |request, sink| {
        let _ = sender.send((request, sink));
    });
    (Arc::new(generate), calls)
}

pub(crate) fn item(tokens: &[u32], finish: Option<FinishReason>) -> TokenItem {
    TokenItem {
        tokens: tokens.to_vec(),
        finish,
        ..TokenItem::default()
    }
}

/// All tokens, and how the answer ended.
pub(crate) async fn read(
    mut stream: kvasir_transport::TokenStream,
) -> (Vec<u32>, Result<Option<FinishReason>, PlaneError>) {
    let (mut tokens, mut finish) = (Vec::new(), None);
    while let Some(item) = stream.next().await {
        match item {
            Ok(item) => {
                tokens.extend(item.tokens);
                finish = item.finish;
            }
            Err(error) => return (tokens, Err(error)),
        }
    }
    (tokens, Ok(finish))
}

#[tokio::test]
async fn a_request_reaches_its_worker_and_the_answer_comes_home() {
    for wire in Wire::all() {
        for codec in [Codec::Json, Codec::MessagePack] {
            let mut pair = Pair::on(&wire, codec, 8).await;
            let asked = request(3);
            let (stream, call) = tokio::join!(pair.plane.send(W, asked.clone()), async {
                let (request, sink) = pair.calls.recv().await.unwrap();
                let first = TokenItem {
                    cached_tokens: Some(16),
                    ..item(&[1], None)
                };
                assert!(sink.push(first));
                assert!(sink.push(item(&[2, 3], Some(FinishReason::Length))));
                request
            });
            let mut expected = asked;
            expected.context.extra_args = Some(r#"{"nvext":{"cache_salt":"s"}}"#.into());
            assert_eq!(call, expected, "{wire:?}");
            let (tokens, end) = read(stream.unwrap()).await;
            assert_eq!(
                (tokens, end),
                (vec![1, 2, 3], Ok(Some(FinishReason::Length)))
            );
            assert_eq!(pair.home.expected(), 0);
            assert_eq!(pair.tasks.shut_down(LONG).await, 0);
        }
    }
}

/// Many requests share one connection, and each gets its own answer, in whichever order.
#[tokio::test]
async fn requests_follow_each_other_on_one_connection() {
    const MANY: u32 = 200;
    let (mut pair, client) = Pair::start(Codec::MessagePack, 1000).await;
    let asked: Vec<_> = (0..MANY)
        .map(|number| {
            let plane = pair.plane.clone();
            pair.tasks.spawn(async move {
                let stream = plane.send(W, request(number)).await.unwrap();
                (number, read(stream).await)
            })
        })
        .collect();
    let mut kept = Vec::new();
    while kept.len() < MANY as usize {
        kept.push(pair.calls.recv().await.unwrap());
    }
    while let Some((request, sink)) = kept.pop() {
        let number = request.sampling.max_tokens;
        sink.push(item(&[number], Some(FinishReason::Length)));
    }
    for one in asked {
        let (number, answer) = one.await.unwrap().unwrap();
        assert_eq!(answer, (vec![number], Ok(Some(FinishReason::Length))));
    }
    assert_eq!(client.connections(), 1);
    assert_eq!(pair.home.counts().arrived, u64::from(MANY));
}

#[tokio::test]
async fn a_full_worker_and_an_unknown_endpoint_say_so() {
    for wire in Wire::all() {
        let mut pair = Pair::on(&wire, Codec::MessagePack, 1).await;
        let first = pair.plane.send(W, request(1)).await.unwrap();
        let second = pair.plane.send(W, request(1)).await;
        assert_eq!(second.err(), Some(PlaneError::Overloaded(W)), "{wire:?}");
        let (_, sink) = pair.calls.recv().await.unwrap();
        sink.push(item(&[1], Some(FinishReason::Stop)));
        assert_eq!(read(first).await.1, Ok(Some(FinishReason::Stop)));
        pair.served = None;
        let gone = loop {
            match pair.plane.send(W, request(1)).await.err() {
                // A subscription ends, and a place comes free, when its task has seen it.
                Some(PlaneError::Overloaded(_)) | None => tokio::task::yield_now().await,
                Some(error) => break error,
            }
        };
        let is_told = match wire.name() {
            // The server says it, or the worker in its last moment.
            "nats" => matches!(
                gone,
                PlaneError::Connect { .. } | PlaneError::Refused { .. }
            ),
            _ => {
                let why = format!("unknown endpoint {PATH}");
                gone == PlaneError::Refused { worker: W, why }
            }
        };
        assert!(is_told, "{wire:?}: {gone}");
    }
}

/// A client that leaves ends the work for it: before the first token, and after. The promise is 100 ms; a loaded machine gets
/// ten times that.
#[tokio::test]
async fn dropping_a_stream_stops_its_worker_at_once() {
    for wire in Wire::all() {
        let mut pair = Pair::on(&wire, Codec::MessagePack, 8).await;
        for tokens in [0u32, 1, 5000] {
            let mut stream = pair.plane.send(W, request(9)).await.unwrap();
            let (_, sink) = pair.calls.recv().await.unwrap();
            let unread: Vec<u32> = (0..tokens).collect();
            if tokens > 0 {
                assert!(sink.push(item(&unread, None)));
            }
            if tokens == 1 {
                assert_eq!(stream.next().await, Some(Ok(item(&[0], None))));
            }
            let left = tokio::time::Instant::now();
            drop(stream);
            tokio::time::timeout(LONG, sink.closed()).await.unwrap();
            let took = left.elapsed();
            println!("{wire:?}: the worker's stream ended {took:?} after its reader left");
            assert!(took < Duration::from_secs(1), "{wire:?}");
        }
    }
}

#[tokio::test]
async fn a_worker_that_gives_up_its_sink_is_seen_as_gone() {
    for wire in Wire::all() {
        let mut pair = Pair::on(&wire, Codec::MessagePack, 8).await;
        let stream = pair.plane.send(W, request(9)).await.unwrap();
        let (_, sink) = pair.calls.recv().await.unwrap();
        sink.push(item(&[1, 2], None));
        drop(sink);
        let ended = read(stream).await;
        let gone = (vec![1, 2], Err(PlaneError::Disconnected(W)));
        assert_eq!(ended, gone, "{wire:?}");
    }
}

#[tokio::test]
async fn what_an_engine_says_reaches_whoever_asked() {
    for wire in Wire::all() {
        let mut pair = Pair::on(&wire, Codec::MessagePack, 8).await;
        for error in [
            PlaneError::Rejected("no such token".into()),
            PlaneError::Overloaded(W),
        ] {
            let stream = pair.plane.send(W, request(9)).await.unwrap();
            let (_, sink) = pair.calls.recv().await.unwrap();
            sink.fail(error.clone());
            assert_eq!(read(stream).await, (vec![], Err(error)), "{wire:?}");
        }
        let stream = pair.plane.send(W, request(9)).await.unwrap();
        let (_, sink) = pair.calls.recv().await.unwrap();
        sink.fail(PlaneError::Engine("out of memory".into()));
        assert!(matches!(read(stream).await.1, Err(PlaneError::Engine(_))));
    }
}

/// A reader that does not read holds up its own answer only, and what waits for it is bounded.
#[tokio::test]
async fn a_slow_reader_slows_only_its_own_stream() {
    for wire in Wire::all() {
        let mut pair = Pair::on(&wire, Codec::MessagePack, 8).await;
        let slow = pair.plane.send(W, request(9)).await.unwrap();
        let (_, slow_sink) = pair.calls.recv().await.unwrap();
        let flood = pair.tasks.spawn(async move {
            for _ in 0..2000 {
                slow_sink.push(item(&[7; 1000], None));
                tokio::task::yield_now().await;
            }
            slow_sink.push(item(&[], Some(FinishReason::Length)));
        });
        for _ in 0..5 {
            let quick = pair.plane.send(W, request(1)).await.unwrap();
            let (_, sink) = pair.calls.recv().await.unwrap();
            sink.push(item(&[1], Some(FinishReason::Stop)));
            assert_eq!(read(quick).await, (vec![1], Ok(Some(FinishReason::Stop))));
        }
        flood.await.unwrap();
        let (tokens, end) = read(slow).await;
        assert_eq!(
            (tokens.len(), end),
            (2_000_000, Ok(Some(FinishReason::Length))),
            "{wire:?}"
        );
    }
}

/// Requests over TLS: a worker whose certificate the authority signed is asked, another is not, and neither is one that
/// speaks plain TCP.
#[tokio::test]
async fn requests_can_be_secured() {
    let pem = |name: &str| {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tls/");
        std::fs::read(format!("{root}{name}")).unwrap()
    };
    let acceptor = server_tls(&pem("server.pem"), &pem("server-key.pem")).unwrap();
    for (authority, secured, is_reached) in [
        ("ca.pem", true, true),
        ("other-ca.pem", true, false),
        ("ca.pem", false, false),
    ] {
        let options = TcpOptions {
            tls: Some(client_tls(&pem(authority)).unwrap()),
            connect_timeout: LONG,
            ack_timeout: LONG,
            ..TcpOptions::default()
        };
        let mut server = ServerOptions::new(loopback());
        server.tls = secured.then(|| acceptor.clone());
        let (mut pair, _) = Pair::with(Codec::MessagePack, 8, options, server).await;
        match pair.plane.send(W, request(1)).await {
            Ok(stream) => {
                assert!(is_reached, "{authority}");
                let (_, sink) = pair.calls.recv().await.unwrap();
                sink.push(item(&[1], Some(FinishReason::Stop)));
                assert_eq!(read(stream).await, (vec![1], Ok(Some(FinishReason::Stop))));
            }
            Err(error) => {
                assert!(!is_reached, "{error}");
                assert!(matches!(error, PlaneError::Connect { .. }), "{error}");
            }
        }
        pair.tasks.stop();
    }
    assert!(client_tls(b"no certificate").is_err());
    assert!(server_tls(&pem("server.pem"), b"no key").is_err());
}

/// What a thread asks comes back to it: its own connection, its own listener. With one connection for all, or one port for all
/// answers, they still get theirs.
#[tokio::test]
async fn each_thread_has_its_own_connection_and_listener() {
    for (pool_size, is_port_given, connections) in [(50, false, 2), (1, false, 1), (50, true, 2)] {
        let tasks = Tasks::new();
        let server = EndpointServer::bind(ServerOptions::new(loopback()), &tasks);
        let server = server.await.unwrap();
        let generate = TokenEndpoint::new(W, |request: TokenRequest, sink: TokenSink| {
            sink.push(item(
                &[request.sampling.max_tokens],
                Some(FinishReason::Stop),
            ));
        });
        let _served = server.serve(PATH, Arc::new(generate));
        let bind = match is_port_given {
            true => std::net::TcpListener::bind(loopback())
                .unwrap()
                .local_addr()
                .unwrap(),
            false => loopback(),
        };
        let options = ResponseOptions {
            bind,
            ..ResponseOptions::default()
        };
        let home = ResponseServer::start(options, &tasks).await.unwrap();
        let options = TcpOptions {
            pool_size,
            ..TcpOptions::default()
        };
        let client = TcpClient::new(home.clone(), options, &tasks);
        let plane = TokenPlane::new(
            Arc::new(client.clone()),
            endpoint(server.local_addr(), Codec::MessagePack),
        );
        let threads = RuntimeThreads::start("test", 2, |_| {}).unwrap();
        let slots: Vec<_> = (0..6).filter_map(|_| threads.slot()).collect();
        let mut homes = std::collections::BTreeSet::from([home.address()]);
        for (number, slot) in (0..).zip(&slots) {
            let (plane, home) = (plane.clone(), home.clone());
            let asked = tasks.spawn_on(&slot.handle, async move {
                let stream = plane.send(W, request(number)).await.unwrap();
                (read(stream).await, home.address())
            });
            let (answer, home) = asked.await.unwrap().unwrap();
            assert_eq!(answer, (vec![number], Ok(Some(FinishReason::Stop))));
            homes.insert(home);
        }
        assert_eq!(client.connections(), connections);
        assert_eq!(homes.len(), if is_port_given { 1 } else { 3 });
        assert_eq!(home.expected(), 0);
        tasks.stop();
    }
}

#[tokio::test]
async fn a_worker_that_is_not_there_costs_nothing_but_an_error() {
    let tasks = Tasks::new();
    let client = TcpClient::new(home(&tasks).await, TcpOptions::default(), &tasks);
    let unused = std::net::TcpListener::bind(loopback()).unwrap();
    let address = unused.local_addr().unwrap();
    drop(unused);
    let plane = TokenPlane::new(Arc::new(client.clone()), endpoint(address, Codec::Json));
    let failed = plane.send(W, request(1)).await.err().unwrap();
    assert!(
        matches!(failed, PlaneError::Connect { worker: W, .. }),
        "{failed:?}"
    );
    // The worker comes back at the same place: the next request finds it.
    let server = EndpointServer::bind(ServerOptions::new(address), &tasks)
        .await
        .unwrap();
    let generate = TokenEndpoint::new(W, |_, sink: TokenSink| {
        sink.push(item(&[1], Some(FinishReason::Stop)));
    });
    let _served = server.serve(PATH, Arc::new(generate));
    let stream = plane.send(W, request(1)).await.unwrap();
    assert_eq!(read(stream).await, (vec![1], Ok(Some(FinishReason::Stop))));
}
