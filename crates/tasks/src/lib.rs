//! Where tasks are spawned, told to stop and waited for, and the threads that run them.
//!
//! Answers one question: who ends what this process has begun? Every task of the edges is spawned through [`Tasks`].
//!
//! Invariants: a stopped set drops what is left at its next await; what begins on a [`RuntimeThreads`] thread stays there.

mod on_wake;
mod outliving;
mod tasks;
mod threads;

pub use on_wake::OnWake;
pub use outliving::Outliving;
pub use tasks::Tasks;
pub use threads::{RuntimeThreads, ThreadSlot};
