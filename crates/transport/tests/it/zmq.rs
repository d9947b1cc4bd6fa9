//! Both ends are ours: connection, loss, restart, slowness, replay.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use kvasir_tasks::Tasks;
use kvasir_transport::zmq::{
    Endpoint, ReplayStore, ZmqLimits, ZmqPublisher, ZmqReplayServer, ZmqSource, ZmqSourceOptions,
};
use kvasir_transport::{EventSource, SourceEvent, SourceFault, next_event};
use kvasir_wire::frame::Frame;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

fn loopback(port: u16) -> Endpoint {
    Endpoint::new("127.0.0.1", port)
}

async fn publisher(tasks: &Tasks, port: u16) -> ZmqPublisher {
    ZmqPublisher::bind(tasks, &loopback(port), ZmqLimits::default())
        .await
        .unwrap()
}

fn message(sequence: u64, size: usize) -> [Bytes; 3] {
    let sequence = Bytes::copy_from_slice(&sequence.to_be_bytes());
    [
        Bytes::from_static(b"kv-events"),
        sequence,
        vec![7; size].into(),
    ]
}

fn source(tasks: &Tasks, events: u16, replay: Option<u16>) -> ZmqSource {
    let options = ZmqSourceOptions::new(loopback(events), replay.map(loopback));
    ZmqSource::start(tasks, options)
}

async fn next(source: &mut ZmqSource) -> SourceEvent {
    let waiting = tokio::time::timeout(Duration::from_secs(20), next_event(source));
    waiting.await.expect("the source is silent")
}

async fn subscribed(publisher: &ZmqPublisher, count: usize) {
    while publisher.subscribers() != count {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn sequence(event: &SourceEvent) -> u64 {
    match event {
        SourceEvent::Live(frame) => frame.sequence,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn messages_arrive_in_order_after_the_connection_is_told() {
    let tasks = Tasks::new();
    let publisher = publisher(&tasks, 0).await;
    let mut source = source(&tasks, publisher.address().port(), None);
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    subscribed(&publisher, 1).await;
    for n in 0..1000 {
        publisher.publish(&message(n, 300));
    }
    for n in 0..1000 {
        assert_eq!(sequence(&next(&mut source).await), n);
    }
    publisher.publish(&[Bytes::new(), Bytes::from_static(b"short")]);
    assert!(matches!(next(&mut source).await, SourceEvent::Refused(_)));
    publisher.publish(&message(1000, 0));
    assert_eq!(sequence(&next(&mut source).await), 1000);
}

/// The engine comes after us, goes, and comes back at the same address. Each change is told once.
#[tokio::test]
async fn an_engine_may_come_late_and_come_back() {
    let tasks = Tasks::new();
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let mut source = source(&tasks, port, None);
    let refused = next(&mut source).await;
    assert!(
        matches!(
            &refused,
            SourceEvent::Disconnected(SourceFault::Unreachable(_))
        ),
        "{refused:?}"
    );
    for life in 0..2 {
        let publisher = publisher(&tasks, port).await;
        assert_eq!(next(&mut source).await, SourceEvent::Connected);
        subscribed(&publisher, 1).await;
        publisher.publish(&message(life, 10));
        assert_eq!(sequence(&next(&mut source).await), life);
        drop(publisher);
        let closed = next(&mut source).await;
        assert!(
            matches!(&closed, SourceEvent::Disconnected(_)),
            "{closed:?}"
        );
    }
}

/// Nobody reads: the queue fills, the connection is not read any more, the publisher drops and never
/// waits. Reading again shows the hole.
#[tokio::test]
async fn a_slow_reader_costs_the_publisher_nothing() {
    let tasks = Tasks::new();
    let limits = ZmqLimits {
        queue_messages_max: 100,
        ..ZmqLimits::default()
    };
    let publisher = ZmqPublisher::bind(&tasks, &loopback(0), limits)
        .await
        .unwrap();
    let mut options = ZmqSourceOptions::new(loopback(publisher.address().port()), None);
    options.limits.queue_bytes_max = 1 << 20;
    let mut source = ZmqSource::start(&tasks, options);
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    subscribed(&publisher, 1).await;
    let mut sent = 0;
    while publisher.dropped() < 1000 {
        publisher.publish(&message(sent, 100_000));
        sent += 1;
        tokio::task::yield_now().await;
    }
    let mut last = None;
    loop {
        publisher.publish(&message(sent, 10));
        sent += 1;
        let found = sequence(&next(&mut source).await);
        if last.is_some_and(|last| found > last + 1) {
            break;
        }
        last = Some(found);
    }
}

struct Log(Mutex<Vec<Frame<Bytes>>>);

impl ReplayStore for Log {
    fn messages_from(&self, start: u64) -> Vec<Frame<Bytes>> {
        let log = self.0.lock().unwrap();
        log.iter()
            .filter(|f| f.sequence >= start)
            .cloned()
            .collect()
    }
}

#[tokio::test]
async fn a_replay_brings_everything_and_its_end() {
    let tasks = Tasks::new();
    let publisher = publisher(&tasks, 0).await;
    let frames = (0..9000).map(|sequence| Frame {
        sequence,
        payload: Bytes::from(vec![1; 1000]),
    });
    let store = Arc::new(Log(Mutex::new(frames.collect())));
    let limits = ZmqLimits::default();
    let server = ZmqReplayServer::bind(&tasks, &loopback(0), limits, store)
        .await
        .unwrap();
    let port = publisher.address().port();
    let mut source = source(&tasks, port, Some(server.address().port()));
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    source.replay(1, 10);
    for expected in 10..9000 {
        match next(&mut source).await {
            SourceEvent::Replayed { attempt: 1, frame } => assert_eq!(frame.sequence, expected),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        next(&mut source).await,
        SourceEvent::ReplayEnded { attempt: 1 }
    );
    // From the future: the end alone.
    source.replay(2, 1 << 40);
    assert_eq!(
        next(&mut source).await,
        SourceEvent::ReplayEnded { attempt: 2 }
    );
    drop(server);
    source.replay(3, 0);
    let failed = next(&mut source).await;
    assert!(
        matches!(&failed, SourceEvent::ReplayFailed { attempt: 3, .. }),
        "{failed:?}"
    );
}

/// Whoever listens there is named: an HTTP server, a replay port in place of the event port, a silent one.
#[tokio::test]
async fn a_wrong_port_is_named() {
    let tasks = Tasks::new();
    let http = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = http.local_addr().unwrap().port();
    let mut to_http = source(&tasks, port, None);
    let (mut stream, _) = http.accept().await.unwrap();
    stream
        .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        .await
        .unwrap();
    let SourceEvent::Disconnected(SourceFault::Protocol(reason)) = next(&mut to_http).await else {
        panic!("not named");
    };
    assert!(reason.contains("does not speak ZMTP"), "{reason}");

    let store = Arc::new(Log(Mutex::new(Vec::new())));
    let limits = ZmqLimits::default();
    let server = ZmqReplayServer::bind(&tasks, &loopback(0), limits, store)
        .await
        .unwrap();
    let mut to_replay = source(&tasks, server.address().port(), None);
    let SourceEvent::Disconnected(SourceFault::Protocol(reason)) = next(&mut to_replay).await
    else {
        panic!("not named");
    };
    assert!(
        reason.contains("ROUTER") && reason.contains("right port"),
        "{reason}"
    );

    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut options = ZmqSourceOptions::new(loopback(silent.local_addr().unwrap().port()), None);
    options.limits.connect_timeout = Duration::from_millis(50);
    let mut to_silent = ZmqSource::start(&tasks, options);
    let fault = next(&mut to_silent).await;
    assert_eq!(fault, SourceEvent::Disconnected(SourceFault::Silent));
}

/// A host that died without a word: heartbeats go unanswered, and it is noticed.
#[tokio::test]
async fn a_peer_that_stops_answering_is_noticed() {
    let tasks = Tasks::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut options = ZmqSourceOptions::new(loopback(listener.local_addr().unwrap().port()), None);
    options.limits.heartbeat = Duration::from_millis(20);
    let mut source = ZmqSource::start(&tasks, options);
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut hello = [0; 64];
    (hello[0], hello[9], hello[10], hello[11]) = (0xff, 0x7f, 3, 1);
    hello[12..16].copy_from_slice(b"NULL");
    stream.write_all(&hello).await.unwrap();
    let ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB";
    stream.write_all(ready).await.unwrap();
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    let gone = next(&mut source).await;
    assert_eq!(gone, SourceEvent::Disconnected(SourceFault::Silent));
}

#[tokio::test]
async fn what_is_dropped_closes_its_connections() {
    let tasks = Tasks::new();
    let publisher = publisher(&tasks, 0).await;
    let mut source = source(&tasks, publisher.address().port(), None);
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    subscribed(&publisher, 1).await;
    drop(source);
    subscribed(&publisher, 0).await;
    drop(publisher);
    assert_eq!(tasks.shut_down(Duration::from_secs(5)).await, 0);
}
