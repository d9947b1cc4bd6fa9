//! The settings of the router and of the engine model, declared once.
//!
//! Answers: what is the default of a setting, and which values may it have? The option table of `config`, the
//! `RouterConfig` of `router`, the weights of `placement`, the checks of request overrides and the `EngineConfig` of
//! `engine` all read these rows.
//! Why they have a crate of their own: docs/decisions/0035.
//!
//! Invariants: a row and its option have the same name (`router::ROUTER_TEMPERATURE` is `--router-temperature` and
//! `RouterConfig::router_temperature`); the text of a default is the literal that makes its value.
//!
//! Elsewhere: flags, variables, help and rules between options (`config`); what a setting does (`router`, `placement`,
//! `index`, `engine`).

mod choice;
pub mod engine;
pub mod router;
mod row;

pub use choice::{
    Choice, EngineFamily, PreemptionMode, PrefillLoadModel, QueuePolicy, RouterMode, RouterPolicy,
};
pub use row::{Range, Row, SECONDS_MAX};
