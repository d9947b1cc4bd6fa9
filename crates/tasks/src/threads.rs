//! Threads that serve connections or apply events, each with an executor and a reactor of its own.
//!
//! What begins on one of them stays there: a request wakes no other thread, finds its data in the cache of its
//! core, and nothing is stolen. A connection goes to the thread that has the fewest, and so does a stream of events.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// The threads. They end when this is dropped, with whatever still runs on them.
pub struct RuntimeThreads {
    threads: Vec<RuntimeThread>,
}

struct RuntimeThread {
    handle: Handle,
    taken: Arc<AtomicUsize>,
    /// Dropped, it ends the thread.
    _running: oneshot::Sender<()>,
}

impl RuntimeThreads {
    /// Starts `count` threads, at least one, for `purpose`. Each begins with `on_start`, which gets its number, from 1.
    pub fn start(purpose: &'static str, count: usize, on_start: fn(usize)) -> io::Result<Self> {
        let threads =
            (1..=count.max(1)).map(|number| RuntimeThread::start(purpose, number, on_start));
        Ok(Self {
            threads: threads.collect::<io::Result<_>>()?,
        })
    }

    /// Runs one of `each` on every thread, until the thread ends.
    pub fn on_each<F: Future<Output = ()> + Send + 'static>(&self, each: impl Fn() -> F) {
        for thread in &self.threads {
            thread.handle.spawn(each());
        }
    }

    /// A slot on the thread that has the fewest taken.
    #[must_use]
    pub fn slot(&self) -> Option<ThreadSlot> {
        let fewest = |thread: &&RuntimeThread| thread.taken.load(Ordering::Relaxed);
        self.threads.iter().min_by_key(fewest).map(|thread| {
            thread.taken.fetch_add(1, Ordering::Relaxed);
            ThreadSlot {
                handle: thread.handle.clone(),
                taken: Arc::clone(&thread.taken),
            }
        })
    }
}

impl RuntimeThread {
    fn start(purpose: &'static str, number: usize, on_start: fn(usize)) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (running, stopped) = oneshot::channel();
        std::thread::Builder::new()
            .name(format!("{purpose}-{number}"))
            .spawn(move || {
                on_start(number);
                let _ = runtime.block_on(stopped);
            })?;
        Ok(Self {
            handle,
            taken: Arc::default(),
            _running: running,
        })
    }
}

/// A slot on one thread, for a connection or a stream of events; free again when it is dropped.
#[derive(Debug)]
pub struct ThreadSlot {
    /// Where it runs.
    pub handle: Handle,
    taken: Arc<AtomicUsize>,
}

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_spread_evenly_and_come_free() {
        let threads = RuntimeThreads::start("http", 3, |_| {}).unwrap();
        let ids = |slots: &[ThreadSlot]| -> Vec<_> {
            let ids = slots.iter().map(|slot| slot.handle.id());
            ids.collect()
        };
        let mut slots: Vec<ThreadSlot> = (0..6).map(|_| threads.slot().unwrap()).collect();
        let six = ids(&slots);
        for thread in &threads.threads {
            let here = six.iter().filter(|id| **id == thread.handle.id());
            assert_eq!(here.count(), 2);
        }
        let left = slots.remove(4).handle.id();
        assert_eq!(threads.slot().unwrap().handle.id(), left);
    }

    #[test]
    fn what_is_spawned_on_a_thread_stays_there_and_ends_with_it() {
        let threads = RuntimeThreads::start("http", 2, |_| {}).unwrap();
        let slot = threads.slot().unwrap();
        let (send, names) = std::sync::mpsc::channel();
        let again = send.clone();
        slot.handle.spawn(async move {
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
        drop((threads, slot, send));
        assert!(names.recv().is_err());
    }
}
