//! The HTTP door over real sockets, with engines and token workers that do what a test tells them: what clients
//! and engines see, byte for byte, when all goes well and when it does not.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests fail by panicking"
)]

mod admin;
mod ahead;
mod batches;
mod bodies;
mod cards;
mod client;
mod complete;
mod crowd;
mod dashboard;
mod discovery;
mod dying;
mod engine;
mod facts;
mod families;
mod faults;
mod fleet;
mod freezes;
mod handed_over;
mod health;
mod leaving;
mod limits;
mod membership;
mod memory;
mod metrics;
mod migration;
mod mixed;
mod overload;
mod pairs;
mod passed;
mod pods;
mod ranks;
mod reading;
mod refusals;
mod rig;
mod sessions;
mod shared_cache;
mod stalls;
mod streams;
mod tls;
mod tokens;
mod told;
mod tool_calls;
mod transfer;
mod two_step;
