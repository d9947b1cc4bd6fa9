//! The locks and atomics that threads share; loom's own in its model check, so that the real code is what the
//! model checker runs.

#[cfg(all(test, loom))]
use loom::sync::Mutex;
#[cfg(all(test, loom))]
pub(crate) use loom::sync::{
    MutexGuard,
    atomic::{AtomicU32, AtomicU64},
};
#[cfg(not(all(test, loom)))]
use std::sync::Mutex;
#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{
    MutexGuard,
    atomic::{AtomicU32, AtomicU64},
};

pub(crate) use std::sync::atomic::Ordering;

use std::sync::{PoisonError, TryLockError};

/// How often a lock that others hold for about a microsecond is tried before this thread sleeps: some ten
/// microseconds, less than it takes to be woken.
const TRIES: u32 = if cfg!(loom) { 0 } else { 200 };

/// The lock of those who write. It is held for microseconds, so a waiter spins before it sleeps; whoever holds it
/// for longer in parts can ask whether others wait.
///
/// In cache lines of its own: processors fetch them in pairs. A writer that panicked has a bug; what it left may be
/// wrong, and to stop learning would be worse, so the lock is never poisoned.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct WriteLock<T> {
    mutex: Mutex<T>,
    waiting: AtomicU32,
}

impl<T> WriteLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            mutex: Mutex::new(value),
            waiting: AtomicU32::new(0),
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        match self.try_lock() {
            Some(guard) => guard,
            None => self.wait(),
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.mutex.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.spin().unwrap_or_else(|| {
            let locked = self.mutex.lock();
            locked.unwrap_or_else(PoisonError::into_inner)
        });
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    fn spin(&self) -> Option<MutexGuard<'_, T>> {
        for _ in 0..TRIES {
            for _ in 0..8 {
                std::hint::spin_loop();
            }
            let guard = self.try_lock();
            if guard.is_some() {
                return guard;
            }
        }
        None
    }

    /// Whether somebody waits for the lock.
    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}
