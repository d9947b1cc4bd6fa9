//! What keeps a router from knowing an engine's cache, and the flag that mends it.
//!
//! Answers one question: would `kvasir frontend`, told what it is told about this worker, predict what the
//! worker's cache holds? [`probe`] asks the worker and writes down what it saw as a [`World`]; each check is a
//! function from that to a verdict; [`Report`] shows the verdicts to people and programs.
//!
//! Invariants: every question has a time limit, and their number is bounded; a check reads the [`World`] and
//! nothing else; what a failed check advises is complete, flag and value.
//!
//! Elsewhere: how the frontend itself asks engines (`kvasir-frontend`), options and exit codes (`cli`).

mod advice;
mod checks;
mod finding;
mod listed;
mod probe;
mod report;
mod world;

pub use checks::examine;
pub use finding::{Advice, Check, Finding, Outcome, Whose};
pub use listed::{Listed, read_workers};
pub use probe::Probe;
pub use report::{Examined, Report};
pub use world::{
    Asked, Comparison, Difference, EventsSeen, RankSeen, ReplaySeen, Silence, TextSeen, Told,
    Twice, World,
};
