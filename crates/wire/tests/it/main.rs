//! Every captured byte, every dialect there and back, and bytes that nobody sent.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod captures;
mod fast;
mod fuzz;
mod golden;
mod native;
mod readme;
mod round_trip;
mod rules;
mod trtllm;
