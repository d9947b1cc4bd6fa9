//! Whether the connections to a worker may be reused.
//!
//! Answers one question: did this worker of late send bytes that belong to no request? Then what comes next on a kept connection may be
//! another request's answer, and for a while every request has a connection of its own.
//!
//! What always holds: an episode lasts [`FIRST`] since the last such byte; one that follows another within [`FORGET`] lasts twice as
//! long as that, at most [`LONGEST`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How long no connection is kept, the first time.
pub(super) const FIRST: Duration = Duration::from_secs(60);
/// How long at most.
const LONGEST: Duration = Duration::from_secs(3600);
/// After this time without a surplus byte the next episode is the first again.
const FORGET: Duration = Duration::from_secs(3600);

/// No episode yet.
const NEVER: u64 = 0;

/// What is held against one worker. Times are milliseconds since its pool was made.
#[derive(Debug, Default)]
pub(super) struct Distrust {
    /// When it ends; read by every request.
    until: AtomicU64,
    /// How long the last episode was to be.
    span: Mutex<Duration>,
}

impl Distrust {
    /// Bytes came that belong to no request. How long no connection is kept, if an episode begins now.
    pub(super) fn notice(&self, now: u64) -> Option<Duration> {
        let mut span = self.span.lock().unwrap_or_else(PoisonError::into_inner);
        let until = self.until.load(Ordering::Relaxed);
        let begins = until == NEVER || now >= until;
        if begins {
            let relapse = until != NEVER && now - until < millis(FORGET);
            *span = match relapse {
                true => (*span * 2).min(LONGEST),
                false => FIRST,
            };
        }
        self.until.store(now + millis(*span), Ordering::Relaxed);
        begins.then_some(*span)
    }

    /// Whether an episode runs.
    pub(super) fn runs(&self, now: impl FnOnce() -> u64) -> bool {
        match self.until.load(Ordering::Relaxed) {
            NEVER => false,
            until => now() < until,
        }
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60_000;

    #[test]
    fn an_episode_begins_once_and_ends_a_minute_after_the_last_byte() {
        let distrust = Distrust::default();
        assert!(!distrust.runs(|| 5));
        assert_eq!(distrust.notice(5), Some(FIRST));
        assert_eq!(distrust.notice(MINUTE), None, "it runs already");
        assert!(distrust.runs(|| 2 * MINUTE - 1));
        assert!(!distrust.runs(|| 2 * MINUTE));
    }

    #[test]
    fn who_relapses_waits_twice_as_long_and_at_most_an_hour() {
        let distrust = Distrust::default();
        let mut now = 5;
        let mut spans = Vec::new();
        for _ in 0..8 {
            let span = distrust.notice(now).unwrap();
            spans.push(span.as_secs() / 60);
            now += millis(span);
        }
        assert_eq!(spans, [1, 2, 4, 8, 16, 32, 60, 60]);
        now += millis(FORGET);
        assert_eq!(distrust.notice(now), Some(FIRST), "long ago");
    }
}
