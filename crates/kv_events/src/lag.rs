//! How late an engine's events come.
//!
//! Answers one question: how much longer than its quickest message do this engine's messages take of late? Each says when it
//! was made, by the engine's clock. The quickest of the last minutes tells how that clock differs from ours, but for the time
//! that every message takes; what a message takes longer is its lag.
//!
//! What always holds: a lag is at most [`EventLag::MAX`], whatever times messages claim. A clock that is set while the
//! engine runs makes lags look too long for some minutes, never too short for longer than one message.

use std::time::Duration;

use kvasir_types::Time;

/// How long the quickest message is remembered, at least; twice as long at most.
const QUICKEST_FOR: Duration = Duration::from_secs(600);
/// How long the slowest is.
const SLOWEST_FOR: Duration = Duration::from_secs(30);

/// How late the messages of one engine come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EventLag {
    /// Least difference between our time and the message's, in seconds.
    offset: Least,
    /// Longest lag, negated.
    slowest: Least,
    /// When the newest message was made, by the engine's clock.
    newest: Option<f64>,
}

impl EventLag {
    /// No lag counts as longer.
    pub(crate) const MAX: Duration = Duration::from_secs(5);

    /// A message that was made at `made`, by the engine's clock, has come. One that is older than another that came
    /// before, or has no time, says nothing.
    pub(crate) fn observe(&mut self, now: Time, made: f64) {
        if !made.is_finite() || made <= 0.0 || self.newest.is_some_and(|newest| made <= newest) {
            return;
        }
        self.newest = Some(made);
        let took = now.as_secs_f64() - made;
        let offset = self.offset.add(now, took, QUICKEST_FOR);
        let lag = (took - offset).clamp(0.0, Self::MAX.as_secs_f64());
        self.slowest.add(now, -lag, SLOWEST_FOR);
    }

    /// The longest lag of late.
    pub(crate) fn slowest(&self) -> Duration {
        let lag = self.slowest.get().map_or(0.0, |lag| -lag);
        Duration::from_secs_f64(lag.clamp(0.0, Self::MAX.as_secs_f64()))
    }
}

/// The least of the values of a while.
#[derive(Clone, Copy, Debug, Default)]
struct Least {
    since: Time,
    current: Option<f64>,
    before: Option<f64>,
}

impl Least {
    fn add(&mut self, now: Time, value: f64, span: Duration) -> f64 {
        if now - self.since >= span {
            // What is older than two spans is forgotten, too.
            let kept = now - self.since < span * 2;
            self.before = self.current.take().filter(|_| kept);
            self.since = now;
        }
        let least = self.current.map_or(value, |least| least.min(value));
        self.current = Some(least);
        self.before.map_or(least, |before| before.min(least))
    }

    fn get(&self) -> Option<f64> {
        match (self.current, self.before) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The engine's clock, some decades ahead of ours.
    const EPOCH: f64 = 1.7e9;

    fn ms(millis: u64) -> Time {
        Time::from_millis(millis)
    }

    fn near(found: Duration, millis: u64) -> bool {
        found.abs_diff(Duration::from_millis(millis)) < Duration::from_millis(1)
    }

    #[test]
    fn lag_is_what_a_message_takes_longer_than_the_quickest() {
        let mut lag = EventLag::default();
        assert_eq!(lag.slowest(), Duration::ZERO);
        for at in 1..100 {
            lag.observe(ms(at * 10 + 3), EPOCH + at as f64 / 100.0);
        }
        assert!(near(lag.slowest(), 0), "{:?}", lag.slowest());
        lag.observe(ms(1500), EPOCH + 1.097);
        assert!(near(lag.slowest(), 400), "{:?}", lag.slowest());
    }

    #[test]
    fn a_slow_minute_is_forgotten_and_a_new_clock_is_learned() {
        let mut lag = EventLag::default();
        lag.observe(ms(1000), EPOCH);
        lag.observe(ms(2500), EPOCH + 1.0);
        assert!(near(lag.slowest(), 500));
        for at in 3..100 {
            lag.observe(ms(at * 1000), EPOCH + at as f64 - 1.0);
        }
        assert!(near(lag.slowest(), 0), "{:?}", lag.slowest());
        // The engine's clock goes back by 60 s; its messages are older than what came, until it has caught up.
        lag.observe(ms(200_000), EPOCH + 139.0);
        assert!(near(lag.slowest(), 5000), "bounded");
        for at in 201..2000 {
            lag.observe(ms(at * 1000), EPOCH + at as f64 - 61.0);
        }
        assert!(near(lag.slowest(), 0), "{:?}", lag.slowest());
    }

    #[test]
    fn times_that_cannot_be_say_nothing() {
        let mut lag = EventLag::default();
        for made in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            lag.observe(ms(1000), made);
        }
        assert_eq!(lag.newest, None);
        lag.observe(ms(1000), EPOCH);
        lag.observe(ms(9000), EPOCH - 5.0);
        assert_eq!(lag.slowest(), Duration::ZERO, "it came after a newer one");
        lag.observe(ms(9000), f64::MAX);
        assert!(lag.slowest() <= EventLag::MAX);
    }
}
