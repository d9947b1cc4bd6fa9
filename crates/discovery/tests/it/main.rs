//! Records as recorded, and the backends against real files and servers.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a helper that fails is a failed test"
)]

mod etcd;
mod file;
mod mem;
mod recorded;
mod rig;
