//! The option table from the outside: every row through every source, rules, messages, pages.

#![expect(clippy::expect_used, reason = "a test fails by panicking")]
#![expect(
    clippy::needless_pass_by_value,
    reason = "snapshots are passed as they are written"
)]

mod anything;
mod messages;
mod pages;
mod rows;
mod rules;
mod support;
