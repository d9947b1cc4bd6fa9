//! Which thread's connections are these? A connection is kept for the thread whose reactor watches it.
//!
//! Another thread could use it too, but each of its bytes would then wake two threads instead of one.

use std::cell::Cell;

/// Threads that keep connections of their own; further ones share with these.
pub(crate) const HOMES: usize = 64;

thread_local! {
    static HOME: Cell<usize> = const { Cell::new(0) };
}

/// Gives the calling thread connections of its own; `number` is from 1 on. Threads that never ask share one set.
pub fn settle(number: usize) {
    HOME.set(number % HOMES);
}

/// Whose connections the calling thread uses, as a number below [`HOMES`].
pub(crate) fn home() -> usize {
    HOME.get()
}
