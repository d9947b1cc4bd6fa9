//! Which router each worker belongs to, and for how long.
//!
//! Whoever adds and removes workers does not wait for the event plane: what changed is kept by worker, the last word counts, and
//! a worker that left and came back meanwhile has a new stay, so that what was opened for the old one is closed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_types::WorkerId;
use tokio::sync::Notify;

use super::PlaneWorker;

/// A worker during one stay.
#[derive(Clone, Debug)]
pub(super) struct Member {
    worker: PlaneWorker,
    /// Counts stays of all workers.
    pub(super) stay: u64,
}

impl Deref for Member {
    type Target = PlaneWorker;

    fn deref(&self) -> &PlaneWorker {
        &self.worker
    }
}

/// The workers, and those of which something changed. Clones are one.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkerRouters {
    inner: Arc<Mutex<Inner>>,
    wake: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Inner {
    members: BTreeMap<WorkerId, Member>,
    changed: BTreeSet<WorkerId>,
    stays: u64,
}

impl WorkerRouters {
    pub(super) fn join(&self, worker: PlaneWorker) {
        let mut inner = self.lock();
        let id = worker.id;
        let same = |member: &Member| Arc::ptr_eq(&member.host, &worker.host);
        let stay = inner.members.get(&id).filter(|member| same(member));
        let stay = match stay.map(|member| member.stay) {
            Some(stay) => stay,
            None => {
                inner.stays += 1;
                inner.stays
            }
        };
        inner.members.insert(id, Member { worker, stay });
        inner.changed.insert(id);
        drop(inner);
        self.wake.notify_one();
    }

    pub(super) fn leave(&self, worker: WorkerId) {
        let mut inner = self.lock();
        if inner.members.remove(&worker).is_some() {
            inner.changed.insert(worker);
        }
        drop(inner);
        self.wake.notify_one();
    }

    pub(super) fn get(&self, worker: WorkerId) -> Option<Member> {
        self.lock().members.get(&worker).cloned()
    }

    /// Waits until something changed; of which workers.
    pub(super) async fn changed(&self) -> BTreeSet<WorkerId> {
        loop {
            let changed = std::mem::take(&mut self.lock().changed);
            if !changed.is_empty() {
                return changed;
            }
            self.wake.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
