//! Whether this machine is short of what connections need: descriptors, ports, memory.
//!
//! Whoever cannot accept, connect or ask for want of them says so here. Room is made (idle connections of clients are closed), and
//! the operator is told once, however often it happens.
//!
//! What always holds: one line in the log begins an episode, one ends it; it has ended when nothing failed for [`CALM_AFTER`].

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_telemetry::{Clock, Metrics};
use kvasir_transport::is_out_of_descriptors;
use kvasir_types::Time;

use crate::http::server::connections::ClientConnections;

/// An episode has ended when nothing failed for so long.
const CALM_AFTER: Duration = Duration::from_secs(10);
/// Connections are not closed more often, however many requests fail at once.
const SHED_EVERY: Duration = Duration::from_millis(20);

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
    /// When something failed last.
    last: Time,
    /// When connections were closed for it last.
    shed: Time,
}

/// What follows one failure.
struct Strike {
    is_first: bool,
    /// Connections are closed for it.
    sheds: bool,
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

    /// `what` failed because this machine is short of something. For descriptors, idle connections of clients are closed.
    pub(crate) fn struck(&self, what: &str, error: &io::Error) {
        let is_descriptors = is_out_of_descriptors(error);
        let limit = match is_descriptors {
            true => "descriptors",
            false => "ports_or_memory",
        };
        let reached = &self.inner.metrics.limit_reached_total;
        reached.with_label_values(&[limit]).inc();
        let strike = self.count();
        match (strike.is_first, is_descriptors) {
            (true, true) => {
                tracing::warn!(%error, "{what} failed; idle connections of clients are closed, new ones wait. \
                    Raise the limit of open files (ulimit -n), or lower --http-connections-max");
            }
            (true, false) => {
                tracing::warn!(%error, "{what} failed: this machine has no port or no memory left for a connection");
            }
            (false, _) => {}
        }
        if is_descriptors && strike.sheds {
            self.inner.connections.shed_some();
        }
    }

    /// Counts a failure.
    fn count(&self) -> Strike {
        let now = self.inner.clock.now();
        let mut episode = self.episode();
        let is_first = episode.is_none();
        let episode = episode.get_or_insert(Episode {
            failures: 0,
            last: now,
            shed: now,
        });
        episode.failures += 1;
        episode.last = now;
        let sheds = is_first || now - episode.shed >= SHED_EVERY;
        if sheds {
            episode.shed = now;
        }
        self.inner.is_on.store(true, Ordering::Relaxed);
        Strike { is_first, sheds }
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

#[cfg(test)]
mod tests {
    use kvasir_telemetry::MetricOptions;

    use super::*;

    #[test]
    fn an_episode_begins_once_and_a_burst_of_failures_sheds_once() {
        let (metrics, clock) = (
            Metrics::new(&MetricOptions::default()).unwrap(),
            Clock::new(),
        );
        let connections = Arc::new(ClientConnections::new(clock));
        let shortage = Shortage::new(connections, metrics, clock);
        let begun = clock.now();
        let strikes: Vec<Strike> = (0..1000).map(|_| shortage.count()).collect();
        let bursts = (clock.now() - begun).as_millis() / SHED_EVERY.as_millis() + 1;
        assert_eq!(strikes.iter().filter(|s| s.is_first).count(), 1);
        assert!(strikes.iter().filter(|s| s.sheds).count() as u128 <= bursts);
        shortage.eased();
        assert!(!shortage.count().is_first, "it is not over yet");
    }
}
