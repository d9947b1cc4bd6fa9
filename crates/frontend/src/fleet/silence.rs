//! How long a worker has been silent.
//!
//! Silence is time: it begins with the last byte that came from the worker, on any stream or as the answer to any question. How
//! many questions were asked meanwhile says nothing, as a connection that is refused fails within microseconds. Some questions
//! must have failed all the same: a process that stood still itself has heard nobody.

use std::time::Duration;

use tokio::time::Instant;

/// Questions without an answer before a silence counts, however long it is.
const UNANSWERED_MIN: u32 = 3;

/// The silence of one worker.
#[derive(Debug)]
pub(super) struct Silence {
    /// The last byte, or the last time that we could not ask.
    since: Instant,
    /// Questions since then that nobody answered.
    unanswered: u32,
    /// When the last of them failed.
    failed_at: Option<Instant>,
}

impl Silence {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            unanswered: 0,
            failed_at: None,
        }
    }

    /// A byte came, or we could not ask: silence begins anew.
    pub(super) fn begin(&mut self, at: Instant) {
        if at > self.since {
            *self = Self::new(at);
        }
    }

    /// A question was not answered. It counts if the last one that did failed `gap` ago.
    pub(super) fn question_failed(&mut self, now: Instant, gap: Duration) {
        if self.failed_at.is_none_or(|at| now >= at + gap) {
            self.unanswered = self.unanswered.saturating_add(1);
            self.failed_at = Some(now);
        }
    }

    /// Whether a question went unanswered since the last byte.
    pub(super) fn is_doubtful(&self) -> bool {
        self.unanswered > 0
    }

    /// When the worker will have been silent for `max`; none as long as too few questions failed.
    pub(super) fn ends_at(&self, max: Duration) -> Option<Instant> {
        (self.unanswered >= UNANSWERED_MIN).then(|| self.since + max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_secs(10);
    const GAP: Duration = Duration::from_secs(1);

    #[test]
    fn silence_is_counted_in_seconds_since_the_last_byte() {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let mut silence = Silence::new(start);
        for _ in 0..1000 {
            silence.question_failed(at(1), GAP);
        }
        assert_eq!(silence.ends_at(MAX), None, "a thousand at once are one");
        silence.question_failed(at(1001), GAP);
        assert_eq!(silence.ends_at(MAX), None);
        silence.question_failed(at(2001), GAP);
        assert_eq!(silence.ends_at(MAX), Some(at(10_000)));
        silence.begin(at(2000));
        assert!(!silence.is_doubtful(), "a byte");
        assert_eq!(silence.ends_at(MAX), None);
        for second in 3..6 {
            silence.question_failed(at(1000 * second), GAP);
        }
        assert_eq!(silence.ends_at(MAX), Some(at(12_000)));
        silence.begin(at(1500));
        assert_eq!(silence.ends_at(MAX), Some(at(12_000)), "an older byte");
    }
}
