//! What events show of an answered prompt, when they had their time.
//!
//! Answers one question: an answer is off, or brought something new; what do the events say of its prompt? They come
//! later than the answer: milliseconds, or half a second where the engine has too little processor time. So a prompt is looked for until
//! events show what the answer says, at most for twice as long as events of this rank took of late.
//!
//! What always holds: answers that are off wait in the order in which they came, at most [`OFF_MAX`]; of the others one
//! waits at a time, the last; nobody who serves a request waits for a look.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_index::Matches;
use kvasir_trust::{Answer, Evidence, StoredCheck};
use kvasir_types::{LocalHash, Time, WorkerRank};

use super::CacheView;
use super::prediction::EventTotals;
use crate::events::StreamState;

/// Events have at least this long.
const PATIENCE_MIN: Duration = Duration::from_secs(1);
/// And at most this long, however late they were.
const PATIENCE_MAX: Duration = Duration::from_secs(5);
/// Between two looks for one prompt, while events come.
const LOOK_PAUSE: Duration = Duration::from_millis(10);
/// So long the latest of a rank's events counts, unless a later one comes.
const LATEST_FOR: Duration = Duration::from_secs(60);
/// Answers that are off and wait for events; more say nothing new.
const OFF_MAX: usize = 64;
/// So long it counts that events of a rank told of another's prompts, unless they tell of its own.
const FOREIGN_FOR: Duration = Duration::from_secs(60);

/// An answered prompt that is looked for.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) answered: Time,
    pub(super) prompt: Arc<[LocalHash]>,
    /// Complete blocks of the prompt.
    pub(super) blocks: u32,
    /// What events had said when it was sent.
    pub(super) sent: EventTotals,
    /// Ranks that had all of it then.
    pub(super) had_all: Vec<WorkerRank>,
    /// The answer, if it was off.
    pub(super) off: Option<OffAnswer>,
}

/// An answer that was not as predicted.
#[derive(Debug)]
pub(super) struct OffAnswer {
    pub(super) answer: Answer,
    /// What events had said when the engine had looked into its cache, if that was long before the answer ended.
    pub(super) then: Option<EventTotals>,
}

/// Prompts that wait to be looked for.
#[derive(Debug, Default)]
pub(super) struct Looks {
    running: bool,
    off: VecDeque<Look>,
    last: Option<Look>,
    /// How long after their answer events came at worst of late, and when.
    latest: Option<(Time, Duration)>,
}

impl Looks {
    fn next(&mut self) -> Option<Look> {
        let next = self.off.pop_front().or_else(|| self.last.take());
        self.running = next.is_some();
        next
    }

    /// Events of an answer came so long after it.
    fn latest_event(&mut self, now: Time, took: Duration) {
        if took >= self.latest(now) {
            self.latest = Some((now, took));
        }
    }

    /// How long events took at worst of late.
    fn latest(&self, now: Time) -> Duration {
        let latest = self.latest.filter(|(at, _)| now - *at < LATEST_FOR);
        latest.map_or(Duration::ZERO, |(_, took)| took)
    }
}

/// Which ranks' events told of prompts that went elsewhere, and when. Clones are one.
#[derive(Clone, Debug, Default)]
pub(super) struct ForeignPrompts(Arc<Mutex<HashMap<WorkerRank, Time>>>);

impl ForeignPrompts {
    fn ranks(&self) -> MutexGuard<'_, HashMap<WorkerRank, Time>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, rank: WorkerRank, now: Time) {
        self.ranks().insert(rank, now);
    }

    /// The rank's events told of its own prompts, or it is gone.
    pub(super) fn forget(&self, rank: WorkerRank) {
        self.ranks().remove(&rank);
    }

    fn has(&self, rank: WorkerRank, now: Time) -> bool {
        let ranks = self.ranks();
        ranks.get(&rank).is_some_and(|at| now - *at < FOREIGN_FOR)
    }
}

impl CacheView {
    /// Has a prompt looked for when events had their time.
    pub(super) fn look_later(self: &Arc<Self>, look: Look) {
        if look.blocks == 0 || !self.is_listening() {
            return;
        }
        let mut looks = self.looks();
        match look.off {
            Some(_) if looks.off.len() >= OFF_MAX => return,
            Some(_) => looks.off.push_back(look),
            None => looks.last = Some(look),
        }
        if !std::mem::replace(&mut looks.running, true) {
            let looking = Arc::clone(self).keep_looking();
            self.context.tasks.background().spawn(looking);
        }
    }

    async fn keep_looking(self: Arc<Self>) {
        loop {
            let Some(look) = self.looks().next() else {
                return;
            };
            self.give_time(&look).await;
            self.look(&look);
        }
    }

    /// Waits until events show what the answer says, or must have come.
    async fn give_time(&self, look: &Look) {
        let Some(subscription) = self.subscription() else {
            return;
        };
        let deadline = look.answered + self.patience();
        loop {
            let now = self.context.clock.now();
            if self.is_shown(look) {
                self.looks().latest_event(now, now - look.answered);
                return;
            }
            let left = deadline - now;
            if left.is_zero() {
                return;
            }
            let batches = |state: &StreamState| state.status.counts.batches;
            let before = subscription.stream.read(batches);
            let news = subscription.stream.until(|state| batches(state) != before);
            let _ = tokio::time::timeout(left, news).await;
            tokio::time::sleep(LOOK_PAUSE.min(left)).await;
        }
    }

    /// Whether events show by now what the answer says.
    fn is_shown(&self, look: &Look) -> bool {
        let size = self.block_size().max(1);
        match &look.off {
            None => self.found(look) >= look.blocks,
            Some(OffAnswer { answer, then }) => {
                let reported = answer.cached_reported.unwrap_or(0);
                let removed = || {
                    let totals = then.unwrap_or_else(|| self.event_totals());
                    totals.removed_since(&look.sent).saturating_mul(size)
                };
                match answer.cached > reported {
                    true => (answer.cached - reported).saturating_sub(removed()) < size,
                    false => self.found(look) >= reported / size,
                }
            }
        }
    }

    /// Leading blocks of the prompt that this rank has.
    fn found(&self, look: &Look) -> u32 {
        let mut matches = Matches::new();
        self.index.find(&look.prompt, &mut matches);
        let ours = matches.sources().find(|s| s.events.rank == self.rank);
        ours.map_or(0, |s| s.events.disk_cumulative())
    }

    /// How long events of this rank took of late, from the answer on.
    pub(super) fn event_delay(&self) -> Duration {
        let latest = self.looks().latest(self.context.clock.now());
        latest.max(self.lag())
    }

    /// How long they may take.
    fn patience(&self) -> Duration {
        (self.event_delay() * 2).clamp(PATIENCE_MIN, PATIENCE_MAX)
    }

    fn looks(&self) -> MutexGuard<'_, Looks> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self, look: &Look) {
        let totals = self.event_totals();
        let check = StoredCheck {
            stored: totals.stored_since(&look.sent),
            removed: totals.removed_since(&look.sent),
            orphans: self.has_orphans(),
            ..self.find(look)
        };
        let evidence = match &look.off {
            None => Evidence::Stored(check),
            Some(OffAnswer { answer, then }) => {
                let removed = then.unwrap_or(totals).removed_since(&look.sent);
                Evidence::Answer(Answer {
                    removed_since: removed.saturating_mul(self.block_size()),
                    shown: Some(check),
                    ..*answer
                })
            }
        };
        self.judge(self.context.clock.now(), evidence);
    }

    /// Where the prompt is now: at this rank, or where it was not sent.
    fn find(&self, look: &Look) -> StoredCheck {
        let now = self.context.clock.now();
        let mut matches = Matches::new();
        self.index.find(&look.prompt, &mut matches);
        let (mut found, mut elsewhere) = (0, false);
        for source in matches.sources() {
            let (rank, blocks) = (source.events.rank, source.events.disk_cumulative());
            if rank == self.rank {
                found = blocks;
            } else if blocks >= look.blocks && !look.had_all.contains(&rank) {
                self.foreign.note(rank, now);
                elsewhere = true;
            }
        }
        if found >= look.blocks {
            self.foreign.forget(self.rank);
        }
        StoredCheck {
            expected: look.blocks,
            found,
            others: (elsewhere && found < look.blocks) || self.foreign.has(self.rank, now),
            ..StoredCheck::default()
        }
    }
}
