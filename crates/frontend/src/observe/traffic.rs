//! How did traffic go over the last 15 minutes?
//!
//! Counts are read from the series of `/metrics` and kept as they stand, one reading for every [`STEP`]; what happened
//! between two of them is their difference. Percentiles come from the buckets of histograms, as Prometheus computes them.
//!
//! What always holds: [`STEPS`] readings at most, of all traffic and of [`MODELS_MAX`] models. Elsewhere: who sees it
//! (`admin::dashboard`).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kvasir_telemetry::{
    HistogramReading, MetricFamily, Metrics, PREFILL_POOL, SeriesReading, read_series,
};
use kvasir_types::Time;
use serde_json::{Value, json};

/// Time between two readings that are kept.
pub(crate) const STEP: Duration = Duration::from_secs(5);
/// Differences that are kept: 15 minutes.
pub(crate) const STEPS: usize = 180;
/// Steps that figures of "now" are over: a minute.
const WINDOW_STEPS: usize = 12;
/// Models whose traffic is kept apart; that of others is in the sum alone.
pub(crate) const MODELS_MAX: usize = 16;
/// The label of requests for models that are not served.
const UNKNOWN_MODEL: &str = "unknown";

/// Values by size, as a histogram has counted them.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sizes {
    count: u64,
    sum: f64,
    cumulative: Vec<u64>,
}

impl Sizes {
    fn add(&mut self, read: &HistogramReading) {
        self.count += read.count;
        self.sum += read.sum;
        self.cumulative.resize(read.cumulative.len(), 0);
        for (ours, theirs) in self.cumulative.iter_mut().zip(&read.cumulative) {
            *ours += theirs;
        }
    }

    /// The value that a share `q` of those since `before` does not exceed; `None` if there were none.
    fn quantile(&self, before: &Self, bounds: &[f64], q: f64) -> Option<f64> {
        let count = self.count.saturating_sub(before.count);
        if count == 0 {
            return None;
        }
        let rank = q * count as f64;
        let earlier = |at: usize| before.cumulative.get(at).copied().unwrap_or(0);
        let (mut below, mut lower) = (0, 0.0);
        for (at, (now, upper)) in self.cumulative.iter().zip(bounds).enumerate() {
            let up_to = now.saturating_sub(earlier(at));
            if up_to as f64 >= rank && up_to > below {
                let inside = (rank - below as f64) / (up_to - below) as f64;
                return Some(lower + (upper - lower) * inside.clamp(0.0, 1.0));
            }
            (below, lower) = (up_to, *upper);
        }
        bounds.last().copied()
    }
}

/// Traffic since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct TrafficCounts {
    started: u64,
    succeeded: u64,
    failed: u64,
    rejected: u64,
    cancelled: u64,
    output_tokens: u64,
    /// Tokens of the prompts of answers that are complete, and those that engines found cached.
    prompt_tokens: f64,
    reported_tokens: f64,
    /// Tokens that chosen workers should have found cached: those that answer, and those that compute prompts for them.
    predicted_tokens: f64,
    prefill_predicted_tokens: f64,
    first_token: Sizes,
    between_tokens: Sizes,
    /// Requests under way, and those without a first token.
    active: f64,
    waiting: f64,
    /// Requests that routers hold back.
    pub(crate) held: u64,
}

impl TrafficCounts {
    /// The counters as they stand.
    fn totals(&self) -> Value {
        json!({
            "started": self.started,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "rejected": self.rejected,
            "cancelled": self.cancelled,
            "output_tokens": self.output_tokens,
            "active": self.active,
            "waiting": self.waiting,
            "held": self.held,
        })
    }

    /// Tokens that were predicted since, about the workers that computed the prompts: those are others than the ones that answer
    /// where there are prefill workers, and each prompt is predicted for both.
    fn predicted_since(&self, was: &Self) -> f64 {
        let prefill = self.prefill_predicted_tokens - was.prefill_predicted_tokens;
        match prefill > 0.0 {
            true => prefill,
            false => (self.predicted_tokens - was.predicted_tokens).max(0.0),
        }
    }

    fn ended(&mut self, error_type: &str, count: u64) {
        *match error_type {
            "" => &mut self.succeeded,
            "overload" => &mut self.rejected,
            "cancelled" => &mut self.cancelled,
            _ => &mut self.failed,
        } += count;
    }
}

/// What all series stand at, of all traffic and by model.
#[derive(Clone, Debug, Default)]
pub(crate) struct TrafficReading {
    pub(crate) all: TrafficCounts,
    models: BTreeMap<String, TrafficCounts>,
    /// Bounds of the histograms of first tokens and of gaps.
    bounds: [Vec<f64>; 2],
}

impl TrafficReading {
    /// Reads the series.
    pub(crate) fn take(metrics: &Metrics) -> Self {
        let mut read = Self::default();
        let count = |series: &SeriesReading<'_>| series.value() as u64;
        read.each(&metrics.requests_started_total, |to, series| {
            to.started += count(series);
        });
        read.each(&metrics.requests_total, |to, series| {
            to.ended(series.label("error_type"), count(series));
        });
        read.each(&metrics.output_tokens_total, |to, series| {
            to.output_tokens += count(series);
        });
        read.each(&metrics.active_requests, |to, s| to.active += s.value());
        read.each(&metrics.queued_requests, |to, s| to.waiting += s.value());
        read.each(&metrics.input_sequence_tokens, |to, series| {
            to.prompt_tokens += series.histogram().sum;
        });
        read.each(&metrics.cached_tokens, |to, series| {
            to.reported_tokens += series.histogram().sum;
        });
        let predicted = &metrics.router_kv_selected_cached_prefix_tokens_total;
        read.each(predicted, |to, series| {
            let is_prefill = series.label("model").ends_with(PREFILL_POOL);
            *match is_prefill {
                true => &mut to.prefill_predicted_tokens,
                false => &mut to.predicted_tokens,
            } += series.value();
        });
        let mut bounds = [Vec::new(), Vec::new()];
        read.each(&metrics.time_to_first_token_seconds, |to, series| {
            let read = series.histogram();
            to.first_token.add(&read);
            bounds[0] = read.bounds;
        });
        read.each(&metrics.inter_token_latency_seconds, |to, series| {
            let read = series.histogram();
            to.between_tokens.add(&read);
            bounds[1] = read.bounds;
        });
        read.bounds = bounds;
        while read.models.len() > MODELS_MAX {
            read.models.pop_last();
        }
        read
    }

    /// Calls `add` with where a series counts, twice: for all and for its model.
    fn each<F: MetricFamily>(
        &mut self,
        family: &F,
        mut add: impl FnMut(&mut TrafficCounts, &SeriesReading<'_>),
    ) {
        read_series(family, |series| {
            add(&mut self.all, &series);
            let model = series.label("model");
            let model = model.strip_suffix(PREFILL_POOL).unwrap_or(model);
            if let Some(counts) = self.models.get_mut(model) {
                add(counts, &series);
            } else if !matches!(model, "" | UNKNOWN_MODEL) {
                let mut counts = TrafficCounts::default();
                add(&mut counts, &series);
                self.models.insert(model.to_owned(), counts);
            }
        });
    }
}

/// One reading that is kept.
#[derive(Clone, Debug)]
struct Kept {
    step: u64,
    at: Time,
    read: TrafficReading,
}

/// The last 15 minutes.
#[derive(Clone, Debug, Default)]
pub(crate) struct TrafficHistory {
    kept: VecDeque<Kept>,
}

impl TrafficHistory {
    /// What the series stand at now. The newest reading of a step is the one that is kept.
    pub(crate) fn observe(&mut self, at: Time, read: TrafficReading) {
        let step = at.as_nanos() / STEP.as_nanos() as u64;
        if self.kept.back().is_some_and(|last| last.step == step) {
            self.kept.pop_back();
        }
        while self.kept.len() > STEPS {
            self.kept.pop_front();
        }
        self.kept.push_back(Kept { step, at, read });
    }

    /// All steps, oldest first, of all traffic (under an empty name) and of each model.
    pub(crate) fn rows(&self) -> Value {
        let newest = self.kept.back();
        let models = newest.into_iter().flat_map(|last| last.read.models.keys());
        let mut scopes = serde_json::Map::new();
        for scope in std::iter::once("").chain(models.map(String::as_str)) {
            let pairs = self.kept.iter().zip(self.kept.iter().skip(1));
            let rows = pairs.map(|(before, now)| difference(before, now, scope));
            scopes.insert(scope.to_owned(), rows.collect());
        }
        scopes.into()
    }

    /// The newest step, the last minute and the counters, for all traffic and each model.
    pub(crate) fn latest(&self) -> Value {
        let Some(now) = self.kept.back() else {
            return Value::Null;
        };
        let back = |steps: usize| {
            let at = self.kept.len().saturating_sub(1 + steps);
            self.kept.get(at).unwrap_or(now)
        };
        let models = now.read.models.keys().map(String::as_str);
        let mut scopes = serde_json::Map::new();
        for scope in std::iter::once("").chain(models) {
            let row = json!({
                "step": difference(back(1), now, scope),
                "minute": difference(back(WINDOW_STEPS), now, scope),
                "totals": now.of(scope).totals(),
            });
            scopes.insert(scope.to_owned(), row);
        }
        scopes.into()
    }
}

impl Kept {
    fn of(&self, scope: &str) -> TrafficCounts {
        let counts = match scope {
            "" => Some(&self.read.all),
            model => self.read.models.get(model),
        };
        counts.cloned().unwrap_or_default()
    }
}

/// The columns of a row, in order.
pub(crate) const COLUMNS: [&str; 18] = [
    "step",
    "requests",
    "succeeded",
    "failed",
    "rejected",
    "cancelled",
    "output_tokens",
    "active",
    "waiting",
    "held",
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    "itl_p50",
    "itl_p95",
    "itl_p99",
    "predicted",
    "reported",
];

/// What happened between two readings: counts by second, times in seconds, shares of prompt tokens.
fn difference(before: &Kept, now: &Kept, scope: &str) -> Value {
    let (was, is) = (before.of(scope), now.of(scope));
    let seconds = (now.at - before.at).as_secs_f64();
    let rate = |was: u64, is: u64| match seconds > 0.0 {
        true => rounded(is.saturating_sub(was) as f64 / seconds),
        false => Value::from(0),
    };
    let [first_bounds, gap_bounds] = &now.read.bounds;
    let first = |q| maybe(is.first_token.quantile(&was.first_token, first_bounds, q));
    let gap = |q| {
        maybe(
            is.between_tokens
                .quantile(&was.between_tokens, gap_bounds, q),
        )
    };
    let prompts = is.prompt_tokens - was.prompt_tokens;
    let reported = (is.reported_tokens - was.reported_tokens).max(0.0);
    let predicted = match scope {
        // Models differ in whether others compute their prompts.
        "" => (now.read.models.keys())
            .map(|name| now.of(name).predicted_since(&before.of(name)))
            .sum(),
        _ => is.predicted_since(&was),
    };
    // Predictions are counted when an answer begins, prompts when it is complete.
    let share = |part: f64| maybe((prompts > 0.0).then(|| (part / prompts).min(1.0)));
    json!([
        now.step,
        rate(was.started, is.started),
        rate(was.succeeded, is.succeeded),
        rate(was.failed, is.failed),
        rate(was.rejected, is.rejected),
        rate(was.cancelled, is.cancelled),
        rate(was.output_tokens, is.output_tokens),
        is.active,
        is.waiting,
        is.held,
        first(0.5),
        first(0.95),
        first(0.99),
        gap(0.5),
        gap(0.95),
        gap(0.99),
        share(predicted),
        share(reported),
    ])
}

fn maybe(value: Option<f64>) -> Value {
    value.map_or(Value::Null, rounded)
}

/// To a hundredth of a millisecond: more digits are bytes that nobody reads.
fn rounded(value: f64) -> Value {
    Value::from((value * 1e5).round() / 1e5)
}

#[cfg(test)]
mod tests {
    use kvasir_telemetry::MetricOptions;

    use super::*;

    fn metrics() -> Metrics {
        Metrics::new(&MetricOptions::default()).unwrap()
    }

    fn served(metrics: &Metrics, model: &str, error_type: &str, seconds: f64) {
        let labels = [model, "chat_completions", "unary"];
        metrics
            .requests_started_total
            .with_label_values(&labels)
            .inc();
        let status = if error_type.is_empty() {
            "success"
        } else {
            "error"
        };
        let labels = [model, "chat_completions", "unary", status, error_type];
        metrics.requests_total.with_label_values(&labels).inc();
        let first = &metrics.time_to_first_token_seconds;
        first.with_label_values(&[model]).observe(seconds);
    }

    fn column(row: &Value, name: &str) -> Value {
        let at = COLUMNS.iter().position(|column| *column == name).unwrap();
        row[at].clone()
    }

    #[test]
    fn a_step_is_the_difference_of_two_readings() {
        let metrics = metrics();
        let mut history = TrafficHistory::default();
        history.observe(Time::ZERO, TrafficReading::take(&metrics));
        for error_type in ["", "", "overload", "cancelled", "internal"] {
            served(&metrics, "m", error_type, 0.5);
        }
        served(&metrics, UNKNOWN_MODEL, "not_found", 0.5);
        history.observe(Time::from_millis(5_500), TrafficReading::take(&metrics));
        let rows = history.rows();
        assert_eq!(rows.as_object().unwrap().len(), 2, "all and `m`: {rows}");
        let row = &rows["m"][0];
        assert_eq!(column(row, "requests"), json!(0.90909));
        for name in ["failed", "rejected", "cancelled"] {
            assert_eq!(column(row, name), json!(0.18182), "{name}");
        }
        assert_eq!(column(&rows[""][0], "failed"), json!(0.36364));
        assert_eq!(history.latest()["m"]["totals"]["succeeded"], 2);
        // The same step again: its newest reading counts.
        served(&metrics, "m", "", 0.5);
        history.observe(Time::from_millis(6_000), TrafficReading::take(&metrics));
        assert_eq!(history.rows()["m"].as_array().unwrap().len(), 1);
        assert_eq!(column(&history.rows()["m"][0], "requests"), json!(1.0));
    }

    /// The prompt of a request that has two workers is predicted twice and counted once: for the one that computes it.
    #[test]
    fn predictions_are_about_the_workers_that_compute_prompts() {
        let metrics = metrics();
        let mut history = TrafficHistory::default();
        history.observe(Time::ZERO, TrafficReading::take(&metrics));
        let placed = |model: &str, phase: &str, predicted: u64| {
            let selected = &metrics.router_kv_selected_cached_prefix_tokens_total;
            selected
                .with_label_values(&[model, phase])
                .inc_by(predicted);
        };
        for model in ["split", "whole"] {
            let prompts = &metrics.input_sequence_tokens;
            prompts.with_label_values(&[model]).observe(100.0);
        }
        placed("split", "aggregated", 90);
        placed("split@prefill", "prefill", 40);
        placed("whole", "aggregated", 20);
        history.observe(Time::from_millis(5_500), TrafficReading::take(&metrics));
        let rows = history.rows();
        assert_eq!(rows.as_object().unwrap().len(), 3, "a pool is its model");
        let share = |scope: &str| column(&rows[scope][0], "predicted");
        assert_eq!(share("split"), json!(0.4));
        assert_eq!(share("whole"), json!(0.2));
        assert_eq!(share(""), json!(0.3));
    }

    #[test]
    fn percentiles_lie_inside_the_bucket_that_reaches_them() {
        let metrics = metrics();
        let before = TrafficReading::take(&metrics);
        for at in 1..=100 {
            served(&metrics, "m", "", f64::from(at) * 0.01);
        }
        let now = TrafficReading::take(&metrics);
        let quantile = |q| {
            let (was, is) = (&before.all.first_token, &now.all.first_token);
            is.quantile(was, &now.bounds[0], q).unwrap()
        };
        for (q, exact) in [(0.5, 0.5), (0.95, 0.95), (0.99, 0.99)] {
            let found = quantile(q);
            let upper = now.bounds[0].iter().find(|bound| **bound >= exact).unwrap();
            assert!(found > 0.5 * exact && found <= *upper, "{q}: {found}");
        }
        let none = now
            .all
            .first_token
            .quantile(&now.all.first_token, &now.bounds[0], 0.5);
        assert_eq!(none, None, "nothing came since");
    }

    #[test]
    fn history_and_models_are_bounded() {
        let metrics = metrics();
        for at in 0..MODELS_MAX + 5 {
            served(&metrics, &format!("m{at:02}"), "", 0.1);
        }
        let mut history = TrafficHistory::default();
        for step in 0..(STEPS as u64 + 50) {
            history.observe(
                Time::ZERO + STEP * step as u32,
                TrafficReading::take(&metrics),
            );
        }
        let rows = history.rows();
        assert_eq!(rows.as_object().unwrap().len(), MODELS_MAX + 1);
        assert_eq!(rows[""].as_array().unwrap().len(), STEPS);
        let all = history.latest()[""]["totals"]["started"].clone();
        assert_eq!(
            all,
            MODELS_MAX + 5,
            "those that are not kept apart are in the sum"
        );
    }
}
