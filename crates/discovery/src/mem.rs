//! Records within one process.
//!
//! Answers one question: who is there, where all workers live in this process? The store of `--discovery-backend mem`, of the
//! demo and of tests. A lease that is dropped takes its records with it: nobody could outlive it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::record::{Bucket, Record, RecordKey};
use crate::store::{Feed, Lease, Store, StoreError, StoreFuture, Watch, watch};

/// A store in this process. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct MemStore {
    shared: Arc<Mutex<Content>>,
    last_id: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Content {
    values: BTreeMap<RecordKey, Vec<u8>>,
    watchers: Vec<(Vec<Bucket>, Feed)>,
    /// Why nobody can reach it, for tests of what others make of that.
    broken: Option<String>,
}

impl MemStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a value as it is, readable or not.
    pub fn put_raw(&self, key: &RecordKey, value: &[u8]) {
        let mut content = self.lock();
        content.values.insert(key.clone(), value.to_vec());
        content.tell(key);
    }

    /// Takes a value out.
    pub fn delete(&self, key: &RecordKey) {
        let mut content = self.lock();
        content.values.remove(key);
        content.tell(key);
    }

    /// From now on watchers hear nothing, until [`Self::repair`].
    pub fn fail(&self, why: &str) {
        let mut content = self.lock();
        content.broken = Some(why.into());
        content.open_watchers().for_each(|(_, feed)| feed.lost(why));
    }

    /// Watchers hear again, beginning with what they missed.
    pub fn repair(&self) {
        let mut content = self.lock();
        content.broken = None;
        let values = std::mem::take(&mut content.values);
        for (buckets, feed) in content.open_watchers() {
            list(buckets, feed, &values);
        }
        content.values = values;
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells a watcher all there is.
fn list(buckets: &[Bucket], feed: &Feed, values: &BTreeMap<RecordKey, Vec<u8>>) {
    for bucket in buckets {
        let of_bucket = values.iter().filter(|(key, _)| key.bucket == *bucket);
        for (key, value) in of_bucket.clone() {
            feed.put(key, value);
        }
        feed.retain(
            *bucket,
            &of_bucket.map(|(key, _)| key.key.clone()).collect(),
        );
    }
    feed.synced();
}

impl Content {
    fn open_watchers(&mut self) -> impl Iterator<Item = &(Vec<Bucket>, Feed)> {
        self.watchers.retain(|(_, feed)| !feed.is_closed());
        self.watchers.iter()
    }

    fn tell(&mut self, key: &RecordKey) {
        if self.broken.is_some() {
            return;
        }
        let value = self.values.get(key).cloned();
        for (_, feed) in self
            .open_watchers()
            .filter(|(b, _)| b.contains(&key.bucket))
        {
            match &value {
                Some(value) => feed.put(key, value),
                None => feed.delete(key),
            }
        }
    }
}

impl Store for MemStore {
    fn backend(&self) -> &'static str {
        "mem"
    }

    fn address(&self) -> String {
        "this process".into()
    }

    fn watch(&self, buckets: &[Bucket]) -> Watch {
        let (feed, watch) = watch(&self.address());
        let mut content = self.lock();
        match &content.broken {
            Some(why) => feed.lost(why),
            None => list(buckets, &feed, &content.values),
        }
        content.watchers.push((buckets.to_vec(), feed));
        watch
    }

    fn lease(&self) -> StoreFuture<'_, Result<Arc<dyn Lease>, StoreError>> {
        let lease = MemLease {
            id: self.last_id.fetch_add(1, Ordering::Relaxed) + 1,
            store: self.clone(),
            keys: Mutex::default(),
        };
        let lease: Arc<dyn Lease> = Arc::new(lease);
        Box::pin(std::future::ready(Ok(lease)))
    }
}

#[derive(Debug)]
struct MemLease {
    id: u64,
    store: MemStore,
    keys: Mutex<Vec<RecordKey>>,
}

impl MemLease {
    fn keys(&self) -> MutexGuard<'_, Vec<RecordKey>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        for key in std::mem::take(&mut *self.keys()) {
            self.store.delete(&key);
        }
    }
}

impl Lease for MemLease {
    fn id(&self) -> u64 {
        self.id
    }

    fn put(&self, record: Record) -> StoreFuture<'_, Result<(), StoreError>> {
        let key = record.key();
        self.store.put_raw(&key, &record.to_bytes());
        let mut keys = self.keys();
        if !keys.contains(&key) {
            keys.push(key);
        }
        Box::pin(std::future::ready(Ok(())))
    }

    fn remove(&self, key: RecordKey) -> StoreFuture<'_, Result<(), StoreError>> {
        self.keys().retain(|known| *known != key);
        self.store.delete(&key);
        Box::pin(std::future::ready(Ok(())))
    }

    fn revoke(&self) -> StoreFuture<'_, Result<(), StoreError>> {
        self.end();
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Drop for MemLease {
    fn drop(&mut self) {
        self.end();
    }
}
