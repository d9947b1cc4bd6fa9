//! Which connections of clients are open, and which are closed when there are too many.
//!
//! A connection on which nothing is asked holds a descriptor and a place that somebody else may need. When there is none left, those
//! that have been idle for longest are closed. One that carries a request never is.
//!
//! What always holds: nobody is looked for until a place or a descriptor is missing, so requests pay nothing for this but the
//! time of their end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_telemetry::Clock;
use kvasir_types::Time;

use super::Door;
use super::activity::Activity;

/// A connection that has been idle for less is not closed: its request may be on its way.
const IDLE_MIN: Duration = Duration::from_millis(250);
/// Without descriptors one of so many connections is closed at once.
const SHED_SHARE: usize = 16;
/// Connections that are closed at once at least when there are no descriptors.
const SHED_MIN: usize = 4;

/// The open connections of clients.
#[derive(Debug)]
pub(crate) struct ClientConnections {
    open: Mutex<OpenList>,
    clock: Clock,
}

#[derive(Debug, Default)]
struct OpenList {
    last_key: u64,
    by_key: HashMap<u64, (Door, Arc<Activity>)>,
}

/// One open connection; dropped, it is closed.
pub(super) struct OpenConnection {
    connections: Arc<ClientConnections>,
    key: u64,
    pub(super) activity: Arc<Activity>,
}

impl ClientConnections {
    pub(crate) fn new(clock: Clock) -> Self {
        Self {
            open: Mutex::default(),
            clock,
        }
    }

    /// A client has connected at `door`.
    pub(super) fn enter(self: &Arc<Self>, door: Door, activity: Arc<Activity>) -> OpenConnection {
        let mut open = self.lock();
        open.last_key += 1;
        let key = open.last_key;
        open.by_key.insert(key, (door, Arc::clone(&activity)));
        OpenConnection {
            connections: Arc::clone(self),
            key,
            activity,
        }
    }

    /// How many are open.
    pub(crate) fn count(&self) -> usize {
        self.lock().by_key.len()
    }

    /// Descriptors are short: closes some that are idle, at whatever door.
    pub(crate) fn shed_some(&self) {
        let count = (self.lock().by_key.len() / SHED_SHARE).max(SHED_MIN);
        self.shed(count, |_| true);
    }

    /// Closes the `count` that have been idle for longest at a door. Those that are being closed already count.
    pub(super) fn shed(&self, count: usize, at: impl Fn(Door) -> bool) {
        let now = self.clock.now();
        let mut idle: Vec<(Time, Arc<Activity>)> = Vec::new();
        let mut closing = 0;
        for (door, activity) in self.lock().by_key.values() {
            match activity.idle_since() {
                Some(_) if !at(*door) => {}
                Some(_) if activity.is_leaving() => closing += 1,
                Some(since) if now - since >= IDLE_MIN => idle.push((since, Arc::clone(activity))),
                Some(_) | None => {}
            }
        }
        let count = count.saturating_sub(closing).min(idle.len());
        if count < idle.len() {
            idle.select_nth_unstable_by_key(count, |(since, _)| *since);
        }
        for (_, activity) in idle.iter().take(count) {
            activity.ask_to_leave();
        }
    }

    fn lock(&self) -> MutexGuard<'_, OpenList> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.connections.lock().by_key.remove(&self.key);
    }
}
