//! Which worker a request should go to, and why.
//!
//! Answers one question: given what each rank has to do already and how much of the prompt it holds, what
//! does each candidate cost, and which is taken? The answer always comes with its terms.
//!
//! Elsewhere: how overlap was found (`kvasir-index`), who is a member and what was promised to whom
//! (`kvasir-router`), HTTP.

mod busy;
mod choice;
mod classes;
mod cost;
mod fleet;
mod ledger;
mod map;
mod overlap;
mod policy;
mod predict;
mod queue;
mod request;
mod score;
mod slot_set;
mod time;
mod worker;

pub use kvasir_options::QueuePolicy;

pub use busy::{RankBusy, ReportedLoad, Thresholds};
pub use choice::WinReason;
pub use classes::{Bucket, PolicyClass, PolicyConfig, PolicyConfigError};
pub use cost::{CandidateState, CostTerms, Weights, taint_factor};
pub use fleet::{Fleet, Member};
pub use ledger::{
    Booking, FreedBooking, Ledger, LedgerNote, Load, PrefillSample, RankState, RunningRequest,
    Sign, SignChange, TimedLoad,
};
pub use map::{FastMap, FoldHasher};
pub use overlap::{Overlap, RankOverlap};
pub use policy::{
    DeviceAware, Feedback, FleetView, Gate, LeastLoaded, LinearCost, PlacementRequest, Policy,
    PowerOfTwo, Random, RoundRobin, WaitingRequest,
};
pub use predict::{LearnedPrefillTimes, PrefillModel};
pub use queue::{Queue, QueueEntry, QueueFull, QueueLimit, QueueStats};
pub use request::{Constraints, Hints, InvalidOverride, Overrides, Pin};
pub use score::{CANDIDATES_KEPT, Candidate, Prompt, Scorer, ScoringContext};
pub use slot_set::SlotSet;
pub use time::{
    Estimator, GAP_TOKENS, LearnedRecord, LearnedTimes, PlacedWork, StepLaw, TimePolicy, TimeTerms,
    TimedRequest,
};
pub use worker::WorkerSpec;
