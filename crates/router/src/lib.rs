//! The brain: who is a member, who has promised what to whom, where the next request goes.
//!
//! Answers one question: given everything that happened until now, what is to be done next? [`Router`] is
//! a value: the same inputs at the same times give the same outputs, on any host. It reads no clock, draws
//! no random number that is not in its seed, writes no log line and waits for nothing; the server, the
//! simulator and the bindings run this same code.
//!
//! What always holds: whatever is booked is freed exactly once, whichever way the request ends; a request
//! that arrived is answered with exactly one [`Output::Send`] or [`Output::Refuse`] unless its
//! [`Input::Finished`] comes first; every map, queue and ring has a bound in [`RouterConfig`].
//!
//! Elsewhere: the index (lookups run on the caller's thread, *before* [`Input::Arrived`]; [`Lookup`] has the steps), cost and load
//! (`kvasir-placement`), bytes and sockets (the host).
//!
//! ```
//! use kvasir_router::{Arrival, Input, Output, Router, RouterConfig, WorkerSpec};
//! use kvasir_types::{RequestId, Time, WorkerId};
//!
//! let mut router = Router::new(RouterConfig::default());
//! let mut out = Vec::new();
//! router.step(Time::ZERO, Input::Joined(WorkerSpec::new(WorkerId(7))), &mut out);
//! router.step(Time::ZERO, Input::Arrived(Box::new(Arrival::new(RequestId(1), 100))), &mut out);
//! assert!(matches!(out.last(), Some(Output::Send(sent)) if sent.target.worker == WorkerId(7)));
//! ```

mod admission;
mod attempts;
mod bypass;
mod config;
mod decision;
mod error;
mod filter;
mod health;
mod input;
mod lookup;
mod output;
mod peers;
mod predicted;
mod request_settings;
mod ring;
mod router;
mod session;
mod shadow;
mod two_step;
mod what_if;

pub use attempts::{AttemptLimits, Attempts, GiveUp, NextStep, PROGRESS_TOKENS, Phase};
pub use bypass::{BypassPolicy, BypassReason, BypassTerms, BypassView};
pub use config::{Role, RouterConfig};
pub use decision::{DecidingTerm, Decision, Exclusion, ExclusionReason, Reason};
pub use error::{LimitKind, RouteError};
pub use health::{BROKEN_MAX, ERRORS_MAX, FIRST_SPAN, FORGIVEN_AFTER, OUTWEIGHED_MAX};
pub use input::{
    Arrival, Input, LoadReport, Outcome, PeerChange, PeerEvent, PeerRecall, Probe, ReplicaId,
    SessionAction, SessionEvent, SessionRequest, ThresholdUpdate, TokenProbe,
};
pub use kvasir_options::{PrefillLoadModel, RouterMode, RouterPolicy};
pub use kvasir_placement::{
    Bucket, Candidate, Constraints, CostTerms, Fleet, GAP_TOKENS, Gate, Hints, LearnedRecord,
    LearnedTimes, Load, Overlap, Overrides, Pin, Policy, PolicyClass, PolicyConfig,
    PolicyConfigError, QueuePolicy, QueueStats, RankOverlap, RunningRequest, StepLaw, Thresholds,
    TimeTerms, Weights, WorkerSpec,
};
pub use lookup::Lookup;
pub use output::{Observation, Output, Placement, SessionCommand};
pub use peers::{PEER_BOOKINGS_MAX, REPLICAS_MAX};
pub use predicted::PredictedTokens;
pub use router::{PotentialLoad, Router};
pub use session::SessionRow;
pub use shadow::{ShadowChoice, ShadowPolicy, ShadowStats};
pub use two_step::{
    DecodeMode, Handoff, Leg, PoolState, PrefillEnd, Trouble, TwoStep, TwoStepAction,
    TwoStepFailure, TwoStepInput, TwoStepTerms,
};
pub use what_if::{MovedDecision, RankShare, WeightChange, WhatIf, WhatIfSum};
