//! Flags, environment and file become checked values with their origin.
//!
//! Answers: what is this process to do, and with which settings? [`parse`] does all of it: it finds
//! the command, reads flags, variables and the `--config` file by the one option table, applies
//! the rules between options, and returns what to run, what to print, or everything that is wrong.
//!
//! Invariants: precedence is flag, variable, file, default; each option is declared once (`table`);
//! a [`Settings`] holds only legal values; a message about a bad value is the same from every
//! source.
//!
//! Elsewhere: what the values do. Consumers read `settings.get(keys::HTTP_PORT)`.

mod args;
mod choice;
mod coming_from_dynamo;
mod command;
mod complete;
mod disagg;
mod environment;
mod error;
mod file;
mod help;
mod invoke;
mod man;
mod nearest;
mod notice;
mod overrides;
mod redact;
mod reference;
mod rule_text;
mod rules;
mod schema;
mod settings;
mod show;
mod spec;
mod table;
mod value;

pub use choice::*;
pub use coming_from_dynamo::coming_from_dynamo_page;
pub use command::{Command, Scope};
pub use disagg::{ConditionalDisagg, DisaggPolicy};
pub use environment::Environment;
pub use error::{ConfigError, Problem};
pub use invoke::{Invocation, Run, parse};
pub use notice::{Notice, NoticeKind};
pub use overrides::parse_overrides;
pub use redact::redacted;
pub use reference::reference_page;
pub use settings::{Origin, Setting, Settings};
pub use spec::{Effect, EnvVar, Group, Key, Sources, Spec};
pub use table::{ENGINE_VARIABLES, all as options, named as option_named};
pub use value::{Bytes, Choice, Kind, SettingType, TextRule, Value, parse as parse_value};

/// The typed name of every option.
pub mod keys {
    pub use crate::table::cache::*;
    pub use crate::table::cost::*;
    pub use crate::table::demo::*;
    pub use crate::table::disagg::*;
    pub use crate::table::engine::*;
    pub use crate::table::general::*;
    pub use crate::table::http::*;
    pub use crate::table::metrics::*;
    pub use crate::table::model::*;
    pub use crate::table::operate::*;
    pub use crate::table::planes::*;
    pub use crate::table::queue::*;
    pub use crate::table::resilience::*;
    pub use crate::table::selection::*;
    pub use crate::table::services::*;
    pub use crate::table::standalone::*;
}
