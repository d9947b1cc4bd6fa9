//! What every backend offers: watching records, and announcing one's own.
//!
//! Answers one question: how does a process hear of others, and how do they hear of it? One trait; a backend feeds a
//! [`Mirror`](crate::Mirror) and so has the rules that are written there.
//!
//! What always holds: a watch never ends by itself and never fails; what stands in the way is a [`Change::Lost`]. A record that was
//! announced is kept alive, and announced again if the store lost it, until it is taken back or its lease ends. A store that is back and
//! has forgotten records takes none away before their owners had time to announce them again.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::coordination::Coordination;
use crate::mirror::{Change, Mirror, Put};
use crate::record::{Bucket, Record, RecordKey};

/// Records that a store no longer has when it is back are gone after this time, unless a watcher is told otherwise: their owners
/// announce them again with their next sign of life, which is 10 seconds away at most.
pub const RESTORE_GRACE: Duration = Duration::from_secs(15);

/// What asynchronous calls of this module return.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Why a store did not do what it was asked. Whoever runs the store is asked to put it right; asking again may help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It cannot be reached, or does not answer.
    #[error("{address} cannot be reached: {cause}")]
    Unreachable {
        /// Where it was looked for.
        address: String,
        /// What stood in the way.
        cause: String,
    },
    /// It is there and refuses.
    #[error("{address} refuses: {cause}")]
    Refused {
        /// Where it is.
        address: String,
        /// What it says.
        cause: String,
    },
    /// The lease has ended: nothing more is announced under it.
    #[error("the lease has ended")]
    Ended,
}

/// A place where records are kept.
pub trait Store: Send + Sync + 'static {
    /// Which backend it is, as `--discovery-backend` names it.
    fn backend(&self) -> &'static str;

    /// Where it is, for messages.
    fn address(&self) -> String;

    /// Watches these buckets: their records now, [`Change::Synced`], then every change. It goes on until it is dropped, and
    /// finds by itself back to a store that was lost.
    fn watch(&self, buckets: &[Bucket]) -> Watch;

    /// Begins a lease, under which a worker announces itself.
    fn lease(&self) -> StoreFuture<'_, Result<Arc<dyn Lease>, StoreError>>;

    /// Where names can be taken, if the backend has that.
    fn coordination(&self) -> Option<Arc<dyn Coordination>> {
        None
    }
}

/// What one worker has announced. It is kept alive until it is revoked; one that is dropped without that leaves its records to
/// expire, as a process that dies does.
pub trait Lease: Send + Sync + 'static {
    /// The id that the worker is known by: `instance_id` of its records.
    fn id(&self) -> u64;

    /// Announces a record, or replaces it. From then on the lease keeps it there.
    fn put(&self, record: Record) -> StoreFuture<'_, Result<(), StoreError>>;

    /// Takes a record back.
    fn remove(&self, key: RecordKey) -> StoreFuture<'_, Result<(), StoreError>>;

    /// Takes back all that was announced, at once, and ends the lease.
    fn revoke(&self) -> StoreFuture<'_, Result<(), StoreError>>;
}

/// The reading end of a watch.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    /// How long records count that a store no longer has when it is back.
    grace: Duration,
    /// Until then they do.
    held_until: Option<Instant>,
}

/// The end of a watch that a backend feeds. Clones feed the same watch.
#[derive(Clone, Debug)]
pub struct Feed {
    shared: Arc<Shared>,
    address: Arc<str>,
}

#[derive(Debug, Default)]
struct Shared {
    mirror: Mutex<Mirror>,
    /// Something waits.
    wake: Notify,
    /// Nobody reads any more.
    closed: Notify,
    is_closed: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Mirror> {
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A watch and the end that feeds it, for backends. `address` names the store in log lines.
#[must_use]
pub fn watch(address: &str) -> (Feed, Watch) {
    let shared = Arc::new(Shared::default());
    let feed = Feed {
        shared: Arc::clone(&shared),
        address: address.into(),
    };
    let watch = Watch {
        shared,
        grace: RESTORE_GRACE,
        held_until: None,
    };
    (feed, watch)
}

impl Watch {
    /// The same, with another time for records that a store no longer has when it is back.
    #[must_use]
    pub const fn with_grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// The next change; waits for one.
    pub async fn next(&mut self) -> Change {
        loop {
            if let Some(change) = self.try_next() {
                return change;
            }
            let is_holding = self.shared.lock().is_holding();
            self.held_until = match is_holding {
                true => Some(self.held_until.unwrap_or(Instant::now() + self.grace)),
                false => None,
            };
            let Some(until) = self.held_until else {
                self.shared.wake.notified().await;
                continue;
            };
            tokio::select! {
                () = self.shared.wake.notified() => {}
                () = tokio::time::sleep_until(until) => self.shared.lock().release(),
            }
        }
    }

    /// The next change, if one waits already.
    pub fn try_next(&mut self) -> Option<Change> {
        self.shared.lock().next_change()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Release);
        self.shared.closed.notify_waiters();
        self.shared.closed.notify_one();
    }
}

impl Feed {
    /// A key has this value.
    pub fn put(&self, key: &RecordKey, value: &[u8]) {
        self.change(|mirror| match mirror.put(key, value) {
            Put::Unreadable(error) => {
                tracing::warn!(store = %self.address, %key, %error,
                    "a record cannot be read: what was known before stays; its writer has to put it right");
            }
            Put::Refused => tracing::error!(store = %self.address, key_bytes = key.key.len(),
                keys_max = crate::mirror::KEYS_MAX, "a record is left out: its key is too long, or there are too many"),
            Put::Taken | Put::Same | Put::StillUnreadable => {}
        });
    }

    /// A key is gone.
    pub fn delete(&self, key: &RecordKey) {
        self.change(|mirror| mirror.delete(key));
    }

    /// A bucket has these keys and no others.
    pub fn retain(&self, bucket: Bucket, keys: &BTreeSet<String>) {
        self.change(|mirror| mirror.retain(bucket, keys));
    }

    /// A listing of all buckets is complete.
    pub fn synced(&self) {
        self.change(Mirror::synced);
    }

    /// The store is out of reach.
    pub fn lost(&self, why: &str) {
        self.change(|mirror| mirror.lost(why));
    }

    /// Whether nobody reads any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed.load(Ordering::Acquire)
    }

    /// Waits until nobody reads any more.
    pub async fn closed(&self) {
        let closed = self.shared.closed.notified();
        if !self.is_closed() {
            closed.await;
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Mirror) -> T) {
        let mut mirror = self.shared.lock();
        change(&mut mirror);
        let wakes = mirror.has_changes();
        drop(mirror);
        if wakes {
            self.shared.wake.notify_one();
        }
    }
}
