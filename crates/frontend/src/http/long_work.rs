//! Where does work go that would hold up a serving thread?
//!
//! A serving thread has hundreds of requests. What computes for milliseconds (reading, hashing or rewriting a long body,
//! running a template, tokenizing a long text) runs on a thread of a pool, and the request waits for it.
//!
//! What always holds: of each kind at most as many run at once as there are slots, and the others wait; long texts take
//! no slot of short ones; work that was given up on keeps its thread, but not its slot. What is short stays where it is: a change of threads costs more than it does.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::Duration;

use kvasir_tasks::Tasks;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bodies up to this size are read where they arrive, which takes well under a millisecond.
pub(crate) const LONG_BODY_BYTES: usize = 128 << 10;
/// Texts up to this size take milliseconds with any sound tokenizer.
pub(crate) const SHORT_TEXT_BYTES: usize = 64 << 10;
/// Fewest slots of each kind.
const SLOTS_MIN: usize = 2;
/// Most slots of each kind, however many cores there are.
const SLOTS_MAX: usize = 16;

/// Whether a body of so many bytes is read elsewhere.
pub(crate) fn is_long(bytes: usize) -> bool {
    bytes > LONG_BODY_BYTES
}

/// The pool. Three kinds of work have slots of their own: bodies, whose work ends; texts, whose tokenizers and templates may
/// not; and texts that are short, which must not wait for long ones.
#[derive(Debug)]
pub(crate) struct LongWork {
    bodies: Arc<Semaphore>,
    texts: Arc<Semaphore>,
    short_texts: Arc<Semaphore>,
}

/// A place among the texts that are worked on.
#[derive(Debug)]
pub(crate) struct TextSlot(OwnedSemaphorePermit);

impl Default for LongWork {
    fn default() -> Self {
        let cores = available_parallelism().map_or(SLOTS_MIN, usize::from);
        let slots = cores.clamp(SLOTS_MIN, SLOTS_MAX);
        Self::with_slots(slots)
    }
}

/// Work that took longer than it may: it was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Late;

impl LongWork {
    /// So many slots of each kind.
    fn with_slots(slots: usize) -> Self {
        Self {
            bodies: Arc::new(Semaphore::new(slots)),
            texts: Arc::new(Semaphore::new(slots)),
            short_texts: Arc::new(Semaphore::new(slots)),
        }
    }

    /// Waits for a place for a text of so many bytes.
    pub(crate) async fn text_slot(&self, bytes: usize) -> Option<TextSlot> {
        let slots = match bytes <= SHORT_TEXT_BYTES {
            true => &self.short_texts,
            false => &self.texts,
        };
        let slot = Arc::clone(slots).acquire_owned().await;
        slot.ok().map(TextSlot)
    }

    /// Runs a future that computes for long between its waits; none if it panicked. A caller that leaves does not stop it.
    pub(crate) async fn drive<F>(&self, future: F) -> Option<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let slot = Arc::clone(&self.bodies).acquire_owned().await.ok()?;
        let runtime = Handle::current();
        let future = Box::pin(future);
        let work = move || {
            let output = runtime.block_on(future);
            drop(slot);
            output
        };
        tokio::task::spawn_blocking(work).await.ok()
    }
}

impl TextSlot {
    /// Runs `work` on a text. After `limit` it is given up: `late` is called, and what it returns is kept until the work
    /// ends at last. None if it panicked.
    pub(crate) async fn run<T, K>(
        self,
        tasks: &Tasks,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce() -> K + Send + 'static,
    ) -> Result<Option<T>, Late>
    where
        T: Send + 'static,
        K: Send + 'static,
    {
        // A task of its own: who waits for it may leave, and then somebody must still look at the clock.
        let watched = tasks.background().spawn(watch(self.0, limit, work, late));
        match watched.await {
            Ok(Some(outcome)) => outcome,
            _ => Ok(None),
        }
    }
}

async fn watch<T: Send + 'static, K: Send + 'static>(
    slot: OwnedSemaphorePermit,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce() -> K,
) -> Result<Option<T>, Late> {
    // What the thread drops when it ends: its slot, and what stands for its lateness.
    let held: Arc<Mutex<(Option<OwnedSemaphorePermit>, Option<K>)>> =
        Arc::new(Mutex::new((Some(slot), None)));
    let inside = Arc::clone(&held);
    let mut running = tokio::task::spawn_blocking(move || {
        let output = work();
        drop(inside);
        output
    });
    match tokio::time::timeout(limit, &mut running).await {
        Ok(done) => Ok(done.ok()),
        Err(_) => {
            let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
            *held = (None, Some(late()));
            Err(Late)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Barrier, mpsc};

    use super::*;

    #[tokio::test]
    async fn no_more_run_at_once_than_there_are_slots() {
        let pool = Arc::new(LongWork::with_slots(2));
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let pair = Arc::new(Barrier::new(2));
        let work = (0..8).map(|_| {
            let (pool, running, most) = (pool.clone(), running.clone(), most.clone());
            let pair = Arc::clone(&pair);
            async move {
                let computes = async move {
                    let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    pair.wait();
                    running.fetch_sub(1, Ordering::SeqCst);
                };
                pool.drive(computes).await
            }
        });
        let tasks = Tasks::new();
        let all: Vec<_> = work.map(|each| tasks.spawn(each)).collect();
        for each in all {
            assert_eq!(each.await.unwrap(), Some(Some(())));
        }
        assert_eq!(most.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_panic_is_no_answer_and_frees_the_slot() {
        let pool = LongWork::with_slots(1);
        for _ in 0..3 {
            assert_eq!(pool.drive(async { panic!("a bug") }).await, None::<()>);
        }
        assert_eq!(pool.drive(async { 5 }).await, Some(5));
    }

    /// The slot is free at once, what stands for the lateness lives as long as the work.
    #[tokio::test]
    async fn late_work_is_given_up_and_known_until_it_ends() {
        let (pool, tasks) = (LongWork::with_slots(1), Tasks::new());
        let (end, ends) = mpsc::channel::<()>();
        let alive = Arc::new(());
        let kept = Arc::clone(&alive);
        let stuck = move || ends.recv().is_ok();
        let slot = pool.text_slot(1).await.unwrap();
        let late = slot
            .run(&tasks, Duration::from_millis(5), stuck, move || kept)
            .await;
        assert_eq!(late, Err(Late));
        assert_eq!(Arc::strong_count(&alive), 2);
        let slot = pool.text_slot(1).await.unwrap();
        let next = slot.run(&tasks, Duration::from_secs(20), || 7, || ());
        assert_eq!(next.await, Ok(Some(7)));
        end.send(()).unwrap();
        while Arc::strong_count(&alive) > 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    #[tokio::test]
    async fn short_texts_do_not_wait_for_long_ones() {
        let pool = LongWork::with_slots(1);
        let long = pool.text_slot(SHORT_TEXT_BYTES + 1).await.unwrap();
        let next = pool.text_slot(usize::MAX);
        let next = tokio::time::timeout(Duration::from_millis(5), next);
        assert!(next.await.is_err());
        drop(pool.text_slot(SHORT_TEXT_BYTES).await.unwrap());
        drop(long);
        assert!(pool.text_slot(usize::MAX).await.is_some());
    }
}
