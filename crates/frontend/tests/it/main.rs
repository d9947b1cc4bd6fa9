//! The frontend over real sockets, with workers that do what a test tells them.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests fail by panicking"
)]

mod tokens;
