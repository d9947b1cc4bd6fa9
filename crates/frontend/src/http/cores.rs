//! Threads that serve connections or listen to events, each with an executor and a reactor of its own.
//!
//! What begins on one of them stays there: a request wakes no other thread, finds its data in the cache of its
//! core, and nothing is stolen. A connection goes to the thread that has the fewest, and so does a stream of events.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// The threads. They end when this is dropped, with whatever still runs on them.
pub struct Cores {
    cores: Vec<Core>,
}

struct Core {
    handle: Handle,
    connections: Arc<AtomicUsize>,
    /// Dropped, it ends the thread.
    _running: oneshot::Sender<()>,
}

impl Cores {
    /// Starts `count` threads, at least one, for `purpose`.
    pub fn start(purpose: &'static str, count: usize) -> io::Result<Self> {
        let cores = (1..=count.max(1)).map(|number| Core::start(purpose, number));
        Ok(Self {
            cores: cores.collect::<io::Result<_>>()?,
        })
    }

    /// Runs one of `each` on every thread, until the thread ends.
    pub(crate) fn on_each<F: Future<Output = ()> + Send + 'static>(&self, each: impl Fn() -> F) {
        for core in &self.cores {
            core.handle.spawn(each());
        }
    }

    /// A seat on the thread that has the fewest.
    pub(crate) fn seat(&self) -> Option<Seat> {
        let fewest = |core: &&Core| core.connections.load(Ordering::Relaxed);
        self.cores.iter().min_by_key(fewest).map(|core| {
            core.connections.fetch_add(1, Ordering::Relaxed);
            Seat {
                handle: core.handle.clone(),
                connections: Arc::clone(&core.connections),
            }
        })
    }
}

impl Core {
    fn start(purpose: &'static str, number: usize) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (running, stopped) = oneshot::channel();
        std::thread::Builder::new()
            .name(format!("{purpose}-{number}"))
            .spawn(move || {
                kvasir_upstream::set_thread_slot(number);
                let _ = runtime.block_on(stopped);
            })?;
        Ok(Self {
            handle,
            connections: Arc::default(),
            _running: running,
        })
    }
}

/// A seat on one thread, for a connection or a stream of events.
pub(crate) struct Seat {
    /// Where it runs.
    pub(crate) handle: Handle,
    connections: Arc<AtomicUsize>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_spread_evenly_and_seats_come_free() {
        let cores = Cores::start("http", 3).unwrap();
        let ids = |seats: &[Seat]| -> Vec<_> {
            let ids = seats.iter().map(|seat| seat.handle.id());
            ids.collect()
        };
        let mut seats: Vec<Seat> = (0..6).map(|_| cores.seat().unwrap()).collect();
        let six = ids(&seats);
        for core in &cores.cores {
            let here = six.iter().filter(|id| **id == core.handle.id());
            assert_eq!(here.count(), 2);
        }
        let left = seats.remove(4).handle.id();
        assert_eq!(cores.seat().unwrap().handle.id(), left);
    }

    #[test]
    fn what_is_spawned_on_a_thread_stays_there_and_ends_with_it() {
        let cores = Cores::start("http", 2).unwrap();
        let seat = cores.seat().unwrap();
        let (send, names) = std::sync::mpsc::channel();
        let again = send.clone();
        seat.handle.spawn(async move {
            let name = || std::thread::current().name().map(str::to_owned);
            again.send(name()).unwrap();
            tokio::task::yield_now().await;
            #[expect(clippy::disallowed_methods, reason = "what is tested")]
            tokio::spawn(async move {
                again.send(name()).unwrap();
                std::future::pending::<()>().await;
            });
        });
        let (first, second) = (names.recv().unwrap(), names.recv().unwrap());
        assert_eq!((first.as_deref(), &second), (Some("http-1"), &first));
        drop((cores, seat, send));
        assert!(names.recv().is_err());
    }
}
