//! Which of the pool's sets of idle connections does this thread use?
//!
//! A connection is kept for the thread whose reactor polls it. Another thread could use it too, but each read would then wake
//! two threads instead of one.

use std::cell::Cell;

/// Sets of idle connections; with more threads, some share one.
pub(crate) const THREAD_SLOTS: usize = 64;

thread_local! {
    static THREAD_SLOT: Cell<usize> = const { Cell::new(0) };
}

/// Gives the calling thread a set of its own; `number` is from 1 on. Threads that never call this share one set.
pub fn set_thread_slot(number: usize) {
    THREAD_SLOT.set(number % THREAD_SLOTS);
}

/// The set that the calling thread uses, below [`THREAD_SLOTS`].
pub(crate) fn thread_slot() -> usize {
    THREAD_SLOT.get()
}
