//! All runs of a plan, several at a time.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use kvasir_sim::{ArrivalMode, Fleet, RunReport, SimError, simulate};
use kvasir_telemetry::Clock;

use crate::progress::ProgressBar;
use crate::{Plan, ReplayError};

/// Time between two drawings of the progress bar.
const REDRAW: Duration = Duration::from_millis(100);

/// The result of one run.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// Its level of load.
    pub pace: usize,
    /// Its policy.
    pub policy: usize,
    /// Its seed.
    pub seed: usize,
    /// What it measured.
    pub report: RunReport,
    /// Seconds of real time.
    pub wall_s: f64,
}

/// Which run.
#[derive(Clone, Copy, Debug)]
struct Task {
    pace: usize,
    policy: usize,
    seed: usize,
}

/// Simulates everything, several runs at a time. Results are in the order of the plan.
pub fn run_all(plan: &Plan, draw: bool) -> Result<Vec<RunResult>, ReplayError> {
    let tasks = tasks(plan);
    let per_run = plan.traces.first().map_or(0, |t| t.requests.len() as u64);
    let mut bar = ProgressBar::new(draw, tasks.len(), per_run * tasks.len() as u64);
    let (next, clock) = (AtomicUsize::new(0), Clock::new());
    let done: Vec<AtomicU32> = tasks.iter().map(|_| AtomicU32::new(0)).collect();
    let (sender, results) = mpsc::channel();
    let mut finished: Vec<Option<RunResult>> = tasks.iter().map(|_| None).collect();
    let mut problem = None;
    std::thread::scope(|scope| {
        for _ in 0..plan.jobs.clamp(1, tasks.len().max(1)) {
            let (sender, next, done, tasks) = (sender.clone(), &next, &done, &tasks);
            scope.spawn(move || {
                while let Some((at, task)) = take(next, tasks) {
                    let outcome = one(plan, task, &clock, &done[at]);
                    if sender.send((at, outcome)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        loop {
            match results.recv_timeout(REDRAW) {
                Ok((at, Ok(run))) => {
                    bar.run_done(&run.report.policy);
                    finished[at] = Some(run);
                }
                Ok((_, Err(error))) => {
                    problem.get_or_insert(error);
                    next.store(tasks.len(), Ordering::Relaxed);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            bar.draw(
                done.iter()
                    .map(|n| u64::from(n.load(Ordering::Relaxed)))
                    .sum(),
            );
        }
    });
    bar.clear();
    match problem {
        Some(error) => Err(error.into()),
        None => Ok(finished.into_iter().flatten().collect()),
    }
}

fn tasks(plan: &Plan) -> Vec<Task> {
    let mut tasks = Vec::new();
    for pace in 0..plan.paces.len() {
        for policy in 0..plan.policies.len() {
            tasks.extend((0..plan.seeds.len()).map(|seed| Task { pace, policy, seed }));
        }
    }
    tasks
}

fn take(next: &AtomicUsize, tasks: &[Task]) -> Option<(usize, Task)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    Some((at, *tasks.get(at)?))
}

fn one(plan: &Plan, task: Task, clock: &Clock, done: &AtomicU32) -> Result<RunResult, SimError> {
    let Task { pace, policy, seed } = task;
    let fleet = Fleet {
        arrivals: plan
            .paces
            .get(pace)
            .copied()
            .unwrap_or(ArrivalMode::Open { speed: 1.0 }),
        seed: plan.seeds.get(seed).copied().unwrap_or(0),
        ..plan.fleet.clone()
    };
    let fleet = match plan.splits.get(policy) {
        Some(split) => Fleet {
            workers: split.workers,
            prefill: split.prefill,
            ..fleet
        },
        None => fleet,
    };
    let began = clock.now();
    let mut see = |p: kvasir_sim::Progress| done.store(p.done, Ordering::Relaxed);
    let report = simulate(&plan.traces[seed], &fleet, &plan.policies[policy], &mut see)?;
    let wall_s = (clock.now() - began).as_secs_f64();
    Ok(RunResult {
        pace,
        policy,
        seed,
        report,
        wall_s,
    })
}
