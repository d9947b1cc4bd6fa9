//! Which models are served, and what becomes of their series when they are not.
//!
//! Answers one question: which model, and which router, has this name? The registry of a process; what a host keeps
//! beside each model is its own ([`ModelEntry`]).
//!
//! What always holds: a model that is retired keeps its series until the last of its requests has ended; a page of
//! metrics does not wait for a model that is made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
};

use kvasir_telemetry::Metrics;
use kvasir_types::Time;

use crate::Model;
use crate::router_host::RouterHost;
use crate::view::EventSockets;

/// A model with what its host keeps beside it.
pub trait ModelEntry: Send + Sync + 'static {
    /// The model.
    fn model(&self) -> &Model;

    /// Whether somebody who does not hold the entry still writes series of the model.
    fn is_in_use(&self) -> bool {
        false
    }
}

impl ModelEntry for Model {
    fn model(&self) -> &Model {
        self
    }
}

/// The routers of a process.
pub trait Routers: Send + Sync {
    /// Each of them once, by name.
    fn all(&self) -> Vec<Arc<RouterHost>>;

    /// One of those with this name.
    fn named(&self, name: &str) -> Option<Arc<RouterHost>>;
}

impl<M: ModelEntry> Routers for Models<M> {
    fn all(&self) -> Vec<Arc<RouterHost>> {
        let models = self.of_routers().into_iter();
        models
            .map(|entry| Arc::clone(&entry.model().host))
            .collect()
    }

    fn named(&self, name: &str) -> Option<Arc<RouterHost>> {
        let hosts = self.read();
        let mut hosts = hosts.values().map(|entry| &entry.model().host);
        hosts.find(|host| **host.name() == *name).cloned()
    }
}

/// The served models by name.
#[derive(Debug)]
pub struct Models<M> {
    by_name: RwLock<BTreeMap<Arc<str>, Arc<M>>>,
    /// Held while series are made for a model, or taken out after it: not while its index is filled.
    unserved: Mutex<Unserved<M>>,
}

/// Models that have series and are not served.
#[derive(Debug)]
struct Unserved<M> {
    /// Served soon: those of the same name that go meanwhile leave their series to them.
    coming: Vec<Arc<M>>,
    /// Served no more, until the last of their requests has ended.
    retired: Vec<Arc<M>>,
}

impl<M> Default for Models<M> {
    fn default() -> Self {
        let unserved = Unserved {
            coming: Vec::new(),
            retired: Vec::new(),
        };
        Self {
            by_name: RwLock::default(),
            unserved: Mutex::new(unserved),
        }
    }
}

impl<M> Models<M> {
    /// Models that are served at once; each has series and a tokenizer's state, some 100 KB.
    pub const MAX: usize = 1024;
}

impl<M: ModelEntry> Models<M> {
    /// Brings gauges and counters up to date.
    pub fn measure(&self, metrics: &Metrics, now: Time) {
        let mut sockets = EventSockets::default();
        for host in Routers::all(self) {
            let of_router = host.measure(now);
            if host.meters().by_cache() {
                sockets.connected += of_router.connected;
                sockets.away += of_router.away;
            }
        }
        let sources = &metrics.router_kv_zmq_ingress_sources;
        for (state, count) in [
            ("active", sockets.connected),
            ("preconnected", sockets.away),
        ] {
            sources.with_label_values(&[state]).set(count as f64);
        }
        // Whoever holds it sweeps, or a later page does: a thread that serves does not wait for that.
        match self.unserved.try_lock() {
            Ok(mut unserved) => self.sweep(&mut unserved, metrics),
            Err(TryLockError::Poisoned(unserved)) => {
                self.sweep(&mut unserved.into_inner(), metrics)
            }
            Err(TryLockError::WouldBlock) => {}
        }
    }

    /// Serves one more; a model of the same name is replaced.
    pub fn insert(&self, entry: Arc<M>) {
        self.write().insert(Arc::clone(&entry.model().name), entry);
    }

    /// Makes one, fills it, which may take long, and serves it: until then nobody asks anything of it.
    pub fn make(&self, make: impl FnOnce() -> Arc<M>, fill: impl FnOnce(&M)) -> Arc<M> {
        let mut unserved = self.unserved();
        let made = make();
        unserved.coming.push(Arc::clone(&made));
        drop(unserved);
        fill(&made);
        self.insert(Arc::clone(&made));
        let mut unserved = self.unserved();
        unserved.coming.retain(|coming| !Arc::ptr_eq(coming, &made));
        made
    }

    /// Serves a model no more. Whoever takes it out has it retired.
    pub fn take(&self, name: &str) -> Option<Arc<M>> {
        self.write().remove(name)
    }

    /// These were taken out: their series go with the last of their requests.
    pub fn retire(&self, taken: Vec<Arc<M>>, metrics: &Metrics) {
        let mut unserved = self.unserved();
        unserved.retired.extend(taken);
        self.sweep(&mut unserved, metrics);
    }

    /// Lets go of models that nobody uses any more, and of the series under names that are no longer in use.
    fn sweep(&self, unserved: &mut Unserved<M>, metrics: &Metrics) {
        let unused = |entry: &mut Arc<M>| Arc::strong_count(entry) == 1 && !entry.is_in_use();
        let mut gone: BTreeSet<Arc<str>> = BTreeSet::new();
        for entry in unserved.retired.extract_if(.., unused) {
            gone.extend(names(entry.model()).map(Arc::clone));
        }
        if gone.is_empty() {
            return;
        }
        let here = self.read();
        let with_series = here
            .values()
            .chain(&unserved.coming)
            .chain(&unserved.retired);
        for name in with_series.flat_map(|entry| names(entry.model())) {
            gone.remove(name);
        }
        drop(here);
        metrics.forget_models(&gone);
    }

    /// The model of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Arc<M>> {
        self.read().get(name).cloned()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.read().len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there is more than one.
    #[must_use]
    pub fn has_several(&self) -> bool {
        self.len() > 1
    }

    /// The only one, if there is one and no other.
    #[must_use]
    pub fn only(&self) -> Option<Arc<M>> {
        let by_name = self.read();
        let mut models = by_name.values();
        let first = models.next();
        first.filter(|_| models.next().is_none()).cloned()
    }

    /// All of them, by name.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<M>> {
        self.read().values().cloned().collect()
    }

    /// One of each router: the one whose name the router has, if that is served.
    #[must_use]
    pub fn of_routers(&self) -> Vec<Arc<M>> {
        let host = |entry: &Arc<M>| Arc::clone(&entry.model().host);
        let mut all = self.all();
        all.sort_by_key(|entry| {
            let model = entry.model();
            (Arc::as_ptr(&model.host), model.name != *model.host.name())
        });
        all.dedup_by(|later, first| Arc::ptr_eq(&host(later), &host(first)));
        all.sort_by(|one, other| host(one).name().cmp(host(other).name()));
        all
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<Arc<str>, Arc<M>>> {
        self.by_name.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<Arc<str>, Arc<M>>> {
        self.by_name.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn unserved(&self) -> MutexGuard<'_, Unserved<M>> {
        self.unserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What its series are under: its own name and its router's.
fn names(model: &Model) -> [&Arc<str>; 2] {
    [&model.name, model.host.name()]
}
