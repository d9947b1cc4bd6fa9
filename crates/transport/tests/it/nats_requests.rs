//! What requests over NATS do when the server is not there, goes away and comes back.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use kvasir_tasks::Tasks;
use kvasir_transport::nats::{NatsClient, NatsLink, NatsOptions, NatsServer};
use kvasir_transport::tcp::TcpOptions;
use kvasir_transport::{PlaneError, RequestPlane, TokenEndpoint, TokenPlane, TokenSink};
use kvasir_types::{Codec, FinishReason, PlaneEndpoint};

use crate::nats_process::NatsProcess;
use crate::rpc::{LONG, W, home, item, read, request};
use crate::wires::SUBJECT;

async fn plane(link: &NatsLink, tasks: &Tasks) -> TokenPlane {
    let options = TcpOptions::default();
    let client = NatsClient::new(link.clone(), home(tasks).await, &options, tasks);
    let endpoint = PlaneEndpoint {
        plane: "nats".into(),
        address: SUBJECT.into(),
        codec: Codec::MessagePack,
    };
    TokenPlane::new(Arc::new(client), endpoint)
}

/// Answers every request with one token.
async fn echo(link: &NatsLink, tasks: &Tasks) -> kvasir_transport::ServedEndpoint {
    let generate = TokenEndpoint::new(W, |_, sink: TokenSink| {
        sink.push(item(&[1], Some(FinishReason::Stop)));
    });
    let server = NatsServer::new(link.clone(), 1000, tasks);
    server.serve(SUBJECT, Arc::new(generate)).await.unwrap()
}

async fn until(link: &NatsLink, reached: bool) {
    let mut state = link.watch();
    let wait = state.wait_for(|state| state.reached.is_ok() == reached);
    tokio::time::timeout(LONG, wait).await.unwrap().unwrap();
}

/// The server is killed under load and comes back: what was asked meanwhile is answered, and so is what was on its way.
#[tokio::test]
async fn no_request_is_lost_to_a_server_that_is_restarted() {
    let Some(mut process) = NatsProcess::start() else {
        return;
    };
    let tasks = Tasks::new();
    let (ours, theirs) = (process.link(&tasks), process.link(&tasks));
    let plane = plane(&ours, &tasks).await;
    let _served = echo(&theirs, &tasks).await;
    let (answered, over) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let clients: Vec<_> = (0..16)
        .map(|_| {
            let (plane, answered, over) = (plane.clone(), Arc::clone(&answered), Arc::clone(&over));
            tasks.spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let stream = plane.send(W, request(1)).await.unwrap();
                    assert_eq!(read(stream).await, (vec![1], Ok(Some(FinishReason::Stop))));
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let more = async |by: usize| {
        let before = answered.load(Ordering::Relaxed);
        let grown = async {
            while answered.load(Ordering::Relaxed) < before + by {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(LONG, grown).await.unwrap();
    };
    for _ in 0..3 {
        more(200).await;
        process.kill();
        until(&ours, false).await;
        until(&theirs, false).await;
        process.revive();
        more(200).await;
    }
    over.store(true, Ordering::Relaxed);
    for client in clients {
        tokio::time::timeout(LONG, client).await.unwrap().unwrap();
    }
}

/// A request waits for a server that is not there yet, for a time that has a name, and the worker is not blamed.
#[tokio::test]
async fn a_request_waits_for_the_server_and_not_for_ever() {
    let Some(mut process) = NatsProcess::start() else {
        return;
    };
    process.kill();
    let tasks = Tasks::new();
    let hasty = NatsOptions {
        outage_timeout: Duration::from_millis(50),
        ..process.options()
    };
    let hasty = plane(&NatsLink::new(&hasty, &tasks).unwrap(), &tasks).await;
    match hasty.send(W, request(1)).await {
        Err(PlaneError::Local(why)) => assert!(why.contains("--nats-server"), "{why}"),
        other => panic!("{other:?}"),
    }
    // It has been away for long enough: nobody waits again.
    let again = tokio::time::timeout(Duration::ZERO, hasty.send(W, request(1))).await;
    assert!(matches!(again, Ok(Err(PlaneError::Local(_)))), "{again:?}");
    let (ours, theirs) = (process.link(&tasks), process.link(&tasks));
    let patient = plane(&ours, &tasks).await;
    let waiting = tasks.spawn(async move { patient.send(W, request(1)).await });
    let serving = echo(&theirs, &tasks);
    process.revive();
    let _served = serving.await;
    // It came before anybody read the subject, or after.
    match tokio::time::timeout(LONG, waiting).await.unwrap() {
        Ok(Some(Ok(stream))) => {
            assert_eq!(read(stream).await, (vec![1], Ok(Some(FinishReason::Stop))));
        }
        Ok(Some(Err(PlaneError::Connect { why, .. }))) => {
            assert!(why.contains("nobody reads"), "{why}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_request_that_the_server_does_not_take_is_refused() {
    let Some(process) = NatsProcess::start() else {
        return;
    };
    let tasks = Tasks::new();
    let plane = plane(&process.link(&tasks), &tasks).await;
    let mut long = request(1);
    long.tokens = (100_000..500_000).collect();
    match plane.send(W, long).await {
        Err(PlaneError::Rejected(why)) => assert!(why.contains("1048576"), "{why}"),
        other => panic!("{other:?}"),
    }
    let unread = plane.send(W, request(1)).await.err().unwrap();
    assert!(matches!(unread, PlaneError::Connect { .. }), "{unread}");
}

/// A server with a certificate: believed if the authority is named, or if anything is believed.
#[tokio::test]
async fn a_server_can_be_secured() {
    let pem = |name: &str| {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/tls/");
        format!("{root}{name}")
    };
    let (cert, key) = (pem("server.pem"), pem("server-key.pem"));
    let args = ["--tls", "--tlscert", &cert, "--tlskey", &key];
    let Some(process) = NatsProcess::start_with(&args) else {
        return;
    };
    for (authority, insecure, is_reached) in [
        (Some("ca.pem"), false, true),
        (Some("other-ca.pem"), false, false),
        (None, true, true),
    ] {
        let tasks = Tasks::new();
        let options = NatsOptions {
            tls_ca: authority.map(|name| pem(name).into()),
            tls_insecure: insecure,
            outage_timeout: match is_reached {
                true => LONG,
                false => Duration::from_millis(300),
            },
            ..process.options()
        };
        let plane = plane(&NatsLink::new(&options, &tasks).unwrap(), &tasks).await;
        let error = plane.send(W, request(1)).await.err().unwrap();
        let found = matches!(error, PlaneError::Connect { .. });
        assert_eq!(found, is_reached, "{authority:?} {insecure}: {error}");
        tasks.stop();
    }
}

/// One that says that it has a request and is gone before it brings the answer is not waited for until the answer is due.
#[tokio::test]
async fn a_worker_that_dies_with_a_request_is_noticed() {
    let Some(process) = NatsProcess::start() else {
        return;
    };
    let tasks = Tasks::new();
    let link = process.link(&tasks);
    let plane = plane(&link, &tasks).await;
    let server = format!("nats://127.0.0.1:{}", process.port);
    let options = async_nats::ConnectOptions::new().retry_on_initial_connect();
    let client = options.connect(server).await.unwrap();
    let mut requests = client.subscribe(SUBJECT).await.unwrap();
    // The server has the subscription when it has what came after it.
    let mut probe = client.subscribe("probe.own").await.unwrap();
    client.publish("probe.own", Bytes::new()).await.unwrap();
    next(&mut probe).await;
    let asking = tasks.spawn(async move { plane.send(W, request(1)).await.map(drop) });
    let taken = next(&mut requests).await;
    requests.unsubscribe().await.unwrap();
    client
        .publish(taken.reply.unwrap(), Bytes::new())
        .await
        .unwrap();
    let told = tokio::time::timeout(LONG, asking).await.unwrap();
    let told = told.unwrap().unwrap();
    assert!(matches!(told, Err(PlaneError::Disconnected(W))), "{told:?}");
}

async fn next(messages: &mut async_nats::Subscriber) -> async_nats::Message {
    let message = poll_fn(|cx| Pin::new(&mut *messages).poll_next(cx));
    tokio::time::timeout(LONG, message).await.unwrap().unwrap()
}
