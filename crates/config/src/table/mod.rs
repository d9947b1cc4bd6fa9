//! Every option there is, one row each.
//!
//! Answers: what is the option of this name, flag, variable? Rows are in the modules below, by
//! group; [`all`] is their concatenation and nothing else holds a list.
//!
//! Invariants (kept by the tests of this crate): names are unique, and so are aliases and letters
//! within one command; variables are unique; every default is a legal value of its row.

pub(crate) mod cache;
pub(crate) mod cost;
pub(crate) mod demo;
pub(crate) mod disagg;
pub(crate) mod engine;
pub(crate) mod general;
pub(crate) mod http;
pub(crate) mod metrics;
pub(crate) mod model;
pub(crate) mod operate;
pub(crate) mod planes;
pub(crate) mod queue;
pub(crate) mod resilience;
pub(crate) mod selection;
pub(crate) mod services;
pub(crate) mod standalone;

use crate::command::Scope;
use crate::spec::Spec;

const TABLES: &[&[Spec]] = &[
    general::GENERAL_ROWS,
    operate::OPERATE_ROWS,
    demo::DEMO_ROWS,
    engine::REPLAY_ROWS,
    engine::MOCKER_ROWS,
    engine::ENGINE_ROWS,
    selection::WORKERS_ROWS,
    http::HTTP_ROWS,
    selection::SELECTION_ROWS,
    cost::COST_ROWS,
    cost::TRACKING_ROWS,
    queue::QUEUE_ROWS,
    cache::CACHE_ROWS,
    cache::SNAPSHOT_ROWS,
    cost::AIC_ROWS,
    disagg::DISAGG_ROWS,
    model::MODEL_ROWS,
    resilience::RESILIENCE_ROWS,
    planes::PLANES_ROWS,
    standalone::STANDALONE_ROWS,
    services::SERVICES_ROWS,
    general::OBSERVABILITY_ROWS,
    metrics::METRICS_ROWS,
];

/// All options, grouped, in the order of help and reference.
pub fn all() -> impl Iterator<Item = &'static Spec> {
    TABLES.iter().flat_map(|table| table.iter())
}

/// The option of that name or alias, as a flag without dashes or a key in a file.
pub fn named(name: &str) -> Option<&'static Spec> {
    all().find(|spec| spec.name == name || spec.aliases.contains(&name))
}

/// The option of that name or alias that a command of `scope` has; else the one of another
/// command, so that a message can say whose it is.
pub(crate) fn named_for(name: &str, scope: Scope) -> Option<&'static Spec> {
    let is = |spec: &&Spec| spec.name == name || spec.aliases.contains(&name);
    let own = all().find(|spec| is(spec) && spec.scope.meets(scope));
    own.or_else(|| named(name))
}

/// Variables that belong to engines: they change what engines announce, not what Kvasir does.
pub const ENGINE_VARIABLES: &[(&str, &str)] = &[(
    "PYTHONHASHSEED",
    "Set it to 0 on engines that name blocks with Python's builtin hash: otherwise two replicas \
     give one block two names.",
)];
