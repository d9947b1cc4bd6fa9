//! Records as recorded, and the backends against real files and servers.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a helper that fails is a failed test"
)]

mod api_server;
mod etcd;
mod file;
mod kubernetes;
mod kubernetes_access;
mod kubernetes_pods;
mod mem;
mod recorded;
mod rig;
