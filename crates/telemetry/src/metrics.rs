//! How a row of the metric table becomes a series.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::time::Duration;

use prometheus::{GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};

/// Which family of names a series belongs to; decides its prefix and constant labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// `--metrics-prefix`, `dynamo_frontend` unless set.
    Frontend,
    /// `dynamo_component_router`, labelled with namespace, component and router.
    Router,
    /// `dynamo_component`, labelled with namespace and component.
    Component,
    /// `dynamo_router_overhead`, labelled with the router.
    Overhead,
    /// `dynamo`.
    Dynamo,
    /// `kvasir`: what the seeds do not have.
    Kvasir,
}

/// What a series is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts values by size.
    Histogram,
}

/// The bounds of a histogram.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Buckets {
    /// Not a histogram.
    None,
    /// These.
    List(&'static [f64]),
    /// 0, then `count - 1` log-spaced bounds up to `max`, to two significant digits.
    Log {
        /// Where the spacing starts; its own bound is replaced by 0.
        min: f64,
        /// The last bound.
        max: f64,
        /// How many bounds.
        count: u32,
    },
    /// `start * factor^k` for `k` in `0..count`.
    Power {
        /// The first bound.
        start: f64,
        /// From one to the next.
        factor: f64,
        /// How many bounds.
        count: u32,
    },
    /// `0, step, 2 * step, …, 1`.
    Share {
        /// Distance between bounds.
        step: f64,
    },
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Family of names.
    pub group: Group,
    /// The name after the prefix.
    pub suffix: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Names of its labels, without those that the group adds.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
    /// Bounds, for a histogram.
    pub buckets: Buckets,
}

/// Who exports: the values of the labels that groups add.
#[derive(Clone, Debug)]
pub struct Identity {
    /// `--metrics-prefix`.
    pub frontend_prefix: String,
    /// `dynamo_namespace`.
    pub namespace: String,
    /// `dynamo_component`.
    pub component: String,
    /// `router_id`, and in hexadecimal `worker_id`.
    pub router_id: u64,
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            frontend_prefix: "dynamo_frontend".into(),
            namespace: "dynamo".into(),
            component: "backend".into(),
            router_id: 0,
        }
    }
}

impl Spec {
    /// The whole name.
    #[must_use]
    pub fn name(&self, identity: &Identity) -> String {
        let prefix = match self.group {
            Group::Frontend => identity.frontend_prefix.as_str(),
            Group::Router => "dynamo_component_router",
            Group::Component => "dynamo_component",
            Group::Overhead => "dynamo_router_overhead",
            Group::Dynamo => "dynamo",
            Group::Kvasir => "kvasir",
        };
        format!("{prefix}_{}", self.suffix)
    }

    fn constant_labels(&self, identity: &Identity) -> HashMap<String, String> {
        let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let place = [
            label("dynamo_namespace", &identity.namespace),
            label("dynamo_component", &identity.component),
            label("worker_id", &format!("{:x}", identity.router_id)),
        ];
        let router = label("router_id", &identity.router_id.to_string());
        match self.group {
            Group::Frontend | Group::Dynamo | Group::Kvasir => HashMap::new(),
            Group::Router => place.into_iter().chain([router]).collect(),
            Group::Component => place.into_iter().collect(),
            Group::Overhead => [router].into_iter().collect(),
        }
    }

    fn opts(&self, identity: &Identity) -> Opts {
        Opts::new(self.name(identity), self.help).const_labels(self.constant_labels(identity))
    }
}

impl Buckets {
    /// The bounds themselves.
    #[must_use]
    pub fn bounds(&self) -> Vec<f64> {
        match *self {
            Self::None => Vec::new(),
            Self::List(list) => list.to_vec(),
            Self::Log { min, max, count } => log_spaced(min, max, count),
            Self::Power {
                start,
                factor,
                count,
            } => std::iter::successors(Some(start), |bound| Some(bound * factor))
                .take(count as usize)
                .collect(),
            Self::Share { step } => (0..=(1.0 / step).round() as u32)
                .map(|k| f64::from(k) * step)
                .collect(),
        }
    }
}

/// 0 and `count - 1` log-spaced bounds up to `max`, to two significant digits.
///
/// ```
/// # use kvasir_telemetry::log_spaced;
/// assert_eq!(log_spaced(1.0, 512.0, 10), [0., 2., 4., 8., 16., 32., 64., 130., 260., 510.]);
/// ```
#[must_use]
pub fn log_spaced(min: f64, max: f64, count: u32) -> Vec<f64> {
    let steps = f64::from(count.max(2) - 1);
    (0..count)
        .map(|i| {
            if i == 0 {
                0.0
            } else {
                two_digits(min * (max / min).powf(f64::from(i) / steps))
            }
        })
        .collect()
}

fn two_digits(value: f64) -> f64 {
    format!("{value:.1e}").parse().unwrap_or(value)
}

/// Makes and registers the series of a row; [`crate::metric_table`] calls it once per row.
pub(crate) trait Series: Sized {
    fn register(spec: &Spec, identity: &Identity, registry: &Registry) -> prometheus::Result<Self>;
}

impl Series for IntCounterVec {
    fn register(spec: &Spec, identity: &Identity, registry: &Registry) -> prometheus::Result<Self> {
        let series = Self::new(spec.opts(identity), spec.labels)?;
        registry.register(Box::new(series.clone()))?;
        if spec.labels.is_empty() {
            series.with_label_values::<&str>(&[]);
        }
        Ok(series)
    }
}

impl Series for GaugeVec {
    fn register(spec: &Spec, identity: &Identity, registry: &Registry) -> prometheus::Result<Self> {
        let series = Self::new(spec.opts(identity), spec.labels)?;
        registry.register(Box::new(series.clone()))?;
        if spec.labels.is_empty() {
            series.with_label_values::<&str>(&[]);
        }
        Ok(series)
    }
}

impl Series for HistogramVec {
    fn register(spec: &Spec, identity: &Identity, registry: &Registry) -> prometheus::Result<Self> {
        let opts = HistogramOpts::from(spec.opts(identity)).buckets(spec.buckets.bounds());
        let series = Self::new(opts, spec.labels)?;
        registry.register(Box::new(series.clone()))?;
        if spec.labels.is_empty() {
            series.with_label_values::<&str>(&[]);
        }
        Ok(series)
    }
}

/// Notes a span in a histogram of milliseconds that has no labels.
pub fn observe_ms(histogram: &HistogramVec, span: Duration) {
    histogram
        .with_label_values::<&str>(&[])
        .observe(span.as_secs_f64() * 1e3);
}

/// The reference page of all series, in Markdown, made from the table.
#[must_use]
pub fn metrics_reference(specs: &[Spec]) -> String {
    let identity = Identity::default();
    let mut page = String::from(
        "# Metrics\n\n<!-- Generated by `cargo xtask docs` from crates/telemetry/src/metric_table.rs. -->\n\n\
         Prometheus text on `GET /metrics` of the HTTP port. `dynamo_frontend` becomes what `--metrics-prefix` says.\n\
         Series of `dynamo_component_router` and `dynamo_component` also carry `dynamo_namespace`, `dynamo_component` and `worker_id`\n\
         (the router's own, hexadecimal); those of the router and of `dynamo_router_overhead` carry `router_id`.\n\n\
         | name | type | labels | meaning |\n|---|---|---|---|\n",
    );
    for spec in specs {
        let kind = match spec.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let labels = spec.labels.join(", ");
        let _ = writeln!(
            page,
            "| `{}` | {kind} | {labels} | {} |",
            spec.name(&identity),
            spec.help
        );
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds that Dynamo 1.6.1 exports for these histograms.
    #[test]
    fn log_spaced_bounds_equal_those_observed() {
        assert_eq!(
            log_spaced(0.001, 480.0, 18)[..4],
            [0.0, 0.0022, 0.0047, 0.01]
        );
        assert_eq!(
            log_spaced(0.001, 80.0, 20)[1..5],
            [0.0018, 0.0033, 0.0059, 0.011]
        );
        assert_eq!(log_spaced(50.0, 128_000.0, 12)[1..4], [100.0, 210.0, 430.0]);
        assert_eq!(
            log_spaced(50.0, 32_000.0, 10)[1..5],
            [100.0, 210.0, 430.0, 880.0]
        );
        assert_eq!(log_spaced(0.001, 2.0, 13)[1..4], [0.0019, 0.0035, 0.0067]);
    }

    #[test]
    fn other_bounds() {
        assert_eq!(
            Buckets::Power {
                start: 0.001,
                factor: 2.0,
                count: 3
            }
            .bounds(),
            [0.001, 0.002, 0.004]
        );
        assert_eq!(
            Buckets::Share { step: 0.25 }.bounds(),
            [0.0, 0.25, 0.5, 0.75, 1.0]
        );
    }
}
