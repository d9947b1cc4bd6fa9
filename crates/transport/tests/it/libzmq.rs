//! The other end is libzmq 4.3.5: what its sockets sent, recorded, is played to ours.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use kvasir_tasks::Tasks;
use kvasir_transport::zmq::{
    Endpoint, ReplayStore, ZmqLimits, ZmqPublisher, ZmqReplayServer, ZmqSource, ZmqSourceOptions,
};
use kvasir_transport::{EventSource, SourceEvent, next_event};
use kvasir_wire::frame::Frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

fn recorded(socket: &str) -> Vec<u8> {
    let file = include_str!("../../../../testdata/zmtp/libzmq.jsonl");
    let line = file
        .lines()
        .find(|line| line.contains(&format!("\"{socket}\"")));
    let line: serde_json::Value = serde_json::from_str(line.unwrap()).unwrap();
    STANDARD
        .decode(line["bytes_b64"].as_str().unwrap())
        .unwrap()
}

async fn listener() -> (TcpListener, Endpoint) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, Endpoint::new("127.0.0.1", port))
}

/// Reads until `needle` came.
async fn expect(stream: &mut TcpStream, needle: &[u8]) -> Vec<u8> {
    let mut seen = Vec::new();
    while !seen.windows(needle.len()).any(|w| w == needle) {
        let read = stream.read_buf(&mut seen);
        let count = tokio::time::timeout(Duration::from_secs(10), read).await;
        assert!(count.unwrap().unwrap() > 0, "closed after {seen:02x?}");
    }
    seen
}

async fn next(source: &mut ZmqSource) -> SourceEvent {
    let waiting = tokio::time::timeout(Duration::from_secs(10), next_event(source));
    waiting.await.expect("the source is silent")
}

/// A publisher with heartbeats on: its pings are answered and do not disturb.
#[tokio::test]
async fn our_sub_reads_a_libzmq_pub() {
    let tasks = Tasks::new();
    let (listener, endpoint) = listener().await;
    let mut options = ZmqSourceOptions::new(endpoint, None);
    options.topic = "kv".to_owned();
    let mut source = ZmqSource::start(&tasks, options);
    let (mut engine, _) = listener.accept().await.unwrap();
    engine.write_all(&recorded("PUB")).await.unwrap();
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    for n in 0..3u8 {
        let SourceEvent::Live(frame) = next(&mut source).await else {
            panic!("no message {n}");
        };
        let payload = vec![n; 100 * usize::from(n) * usize::from(n) + usize::from(n)];
        assert_eq!(
            (frame.sequence, frame.payload),
            (u64::from(n), payload.into())
        );
    }
    expect(&mut engine, b"\x01kv").await;
    expect(&mut engine, b"\x04PONG").await;
}

#[tokio::test]
async fn our_dealer_reads_a_libzmq_router() {
    let tasks = Tasks::new();
    let (events, events_at) = listener().await;
    let (replay, replay_at) = listener().await;
    let mut source = ZmqSource::start(&tasks, ZmqSourceOptions::new(events_at, Some(replay_at)));
    source.replay(7, 1);
    let (mut engine, _) = replay.accept().await.unwrap();
    engine.write_all(&recorded("ROUTER")).await.unwrap();
    for n in 1..3u64 {
        let frame = Frame {
            sequence: n,
            payload: Bytes::from(vec![n as u8; 300]),
        };
        let attempt = 7;
        assert_eq!(
            next(&mut source).await,
            SourceEvent::Replayed { attempt, frame }
        );
    }
    assert_eq!(
        next(&mut source).await,
        SourceEvent::ReplayEnded { attempt: 7 }
    );
    let asked = expect(
        &mut engine,
        b"\x01\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x01",
    )
    .await;
    assert!(asked.windows(6).any(|w| w == b"DEALER"));
    drop(events);
}

#[tokio::test]
async fn our_pub_serves_a_libzmq_sub() {
    let tasks = Tasks::new();
    let endpoint = Endpoint::new("127.0.0.1", 0);
    let publisher = ZmqPublisher::bind(&tasks, &endpoint, ZmqLimits::default())
        .await
        .unwrap();
    let mut subscriber = TcpStream::connect(publisher.address()).await.unwrap();
    subscriber.write_all(&recorded("SUB")).await.unwrap();
    while publisher.subscribers() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let parts = |topic: &'static [u8]| {
        [
            Bytes::from_static(topic),
            Bytes::from_static(b"12345678"),
            Bytes::from_static(b"payload"),
        ]
    };
    publisher.publish(&parts(b"other"));
    publisher.publish(&parts(b"kv-events"));
    let seen = expect(&mut subscriber, b"\x00\x07payload").await;
    assert!(!seen.windows(5).any(|w| w == b"other"));
    assert!(
        seen.windows(20)
            .any(|w| w == b"\x01\x09kv-events\x01\x0812345678"[..20].as_ref())
    );
}

struct Two;

impl ReplayStore for Two {
    fn messages_from(&self, start: u64) -> Vec<Frame<Bytes>> {
        let payload = Bytes::from_static(b"batch");
        let frames = (0..2).map(|sequence| Frame {
            sequence,
            payload: payload.clone(),
        });
        frames.filter(|f| f.sequence >= start).collect()
    }
}

#[tokio::test]
async fn our_router_answers_a_libzmq_dealer() {
    let tasks = Tasks::new();
    let endpoint = Endpoint::new("127.0.0.1", 0);
    let limits = ZmqLimits::default();
    let server = ZmqReplayServer::bind(&tasks, &endpoint, limits, Arc::new(Two))
        .await
        .unwrap();
    let mut client = TcpStream::connect(server.address()).await.unwrap();
    client.write_all(&recorded("DEALER")).await.unwrap();
    let end = b"\x01\x00\x01\x00\x01\x08\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00";
    let seen = expect(&mut client, end).await;
    let one = b"\x01\x00\x01\x00\x01\x08\x00\x00\x00\x00\x00\x00\x00\x01\x00\x05batch";
    assert!(seen.windows(one.len()).any(|w| w == one));
    let batches = seen.windows(5).filter(|w| w == b"batch").count();
    assert_eq!(batches, 1, "asked from 1 on");
}
