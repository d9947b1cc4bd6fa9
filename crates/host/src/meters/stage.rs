//! In which stage requests are, and how long each takes.

use std::time::Duration;

use kvasir_telemetry::{Gauge, Histogram, Metrics};

/// What is being done for a request that has no answer yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its body is understood and its prompt becomes tokens.
    Preprocess,
    /// The router chooses, with any wait in its queue.
    Route,
    /// A worker has it and has not begun to answer.
    Dispatch,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Preprocess, Self::Route, Self::Dispatch];

    /// Labels of the gauge: stage and phase.
    const fn labels(self) -> [&'static str; 2] {
        match self {
            Self::Preprocess => ["preprocess", ""],
            Self::Route => ["route", super::ANSWER.phase],
            Self::Dispatch => ["dispatch", super::ANSWER.phase],
        }
    }

    /// Label of the histogram. Dynamo calls the time at the worker by the way there and back.
    const fn duration(self) -> &'static str {
        match self {
            Self::Preprocess => "preprocess",
            Self::Route => "route",
            Self::Dispatch => "transport_roundtrip",
        }
    }
}

/// The series of all stages.
#[derive(Debug)]
pub(super) struct Stages([(Gauge, Histogram); 3]);

impl Stages {
    pub(super) fn new(metrics: &Metrics) -> Self {
        Self(Stage::ALL.map(|stage| {
            let inside = metrics.stage_requests.with_label_values(&stage.labels());
            let took = &metrics.stage_duration_seconds;
            (inside, took.with_label_values(&[stage.duration()]))
        }))
    }

    fn of(&self, stage: Stage) -> &(Gauge, Histogram) {
        let [preprocess, route, dispatch] = &self.0;
        match stage {
            Stage::Preprocess => preprocess,
            Stage::Route => route,
            Stage::Dispatch => dispatch,
        }
    }

    pub(super) fn enter(&self, stage: Stage) -> StageGuard<'_> {
        let inside = &self.of(stage).0;
        inside.inc();
        StageGuard(inside)
    }

    pub(super) fn took(&self, stage: Stage, took: Duration) {
        self.of(stage).1.observe(took.as_secs_f64());
    }
}

/// A request is in a stage; dropped, it is out of it, whichever way.
#[derive(Debug)]
pub struct StageGuard<'a>(&'a Gauge);

impl Drop for StageGuard<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
