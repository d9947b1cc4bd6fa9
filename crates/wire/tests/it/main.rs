//! Every captured byte, every dialect there and back, and nesting without end.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod captures;
mod fast;
mod golden;
mod native;
mod nesting;
mod readme;
mod round_trip;
