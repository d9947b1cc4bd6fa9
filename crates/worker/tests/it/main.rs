//! A worker that joins a store, over real sockets.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod fleet;
