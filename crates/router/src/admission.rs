//! Overload protection: how much a rank is given ahead, and who is refused at once.
//!
//! Answers two questions: does a rank take another request now, and will a newcomer of the queue be placed in time?
//! Both are answered by what was seen: how many requests a rank begins to answer per second while some wait for it,
//! and how many leave the queue per second while some wait in it. No capacity has to be known or configured.
//!
//! What always holds: a rank with fewer than [`RANK_MIN`] requests that wait is open; nobody is refused by an
//! expectation before some have waited for [`GRACE`]. Nothing is counted while it is off.
//!
//! Elsewhere: the longest wait (`router-queue-max-wait-secs`) and the order of the queue.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::{Sign, SignChange, SlotSet};
use kvasir_types::Time;

/// Seconds over which a rate is measured.
const WINDOW: f64 = 5.0;
/// Requests that may wait at a rank before it has shown how fast it is.
const RANK_MIN: u32 = 8;
/// A rank is given what it begins to answer within so many seconds, or within twice the time that a request takes there
/// that finds it idle: one that is slow to begin may begin many at once.
const RANK_SECS: f64 = 1.0;
/// At most within so many.
const RANK_SECS_MAX: f64 = 5.0;
/// How much the latest request that found its rank idle counts.
const ALONE_WEIGHT: f64 = 0.25;
/// A newcomer that would wait longer than this is refused at once.
const QUEUE_SECS: f64 = 1.5;
/// How long requests must have waited, one or another, before an expectation counts: a burst into an idle fleet is let in,
/// and ranks are given more as they show what they can do. Not where an engine says that requests wait in it.
const GRACE: Duration = Duration::from_secs(2);
/// Releases that are assumed beside those that were seen: a short measurement expects much, a long one what was measured.
const ASSUMED: f64 = 4.0;
/// How long an engine's word about its own queue counts.
const REPORT_VALID: Duration = Duration::from_secs(5);
/// Models whose queues are measured apart; beyond it those that have nobody waiting are forgotten.
const LANES_MAX: usize = 256;

/// How often something happens in the time in which it could.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    events: f64,
    secs: f64,
}

impl Rate {
    /// Time passed in which it could.
    fn run(&mut self, secs: f64) {
        let kept = WINDOW / (WINDOW + secs);
        self.events *= kept;
        self.secs = (self.secs + secs) * kept;
    }

    /// Time passed in which it could not: what is known grows old, and is then forgotten.
    fn fade(&mut self, secs: f64) {
        let kept = match secs < 2.0 * WINDOW {
            true => WINDOW / (WINDOW + secs),
            false => 0.0,
        };
        self.events *= kept;
        self.secs *= kept;
    }

    fn per_sec(&self) -> f64 {
        match self.events > 0.0 {
            true => self.events / self.secs,
            false => 0.0,
        }
    }

    /// Seconds until it has happened `times` more.
    fn expected_secs(&self, times: usize) -> f64 {
        times as f64 * self.secs / (self.events + ASSUMED)
    }
}

/// One rank.
#[derive(Clone, Copy, Debug, Default)]
struct RankFlow {
    begun: Rate,
    updated: Time,
    /// Seconds to the first token of a request that finds the rank idle.
    alone_secs: f64,
    /// Requests without a first token.
    unsigned: u32,
    /// Those of them that are taken to wait or to be computed.
    awaited: u32,
    /// All requests.
    running: u32,
    /// Requests that the engine runs at once, where that is known.
    seqs_max: Option<u64>,
    /// Requests that wait in the engine without a trace here, as it said last; fewer as silent ones end.
    behind: u32,
    behind_until: Time,
}

impl RankFlow {
    fn advance(&mut self, now: Time) {
        let secs = (now - self.updated).as_secs_f64();
        self.updated = now;
        if self.unsigned > 0 {
            self.begun.run(secs);
        }
        if self.behind_until <= now {
            self.behind = 0;
        }
    }

    fn is_full(&self) -> bool {
        let seqs_max = self.seqs_max.unwrap_or(u64::MAX);
        let above = u64::from(self.running).saturating_sub(seqs_max);
        let waiting = above.max(u64::from(self.awaited) + u64::from(self.behind));
        let secs = (2.0 * self.alone_secs).clamp(RANK_SECS, RANK_SECS_MAX);
        let ahead = (self.begun.per_sec() * secs) as u64;
        waiting >= ahead.max(u64::from(RANK_MIN))
    }
}

/// The queue of one model.
#[derive(Clone, Copy, Debug, Default)]
struct QueueFlow {
    placed: Rate,
    updated: Time,
    waiting: u32,
    /// Since when some have waited all the time.
    since: Time,
}

impl QueueFlow {
    fn advance(&mut self, now: Time) {
        let secs = (now - self.updated).as_secs_f64();
        self.updated = now;
        match self.waiting {
            0 => self.placed.fade(secs),
            _ => self.placed.run(secs),
        }
    }
}

/// Why a newcomer is refused at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLate {
    /// How long it would wait.
    pub(crate) expected: Duration,
    /// By when those who wait now are placed.
    pub(crate) retry_after: Duration,
}

/// What every rank and every queue has shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct Admission {
    on: bool,
    ranks: Vec<RankFlow>,
    full: SlotSet,
    lanes: BTreeMap<Option<Arc<str>>, QueueFlow>,
}

impl Admission {
    /// How often the queue is looked at while nothing happens: what engines said grows old.
    pub(crate) const RECHECK: Duration = Duration::from_millis(500);
    /// The longest expected wait that is accepted.
    pub(crate) const QUEUE_LIMIT: Duration = Duration::from_millis((QUEUE_SECS * 1e3) as u64);

    pub(crate) fn new(on: bool) -> Self {
        Self {
            on,
            ..Self::default()
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Ranks that take nothing now.
    pub(crate) fn full(&self) -> &SlotSet {
        &self.full
    }

    /// Whether a rank takes another request.
    pub(crate) fn is_open(&self, slot: u32) -> bool {
        !self.full.has(slot)
    }

    /// A rank is there, or what is known of it changed.
    pub(crate) fn joined(&mut self, slot: u32, seqs_max: Option<u64>) {
        if self.ranks.len() <= slot as usize {
            self.ranks.resize(slot as usize + 1, RankFlow::default());
        }
        self.change(slot, None, |flow| flow.seqs_max = seqs_max);
    }

    /// Ranks have other slots now, from and to; no other rank has one.
    pub(crate) fn moved(&mut self, moves: &[(u32, u32)]) {
        let (ranks, full) = (
            std::mem::take(&mut self.ranks),
            std::mem::take(&mut self.full),
        );
        for (from, to) in moves {
            if self.ranks.len() <= *to as usize {
                self.ranks.resize(*to as usize + 1, RankFlow::default());
            }
            let was = ranks.get(*from as usize).copied();
            if let (Some(was), Some(is)) = (was, self.ranks.get_mut(*to as usize)) {
                *is = was;
            }
            self.full.set(*to, full.has(*from));
        }
    }

    /// A rank is gone with all that it had.
    pub(crate) fn left(&mut self, slot: u32) {
        if let Some(flow) = self.ranks.get_mut(slot as usize) {
            *flow = RankFlow::default();
        }
        self.full.set(slot, false);
    }

    pub(crate) fn booked(&mut self, now: Time, slot: u32) {
        self.change(slot, Some(now), |flow| {
            flow.unsigned += 1;
            flow.awaited += 1;
            flow.running += 1;
        });
    }

    /// A sign that a prompt is computed.
    pub(crate) fn signed(&mut self, now: Time, change: &SignChange) {
        self.change(change.slot, Some(now), |flow| {
            if change.before == Sign::Awaited {
                flow.awaited = flow.awaited.saturating_sub(1);
            }
            if change.sign == Sign::Seen {
                flow.unsigned = flow.unsigned.saturating_sub(1);
                flow.begun.events += 1.0;
                if change.silent {
                    flow.behind = flow.behind.saturating_sub(1);
                } else if change.ahead == 0 {
                    let secs = (now - change.booked_at).as_secs_f64();
                    let weight = match flow.alone_secs > 0.0 {
                        true => ALONE_WEIGHT,
                        false => 1.0,
                    };
                    flow.alone_secs += (secs - flow.alone_secs) * weight;
                }
            } else if flow.behind > 0 {
                // Others wait in the engine: so does this one, behind them.
                flow.behind += 1;
            }
        });
    }

    /// A request that had `sign` ended; `served` if its answer is whole.
    pub(crate) fn ended(&mut self, now: Time, slot: u32, sign: Sign, served: bool) {
        self.change(slot, Some(now), |flow| {
            flow.running = flow.running.saturating_sub(1);
            if sign == Sign::Awaited {
                flow.awaited = flow.awaited.saturating_sub(1);
            }
            if sign == Sign::Seen {
                return;
            }
            flow.unsigned = flow.unsigned.saturating_sub(1);
            flow.behind = flow.behind.saturating_sub(1);
            if served {
                flow.begun.events += 1.0;
            }
        });
    }

    /// An engine says how many requests wait in it.
    pub(crate) fn reported(&mut self, now: Time, slot: u32, waiting: u64) {
        self.change(slot, Some(now), |flow| {
            let behind = waiting.saturating_sub(u64::from(flow.awaited));
            flow.behind = u32::try_from(behind).unwrap_or(u32::MAX / 2);
            flow.behind_until = now + REPORT_VALID;
        });
    }

    /// Time alone has passed.
    pub(crate) fn tick(&mut self, now: Time) {
        let old = |flow: &RankFlow| flow.behind > 0 && flow.behind_until <= now;
        for slot in 0..self.ranks.len() {
            if self.ranks.get(slot).is_some_and(old) {
                self.change(slot as u32, Some(now), |_| {});
            }
        }
    }

    fn change(&mut self, slot: u32, now: Option<Time>, change: impl FnOnce(&mut RankFlow)) {
        let Some(flow) = self.ranks.get_mut(slot as usize).filter(|_| self.on) else {
            return;
        };
        if let Some(now) = now {
            flow.advance(now);
        }
        change(flow);
        let full = flow.is_full();
        self.full.set(slot, full);
    }

    /// A request of a model began to wait.
    pub(crate) fn entered(&mut self, now: Time, model: &Option<Arc<str>>) {
        if !self.on {
            return;
        }
        if self.lanes.len() >= LANES_MAX && !self.lanes.contains_key(model) {
            self.lanes.retain(|_, lane| lane.waiting > 0);
        }
        let lane = self.lanes.entry(model.clone()).or_default();
        lane.advance(now);
        if lane.waiting == 0 {
            lane.since = now;
        }
        lane.waiting += 1;
    }

    /// It waits no more; `placed` if it has a worker.
    pub(crate) fn went(&mut self, now: Time, model: &Option<Arc<str>>, placed: bool) {
        if let Some(lane) = self.lanes.get_mut(model) {
            lane.advance(now);
            lane.waiting = lane.waiting.saturating_sub(1);
            lane.placed.events += f64::from(u8::from(placed));
        }
    }

    /// Whether a newcomer behind `ahead` others would wait too long.
    pub(crate) fn too_late(
        &mut self,
        now: Time,
        model: &Option<Arc<str>>,
        ahead: usize,
    ) -> Option<TooLate> {
        let said = self.ranks.iter().any(|flow| flow.behind > 0);
        let lane = self.lanes.get_mut(model)?;
        lane.advance(now);
        if lane.waiting == 0 || !said && now < lane.since + GRACE {
            return None;
        }
        let expected = lane.placed.expected_secs(ahead + 1);
        let all = lane.placed.expected_secs(lane.waiting as usize + 1);
        let span = |secs: f64| Duration::try_from_secs_f64(secs).unwrap_or(Duration::MAX);
        (expected > QUEUE_SECS).then(|| TooLate {
            expected: span(expected),
            retry_after: span(all),
        })
    }

    /// Requests of a model that wait.
    pub(crate) fn waiting(&self, model: &Option<Arc<str>>) -> usize {
        self.lanes
            .get(model)
            .map_or(0, |lane| lane.waiting as usize)
    }

    /// By when those of a model who wait now are placed.
    pub(crate) fn placed_by(&self, model: &Option<Arc<str>>) -> Duration {
        let lane = self.lanes.get(model);
        let secs = lane.map_or(0.0, |lane| {
            lane.placed.expected_secs(lane.waiting as usize + 1)
        });
        Duration::try_from_secs_f64(secs).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests;
