//! Asking a service outside of this process, for an answer that placement can do without.
//!
//! Answers one question: what came of asking, and may it be asked again now? For a pool of blocks ([`crate::SharedCache`]) and for the index of
//! another router ([`crate::RemoteIndex`]).
//!
//! What always holds: a question ends with its deadline; so many are under way and no more; one that keeps failing is left alone for a
//! while ([`breaker`]), which is said once, and so is that it answers again.

mod breaker;

use std::fmt;
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_telemetry::Clock;
use tokio::sync::Semaphore;

use breaker::Breaker;
#[cfg(test)]
pub(crate) use breaker::FAILURES_MAX;

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// It said that it cannot, or could not be reached.
    Error,
    Late,
    /// Too many questions were under way.
    Busy,
    /// It failed too often and is left alone for now.
    Away,
}

impl NoAnswer {
    /// As metrics name it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Late => "late",
            Self::Busy => "busy",
            Self::Away => "away",
        }
    }
}

/// What the log says of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LookasideWords {
    /// It failed several times in a row: what follows from that, and which options to look at.
    pub(crate) failed: &'static str,
    /// It answers again.
    pub(crate) again: &'static str,
}

/// A service with the limits of asking it.
pub(crate) struct Lookaside {
    words: LookasideWords,
    timeout: Duration,
    places: Semaphore,
    breaker: Mutex<Breaker>,
}

impl fmt::Debug for Lookaside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookaside")
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl Lookaside {
    /// One that has so long to answer, and is asked so many questions at once.
    pub(crate) fn new(words: LookasideWords, timeout: Duration, asking_max: usize) -> Self {
        Self {
            words,
            timeout,
            places: Semaphore::new(asking_max),
            breaker: Mutex::default(),
        }
    }

    /// Asks, unless that is of no use now; an error of `question` says what happened.
    pub(crate) async fn ask<T>(
        &self,
        clock: Clock,
        question: impl Future<Output = Result<T, String>>,
    ) -> Result<T, NoAnswer> {
        let Ok(_place) = self.places.try_acquire() else {
            return Err(NoAnswer::Busy);
        };
        if !self.breaker().admits(clock.now()) {
            return Err(NoAnswer::Away);
        }
        let (what, why) = match tokio::time::timeout(self.timeout, question).await {
            Ok(Ok(answer)) => {
                if self.breaker().answered() {
                    tracing::info!("{}", self.words.again);
                }
                return Ok(answer);
            }
            Ok(Err(why)) => (NoAnswer::Error, why),
            Err(_) => {
                let millis = self.timeout.as_millis();
                (NoAnswer::Late, format!("no answer within {millis} ms"))
            }
        };
        if let Some(pause) = self.breaker().failed(clock.now()) {
            let pause_secs = pause.as_secs();
            tracing::warn!(why, pause_secs, "{}", self.words.failed);
        }
        Err(what)
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all places, as so many questions do.
    #[cfg(test)]
    pub(crate) fn fill(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        let all = self.places.available_permits() as u32;
        self.places.try_acquire_many(all).ok()
    }
}
