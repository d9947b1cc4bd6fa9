//! Whether a worker is well: what it says on `/health`, and what is made of it.
//!
//! A server may answer `/v1/models` for ever while its engine is dead, so it is asked. Two answers in a row that
//! say no (or none at all) eject the worker until it says yes. A worker that just failed a request is asked
//! at once: if it is well it is back before anybody misses it, if not it is ejected at the first no.
//!
//! One that says no lives, and ends what it has. One that says nothing, several times in a row, and from which
//! nothing else comes either, is frozen or its host has vanished: its connections are closed, so that what waits
//! there goes elsewhere.

use std::time::Duration;

use http::StatusCode;
use kvasir_router::{Input, Probe};
use kvasir_types::Time;
use kvasir_upstream::{Pool, UpstreamError};
use tokio::time::Instant;

use super::http_watcher::HttpWatcher;

/// Times in a row that a worker may be unwell before it is ejected.
const UNWELL_MAX: u32 = 2;
/// Questions in a row without any answer, and without a byte on any connection, after which what runs on a worker
/// is given up. More than eject it: a server that stalls for a few seconds finishes what it has.
const QUIET_MAX: u32 = 3;
/// A worker that fails again and again is not asked more often than this because of it.
const FAULT_GAP: Duration = Duration::from_millis(100);

/// What came of asking.
pub(super) struct Check {
    asked: Time,
    well: bool,
    /// Why nobody answered, where nobody did.
    pub(super) mute: Option<UpstreamError>,
}

impl HttpWatcher {
    /// Asks whether the worker is well.
    pub(super) async fn check(&mut self) -> Check {
        let asked = self.registration.fleet.context.host.clock.now();
        if self.quiet == 0 {
            self.was_heard();
        }
        match self.ask_health().await {
            Ok(()) => {
                if self.is_ejected() {
                    tracing::info!(worker = %self.pool.endpoint(), "worker is well again");
                }
                (self.unwell, self.quiet) = (0, 0);
                Check {
                    asked,
                    well: true,
                    mute: None,
                }
            }
            Err(error) => {
                self.unwell = self.unwell.saturating_add(1);
                if self.unwell == UNWELL_MAX {
                    tracing::warn!(worker = %self.pool.endpoint(), %error,
                        "health check failed; the worker gets no requests until it passes");
                }
                let heard = self.was_heard() || error.is_answer();
                self.quiet = if heard { 0 } else { self.quiet + 1 };
                Check {
                    asked,
                    well: false,
                    mute: (!error.is_answer()).then_some(error),
                }
            }
        }
    }

    /// Closes the connections of a worker that has given no sign of life for too long.
    pub(super) fn give_up_if_quiet(&self) {
        if self.quiet < QUIET_MAX {
            return;
        }
        let lost: usize = self.pools().map(Pool::in_flight).sum();
        if lost > 0 {
            tracing::warn!(worker = %self.pool.endpoint(), requests = lost,
                "worker gives no sign of life: what it has goes elsewhere");
        }
        self.pools().for_each(Pool::abort_in_flight);
    }

    /// Whether anything came from the worker since this was last asked.
    fn was_heard(&self) -> bool {
        let heard = self.pools().map(Pool::take_received);
        heard.fold(false, |any, heard| any | heard)
    }

    fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.retired.iter().chain([&self.pool])
    }

    /// Asks, and tells the routers. Says whether the worker is well.
    pub(super) async fn check_again(&mut self) -> bool {
        let check = self.check().await;
        self.tell_health(&check);
        check.well
    }

    /// Whether it did not answer last time, or said that it is not well.
    pub(super) fn is_doubtful(&self) -> bool {
        self.failures > 0 || self.unwell > 0
    }

    /// Whether it was unwell too often.
    pub(super) fn is_ejected(&self) -> bool {
        self.unwell >= UNWELL_MAX
    }

    /// Tells the routers whether it is well; a first no says nothing yet.
    pub(super) fn tell_health(&self, check: &Check) {
        if !check.well && !self.is_ejected() {
            return;
        }
        let probe = Probe {
            worker: self.registration.id,
            asked: check.asked,
            healthy: check.well,
        };
        self.registration.tell(|_| Input::Probed(probe));
    }

    /// Waits so long. If a router ejects the worker meanwhile, it is asked at once. Says whether it is well.
    pub(super) async fn pause(&mut self, span: Duration) -> bool {
        let end = Instant::now() + span;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(end) => return true,
                () = self.registration.faulted.notified() => {}
            }
            // It failed a request: one no more is enough.
            self.unwell = self.unwell.max(UNWELL_MAX - 1);
            if !self.check_again().await {
                return false;
            }
            tokio::time::sleep(FAULT_GAP).await;
        }
    }

    /// Any answer but a server's error will do: a server that has no such route is well if it lists its models.
    async fn ask_health(&self) -> Result<(), UpstreamError> {
        let question = self.registration.fleet.question;
        match self.pool.get("/health", question).await {
            Err(UpstreamError::Status(
                StatusCode::NOT_FOUND
                | StatusCode::METHOD_NOT_ALLOWED
                | StatusCode::NOT_IMPLEMENTED,
            )) => self.pool.get("/v1/models", question).await.map(drop),
            Err(UpstreamError::Status(status)) if !status.is_server_error() => Ok(()),
            answer => answer.map(drop),
        }
    }
}

/// Whether what we asked came back to us.
pub(super) fn is_ourselves(error: &UpstreamError) -> bool {
    matches!(error, UpstreamError::Status(StatusCode::LOOP_DETECTED))
}
