//! How a row of the metric table becomes a series.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts,
    Registry, proto::Metric,
};

use crate::{ABSENT, Absent, Identity, MetricOptions, ProcessKind, TunableHistogram, TunedBounds};

/// Which family of names a series belongs to; decides its prefix and constant labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// `--metrics-prefix`, `dynamo_frontend` unless set.
    Frontend,
    /// The same prefix: the queue and the admission of a router that goes by cache; not there without one.
    Queue,
    /// `dynamo_component_router`, labelled with namespace, component and router.
    Router,
    /// The same prefix, without the label of the router: what it knows of workers.
    RouterFleet,
    /// `dynamo_component`, labelled with namespace and component; not there unless a router goes by cache.
    Component,
    /// `dynamo_router_overhead`, labelled with the router; not there unless a router goes by cache.
    Overhead,
    /// `dynamo_router`, labelled with the router; not there unless a router goes by cache.
    RouterTotal,
    /// `dynamo_kvindexer`: only of a process that is an indexer.
    KvIndexer,
    /// `dynamo_component`, labelled with namespace and component: only of a process that serves endpoints on the request plane.
    Worker,
    /// `dynamo`.
    Dynamo,
    /// `kvasir`: what Dynamo does not have.
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
    /// As the operator says.
    TunableHistogram(TunableHistogram),
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

impl Spec {
    /// The whole name.
    #[must_use]
    pub fn name(&self, identity: &Identity) -> String {
        let prefix = match self.group {
            Group::Frontend | Group::Queue => identity.frontend_prefix.as_str(),
            Group::Router | Group::RouterFleet => "dynamo_component_router",
            Group::Component | Group::Worker => "dynamo_component",
            Group::Overhead => "dynamo_router_overhead",
            Group::RouterTotal => "dynamo_router",
            Group::KvIndexer => "dynamo_kvindexer",
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
            Group::Frontend | Group::Queue | Group::KvIndexer | Group::Dynamo | Group::Kvasir => {
                HashMap::new()
            }
            Group::Router => place.into_iter().chain([router]).collect(),
            Group::RouterFleet | Group::Component | Group::Worker => place.into_iter().collect(),
            Group::Overhead | Group::RouterTotal => [router].into_iter().collect(),
        }
    }

    /// Whether the series is on the page of such a process. One that is not can still be written.
    #[must_use]
    pub fn is_shown(&self, options: &MetricOptions) -> bool {
        let process = options.process;
        match self.group {
            Group::Worker => matches!(process, ProcessKind::Router | ProcessKind::Worker),
            _ if process == ProcessKind::Worker => false,
            Group::Queue | Group::Component | Group::Overhead | Group::RouterTotal => {
                options.by_cache
            }
            Group::KvIndexer => process == ProcessKind::Indexer,
            _ => true,
        }
    }

    fn opts(&self, identity: &Identity) -> Opts {
        Opts::new(self.name(identity), self.help).const_labels(self.constant_labels(identity))
    }

    fn histogram_opts(&self, options: &MetricOptions) -> HistogramOpts {
        let bounds = self.buckets.bounds(&options.bounds);
        HistogramOpts::from(self.opts(&options.identity)).buckets(bounds)
    }
}

impl Buckets {
    /// The bounds themselves.
    #[must_use]
    pub fn bounds(&self, tuned: &TunedBounds) -> Vec<f64> {
        match *self {
            Self::None => Vec::new(),
            Self::List(list) => list.to_vec(),
            Self::Log { min, max, count } => log_spaced(min, max, count),
            Self::TunableHistogram(which) => tuned.of(which).list(),
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

/// 0 and `count - 1` log-spaced bounds up to `max`, to two significant digits; bounds that are the same so are one.
///
/// ```
/// # use kvasir_telemetry::log_spaced;
/// assert_eq!(log_spaced(1.0, 512.0, 10), [0., 2., 4., 8., 16., 32., 64., 130., 260., 510.]);
/// assert_eq!(log_spaced(1.0, 1.2, 9), [0., 1., 1.1, 1.2]);
/// ```
#[must_use]
pub fn log_spaced(min: f64, max: f64, count: u32) -> Vec<f64> {
    let steps = f64::from(count.max(2) - 1);
    let spaced = |i| two_digits(min * (max / min).powf(f64::from(i) / steps));
    let mut bounds: Vec<f64> = (0..count)
        .map(|i| if i == 0 { 0.0 } else { spaced(i) })
        .collect();
    bounds.dedup();
    bounds
}

fn two_digits(value: f64) -> f64 {
    format!("{value:.1e}").parse().unwrap_or(value)
}

/// Makes the series of a row, and registers it if it is to be seen; [`crate::metric_table`] calls it once per row.
pub(crate) trait Series: Collector + Clone + Sized + 'static {
    fn make(spec: &Spec, options: &MetricOptions) -> prometheus::Result<Self>;

    fn register(
        spec: &Spec,
        options: &MetricOptions,
        registry: &Registry,
    ) -> prometheus::Result<Self> {
        let series = Self::make(spec, options)?;
        if spec.is_shown(options) {
            registry.register(Box::new(series.clone()))?;
        }
        Ok(series)
    }

    /// Takes out what has one of these values of this label.
    fn forget(&self, spec: &Spec, label: &str, values: &BTreeSet<Arc<str>>);
}

/// What a family would lose: the values of its own labels, for each series that has one of `values` of `label`.
fn labelled(
    family: &impl Collector,
    spec: &Spec,
    label: &str,
    values: &BTreeSet<Arc<str>>,
) -> Vec<Vec<String>> {
    if !spec.labels.contains(&label) {
        return Vec::new();
    }
    let families = family.collect();
    let series = families.iter().flat_map(|family| family.get_metric());
    let ours = series.filter(|metric| value_of(metric, label).is_some_and(|v| values.contains(v)));
    let own = |metric| {
        let labels = spec.labels.iter();
        let values = labels.filter_map(|name| value_of(metric, name).map(str::to_owned));
        values.collect()
    };
    ours.map(own).collect()
}

fn value_of<'a>(metric: &'a Metric, label: &str) -> Option<&'a str> {
    let found = metric.get_label().iter().find(|pair| pair.name() == label);
    found.map(|pair| pair.value())
}

impl Series for IntCounter {
    fn make(spec: &Spec, options: &MetricOptions) -> prometheus::Result<Self> {
        Self::with_opts(spec.opts(&options.identity))
    }

    fn forget(&self, _: &Spec, _: &str, _: &BTreeSet<Arc<str>>) {}
}

impl Series for Gauge {
    fn make(spec: &Spec, options: &MetricOptions) -> prometheus::Result<Self> {
        Self::with_opts(spec.opts(&options.identity))
    }

    fn forget(&self, _: &Spec, _: &str, _: &BTreeSet<Arc<str>>) {}
}

impl Series for Histogram {
    fn make(spec: &Spec, options: &MetricOptions) -> prometheus::Result<Self> {
        Self::with_opts(spec.histogram_opts(options))
    }

    fn forget(&self, _: &Spec, _: &str, _: &BTreeSet<Arc<str>>) {}
}

impl Series for IntCounterVec {
    fn make(spec: &Spec, options: &MetricOptions) -> prometheus::Result<Self> {
        Self::new(spec.opts(&options.identity), spec.labels)
    }

    fn forget(&self, spec: &Spec, label: &str, values: &BTreeSet<Arc<str>>) {
        for labels in labelled(self, spec, label, values) {
            let _ = self.remove_label_values(&labels);
        }
    }
}

impl Series for GaugeVec {
    fn make(spec: &Spec, options: &MetricOptions) -> prometheus::Result<Self> {
        Self::new(spec.opts(&options.identity), spec.labels)
    }

    fn forget(&self, spec: &Spec, label: &str, values: &BTreeSet<Arc<str>>) {
        for labels in labelled(self, spec, label, values) {
            let _ = self.remove_label_values(&labels);
        }
    }
}

impl Series for HistogramVec {
    fn make(spec: &Spec, options: &MetricOptions) -> prometheus::Result<Self> {
        Self::new(spec.histogram_opts(options), spec.labels)
    }

    fn forget(&self, spec: &Spec, label: &str, values: &BTreeSet<Arc<str>>) {
        for labels in labelled(self, spec, label, values) {
            let _ = self.remove_label_values(&labels);
        }
    }
}

/// Notes a span in a histogram of milliseconds.
pub fn observe_ms(histogram: &Histogram, span: Duration) {
    histogram.observe(span.as_secs_f64() * 1e3);
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
         Without `--router-mode kv` the series of `dynamo_component_router` stay at zero, and `dynamo_router_overhead_*`,\n\
         `dynamo_component_kv_cache_*`, `dynamo_frontend_router_queue_*` and `_admission_*` are not there.\n\n\
         Buckets of the frontend's histograms of durations and lengths follow `DYN_METRICS_*_{MIN,MAX,COUNT}`\n\
         (see [options](options.md)): 0, then spaced evenly by logarithm, to two digits.\n\n\
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
    page.push_str(
        "\n## What Dynamo 1.6.1 exports and Kvasir does not\n\n| name | why |\n|---|---|\n",
    );
    let here = |absent: &&Absent| {
        specs
            .iter()
            .any(|spec| absent.covers(&spec.name(&identity)))
    };
    for absent in ABSENT.iter().filter(|absent| !here(absent)) {
        let _ = writeln!(page, "| `{}` | {} |", absent.name, absent.why);
    }
    page.push_str(
        "\n`promtool check metrics` reads the page and complains only of names, and of units in names, that Dynamo chose;\n\
         the test of the page holds it to exactly these:\n\n",
    );
    for (name, complaint) in crate::PROMTOOL {
        let _ = writeln!(page, "- `{name}`: {complaint}");
    }
    page
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use prometheus::core::Desc;
    use prometheus::proto::MetricFamily;

    use super::*;

    /// A family that counts how often it is looked through.
    struct Looked(GaugeVec, Arc<AtomicU32>);

    impl Collector for Looked {
        fn desc(&self) -> Vec<&Desc> {
            self.0.desc()
        }

        fn collect(&self) -> Vec<MetricFamily> {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.collect()
        }
    }

    #[test]
    fn a_family_is_looked_through_once_however_many_go() {
        let spec = Spec {
            group: Group::Kvasir,
            suffix: "s",
            kind: Kind::Gauge,
            labels: &["worker", "model"],
            help: "s",
            buckets: Buckets::None,
        };
        let family = GaugeVec::make(&spec, &MetricOptions::default()).unwrap();
        let names: Vec<Arc<str>> = (0..100).map(|i| format!("m{i}").into()).collect();
        for name in &names {
            family.with_label_values(&["w", name]).set(1.0);
        }
        let looked = Looked(family, Arc::default());
        let gone: BTreeSet<Arc<str>> = names.iter().skip(1).cloned().collect();
        let lost = labelled(&looked, &spec, "model", &gone);
        assert_eq!(looked.1.load(Ordering::Relaxed), 1);
        let lost: BTreeSet<Arc<str>> = lost.iter().map(|labels| (*labels[1]).into()).collect();
        assert_eq!(lost, gone);
        assert!(labelled(&looked, &spec, "other", &gone).is_empty());
    }

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
            .bounds(&TunedBounds::default()),
            [0.001, 0.002, 0.004]
        );
        assert_eq!(
            Buckets::Share { step: 0.25 }.bounds(&TunedBounds::default()),
            [0.0, 0.25, 0.5, 0.75, 1.0]
        );
    }
}
