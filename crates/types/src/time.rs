//! Time as a value: monotonic nanoseconds that the host hands in.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A moment on the host's monotonic clock, in nanoseconds since the host began. The core never reads a
/// clock: a server passes real time, the simulator virtual time.
///
/// Arithmetic saturates, so that a hostile duration cannot overflow:
/// ```
/// # use kvasir_types::Time;
/// # use std::time::Duration;
/// let t = Time::from_nanos(5) + Duration::from_nanos(2);
/// assert_eq!(t - Time::from_nanos(5), Duration::from_nanos(2));
/// assert_eq!(Time::ZERO - t, Duration::ZERO);
/// assert_eq!(Time::MAX + Duration::MAX, Time::MAX);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// When the host began.
    pub const ZERO: Self = Self(0);
    /// Never.
    pub const MAX: Self = Self(u64::MAX);

    /// The moment `nanos` nanoseconds after the host began.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The moment `millis` milliseconds after the host began.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// The moment `secs` seconds after the host began; negative and NaN give [`Time::ZERO`].
    #[must_use]
    pub fn from_secs_f64(secs: f64) -> Self {
        Self((secs * 1e9) as u64)
    }

    /// Nanoseconds since the host began.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Seconds since the host began.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl AddAssign<Duration> for Time {
    fn add_assign(&mut self, span: Duration) {
        *self = *self + span;
    }
}

impl Sub for Time {
    type Output = Duration;

    /// How long after `earlier` this is; zero if it is not.
    fn sub(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.9}s", self.as_secs_f64())
    }
}
