//! How each worker of a model is reached.
//!
//! Answers one question: by which way does a request go to this worker? A model may have workers of both transports; which
//! ones it has decides how its requests are prepared.
//!
//! What always holds: [`Links::transports`] is right for whoever is linked now, and names the last ones, or the expected one,
//! while nobody is.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvasir_transport::RequestPlane;
use kvasir_types::{
    BootstrapAddress, Codec, PlaneEndpoint, Role, TransferRule, TransportKind, WorkerId,
    WorkerRecord,
};
use kvasir_upstream::Pool;

/// The way to one worker. Clones are one.
#[derive(Clone)]
pub enum WorkerLink {
    /// Connections to an engine server: the client's body goes there.
    Http(Pool),
    /// A request plane: token ids go there.
    Plane {
        /// Where the worker is on it.
        endpoint: PlaneEndpoint,
        /// The plane.
        plane: Arc<dyn RequestPlane>,
    },
}

impl WorkerLink {
    /// A worker on a plane of this name, at this address there.
    pub fn plane(name: &str, address: &str, plane: Arc<dyn RequestPlane>) -> Self {
        let endpoint = PlaneEndpoint {
            plane: name.into(),
            address: address.into(),
            codec: Codec::default(),
        };
        Self::Plane { endpoint, plane }
    }

    /// Which transport it is.
    #[must_use]
    pub const fn kind(&self) -> TransportKind {
        match self {
            Self::Http(_) => TransportKind::Http,
            Self::Plane { .. } => TransportKind::Plane,
        }
    }
}

/// Which transports the workers of a model have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Transports {
    /// Only HTTP.
    Http,
    /// Only request planes.
    Plane,
    /// Both.
    Both,
}

impl Transports {
    fn of(has_http: bool, has_plane: bool) -> Option<Self> {
        match (has_http, has_plane) {
            (true, true) => Some(Self::Both),
            (true, false) => Some(Self::Http),
            (false, true) => Some(Self::Plane),
            (false, false) => None,
        }
    }

    /// Whether some workers are reached over HTTP.
    pub(crate) fn has_http(self) -> bool {
        self != Self::Plane
    }
}

/// The ways to the workers of one model, by id.
pub(crate) struct Links {
    by_id: RwLock<HashMap<WorkerId, WorkerLink>>,
    /// Workers that compute a part of requests, and where those who compute another part meet them.
    parts: RwLock<HashMap<WorkerId, WorkerPart>>,
    /// A [`Transports`] as a number, so that a request reads it without the lock.
    transports: AtomicU8,
    /// Some worker computes answers to prompts that others have computed.
    has_decode: AtomicBool,
    /// Some worker cannot compute prompts.
    needs_prefill: AtomicBool,
}

/// The part of a request that a worker computes, where that is not all of it.
struct WorkerPart {
    role: Role,
    bootstrap: Option<BootstrapAddress>,
    transfer: Option<TransferRule>,
    needs_prefill: bool,
}

impl Links {
    /// Nobody is linked yet; the first is expected to be reached so.
    pub(crate) fn new(expected: TransportKind) -> Self {
        let expected = match expected {
            TransportKind::Http => Transports::Http,
            TransportKind::Plane => Transports::Plane,
        };
        Self {
            by_id: RwLock::default(),
            parts: RwLock::default(),
            transports: AtomicU8::new(expected as u8),
            has_decode: AtomicBool::new(false),
            needs_prefill: AtomicBool::new(false),
        }
    }

    /// Which transports there are.
    pub(crate) fn transports(&self) -> Transports {
        let number = self.transports.load(Ordering::Relaxed);
        match number {
            _ if number == Transports::Plane as u8 => Transports::Plane,
            _ if number == Transports::Both as u8 => Transports::Both,
            _ => Transports::Http,
        }
    }

    /// Whether some worker computes answers to prompts that others have computed.
    pub(crate) fn has_decode(&self) -> bool {
        self.has_decode.load(Ordering::Relaxed)
    }

    /// Which part of requests a worker computes.
    pub(crate) fn role(&self, worker: WorkerId) -> Role {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        parts
            .get(&worker)
            .map_or(Role::Aggregated, |part| part.role)
    }

    /// Whether some worker answers prompts that others have computed, and cannot compute one itself.
    pub(crate) fn needs_prefill(&self) -> bool {
        self.needs_prefill.load(Ordering::Relaxed)
    }

    /// The workers that are reached over HTTP and, as `alone` says, can or cannot answer a request whose prompt nobody else computes; none where all are of
    /// one kind.
    pub(crate) fn only(&self, alone: bool) -> Option<Vec<WorkerId>> {
        if !self.needs_prefill() {
            return None;
        }
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        let needs = |id: &WorkerId| parts.get(id).is_some_and(|part| part.needs_prefill);
        let workers = self.http_workers().into_iter();
        let (needy, whole): (Vec<WorkerId>, Vec<WorkerId>) = workers.partition(needs);
        match (whole.is_empty(), alone) {
            (true, _) => None,
            (false, true) => Some(whole),
            (false, false) => Some(needy),
        }
    }

    /// Whether some worker says where others meet it.
    pub(crate) fn has_bootstrap(&self) -> bool {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        parts.values().any(|part| part.bootstrap.is_some())
    }

    /// Whether a worker takes no request without a place where it meets another.
    pub(crate) fn meets(&self, worker: WorkerId) -> bool {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        let part = parts.get(&worker);
        part.is_some_and(|part| part.needs_prefill || part.bootstrap.is_some())
    }

    /// Where decode workers meet a worker, if it says so.
    pub(crate) fn bootstrap(&self, worker: WorkerId) -> Option<BootstrapAddress> {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        parts.get(&worker)?.bootstrap.clone()
    }

    /// Who may take a worker's prompts over, if it says so.
    pub(crate) fn transfer_rule(&self, worker: WorkerId) -> Option<TransferRule> {
        let parts = self.parts.read().unwrap_or_else(PoisonError::into_inner);
        parts.get(&worker)?.transfer.clone()
    }

    /// Notes which part of requests a worker computes.
    pub(crate) fn set_part(&self, record: &WorkerRecord) {
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        match record.role {
            Role::Aggregated => drop(parts.remove(&record.id)),
            role => {
                let part = WorkerPart {
                    role,
                    bootstrap: record.bootstrap.clone(),
                    transfer: record.transfer.clone(),
                    needs_prefill: record.needs_prefill,
                };
                parts.insert(record.id, part);
            }
        }
        self.settle_parts(&parts);
    }

    fn settle_parts(&self, parts: &HashMap<WorkerId, WorkerPart>) {
        let is_decode = |part: &WorkerPart| part.role == Role::Decode;
        let has_decode = parts.values().any(is_decode);
        self.has_decode.store(has_decode, Ordering::Relaxed);
        let needs_prefill = parts.values().any(|part| part.needs_prefill);
        self.needs_prefill.store(needs_prefill, Ordering::Relaxed);
    }

    /// The way to a worker.
    pub(crate) fn get(&self, worker: WorkerId) -> Option<WorkerLink> {
        self.read().get(&worker).cloned()
    }

    /// The connections to a worker that is reached over HTTP.
    pub(crate) fn http(&self, worker: WorkerId) -> Option<Pool> {
        match self.read().get(&worker)? {
            WorkerLink::Http(pool) => Some(pool.clone()),
            WorkerLink::Plane { .. } => None,
        }
    }

    /// The request plane of a worker that is reached by one.
    pub(crate) fn plane(&self, worker: WorkerId) -> Option<Arc<dyn RequestPlane>> {
        match self.read().get(&worker)? {
            WorkerLink::Http(_) => None,
            WorkerLink::Plane { plane, .. } => Some(Arc::clone(plane)),
        }
    }

    /// The connections to some worker that is reached over HTTP, takes new work and is `fit`, to each in turn.
    pub(crate) fn any_http(
        &self,
        turn: usize,
        fit: impl Fn(WorkerId) -> bool,
    ) -> Option<(WorkerId, Pool)> {
        let by_id = self.read();
        let open = || {
            let pools = by_id.iter().filter_map(|(id, link)| match link {
                WorkerLink::Http(pool) => Some((*id, pool)),
                WorkerLink::Plane { .. } => None,
            });
            pools.filter(|(id, pool)| !pool.is_draining() && fit(*id))
        };
        let at = turn.checked_rem(open().count())?;
        open().nth(at).map(|(id, pool)| (id, pool.clone()))
    }

    /// Every worker that is reached over HTTP.
    pub(crate) fn http_workers(&self) -> Vec<WorkerId> {
        let by_id = self.read();
        let http = by_id
            .iter()
            .filter(|(_, link)| link.kind() == TransportKind::Http);
        http.map(|(id, _)| *id).collect()
    }

    /// Closes connections to workers that are idle: their descriptors are needed.
    pub(crate) fn close_idle(&self) {
        for link in self.read().values() {
            if let WorkerLink::Http(pool) = link {
                pool.close_idle();
            }
        }
    }

    /// A worker is reached this way from now on.
    pub(crate) fn insert(&self, worker: WorkerId, link: WorkerLink) {
        let mut by_id = self.write();
        by_id.insert(worker, link);
        self.settle(&by_id);
    }

    /// A worker is reached no more.
    pub(crate) fn remove(&self, worker: WorkerId) {
        let mut by_id = self.write();
        by_id.remove(&worker);
        self.settle(&by_id);
        let mut parts = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        if parts.remove(&worker).is_some() {
            self.settle_parts(&parts);
        }
    }

    fn settle(&self, by_id: &HashMap<WorkerId, WorkerLink>) {
        let has = |kind| by_id.values().any(|link| link.kind() == kind);
        if let Some(now) = Transports::of(has(TransportKind::Http), has(TransportKind::Plane)) {
            self.transports.store(now as u8, Ordering::Relaxed);
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<WorkerId, WorkerLink>> {
        self.by_id.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<WorkerId, WorkerLink>> {
        self.by_id.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use kvasir_transport::MemoryPlane;
    use kvasir_upstream::{WorkerTls, parse_url};

    use super::*;

    fn http() -> WorkerLink {
        let endpoint = parse_url("http://127.0.0.1:9").unwrap();
        WorkerLink::Http(Pool::new(endpoint, WorkerTls::default()))
    }

    fn plane() -> WorkerLink {
        WorkerLink::plane("memory", "m", Arc::new(MemoryPlane::new()))
    }

    #[test]
    fn the_transports_follow_the_workers_and_outlive_the_last() {
        let expected = Links::new(TransportKind::Plane);
        assert_eq!(expected.transports(), Transports::Plane);
        let (links, one, two) = (Links::new(TransportKind::Http), WorkerId(1), WorkerId(2));
        assert_eq!(links.transports(), Transports::Http);
        let steps: [(WorkerId, Option<WorkerLink>, Transports); 7] = [
            (one, Some(plane()), Transports::Plane),
            (one, None, Transports::Plane),
            (one, Some(http()), Transports::Http),
            (two, Some(plane()), Transports::Both),
            (one, Some(plane()), Transports::Plane),
            (two, Some(http()), Transports::Both),
            (one, None, Transports::Http),
        ];
        for (worker, link, expected) in steps {
            match link {
                Some(link) => links.insert(worker, link),
                None => links.remove(worker),
            }
            assert_eq!(links.transports(), expected);
        }
        assert!(links.http(two).is_some() && links.plane(two).is_none());
        assert_eq!(links.http_workers(), [two]);
        assert_eq!(links.any_http(7, |_| true).unwrap().0, two);
        assert!(links.any_http(7, |worker| worker == one).is_none());
    }
}
