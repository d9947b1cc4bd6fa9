//! Recorded sessions, one test per way in which a stream goes wrong, and many ways at once by seed.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod captures;
mod faults;
mod machine;
mod publisher;
mod recovery;
mod router_events;
mod rules;
mod sim;
mod trtllm;
