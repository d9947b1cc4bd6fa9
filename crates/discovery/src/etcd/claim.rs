//! Names that processes take in etcd: a key under a lease, written if nobody has it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::grpc::CallError;
use super::lease::grant;
use super::proto::{LeaseState, Page, Taken, Writer, range_end};
use super::{EtcdStore, PAGE_KEYS, bad};
use crate::coordination::{Claim, ClaimKind, Coordination};
use crate::store::{StoreError, StoreFuture};

/// Before a lease that could not be kept alive is tried again.
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// Names that are listed.
const NAMES_MAX: usize = 10_000;

/// A name and the lease that it is under.
struct Held {
    store: EtcdStore,
    name: String,
    kind: ClaimKind,
    lease: u64,
    is_over: AtomicBool,
}

/// The owner's end: when it is dropped, the lease is no longer kept alive.
struct EtcdClaim(Arc<Held>);

impl Held {
    /// Writes the key, unless it is there.
    async fn take(&self) -> Result<bool, CallError> {
        let key = self.name.as_bytes();
        let put = Writer::default().bytes(1, key).bytes(2, key);
        let put = put.number(3, self.lease).done();
        let request = Taken::ask(key, &put);
        let answer = self.store.call("/etcdserverpb.KV/Txn", request).await?;
        Taken::read(&answer).map_err(bad)
    }

    async fn keep(&self) -> Result<(), CallError> {
        let request = Writer::default().number(1, self.lease).done();
        let answer = self
            .store
            .call("/etcdserverpb.Lease/LeaseKeepAlive", request)
            .await?;
        let state = LeaseState::read(&answer).map_err(bad)?;
        if state.ttl > 0 || self.kind == ClaimKind::Lock {
            return Ok(());
        }
        match grant(&self.store, self.lease).await {
            // Another attempt of ours got through.
            Err(CallError::Status { message, .. }) if message.contains("already exists") => {}
            granted => granted.map(drop)?,
        }
        self.take().await.map(drop)
    }

    async fn revoke(&self) -> Result<(), CallError> {
        self.is_over.store(true, Ordering::Relaxed);
        let request = Writer::default().number(1, self.lease).done();
        let revoked = self
            .store
            .call("/etcdserverpb.Lease/LeaseRevoke", request)
            .await;
        match revoked {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}

async fn keep_alive(held: Weak<Held>, every: Duration) {
    let mut pause = every;
    loop {
        tokio::time::sleep(pause).await;
        let Some(held) = held.upgrade() else {
            return;
        };
        if held.is_over.load(Ordering::Relaxed) {
            return;
        }
        pause = match held.keep().await {
            Ok(()) => every,
            Err(_) => RETRY_EVERY.min(every),
        };
    }
}

impl Claim for EtcdClaim {
    fn release(&self) -> StoreFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let revoked = self.0.revoke().await;
            revoked.map_err(|error| self.0.store.error(&error))
        })
    }
}

impl EtcdStore {
    async fn take(&self, name: &str, kind: ClaimKind) -> Result<Option<EtcdClaim>, CallError> {
        let held = Arc::new(Held {
            store: self.clone(),
            name: name.to_owned(),
            kind,
            lease: grant(self, 0).await?.id,
            is_over: AtomicBool::new(false),
        });
        if !held.take().await? {
            held.revoke().await?;
            return Ok(None);
        }
        let every = Duration::from_secs(self.lease_ttl) / 3;
        self.tasks.spawn(keep_alive(Arc::downgrade(&held), every));
        Ok(Some(EtcdClaim(held)))
    }

    async fn list_names(&self, prefix: &str) -> Result<Vec<String>, CallError> {
        let (mut start, end) = (prefix.as_bytes().to_vec(), range_end(prefix.as_bytes()));
        let mut names = Vec::new();
        while names.len() < NAMES_MAX {
            let request = Page::ask(&start, &end, PAGE_KEYS, 0);
            let answer = self.call("/etcdserverpb.KV/Range", request).await?;
            let page = Page::read(&answer).map_err(bad)?;
            let last = page.values.last().map(|kv| kv.key.clone());
            let keys = page.values.into_iter().map(|kv| kv.key);
            names.extend(keys.filter_map(|key| String::from_utf8(key).ok()));
            match last.filter(|_| page.more) {
                None => break,
                Some(mut last) => {
                    last.push(0);
                    start = last;
                }
            }
        }
        Ok(names)
    }
}

impl Coordination for EtcdStore {
    fn claim<'a>(
        &'a self,
        name: &'a str,
        kind: ClaimKind,
    ) -> StoreFuture<'a, Result<Option<Box<dyn Claim>>, StoreError>> {
        Box::pin(async move {
            let taken = self.take(name, kind).await;
            let taken = taken.map_err(|error| self.error(&error))?;
            Ok(taken.map(|claim| Box::new(claim) as _))
        })
    }

    fn names<'a>(&'a self, prefix: &'a str) -> StoreFuture<'a, Result<Vec<String>, StoreError>> {
        Box::pin(async move {
            let names = self.list_names(prefix).await;
            names.map_err(|error| self.error(&error))
        })
    }
}
