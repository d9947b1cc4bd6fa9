//! JetStream of a real server: what was written is there once and in order, and an object has one writer.

use std::collections::BTreeMap;
use std::time::Duration;

use kvasir_tasks::Tasks;
use kvasir_transport::jetstream::{
    JetStream, JetStreamError, LogPublisher, LogPublisherOptions, ObjectStore, PullConsumer, Pulled,
};
use kvasir_transport::nats::NatsLink;

use crate::nats_process::NatsProcess;

const STREAM: &str = "kept";
const HOUR: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_secs(90);

/// A server whose streams are in a folder of this test's own.
fn server() -> Option<(NatsProcess, std::path::PathBuf)> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("kvasir-jetstream-{}-{number}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    let path = folder.display().to_string();
    let nats = NatsProcess::start_with(&["-js", "-sd", &path])?;
    Some((nats, folder))
}

async fn next(consumer: &mut PullConsumer) -> (u64, String) {
    let pulled = tokio::time::timeout(SOON, consumer.next()).await.unwrap();
    match pulled.unwrap() {
        Pulled::Message(message) => {
            let text = String::from_utf8(message.payload.to_vec()).unwrap();
            (message.sequence, text)
        }
        Pulled::Gone => panic!("the consumer is gone"),
    }
}

/// What is written while the server is away is there when it is back, once and in its order.
#[tokio::test]
async fn what_is_written_is_kept_in_order_and_once() {
    let Some((mut nats, folder)) = server() else {
        return;
    };
    let tasks = Tasks::new();
    let jetstream = JetStream::new(nats.link(&tasks));
    let options = LogPublisherOptions {
        stream: STREAM.to_owned(),
        subject: format!("{STREAM}.events"),
        max_age: HOUR,
        publisher: 7,
    };
    let publisher = LogPublisher::start(jetstream.clone(), options, &tasks);
    for number in 0..3 {
        assert!(publisher.publish(number.to_string().into()));
    }
    let mut read = String::new();
    let mut consumer = loop {
        match PullConsumer::durable(&jetstream, STREAM, "one", 1).await {
            Ok(consumer) => break consumer,
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    let numbers = |text: &str| {
        text.chars()
            .filter(char::is_ascii_digit)
            .collect::<String>()
    };
    while read.len() < 3 {
        let (sequence, text) = next(&mut consumer).await;
        consumer.acknowledge(sequence).await;
        read.push_str(&numbers(&text));
    }
    nats.kill();
    (3..9).for_each(|number| assert!(publisher.publish(number.to_string().into())));
    nats.revive();
    while read.len() < 9 {
        // It may have to be made anew: the one that there was ends with the connection, or does not.
        match tokio::time::timeout(SOON, consumer.next()).await.unwrap() {
            Ok(Pulled::Message(message)) => {
                let text = String::from_utf8(message.payload.to_vec()).unwrap();
                read.push_str(&numbers(&text));
            }
            _ => {
                let first = consumer.last() + 1;
                if let Ok(again) = PullConsumer::durable(&jetstream, STREAM, "one", first).await {
                    consumer = again;
                }
            }
        }
    }
    assert_eq!(read, "012345678");
    // Who comes later reads the same; what is purged is gone.
    let mut late = PullConsumer::once(&jetstream, STREAM, 1).await.unwrap();
    assert_eq!(next(&mut late).await.0, 1);
    jetstream.purge_stream(STREAM, Some(2)).await.unwrap();
    let mut late = PullConsumer::once(&jetstream, STREAM, 1).await.unwrap();
    assert_eq!(next(&mut late).await.0, 2);
    let consumers = jetstream.durable_consumers(STREAM).await.unwrap();
    assert_eq!(consumers.len(), 1, "{consumers:?}");
    assert!(
        jetstream
            .stream_info("none")
            .await
            .unwrap_err()
            .is_not_found()
    );
    nats.kill();
    let _ = std::fs::remove_dir_all(folder);
}

/// Of two who replace the same value the first one does; what the other has uploaded is seen by nobody.
#[tokio::test]
async fn an_object_is_replaced_by_who_has_read_it() {
    let Some((mut nats, folder)) = server() else {
        return;
    };
    let tasks = Tasks::new();
    let store = ObjectStore::new(&JetStream::new(nats.link(&tasks)), "bucket");
    until_there(&store).await;
    let before = store.head("value").await.unwrap();
    assert!(!before.is_there());
    let large: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
    let labels = BTreeMap::from([("kind".to_owned(), "first".to_owned())]);
    store.upload("000000000001a", &large).await.unwrap();
    assert!(store.get("value").await.unwrap().is_none());
    let publish = |head, chunks, bytes| store.publish("value", head, chunks, bytes, &labels);
    publish(&before, "000000000001a", &large).await.unwrap();
    let (first, bytes) = store.get("value").await.unwrap().unwrap();
    assert_eq!((bytes, &first.labels), (large.clone(), &labels));
    // Somebody who read what was there before.
    store.upload("000000000001b", b"other").await.unwrap();
    let late = publish(&before, "000000000001b", b"other").await;
    assert!(matches!(late, Err(JetStreamError::Conflict(_))), "{late:?}");
    store.upload("ffffffffffffc", b"second").await.unwrap();
    publish(&first, "ffffffffffffc", b"second").await.unwrap();
    store.sweep("value", &first, 1 << 40).await.unwrap();
    assert_eq!(store.get("value").await.unwrap().unwrap().1, b"second");
    store.delete().await.unwrap();
    until_there(&store).await;
    assert!(store.get("value").await.unwrap().is_none());
    nats.kill();
    let _ = std::fs::remove_dir_all(folder);
}

/// Creates a bucket, as soon as the server can.
async fn until_there(store: &ObjectStore) {
    let created = async {
        while store.ensure().await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, created).await.unwrap();
}

/// A server that is slow to delete a bucket takes the files of the next one of that name with it: it cannot be written to until it is created again.
#[tokio::test]
async fn a_bucket_whose_files_are_gone_is_created_again() {
    let Some((mut nats, folder)) = server() else {
        return;
    };
    let tasks = Tasks::new();
    let store = ObjectStore::new(&JetStream::new(nats.link(&tasks)), "lost");
    until_there(&store).await;
    std::fs::remove_dir_all(folder.join("jetstream/$G/streams/OBJ_lost")).unwrap();
    // More than the one file that the server has open.
    let large = vec![7; 20 << 20];
    let lost = store.upload("000000000001a", &large).await.unwrap_err();
    assert!(lost.has_lost_files(), "{lost}");
    until_there(&store).await;
    let (head, labels) = (store.head("value").await.unwrap(), BTreeMap::new());
    store.upload("000000000001b", b"bytes").await.unwrap();
    let published = store.publish("value", &head, "000000000001b", b"bytes", &labels);
    published.await.unwrap();
    assert_eq!(store.get("value").await.unwrap().unwrap().1, b"bytes");
    nats.kill();
    let _ = std::fs::remove_dir_all(folder);
}

/// Those who look for a value while the bucket is created find none, and the server lives on: one of version 2.9 crashes if it is asked for a message then.
#[tokio::test]
async fn a_bucket_may_be_looked_at_while_it_is_created() {
    let Some((mut nats, folder)) = server() else {
        return;
    };
    let tasks = Tasks::new();
    let store = ObjectStore::new(&JetStream::new(nats.link(&tasks)), "young");
    let (one, other) = (nats.link(&tasks), nats.link(&tasks));
    let look = async |link: &NatsLink| {
        let store = ObjectStore::new(&JetStream::new(link.clone()), "young");
        for _ in 0..20 {
            assert!(!store.head("value").await.unwrap().is_there());
        }
    };
    for _ in 0..50 {
        let all = async { tokio::join!(look(&one), look(&other), until_there(&store)) };
        tokio::time::timeout(SOON, all).await.unwrap();
        store.delete().await.unwrap();
    }
    nats.kill();
    let _ = std::fs::remove_dir_all(folder);
}
