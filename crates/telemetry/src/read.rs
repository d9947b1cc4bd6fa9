//! What do series stand at, read inside the process?
//!
//! For pages that show what `/metrics` says without a scraper: the same series, so that the figures are the same.

use prometheus::core::Collector;
use prometheus::proto::{Metric, MetricType};

/// One series of a family as it stands.
#[derive(Clone, Copy, Debug)]
pub struct SeriesReading<'a> {
    metric: &'a Metric,
    kind: MetricType,
}

/// A histogram as it stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistogramReading {
    /// Values seen.
    pub count: u64,
    /// Their sum.
    pub sum: f64,
    /// Upper bounds of its buckets, lowest first; what is above the last is in none.
    pub bounds: Vec<f64>,
    /// Values up to each bound.
    pub cumulative: Vec<u64>,
}

impl SeriesReading<'_> {
    /// The value of a label; empty without it.
    #[must_use]
    pub fn label(&self, name: &str) -> &str {
        let pairs = self.metric.get_label().iter();
        let mut named = pairs.filter(|pair| pair.name() == name);
        named.next().map_or("", |pair| pair.value())
    }

    /// What a counter or gauge stands at; 0 for a histogram.
    #[must_use]
    pub fn value(&self) -> f64 {
        match self.kind {
            MetricType::COUNTER => self.metric.get_counter().get_value(),
            MetricType::GAUGE => self.metric.get_gauge().get_value(),
            _ => 0.0,
        }
    }

    /// What a histogram stands at; empty for anything else.
    #[must_use]
    pub fn histogram(&self) -> HistogramReading {
        if self.kind != MetricType::HISTOGRAM {
            return HistogramReading::default();
        }
        let histogram = self.metric.get_histogram();
        let buckets = histogram.get_bucket();
        HistogramReading {
            count: histogram.get_sample_count(),
            sum: histogram.get_sample_sum(),
            bounds: buckets.iter().map(|bucket| bucket.upper_bound()).collect(),
            cumulative: buckets.iter().map(|b| b.cumulative_count()).collect(),
        }
    }
}

/// A family of series.
pub trait MetricFamily: Collector {}

impl<C: Collector> MetricFamily for C {}

/// Calls `each` with every series of a family.
pub fn read_series(family: &impl MetricFamily, mut each: impl FnMut(SeriesReading<'_>)) {
    for family in family.collect() {
        let kind = family.get_field_type();
        for metric in family.get_metric() {
            each(SeriesReading { metric, kind });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MetricOptions, Metrics};

    #[test]
    fn series_read_what_was_written() {
        let metrics = Metrics::new(&MetricOptions::default()).unwrap();
        let tokens = &metrics.output_tokens_total;
        tokens.with_label_values(&["a"]).inc_by(3);
        tokens.with_label_values(&["b"]).inc_by(4);
        let mut read = Vec::new();
        read_series(tokens, |series| {
            read.push((series.label("model").to_owned(), series.value()));
            assert_eq!(series.label("other"), "");
            assert_eq!(series.histogram(), HistogramReading::default());
        });
        read.sort_by(|one, other| one.0.cmp(&other.0));
        assert_eq!(read, [("a".to_owned(), 3.0), ("b".to_owned(), 4.0)]);
        let waits = &metrics.time_to_first_token_seconds;
        waits.with_label_values(&["a"]).observe(0.5);
        read_series(waits, |series| {
            let read = series.histogram();
            assert_eq!((read.count, read.sum, series.value()), (1, 0.5, 0.0));
            let at = read.bounds.iter().position(|bound| *bound >= 0.5).unwrap();
            assert_eq!((read.cumulative[at - 1], read.cumulative[at]), (0, 1));
        });
    }
}
