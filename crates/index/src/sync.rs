//! The atomics that readers and writers meet at; loom's own in its model check, so that the real code is
//! what the model checker runs.

#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

pub(crate) use std::sync::atomic::Ordering;
