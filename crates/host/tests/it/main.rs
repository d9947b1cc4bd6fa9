//! Routers against real servers: what they read from a log that others write, and what is left of it when they die.

#![cfg(feature = "nats")]
#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a helper that fails is a failed test"
)]

mod event_log;
mod rig;
