//! When is a service that fails asked again?
//!
//! After [`FAILURES_MAX`] failures in a row it is left alone for a second; then one question tries it, and each further failure doubles
//! the pause, up to [`PAUSE_MAX`]. A question that is given up halfway counts as neither.

use std::time::Duration;

use kvasir_types::Time;

/// Failures in a row after which it is left alone.
pub(crate) const FAILURES_MAX: u32 = 5;
/// The first pause.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// How it has done lately.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: u32,
    /// The pause that runs, and when the next question may be tried.
    away: Option<(Duration, Time)>,
}

impl Breaker {
    /// Whether it may be asked now. Of those who ask while it is away one is let through after each pause.
    pub(crate) fn admits(&mut self, now: Time) -> bool {
        match &mut self.away {
            None => true,
            Some((pause, next)) if *next <= now => {
                *next = now + *pause;
                true
            }
            Some(_) => false,
        }
    }

    /// It answered; says whether it was away.
    pub(crate) fn answered(&mut self) -> bool {
        self.failures = 0;
        self.away.take().is_some()
    }

    /// It did not; how long it is left alone, if that begins now.
    pub(crate) fn failed(&mut self, now: Time) -> Option<Duration> {
        if let Some((pause, next)) = &mut self.away {
            *pause = (*pause * 2).min(PAUSE_MAX);
            *next = now + *pause;
            return None;
        }
        self.failures += 1;
        if self.failures < FAILURES_MAX {
            return None;
        }
        self.away = Some((PAUSE, now + PAUSE));
        Some(PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn one_that_fails_is_left_alone_and_tried_by_one_at_a_time() {
        let mut breaker = Breaker::default();
        for _ in 1..FAILURES_MAX {
            assert!(breaker.admits(at(0)) && breaker.failed(at(0)).is_none());
        }
        // One answer in between begins the count anew.
        assert!(!breaker.answered());
        for _ in 1..FAILURES_MAX {
            assert!(breaker.failed(at(0)).is_none());
        }
        assert_eq!(breaker.failed(at(0)), Some(PAUSE));
        assert!(!breaker.admits(at(999)));
        assert!(breaker.admits(at(1000)) && !breaker.admits(at(1001)));
        // That one was given up: another may try after the same pause.
        assert!(breaker.admits(at(2000)));
        assert_eq!(breaker.failed(at(2000)), None);
        assert!(!breaker.admits(at(3999)) && breaker.admits(at(4000)));
        assert!(breaker.answered() && breaker.admits(at(4000)));
        for _ in 0..20 {
            breaker.failed(at(0));
        }
        assert!(breaker.admits(at(30_000)));
    }
}
