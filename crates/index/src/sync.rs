//! The locks and atomics that threads meet at; loom's own in its model check, so that the real code is what
//! the model checker runs.

#[cfg(all(test, loom))]
pub(crate) use loom::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU32, AtomicU64},
};
#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU32, AtomicU64},
};

pub(crate) use std::sync::atomic::Ordering;

use std::sync::PoisonError;

/// Something that threads write often, in cache lines of its own: processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub(crate) T);

/// How often a lock that others hold for less than a microsecond is tried before this thread sleeps: some ten
/// microseconds, less than it takes to be woken.
const TRIES: u32 = if cfg!(loom) { 0 } else { 200 };

/// Waits for a lock that is never held for long. Who panicked with it in hand has a bug; what it left may be
/// wrong, and to stop learning would be worse.
pub(crate) fn lock_soon<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    for _ in 0..TRIES {
        if let Ok(guard) = lock.try_lock() {
            return guard;
        }
        for _ in 0..8 {
            std::hint::spin_loop();
        }
    }
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
