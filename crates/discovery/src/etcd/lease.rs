//! What one worker has announced in etcd, kept alive under its lease.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::EtcdStore;
use super::grpc::CallError;
use super::proto::{LeaseState, Writer};
use crate::record::{Record, RecordKey};
use crate::store::{Lease, StoreError, StoreFuture};

/// Before a lease that could not be kept alive is tried again.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// The records of one worker.
pub(super) struct EtcdLease {
    id: u64,
    store: EtcdStore,
    content: Mutex<Announced>,
}

#[derive(Default)]
struct Announced {
    values: BTreeMap<RecordKey, Arc<[u8]>>,
    has_ended: bool,
    /// A record could not be written: all are announced again.
    is_behind: bool,
    /// It cannot be kept alive, which was said.
    is_doubtful: bool,
}

impl EtcdLease {
    pub(super) async fn start(store: &EtcdStore) -> Result<Arc<Self>, CallError> {
        let granted = grant(store, 0).await?;
        let lease = Arc::new(Self {
            id: granted.id,
            store: store.clone(),
            content: Mutex::default(),
        });
        let every = Duration::from_secs(store.lease_ttl) / 3;
        store.tasks.spawn(keep_alive(Arc::downgrade(&lease), every));
        Ok(lease)
    }

    fn content(&self) -> MutexGuard<'_, Announced> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self) -> bool {
        self.content().has_ended
    }

    /// Keeps the lease alive; one that is lost is granted anew, with all its keys.
    async fn refresh(&self) -> Result<(), CallError> {
        let request = Writer::default().number(1, self.id).done();
        let answer = self
            .store
            .call("/etcdserverpb.Lease/LeaseKeepAlive", request)
            .await?;
        let state = LeaseState::read(&answer).map_err(super::bad)?;
        if state.ttl > 0 && !self.content().is_behind {
            return Ok(());
        }
        if state.ttl > 0 {
            return self.announce_all().await;
        }
        tracing::warn!(lease = self.id, store = %self.store.endpoints, "our lease is lost: it is granted anew and our records are announced again");
        self.announce_again().await
    }

    async fn announce_again(&self) -> Result<(), CallError> {
        match grant(&self.store, self.id).await {
            Ok(_) => {}
            // It is there after all: another attempt of ours got through.
            Err(CallError::Status { message, .. }) if message.contains("already exists") => {}
            Err(error) => return Err(error),
        }
        self.announce_all().await
    }

    async fn announce_all(&self) -> Result<(), CallError> {
        let values = self.content().values.clone();
        for (key, value) in values {
            self.store.put(&key, &value, self.id).await?;
        }
        self.content().is_behind = false;
        Ok(())
    }

    /// Says once that the lease cannot be kept alive, and that it can again.
    fn note(&self, kept: &Result<(), CallError>) {
        let mut content = self.content();
        let was_doubtful = std::mem::replace(&mut content.is_doubtful, kept.is_err());
        drop(content);
        match kept {
            Err(error) if !was_doubtful => tracing::error!(%error, store = %self.store.endpoints,
                "etcd cannot be told that we live; it is tried again until it can"),
            Ok(()) if was_doubtful => {
                tracing::info!(store = %self.store.endpoints, "etcd knows again that we live")
            }
            _ => {}
        }
    }
}

/// A lease of this id, or of a new one if that is 0.
pub(super) async fn grant(store: &EtcdStore, id: u64) -> Result<LeaseState, CallError> {
    let request = Writer::default().number(1, store.lease_ttl).number(2, id);
    let answer = store
        .call("/etcdserverpb.Lease/LeaseGrant", request.done())
        .await?;
    LeaseState::read(&answer).map_err(super::bad)
}

async fn keep_alive(lease: Weak<EtcdLease>, every: Duration) {
    let mut pause = every;
    loop {
        tokio::time::sleep(pause).await;
        let Some(lease) = lease.upgrade() else {
            return;
        };
        if lease.has_ended() {
            return;
        }
        let kept = lease.refresh().await;
        lease.note(&kept);
        pause = match kept {
            Ok(()) => every,
            Err(_) => RETRY_EVERY.min(every),
        };
    }
}

impl Lease for EtcdLease {
    fn id(&self) -> u64 {
        self.id
    }

    fn put(&self, record: Record) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            if self.has_ended() {
                return Err(StoreError::Ended);
            }
            let (key, value): (_, Arc<[u8]>) = (record.key(), record.to_bytes().into());
            // Known before it is written: whoever announces again announces this, too.
            self.content()
                .values
                .insert(key.clone(), Arc::clone(&value));
            let mut put = self.store.put(&key, &value, self.id).await;
            if put.as_ref().is_err_and(CallError::is_not_found) {
                put = self.announce_again().await;
            }
            self.content().is_behind |= put.is_err();
            put.map_err(|error| self.store.error(&error))
        })
    }

    fn remove(&self, key: RecordKey) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.content().values.remove(&key);
            let deleted = self.store.delete(&key).await;
            deleted.map_err(|error| self.store.error(&error))
        })
    }

    fn revoke(&self) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            {
                let mut content = self.content();
                content.has_ended = true;
                content.values.clear();
            }
            let request = Writer::default().number(1, self.id).done();
            let revoked = self
                .store
                .call("/etcdserverpb.Lease/LeaseRevoke", request)
                .await;
            match revoked {
                Err(error) if !error.is_not_found() => Err(self.store.error(&error)),
                _ => Ok(()),
            }
        })
    }
}
