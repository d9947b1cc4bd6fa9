//! Policies side by side: one row for each, one table for each level of load, the best marked.

use kvasir_sim::{ArrivalMode, RunReport};

use crate::split::verdict;
use crate::{Plan, RunResult};

/// A number of a run, and how it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Time to first token: mean.
    TtftMean,
    /// Its median.
    TtftP50,
    /// Its 90th percentile.
    TtftP90,
    /// Its 99th percentile.
    TtftP99,
    /// Gap between tokens: mean.
    ItlMean,
    /// Its 99th percentile.
    ItlP99,
    /// From arrival to last token: mean.
    E2eMean,
    /// From arrival to entering a batch: mean.
    Queue,
    /// Tokens answered a second.
    Throughput,
    /// Share of requests within the service level.
    Goodput,
    /// Share of prompt tokens found in a cache.
    Hits,
    /// Largest over mean load.
    Imbalance,
    /// Requests thrown out of a batch.
    Preemptions,
}

impl Column {
    /// All, in the order of tables.
    pub const ALL: [Self; 13] = [
        Self::TtftMean,
        Self::TtftP50,
        Self::TtftP90,
        Self::TtftP99,
        Self::ItlMean,
        Self::ItlP99,
        Self::E2eMean,
        Self::Queue,
        Self::Throughput,
        Self::Goodput,
        Self::Hits,
        Self::Imbalance,
        Self::Preemptions,
    ];

    /// The two lines of its heading.
    #[must_use]
    pub const fn heading(self) -> [&'static str; 2] {
        match self {
            Self::TtftMean => ["TTFT ms", "mean"],
            Self::TtftP50 => ["", "p50"],
            Self::TtftP90 => ["", "p90"],
            Self::TtftP99 => ["", "p99"],
            Self::ItlMean => ["ITL ms", "mean"],
            Self::ItlP99 => ["", "p99"],
            Self::E2eMean => ["E2E ms", "mean"],
            Self::Queue => ["queue ms", "mean"],
            Self::Throughput => ["tokens", "/s"],
            Self::Goodput => ["good", "%"],
            Self::Hits => ["hits", "%"],
            Self::Imbalance => ["max/", "mean"],
            Self::Preemptions => ["pre-", "empted"],
        }
    }

    /// Whether less is better.
    #[must_use]
    pub const fn less_is_better(self) -> bool {
        !matches!(self, Self::Throughput | Self::Goodput | Self::Hits)
    }

    fn of(self, run: &RunReport) -> f64 {
        match self {
            Self::TtftMean => run.ttft.mean,
            Self::TtftP50 => run.ttft.p50,
            Self::TtftP90 => run.ttft.p90,
            Self::TtftP99 => run.ttft.p99,
            Self::ItlMean => run.itl.mean,
            Self::ItlP99 => run.itl.p99,
            Self::E2eMean => run.e2e.mean,
            Self::Queue => run.queue.mean,
            Self::Throughput => run.output_tokens_per_s,
            Self::Goodput => run.goodput_share * 100.0,
            Self::Hits => run.hit_share * 100.0,
            Self::Imbalance => run.imbalance,
            Self::Preemptions => run.preemptions as f64,
        }
    }

    /// A value of this column as people read it.
    #[must_use]
    pub fn show(self, value: f64) -> String {
        match self {
            Self::ItlMean | Self::ItlP99 | Self::Goodput | Self::Hits => format!("{value:.1}"),
            Self::Imbalance => format!("{value:.2}"),
            _ => format!("{value:.0}"),
        }
    }
}

/// A policy at a level of load: means over its seeds.
#[derive(Clone, Debug)]
pub struct Row {
    /// The policy.
    pub policy: String,
    /// Values, in the order of [`Column::ALL`].
    pub values: Vec<f64>,
    /// Requests, over all seeds, that were completed; without any its values say nothing.
    pub completed: u64,
    /// Requests, over all seeds, that were not completed.
    pub lost: u64,
}

impl Row {
    /// The value of a column.
    #[must_use]
    pub fn value(&self, column: Column) -> f64 {
        let at = Column::ALL.iter().position(|other| *other == column);
        at.and_then(|at| self.values.get(at))
            .copied()
            .unwrap_or(0.0)
    }
}

/// All policies at one level of load.
#[derive(Clone, Debug)]
pub struct LoadLevel {
    /// What it is called.
    pub title: String,
    /// One row for each policy.
    pub rows: Vec<Row>,
}

/// Everything, to be shown.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// What was replayed, on what.
    pub subtitle: String,
    /// Levels of load.
    pub levels: Vec<LoadLevel>,
    /// Which row the others are compared with.
    pub baseline: usize,
    /// Which way to split engines is best at each load, where that was asked.
    pub verdict: Vec<String>,
}

impl Comparison {
    /// Puts runs side by side.
    #[must_use]
    pub fn new(plan: &Plan, finished: &[RunResult]) -> Self {
        let level = |pace: usize| LoadLevel {
            title: title(plan.paces[pace]),
            rows: (0..plan.policies.len())
                .map(|policy| row(finished, pace, policy))
                .collect(),
        };
        let mut comparison = Self {
            subtitle: subtitle(plan),
            levels: (0..plan.paces.len()).map(level).collect(),
            baseline: plan.baseline,
            verdict: Vec::new(),
        };
        comparison.verdict = verdict(plan, &comparison);
        comparison
    }
}

impl LoadLevel {
    /// Whether a row has the best value of a column, if the policies differ in it.
    #[must_use]
    pub fn is_best(&self, row: &Row, column: usize) -> bool {
        row.completed > 0 && self.best(column) == row.values.get(column).copied()
    }

    /// The best value of a column among the policies that served anything, if they differ in it.
    fn best(&self, column: usize) -> Option<f64> {
        let values = || {
            self.rows
                .iter()
                .filter(|row| row.completed > 0)
                .filter_map(|row| row.values.get(column).copied())
        };
        let least = values().fold(f64::INFINITY, f64::min);
        let most = values().fold(f64::NEG_INFINITY, f64::max);
        let less = Column::ALL.get(column).is_some_and(|c| c.less_is_better());
        (least < most).then_some(if less { least } else { most })
    }
}

fn row(finished: &[RunResult], pace: usize, policy: usize) -> Row {
    let runs: Vec<&RunReport> = finished
        .iter()
        .filter(|run| run.pace == pace && run.policy == policy)
        .map(|run| &run.report)
        .collect();
    let mean = |column: &Column| {
        runs.iter().map(|run| column.of(run)).sum::<f64>() / runs.len().max(1) as f64
    };
    Row {
        policy: runs
            .first()
            .map_or_else(String::new, |run| run.policy.clone()),
        values: Column::ALL.iter().map(mean).collect(),
        completed: runs.iter().map(|run| u64::from(run.counts.completed)).sum(),
        lost: runs
            .iter()
            .map(|run| u64::from(run.requests - run.counts.completed))
            .sum(),
    }
}

/// A level of load in words.
pub(crate) fn title(pace: ArrivalMode) -> String {
    match pace {
        ArrivalMode::Open { speed } => format!("speed {speed}"),
        ArrivalMode::Closed { clients, think } => {
            format!("{clients} clients, thinking {} ms", think.as_millis())
        }
    }
}

fn subtitle(plan: &Plan) -> String {
    let trace = plan.traces.first();
    let (name, requests) = trace.map_or(("", 0), |t| (t.name.as_str(), t.requests.len()));
    let fleet = &plan.fleet;
    let mut text = format!(
        "{name} · {requests} requests · {} × {} · {}-token blocks",
        fleet.workers, plan.engine_name, fleet.engine.block_size
    );
    if fleet.ranks > 1 {
        text += &format!(" · {} ranks each", fleet.ranks);
    }
    if fleet.replicas > 1 {
        text += &format!(" · {} routers", fleet.replicas);
    }
    if plan.seeds.len() > 1 {
        text += &format!(" · means of {} seeds", plan.seeds.len());
    }
    text + &format!(
        " · good: TTFT ≤ {} ms, ITL ≤ {} ms · best possible hits {:.1} %",
        fleet.slo.ttft.as_millis(),
        fleet.slo.itl.as_millis(),
        plan.ideal_hit_share * 100.0
    )
}
