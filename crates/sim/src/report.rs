//! How a run went.
//!
//! Definitions: *time to first token* is from arrival at the router to the first token, queues included.
//! *Inter-token latency* is each gap between two tokens of one answer; for the service level an answer's
//! mean gap counts. *Hit share* is prompt tokens found in the cache of the chosen engine over all prompt
//! tokens that entered a batch. *Imbalance* is the largest over the mean number of requests in an engine,
//! averaged over the run. *Goodput* is the share of all requests that completed within the service level.

use std::time::Duration;

use kvasir_types::Time;

use crate::stats::{Histogram, quantile};
use crate::world::{Request, State};
use crate::{ArrivalMode, Fleet, Policy, Series, Summary, Trace};

/// Points of a distribution that reports keep.
const CDF_POINTS: usize = 200;
/// Parts of a run for which the hit share is told.
const HIT_PARTS: usize = 60;

/// What became of the requests. Their sum is the number of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answered.
    pub completed: u32,
    /// No worker took it.
    pub refused: u32,
    /// No engine can compute it.
    pub rejected: u32,
    /// A turn of a conversation that had ended.
    pub dropped: u32,
    /// Neither: the run came to an end before. A fault of ours.
    pub stuck: u32,
}

/// One run in numbers; times in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct RunReport {
    /// The policy's name.
    pub policy: String,
    /// How requests came.
    pub arrivals: ArrivalMode,
    /// Workers at the start; those that answer, if others compute prompts.
    pub workers: u32,
    /// Workers that compute prompts for them.
    pub prefill_workers: u32,
    /// The seed.
    pub seed: u64,
    /// Requests of the trace.
    pub requests: u32,
    /// What became of them.
    pub counts: Counts,
    /// Time to first token.
    pub ttft: Summary,
    /// Gaps between tokens.
    pub itl: Summary,
    /// From arrival to the last token.
    pub e2e: Summary,
    /// From arrival to entering a batch.
    pub queue: Summary,
    /// Prompt tokens found, as a share.
    pub hit_share: f64,
    /// Prompt tokens that entered a batch.
    pub prompt_tokens: u64,
    /// Tokens answered.
    pub output_tokens: u64,
    /// Virtual seconds from the first arrival to the last token.
    pub duration_s: f64,
    /// Tokens answered per virtual second.
    pub output_tokens_per_s: f64,
    /// Requests completed per virtual second.
    pub requests_per_s: f64,
    /// Requests completed within the service level, as a share of all.
    pub goodput_share: f64,
    /// Largest over mean number of requests in an engine.
    pub imbalance: f64,
    /// Requests thrown out of a batch.
    pub preemptions: u64,
    /// Attempts at another worker.
    pub retries: u64,
    /// Requests that waited in a router's queue.
    pub queued: u64,
    /// Cache events that never reached a router.
    pub events_lost: u64,
    /// Cache events that an index could not use.
    pub events_refused: u64,
    /// Events of the simulation.
    pub events: u64,
    /// Quantiles of the time to first token, 0 to 1 in equal steps.
    pub ttft_cdf: Vec<f64>,
    /// Hit share over time, by equal parts of the run; `None` where nothing started.
    pub hits: Vec<Option<f64>>,
    /// Loads over time.
    pub series: Series,
}

/// What is counted while a run goes on.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) gaps: Histogram,
    pub(crate) preemptions: u64,
    pub(crate) retries: u64,
    pub(crate) queued: u64,
    pub(crate) events_lost: u64,
    pub(crate) events_refused: u64,
    pub(crate) events: u64,
    pub(crate) series: Series,
}

impl Tally {
    pub(crate) fn report(
        self,
        trace: &Trace,
        fleet: &Fleet,
        policy: &Policy,
        requests: &[Request],
        areas: &[f64],
    ) -> RunReport {
        let completed: Vec<&Request> = completed(requests).collect();
        let seconds = duration(requests).as_secs_f64();
        let per_second = |n: f64| if seconds > 0.0 { n / seconds } else { 0.0 };
        let ms = |f: fn(&Request) -> Duration| -> Vec<f64> {
            completed.iter().map(|r| f(r).as_secs_f64() * 1e3).collect()
        };
        let mut ttft = ms(|r| r.first_token - r.arrived);
        let ttft_summary = Summary::of(&mut ttft);
        let at = |point: usize| quantile(&ttft, point as f64 / CDF_POINTS as f64);
        let (found, prompt_tokens) = hits(trace, requests);
        let output_tokens = completed.iter().map(|r| u64::from(r.generated)).sum();
        let good = completed.iter().filter(|r| is_good(r, fleet)).count();
        RunReport {
            policy: policy.name.clone(),
            arrivals: fleet.arrivals,
            workers: fleet.workers,
            prefill_workers: fleet.prefill.map_or(0, |pool| pool.workers),
            seed: fleet.seed,
            requests: requests.len() as u32,
            counts: counts(requests),
            ttft: ttft_summary,
            itl: self.gaps.summary(),
            e2e: Summary::of(&mut ms(|r| r.last_token - r.arrived)),
            queue: Summary::of(&mut ms(|r| r.started - r.arrived)),
            hit_share: found as f64 / prompt_tokens.max(1) as f64,
            prompt_tokens,
            output_tokens,
            duration_s: seconds,
            output_tokens_per_s: per_second(output_tokens as f64),
            requests_per_s: per_second(completed.len() as f64),
            goodput_share: good as f64 / requests.len().max(1) as f64,
            imbalance: imbalance(areas),
            preemptions: self.preemptions,
            retries: self.retries,
            queued: self.queued,
            events_lost: self.events_lost,
            events_refused: self.events_refused,
            events: self.events,
            ttft_cdf: (0..=CDF_POINTS).map(at).collect(),
            hits: hits_over_time(trace, requests),
            series: self.series,
        }
    }
}

fn completed(requests: &[Request]) -> impl Iterator<Item = &Request> {
    requests.iter().filter(|r| r.state == State::Completed)
}

fn counts(requests: &[Request]) -> Counts {
    let mut counts = Counts::default();
    for request in requests {
        let count = match request.state {
            State::Completed => &mut counts.completed,
            State::Refused => &mut counts.refused,
            State::Rejected => &mut counts.rejected,
            State::Dropped => &mut counts.dropped,
            State::Ahead | State::Routing | State::Running { .. } => &mut counts.stuck,
        };
        *count += 1;
    }
    counts
}

fn duration(requests: &[Request]) -> Duration {
    let first = completed(requests).map(|r| r.arrived).min();
    let last = completed(requests).map(|r| r.last_token).max();
    last.unwrap_or_default() - first.unwrap_or_default()
}

fn is_good(request: &Request, fleet: &Fleet) -> bool {
    let gaps = request.generated.saturating_sub(1).max(1);
    let mean_gap = (request.last_token - request.first_token) / gaps;
    request.first_token - request.arrived <= fleet.slo.ttft && mean_gap <= fleet.slo.itl
}

/// Prompt tokens found, and prompt tokens asked, of requests that entered a batch.
fn hits(trace: &Trace, requests: &[Request]) -> (u64, u64) {
    let entered = requests
        .iter()
        .zip(&trace.requests)
        .filter_map(|(request, of)| Some((u64::from(request.cached?), u64::from(of.prompt.len()))));
    entered.fold((0, 0), |sum, (found, asked)| (sum.0 + found, sum.1 + asked))
}

fn hits_over_time(trace: &Trace, requests: &[Request]) -> Vec<Option<f64>> {
    let last = requests
        .iter()
        .map(|r| r.started)
        .max()
        .unwrap_or(Time::ZERO);
    let part = last.as_nanos() / HIT_PARTS as u64 + 1;
    let mut parts = vec![(0u64, 0u64); HIT_PARTS];
    for (request, of) in requests.iter().zip(&trace.requests) {
        let Some(cached) = request.cached else {
            continue;
        };
        let at = (request.started.as_nanos() / part) as usize;
        if let Some(sum) = parts.get_mut(at) {
            *sum = (
                sum.0 + u64::from(cached),
                sum.1 + u64::from(of.prompt.len()),
            );
        }
    }
    let share = |(found, asked): (u64, u64)| (asked > 0).then(|| found as f64 / asked as f64);
    parts.into_iter().map(share).collect()
}

fn imbalance(areas: &[f64]) -> f64 {
    let mean = areas.iter().sum::<f64>() / areas.len().max(1) as f64;
    let largest = areas.iter().copied().fold(0.0, f64::max);
    if mean > 0.0 { largest / mean } else { 1.0 }
}
