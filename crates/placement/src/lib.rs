//! Which worker a request should go to, and why.
//!
//! Answers one question: given what each rank has to do already and how much of the prompt it holds, what
//! does each candidate cost, and which is taken? The answer always comes with its terms.
//!
//! Elsewhere: how overlap was found (`kvasir-index`), who is a member and what was promised to whom
//! (`kvasir-router`), HTTP.

mod ask;
mod bits;
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
mod score;
mod worker;

pub use kvasir_options::QueuePolicy;

pub use ask::{BadOverride, Constraints, Hints, Overrides, Pin};
pub use bits::Bits;
pub use busy::{RankBusy, Reported, Thresholds};
pub use choice::Won;
pub use classes::{Bucket, PolicyClass, PolicyConfig, PolicyConfigError};
pub use cost::{Facts, Terms, Weights, taint_factor};
pub use fleet::{Fleet, Member};
pub use ledger::{Booking, Freed, Ledger, Load, Prefilled};
pub use map::{FastMap, Fold};
pub use overlap::{Overlap, RankOverlap};
pub use policy::{
    Ask, DeviceAware, Feedback, Gate, Hold, LeastLoaded, LinearCost, Policy, PowerOfTwo, Random,
    RoundRobin, View,
};
pub use predict::{Learned, PrefillModel};
pub use queue::{Entry, Full, Queue, QueueLimit, QueueStats};
pub use score::{Candidate, KEPT, Prompt, Scene, Scorer};
pub use worker::{Device, WorkerSpec};
