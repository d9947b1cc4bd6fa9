//! The event plane over real sockets: four parts, envelopes, numbers; and the recorded messages of real publishers.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use kvasir_tasks::Tasks;
use kvasir_transport::event_plane::{
    ChannelAddress, PlanePublisher, PlanePublisherOptions, PlaneReader,
};
use kvasir_transport::zmq::{
    Endpoint, ZmqFraming, ZmqLimits, ZmqPublisher, ZmqSource, ZmqSourceOptions,
};
use kvasir_transport::{SourceEvent, next_event};
use kvasir_wire::native::Topic;
use serde_json::Value as Json;

fn options(topic: Topic) -> PlanePublisherOptions {
    PlanePublisherOptions {
        publisher: 7,
        topic,
        host: "127.0.0.1".to_owned(),
    }
}

fn listen(tasks: &Tasks, endpoint: Endpoint, topic: Topic) -> ZmqSource {
    let options = ZmqSourceOptions {
        topic: topic.name().to_owned(),
        framing: ZmqFraming::EventPlane,
        ..ZmqSourceOptions::new(endpoint, None)
    };
    ZmqSource::start(tasks, options)
}

async fn next(source: &mut ZmqSource) -> SourceEvent {
    let next = tokio::time::timeout(Duration::from_secs(30), next_event(source));
    next.await.unwrap()
}

async fn until(mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait)
        .await
        .unwrap();
}

#[tokio::test]
async fn what_is_published_is_heard_in_order_and_once() {
    let tasks = Tasks::new();
    let publisher = PlanePublisher::bind_zmq(&tasks, options(Topic::KvEvents))
        .await
        .unwrap();
    let ChannelAddress::Zmq(address) = publisher.address() else {
        panic!("bound on ZeroMQ");
    };
    assert!(address.starts_with("tcp://127.0.0.1:"), "{address}");
    let mut source = listen(&tasks, address.parse().unwrap(), Topic::KvEvents);
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    until(|| publisher.subscribers() == Some(1)).await;
    for payload in ["a", "b"] {
        assert_eq!(publisher.publish(payload.into(), 5), 0);
    }
    for (number, payload) in ["a", "b"].into_iter().enumerate() {
        let SourceEvent::Live(frame) = next(&mut source).await else {
            panic!("a message");
        };
        assert_eq!(
            (frame.sequence, &frame.payload[..]),
            (number as u64, payload.as_bytes())
        );
    }
    assert_eq!(
        (publisher.publisher(), publisher.topic()),
        (7, Topic::KvEvents)
    );
    assert!(!publisher.is_bare());
}

/// What real publishers sent, sent again: every message of the topic is heard, those of others are not, repeats are not.
#[tokio::test]
async fn recorded_messages_are_heard_by_topic_and_once() {
    let root = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/dynamo-events/zmq.jsonl"
    );
    let text = std::fs::read_to_string(root).unwrap();
    let messages: Vec<Vec<Bytes>> = text
        .lines()
        .map(|line| {
            let line: Json = serde_json::from_str(line).unwrap();
            let frames = line["frames"].as_array().unwrap().iter();
            let bytes = |frame: &Json| STANDARD.decode(frame.as_str().unwrap()).unwrap().into();
            frames.map(bytes).collect()
        })
        .collect();
    let mut expected = Vec::new();
    let mut reader = PlaneReader::new("kv_metrics");
    for parts in &messages {
        expected.extend(reader.read_parts(parts).unwrap());
    }
    assert!(expected.len() > 5 && expected.len() < messages.len());
    let tasks = Tasks::new();
    let any = Endpoint::new("127.0.0.1", 0);
    let publisher = ZmqPublisher::bind(&tasks, &any, ZmqLimits::default())
        .await
        .unwrap();
    let endpoint = any.with_port(publisher.address().port());
    let mut source = listen(&tasks, endpoint, Topic::KvMetrics);
    assert_eq!(next(&mut source).await, SourceEvent::Connected);
    until(|| publisher.subscribers() == 1).await;
    for parts in &messages {
        publisher.publish(parts);
        publisher.publish(parts);
    }
    for frame in expected {
        assert_eq!(next(&mut source).await, SourceEvent::Live(frame));
    }
    // One of another shape is told as such, and comes after all repeats: none of them was told.
    let topic = Bytes::from_static(b"kv_metrics");
    publisher.publish(&[topic.clone(), topic]);
    assert!(matches!(next(&mut source).await, SourceEvent::Refused(_)));
}
