//! The only reader of the system's clocks.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvasir_types::Time;

/// Real time, as the core wants it: nanoseconds since this clock was made. Copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
    start_unix_nanos: u64,
}

impl Clock {
    /// A clock that begins now.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that reads the clocks"
    )]
    #[expect(
        clippy::new_without_default,
        reason = "two clocks do not agree: making one is a decision"
    )]
    pub fn new() -> Self {
        let unix = unix_now();
        let start_unix_nanos = u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX);
        Self {
            start: Instant::now(),
            start_unix_nanos,
        }
    }

    /// Now, on the monotonic clock.
    #[must_use]
    pub fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// What the wall clock showed at `time`, in milliseconds since 1970; steps of the wall clock since
    /// the start are not followed.
    #[must_use]
    pub fn unix_millis(&self, time: Time) -> u64 {
        self.start_unix_nanos.saturating_add(time.as_nanos()) / 1_000_000
    }

    /// The same in nanoseconds.
    #[must_use]
    pub fn unix_nanos(&self, time: Time) -> u64 {
        self.start_unix_nanos.saturating_add(time.as_nanos())
    }

    /// What the wall clock showed at `time`, in seconds since 1970.
    #[must_use]
    pub fn unix_secs(&self, time: Time) -> u64 {
        self.unix_millis(time) / 1000
    }

    /// The [`Instant`] of `time`, for timers.
    #[must_use]
    pub fn instant(&self, time: Time) -> Instant {
        self.start + (time - Time::ZERO)
    }
}

/// What the wall clock shows, since 1970.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place that reads the clocks"
)]
pub(crate) fn unix_now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}
