//! The request plane over TCP: our client with our own workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_transport::tcp::{EndpointServer, ServerOptions, TcpClient, TcpOptions};
use kvasir_transport::{
    PlaneError, RequestPlane, ResponseOptions, ResponseServer, ServedEndpoint, TokenEndpoint,
    TokenPlane, TokenSink,
};
use kvasir_types::{
    Codec, DpRank, FinishReason, PlaneEndpoint, RequestContext, RequestId, Sampling, TokenItem,
    TokenRequest, WorkerId,
};
use tokio::sync::mpsc;

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
    pub(crate) client: TcpClient,
    pub(crate) plane: TokenPlane,
    pub(crate) served: Option<ServedEndpoint>,
    pub(crate) calls: mpsc::UnboundedReceiver<(TokenRequest, TokenSink)>,
}

impl Pair {
    pub(crate) async fn start(codec: Codec, capacity: usize) -> Self {
        let options = TcpOptions::default();
        Self::with(codec, capacity, options, ServerOptions::new(loopback())).await
    }

    pub(crate) async fn with(
        codec: Codec,
        capacity: usize,
        options: TcpOptions,
        mut server: ServerOptions,
    ) -> Self {
        let tasks = Tasks::new();
        server.capacity = capacity;
        let server = EndpointServer::bind(server, &tasks).await.unwrap();
        let (sender, calls) = mpsc::unbounded_channel();
        let generate = TokenEndpoint::new(W, move |request, sink| {
            let _ = sender.send((request, sink));
        });
        let served = server.serve(PATH, Arc::new(generate));
        let home = home(&tasks).await;
        let client = TcpClient::new(home.clone(), options, &tasks);
        let endpoint = endpoint(server.local_addr(), codec);
        Self {
            tasks,
            home,
            plane: TokenPlane::new(Arc::new(client.clone()), endpoint),
            client,
            served: Some(served),
            calls,
        }
    }
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
    for codec in [Codec::Json, Codec::MessagePack] {
        let mut pair = Pair::start(codec, 8).await;
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
        assert_eq!(call, expected);
        let (tokens, end) = read(stream.unwrap()).await;
        assert_eq!(
            (tokens, end),
            (vec![1, 2, 3], Ok(Some(FinishReason::Length)))
        );
        assert_eq!((pair.home.expected(), pair.client.connections()), (0, 1));
        assert_eq!(pair.tasks.shut_down(LONG).await, 0);
    }
}

/// Many requests share one connection, and each gets its own answer, in whichever order.
#[tokio::test]
async fn requests_follow_each_other_on_one_connection() {
    const MANY: u32 = 200;
    let mut pair = Pair::start(Codec::MessagePack, 1000).await;
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
    assert_eq!(pair.client.connections(), 1);
    assert_eq!(pair.home.counts().arrived, u64::from(MANY));
}

#[tokio::test]
async fn a_full_worker_and_an_unknown_endpoint_say_so() {
    let mut pair = Pair::start(Codec::MessagePack, 1).await;
    let first = pair.plane.send(W, request(1)).await.unwrap();
    let second = pair.plane.send(W, request(1)).await;
    assert_eq!(second.err(), Some(PlaneError::Overloaded(W)));
    let (_, sink) = pair.calls.recv().await.unwrap();
    sink.push(item(&[1], Some(FinishReason::Stop)));
    assert_eq!(read(first).await.1, Ok(Some(FinishReason::Stop)));
    pair.served = None;
    let gone = pair.plane.send(W, request(1)).await.err();
    let why = format!("unknown endpoint {PATH}");
    assert_eq!(gone, Some(PlaneError::Refused { worker: W, why }));
}

/// A client that leaves ends the work for it: before the first token, and after.
#[tokio::test]
async fn dropping_a_stream_stops_its_worker_at_once() {
    let mut pair = Pair::start(Codec::MessagePack, 8).await;
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
        // The promise is 100 ms; a loaded machine gets ten times that.
        assert!(left.elapsed() < Duration::from_secs(1));
    }
}

#[tokio::test]
async fn a_worker_that_gives_up_its_sink_is_seen_as_gone() {
    let mut pair = Pair::start(Codec::MessagePack, 8).await;
    let stream = pair.plane.send(W, request(9)).await.unwrap();
    let (_, sink) = pair.calls.recv().await.unwrap();
    sink.push(item(&[1, 2], None));
    drop(sink);
    let ended = read(stream).await;
    assert_eq!(ended, (vec![1, 2], Err(PlaneError::Disconnected(W))));
}

#[tokio::test]
async fn what_an_engine_says_reaches_whoever_asked() {
    let mut pair = Pair::start(Codec::MessagePack, 8).await;
    for error in [
        PlaneError::Rejected("no such token".into()),
        PlaneError::Overloaded(W),
    ] {
        let stream = pair.plane.send(W, request(9)).await.unwrap();
        let (_, sink) = pair.calls.recv().await.unwrap();
        sink.fail(error.clone());
        assert_eq!(read(stream).await, (vec![], Err(error)));
    }
    let stream = pair.plane.send(W, request(9)).await.unwrap();
    let (_, sink) = pair.calls.recv().await.unwrap();
    sink.fail(PlaneError::Engine("out of memory".into()));
    assert!(matches!(read(stream).await.1, Err(PlaneError::Engine(_))));
}

/// A reader that does not read holds up its own answer only, and what waits for it is bounded.
#[tokio::test]
async fn a_slow_reader_slows_only_its_own_stream() {
    let mut pair = Pair::start(Codec::MessagePack, 8).await;
    let slow = pair.plane.send(W, request(9)).await.unwrap();
    let (_, slow_sink) = pair.calls.recv().await.unwrap();
    let pushed = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&pushed);
    let flood = pair.tasks.spawn(async move {
        for _ in 0..2000 {
            slow_sink.push(item(&[7; 1000], None));
            counted.fetch_add(1, Ordering::Relaxed);
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
        (2_000_000, Ok(Some(FinishReason::Length)))
    );
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
