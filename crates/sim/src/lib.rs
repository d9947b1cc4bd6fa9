//! Many engines and the router, in virtual time.
//!
//! Answers one question: what would this traffic have been like under this policy? A [`Trace`] (read or
//! generated) meets a [`Fleet`] of engine models through the same router code that serves; [`simulate`]
//! plays it and says how it went.
//!
//! Invariants: the same trace, fleet, policy and seed give the same report to the last bit, on every
//! machine; every request of the trace is accounted for exactly once (completed, refused, rejected or
//! dropped with the conversation it belonged to); virtual time never goes back.
//!
//! Elsewhere: how an engine works (`kvasir-engine`), how a worker is chosen (`kvasir-router`), files,
//! threads, tables and pages (`kvasir replay` in `kvasir-cli`).

mod fleet;
mod generate;
mod ideal;
mod policy;
mod prompt;
mod report;
mod series;
mod stats;
mod trace;
mod world;

pub use fleet::{ArrivalMode, BypassRule, Fleet, FleetChange, PrefillPool, Slo, TransferLink};
pub use generate::{Workload, WorkloadError};
pub use ideal::ideal_hit_share;
pub use policy::Policy;
pub use prompt::{Piece, PromptSource};
pub use report::{Counts, RunReport};
pub use series::Series;
pub use stats::Summary;
pub use trace::{Trace, TraceError, TraceFormat, TraceOptions, TraceRequest};
pub use world::{Progress, SimError, simulate};
