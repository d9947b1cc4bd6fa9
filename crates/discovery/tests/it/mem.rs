//! The store in this process.

use std::time::Duration;

use kvasir_discovery::{Bucket, MemStore, RecordKey, Store};

use crate::rig::{endpoint, next};

#[tokio::test]
async fn what_is_announced_is_heard_and_goes_with_its_lease() {
    let store = MemStore::new();
    let first = store.lease().await.unwrap();
    first.put(endpoint(first.id(), "a")).await.unwrap();
    let mut watch = store.watch(&Bucket::ALL);
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/1 a");
    assert_eq!(next(&mut watch).await, "synced");
    let second = store.lease().await.unwrap();
    second.put(endpoint(second.id(), "b")).await.unwrap();
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/2 b");
    second.put(endpoint(second.id(), "c")).await.unwrap();
    assert_eq!(next(&mut watch).await, "~dynamo/backend/generate/2 c");
    second.revoke().await.unwrap();
    assert_eq!(next(&mut watch).await, "-dynamo/backend/generate/2");
    drop(first);
    assert_eq!(next(&mut watch).await, "-dynamo/backend/generate/1");
}

#[tokio::test]
async fn a_store_that_fails_keeps_what_is_known_and_tells_what_was_missed() {
    let store = MemStore::new();
    let (one, two) = (store.lease().await.unwrap(), store.lease().await.unwrap());
    one.put(endpoint(1, "a")).await.unwrap();
    let mut watch = store.watch(&[Bucket::Instances]).with_grace(Duration::ZERO);
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/1 a");
    assert_eq!(next(&mut watch).await, "synced");
    store.fail("broken");
    assert_eq!(next(&mut watch).await, "lost");
    two.put(endpoint(2, "b")).await.unwrap();
    one.revoke().await.unwrap();
    assert!(watch.try_next().is_none());
    store.repair();
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/2 b");
    assert_eq!(next(&mut watch).await, "restored");
    assert_eq!(next(&mut watch).await, "-dynamo/backend/generate/1");
    let key = RecordKey::new(Bucket::Instances, "dynamo/backend/generate/2");
    store.put_raw(&key, b"not json");
    store.put_raw(&endpoint(3, "").key(), &endpoint(3, "c").to_bytes());
    assert_eq!(next(&mut watch).await, "+dynamo/backend/generate/3 c");
}
