//! Means and quantiles.

use std::time::Duration;

/// Four numbers about many, in milliseconds; all 0 if there were none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// The mean.
    pub mean: f64,
    /// Half are at most this.
    pub p50: f64,
    /// Nine of ten are.
    pub p90: f64,
    /// Ninety-nine of a hundred are.
    pub p99: f64,
}

impl Summary {
    /// Of `values`, which get sorted.
    pub(crate) fn of(values: &mut [f64]) -> Self {
        values.sort_by(f64::total_cmp);
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        Self {
            mean,
            p50: quantile(values, 0.5),
            p90: quantile(values, 0.9),
            p99: quantile(values, 0.99),
        }
    }
}

/// The quantile of sorted values, on a line between neighbours.
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q.clamp(0.0, 1.0) * sorted.len().saturating_sub(1) as f64;
    let (low, share) = (at.floor() as usize, at.fract());
    match (sorted.get(low), sorted.get(low + 1)) {
        (Some(a), Some(b)) => a + (b - a) * share,
        (Some(a), None) => *a,
        (None, _) => 0.0,
    }
}

/// Parts into which each doubling is divided: a value is known to 0.2 percent.
const PARTS: u64 = 512;
const PARTS_BITS: u32 = PARTS.ilog2();

/// Counts of durations, for so many that keeping each would cost too much.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum_ns: u128,
}

impl Default for Histogram {
    fn default() -> Self {
        let doublings = 64 - PARTS_BITS as usize + 1;
        Self {
            counts: vec![0; doublings * PARTS as usize],
            count: 0,
            sum_ns: 0,
        }
    }
}

impl Histogram {
    pub(crate) fn record(&mut self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.count += 1;
        self.sum_ns += u128::from(ns);
        if let Some(count) = self.counts.get_mut(place(ns)) {
            *count += 1;
        }
    }

    pub(crate) fn summary(&self) -> Summary {
        Summary {
            mean: self.sum_ns as f64 / self.count.max(1) as f64 / 1e6,
            p50: self.quantile(0.5),
            p90: self.quantile(0.9),
            p99: self.quantile(0.99),
        }
    }

    fn quantile(&self, q: f64) -> f64 {
        let rank = (q * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle(at) / 1e6;
            }
        }
        0.0
    }
}

/// Values below `PARTS` have a place each; above, each doubling has `PARTS` places.
fn place(ns: u64) -> usize {
    if ns < PARTS {
        return ns as usize;
    }
    let doubling = ns.ilog2() - PARTS_BITS;
    let part = (ns >> doubling) - PARTS;
    (u64::from(doubling + 1) * PARTS + part) as usize
}

fn middle(place: usize) -> f64 {
    let (doubling, part) = (place as u64 / PARTS, place as u64 % PARTS);
    match doubling {
        0 => part as f64,
        n => ((part + PARTS) as f64 + 0.5) * 2f64.powi(n as i32 - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_on_lines() {
        let mut values = [4.0, 1.0, 3.0, 2.0];
        let summary = Summary::of(&mut values);
        assert_eq!((summary.mean, summary.p50), (2.5, 2.5));
        assert!((summary.p90 - 3.7).abs() < 1e-12);
        assert_eq!(Summary::of(&mut []), Summary::default());
        assert_eq!(Summary::of(&mut [7.0]).p99, 7.0);
    }

    /// Every value comes back within 0.2 percent, at the borders of doublings too.
    #[test]
    fn a_histogram_knows_its_values() {
        for ns in [
            0,
            1,
            511,
            512,
            513,
            1023,
            1024,
            5_000_000,
            999_999_999_999,
            u64::MAX,
        ] {
            let mut histogram = Histogram::default();
            histogram.record(Duration::from_nanos(ns));
            let ms = ns as f64 / 1e6;
            let close = |got: f64| (got - ms).abs() <= ms * 0.002;
            let summary = histogram.summary();
            assert!(
                close(summary.p50) && close(summary.p99),
                "{ns}: {summary:?}"
            );
        }
        let mut histogram = Histogram::default();
        for ms in 1..=1000 {
            histogram.record(Duration::from_millis(ms));
        }
        let summary = histogram.summary();
        assert!((summary.p90 - 900.0).abs() < 2.0 && (summary.mean - 500.5).abs() < 1e-6);
        assert_eq!(Histogram::default().summary(), Summary::default());
    }
}
