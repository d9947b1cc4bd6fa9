//! The index against the oracle, real engines' recordings, several threads.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod captures;
mod decisions;
mod histories;
mod limits;
mod predicted;
mod threads;
