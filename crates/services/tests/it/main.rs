//! The services beside what Dynamo 1.6.1's answered to the same requests, and at their bounds; the router on the request plane.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests fail as tests do"
)]

mod limits;
mod plane_router;
mod recorded;
mod rig;
mod takeover;
