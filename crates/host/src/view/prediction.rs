//! What was predicted of one request, and what its engine then reported.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvasir_kv_events::Counts;
use kvasir_trust::{Answer, Evidence};
use kvasir_types::{LocalHash, Time, WorkerRank};

use super::CacheView;
use super::looks::{Look, OffAnswer};

/// An event may be this late on any machine (recorded from vLLM: 1 to 9 ms, once 250); where an engine's events take longer,
/// they have twice the longest time that they took of late.
const EVENT_LAG: Duration = Duration::from_millis(250);

/// What an engine said about a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsageReport {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Those of them that it found cached, where it says so.
    pub cached: Option<u32>,
    /// Tokens of the answer.
    pub output: u32,
}

/// What events had said of a rank at some moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EventTotals {
    stored: u64,
    removed: u64,
    /// Times that all was forgotten.
    emptied: u64,
    /// Some groups of layers keep no whole prefixes.
    hybrid: bool,
}

impl From<&Counts> for EventTotals {
    fn from(counts: &Counts) -> Self {
        Self {
            stored: counts.blocks_stored,
            removed: counts.blocks_removed,
            hybrid: counts.group_skipped > 0,
            emptied: counts.cleared + counts.restarts + counts.replays_too_short,
        }
    }
}

impl EventTotals {
    /// Blocks stored since `before`.
    pub(super) fn stored_since(&self, before: &Self) -> u32 {
        u32::try_from(self.stored.saturating_sub(before.stored)).unwrap_or(u32::MAX)
    }

    /// Blocks gone since `before`; all there are if the rank was emptied.
    pub(super) fn removed_since(&self, before: &Self) -> u32 {
        match self.emptied == before.emptied {
            true => u32::try_from(self.removed.saturating_sub(before.removed)).unwrap_or(u32::MAX),
            false => u32::MAX,
        }
    }
}

/// What events predict of a prompt.
#[derive(Clone, Debug)]
pub(crate) struct Prediction {
    /// The prompt's blocks.
    pub(crate) locals: Arc<[LocalHash]>,
    /// Tokens of the prompt.
    pub(crate) prompt: u32,
    /// Its leading blocks that events say are cached in any tier.
    pub(crate) blocks: u32,
    /// Those that the engine may find in all: beyond its own, a cache that all workers share may have more.
    pub(crate) blocks_max: u32,
    /// Other ranks that have all of it.
    pub(crate) had_all: Vec<WorkerRank>,
}

/// Most tokens of a prompt that an engine can find cached: whole blocks, and it always computes the last token.
pub(crate) fn cacheable_tokens(prompt: u32, block_size: u32) -> u32 {
    let size = block_size.max(1);
    prompt.saturating_sub(1) / size * size
}

/// A prediction that waits for the engine's report.
#[derive(Debug)]
pub(crate) struct PendingPrediction {
    view: Arc<CacheView>,
    prediction: Prediction,
    sent: EventTotals,
    begun: Mutex<Option<BegunAnswer>>,
}

/// When an answer began, and what events said until the cache that it found had been told of.
#[derive(Clone, Copy, Debug)]
struct BegunAnswer {
    at: Time,
    totals: EventTotals,
}

impl PendingPrediction {
    /// The request of `prediction` is about to be sent to the rank of `view`.
    pub(crate) fn new(view: Arc<CacheView>, prediction: Prediction) -> Self {
        Self {
            sent: view.event_totals(),
            view,
            prediction,
            begun: Mutex::new(None),
        }
    }

    /// The answer has begun or goes on: the engine has looked into its cache.
    pub(crate) fn answering(&self, now: Time) {
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let at = begun.map_or(now, |begun| begun.at);
        if now - at <= self.lag() {
            let totals = self.view.event_totals();
            *begun = Some(BegunAnswer { at, totals });
        }
    }

    /// What events tell so long after the engine looked into its cache may have happened before.
    fn lag(&self) -> Duration {
        EVENT_LAG.max(self.view.event_delay() * 2)
    }

    /// The answer is complete.
    pub(crate) fn compare(self, now: Time, report: UsageReport) {
        let size = self.view.block_size().max(1);
        let begun = *self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        // What events said long after the cache was looked into explains nothing.
        let then = begun.filter(|begun| now - begun.at > self.lag());
        let then = then.map(|begun| begun.totals);
        let totals = then.unwrap_or_else(|| self.view.event_totals());
        let cacheable = cacheable_tokens(self.prediction.prompt, size);
        let tokens = |blocks: u32| blocks.saturating_mul(size).min(cacheable);
        // What it fetched from a shared cache is no fault of its events.
        let own = tokens(self.prediction.blocks);
        let most = tokens(self.prediction.blocks_max).max(own);
        let cached = report.cached.map_or(own, |found| found.clamp(own, most));
        let answer = Answer {
            prompt: self.prediction.prompt,
            prompt_reported: Some(report.prompt).filter(|tokens| *tokens > 0),
            cached,
            cached_reported: report.cached,
            removed_since: totals.removed_since(&self.sent).saturating_mul(size),
            hybrid: totals.hybrid,
            shown: None,
        };
        let off = self.view.is_open(&answer);
        if !off {
            self.view.judge(now, Evidence::Answer(answer));
        }
        if answer.prompt_reported.is_none_or(|p| p == answer.prompt) {
            self.view.look_later(Look {
                answered: now,
                blocks: answer.prompt / size,
                prompt: self.prediction.locals,
                sent: self.sent,
                had_all: self.prediction.had_all,
                off: off.then_some(OffAnswer { answer, then }),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::cacheable_tokens;

    #[test]
    fn the_last_token_is_always_computed_and_only_whole_blocks_are_found() {
        let most = [0, 1, 16, 17, 32, 33].map(|prompt| cacheable_tokens(prompt, 16));
        assert_eq!(most, [0, 0, 0, 16, 16, 32]);
        assert_eq!(cacheable_tokens(u32::MAX, 1), u32::MAX - 1);
        assert_eq!(cacheable_tokens(5, 0), 4);
    }
}
