//! What the process tells about itself: metrics, log lines, the time.
//!
//! Answers: which series exist ([`Metrics`], one table), what time it is ([`Clock`], the only reader of
//! the system's clocks), how log lines look ([`log::init`]). No decision is taken here.

mod clock;
pub mod log;
mod metric_table;
mod metrics;

pub use clock::Clock;
pub use metric_table::{Metrics, SPECS};
pub use metrics::{
    Buckets, Group, Identity, Kind, Spec, log_spaced, metrics_reference, observe_ms,
};
pub use prometheus::{GaugeVec, IntCounter};
