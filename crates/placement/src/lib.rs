//! Which worker a request should go to, and why.
//!
//! Answers one question: given what each rank has to do already and how much of the prompt it holds, what
//! does each candidate cost, and which is taken? The answer always comes with its terms.
//!
//! Elsewhere: how overlap was found (`kvasir-index`), who is a member and what was promised to whom
//! (`kvasir-router`), HTTP.

mod ask;
mod cost;
mod overlap;
mod worker;

pub use ask::{BadOverride, Constraints, Hints, Overrides, Pin};
pub use cost::Terms;
pub use overlap::{Overlap, RankOverlap};
pub use worker::{Device, WorkerSpec};
