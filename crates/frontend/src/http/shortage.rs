//! Whether this machine is short of what connections need: descriptors, ports, memory.
//!
//! Whoever cannot accept, connect or ask for want of them says so here. Room is made (idle connections of clients are closed), and
//! the operator is told once, however often it happens.
//!
//! What always holds: one line in the log begins an episode, one ends it; it has ended when nothing failed for [`CALM_AFTER`].

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_telemetry::{Clock, Metrics};
use kvasir_types::Time;

use crate::http::server::connections::ClientConnections;

/// An episode has ended when nothing failed for so long.
const CALM_AFTER: Duration = Duration::from_secs(10);
/// The limit that is reached, as `kvasir_limit_reached_total` names it.
const LIMIT: &str = "descriptors";

/// Whether this machine is short of something. Clones are one.
#[derive(Clone, Debug)]
pub struct Shortage {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    connections: Arc<ClientConnections>,
    metrics: Metrics,
    clock: Clock,
    /// The same as `episode.is_some()`, read without its lock.
    is_on: AtomicBool,
    episode: Mutex<Option<Episode>>,
}

#[derive(Debug)]
struct Episode {
    failures: u64,
    last: Time,
}

impl Shortage {
    pub(crate) fn new(connections: Arc<ClientConnections>, metrics: Metrics, clock: Clock) -> Self {
        Self {
            inner: Arc::new(Inner {
                connections,
                metrics,
                clock,
                is_on: AtomicBool::new(false),
                episode: Mutex::default(),
            }),
        }
    }

    /// `what` failed because this machine is short of something: idle connections of clients are closed.
    pub(crate) fn struck(&self, what: &str, error: &dyn Display) {
        let reached = &self.inner.metrics.limit_reached_total;
        reached.with_label_values(&[LIMIT]).inc();
        if self.begins() {
            tracing::warn!(%error, "{what} failed; idle connections of clients are closed, new ones wait. \
                Raise the limit of open files (ulimit -n), or lower --http-connections-max");
        }
        self.inner.connections.shed_some();
    }

    /// Counts a failure. Says whether it is the first of its episode.
    fn begins(&self) -> bool {
        let now = self.inner.clock.now();
        let mut episode = self.episode();
        let is_new = episode.is_none();
        let episode = episode.get_or_insert(Episode {
            failures: 0,
            last: now,
        });
        episode.failures += 1;
        episode.last = now;
        self.inner.is_on.store(true, Ordering::Relaxed);
        is_new
    }

    /// A connection was made: an episode that has been calm for long is over.
    pub(crate) fn eased(&self) {
        if !self.inner.is_on.load(Ordering::Relaxed) {
            return;
        }
        let now = self.inner.clock.now();
        let mut episode = self.episode();
        let is_over = |episode: &mut Episode| now - episode.last >= CALM_AFTER;
        if let Some(Episode { failures, .. }) = episode.take_if(is_over) {
            self.inner.is_on.store(false, Ordering::Relaxed);
            tracing::info!(failures, "this machine can open connections again");
        }
    }

    fn episode(&self) -> MutexGuard<'_, Option<Episode>> {
        let episode = &self.inner.episode;
        episode.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
