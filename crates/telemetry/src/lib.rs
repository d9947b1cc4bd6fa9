//! What the process tells about itself: metrics, log lines, the time.
//!
//! Answers: which series exist ([`Metrics`], one table), what time it is ([`Clock`], the only reader of
//! the system's clocks), how log lines look ([`log::init`]), which spans a request has ([`Tracer`]) and, with the
//! feature `otel`, how they reach a collector. No decision is taken here.

mod absent;
mod clock;
pub mod log;
mod metric_table;
mod metrics;
mod options;
#[cfg(feature = "otel")]
mod otel;
mod pools;
mod promtool;
mod read;
mod trace;

pub use absent::{ABSENT, Absent};
pub use clock::Clock;
pub use metric_table::{Metrics, SPECS};
pub use metrics::{Buckets, Group, Kind, Spec, log_spaced, metrics_reference, observe_ms};
pub use options::{Identity, LogBounds, MetricOptions, ProcessKind, TunableHistogram, TunedBounds};
#[cfg(feature = "otel")]
pub use otel::{Carried, Carry, EXPORT_TIMEOUT, Otel, OtelOptions};
pub use pools::PREFILL_POOL;
pub use prometheus::{Gauge, GaugeVec, Histogram, IntCounter};
pub use promtool::PROMTOOL;
pub use read::{HistogramReading, MetricFamily, SeriesReading, read_series};
pub use trace::{Attribute, RequestSpans, Span, SpanKind, SpanSink, TraceContext, Tracer};
