//! Requests that others place and name, in the router's ledger.
//!
//! What always holds: a name that is known here is booked, or its booking has expired; there are at most [`NAMES_MAX`] names.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvasir_host::RouterHost;
use kvasir_router::{Input, PeerChange, PeerEvent};
use kvasir_types::{RequestId, WorkerRank};

use crate::group::is_name;

/// Requests that are tracked at once.
const NAMES_MAX: usize = 1 << 20;
/// Names beyond twice those that are booked, before the ones of bookings that expired are forgotten.
const STALE_MAX: usize = 1024;

/// Names of requests, and what the ledger calls them.
#[derive(Debug, Default)]
pub(crate) struct TrackedRequests {
    by_name: Mutex<HashMap<String, (RequestId, WorkerRank)>>,
    last: AtomicU64,
}

/// Why a request is not tracked.
#[derive(Debug)]
pub(crate) enum AddError {
    /// Its name is taken, by one on this rank.
    Exists(String, WorkerRank),
    /// There is no such rank.
    NoRank(WorkerRank),
    /// Its name cannot be used.
    BadName,
    /// There are too many.
    Full,
}

impl AddError {
    /// The status of its answer.
    pub(crate) fn status(&self) -> u16 {
        match self {
            Self::Exists(..) => 409,
            Self::NoRank(_) => 404,
            Self::BadName => 400,
            Self::Full => 503,
        }
    }
}

impl fmt::Display for AddError {
    /// In the words that programs know.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |rank: &WorkerRank| {
            let (worker, rank) = (rank.worker, rank.rank);
            format!("WorkerWithDpRank {{ worker_id: {worker}, dp_rank: {rank} }}")
        };
        match self {
            Self::Exists(name, rank) => write!(
                f,
                "Request {name} already exists (assigned to worker {})",
                shown(rank)
            ),
            Self::NoRank(rank) => write!(f, "Worker {} not found", shown(rank)),
            Self::BadName => {
                f.write_str("a request's name has 1 to 256 bytes and no control characters")
            }
            Self::Full => write!(f, "{NAMES_MAX} requests are tracked already"),
        }
    }
}

impl TrackedRequests {
    /// Books a request on `target`.
    pub(crate) fn add(
        &self,
        host: &RouterHost,
        name: &str,
        target: WorkerRank,
        change: PeerChange,
    ) -> Result<(), AddError> {
        if !is_name(name) {
            return Err(AddError::BadName);
        }
        let mut names = self.names();
        if let Some((id, rank)) = names.get(name).copied()
            && host.ask(|router| router.rank_of(id)).is_some()
        {
            return Err(AddError::Exists(name.to_owned(), rank));
        }
        if host.ask(|router| router.fleet().slot(target)).is_none() {
            return Err(AddError::NoRank(target));
        }
        forget_expired(&mut names, host);
        if names.len() >= NAMES_MAX {
            return Err(AddError::Full);
        }
        let id = RequestId(u128::from(self.last.fetch_add(1, Ordering::Relaxed)) + 1);
        names.insert(name.to_owned(), (id, target));
        host.tell(Input::by_host(PeerEvent { id, target, change }));
        Ok(())
    }

    /// Tells of a request; where it is, if it is known.
    pub(crate) fn change(
        &self,
        host: &RouterHost,
        name: &str,
        change: PeerChange,
    ) -> Option<WorkerRank> {
        let (id, target) = self.names().get(name).copied()?;
        host.tell(Input::by_host(PeerEvent { id, target, change }));
        Some(target)
    }

    /// A request is over; where it was, if it was known.
    pub(crate) fn free(&self, host: &RouterHost, name: &str) -> Option<WorkerRank> {
        let (id, target) = self.names().remove(name)?;
        let change = PeerChange::Free;
        host.tell(Input::by_host(PeerEvent { id, target, change }));
        Some(target)
    }

    fn names(&self) -> MutexGuard<'_, HashMap<String, (RequestId, WorkerRank)>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets names whose bookings expired, once there are many.
fn forget_expired(names: &mut HashMap<String, (RequestId, WorkerRank)>, host: &RouterHost) {
    let booked = host.ask(|router| router.booked());
    if names.len() > 2 * booked + STALE_MAX {
        host.ask(|router| names.retain(|_, (id, _)| router.rank_of(*id).is_some()));
    }
}
