//! What keeps a router from knowing an engine's cache, and the flag that mends it.
//!
//! Answers one question: would `kvasir frontend`, configured as it is for this worker, predict what the
//! worker's cache holds? [`probe`] asks the worker and writes down what it saw as a [`Observations`]; each check is a
//! function from that to a verdict; [`Report`] shows the verdicts to people and programs.
//!
//! Invariants: every question has a time limit, and their number is bounded; a check reads the [`Observations`] and
//! nothing else; what a failed check advises is complete, flag and value.
//!
//! Elsewhere: how the frontend itself asks engines (`kvasir-frontend`), options and exit codes (`cli`).

mod advice;
mod checks;
mod finding;
mod observations;
mod probe;
mod report;
mod worker_list;

pub use checks::{examine, examine_pair};
pub use finding::{Advice, AdviceTarget, Check, Finding, Outcome};
pub use observations::{
    Comparison, Difference, EventCounts, Observations, PairOutcome, PairProbe, ProbeError,
    ProbeResult, RankProbe, RepeatedPrompt, ReplayProbe, Target, TokenizerProbe,
};
pub use probe::Probe;
pub use report::{Report, WorkerReport};
pub use worker_list::{ListedWorker, read_workers};
