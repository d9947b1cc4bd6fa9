//! Whether a worker is well: what it says on `/health`, and what is made of it.
//!
//! A server may answer `/v1/models` for ever while its engine is dead, so it is asked. Two answers in a row that
//! say no (or none at all) eject the worker until it says yes. A worker that just failed a request is asked
//! at once: if it is well it is back before anybody misses it, if not it is ejected at the first no.
//!
//! One that says no lives, and ends what it has; so does one whose streams go on, whether it answers questions or not. One from
//! which nothing comes for [`super::SILENCE_MAX`] ([`Silence`](super::silence::Silence)) is frozen or its host has vanished: its
//! connections are closed, so that what waits there goes elsewhere.
//!
//! What always holds: a question that this machine could not ask changes nothing about the worker.

use std::time::Duration;

use http::StatusCode;
use kvasir_router::{Input, Probe};
use kvasir_types::Time;
use kvasir_upstream::{Pool, UpstreamError};
use tokio::time::Instant;

use super::http_watcher::HttpWatcher;

/// Times in a row that a worker may be unwell before it is ejected.
const UNWELL_MAX: u32 = 2;
/// A worker that fails again and again is not asked more often than this because of it.
const FAULT_GAP: Duration = Duration::from_millis(100);
/// Unanswered questions closer together than this count as one.
const QUESTION_GAP: Duration = Duration::from_secs(1);

/// What came of asking.
pub(super) struct Check {
    asked: Time,
    verdict: Verdict,
    /// Why nobody answered, where nobody did.
    pub(super) mute: Option<UpstreamError>,
}

/// Whether a worker is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Well,
    Unwell,
    /// We could not ask.
    Unknown,
}

impl HttpWatcher {
    /// Asks whether the worker is well.
    pub(super) async fn check(&mut self) -> Check {
        let asked = self.registration.fleet.context.host.clock.now();
        let (verdict, mute) = match self.ask_health().await {
            Ok(()) => {
                if self.is_ejected() {
                    tracing::info!(worker = %self.pool.endpoint(), "worker is well again");
                }
                // A router that had ejected it already does not tell that it waits for a token now.
                self.token_wanted.notify_one();
                self.unwell = 0;
                self.silence.begin(Instant::now());
                (Verdict::Well, None)
            }
            Err(error) if error.is_local() => {
                self.could_not_ask(&error);
                (Verdict::Unknown, Some(error))
            }
            Err(error) => {
                self.unwell = self.unwell.saturating_add(1);
                if self.unwell == UNWELL_MAX {
                    tracing::warn!(worker = %self.pool.endpoint(), %error,
                        "health check failed; the worker gets no requests until it passes");
                }
                self.note_failure(&error);
                (Verdict::Unwell, (!error.is_answer()).then_some(error))
            }
        };
        Check {
            asked,
            verdict,
            mute,
        }
    }

    /// This machine could not ask: what it needs for that is made room for.
    pub(super) fn could_not_ask(&mut self, error: &UpstreamError) {
        self.silence.begin(Instant::now());
        if let UpstreamError::Local(cause) = error {
            let shortage = &self.registration.fleet.context.shortage;
            shortage.struck("asking a worker", cause);
        }
        self.pools().for_each(Pool::close_idle);
    }

    /// A question failed. An error that the worker told is no silence.
    fn note_failure(&mut self, error: &UpstreamError) {
        let now = Instant::now();
        if error.is_answer() {
            self.silence.begin(now);
        } else {
            self.listen();
            let gap = (self.registration.fleet.every / 2).min(QUESTION_GAP);
            self.silence.question_failed(now, gap);
        }
    }

    /// Takes note of the last byte that came.
    fn listen(&mut self) {
        if let Some(heard) = self.pools().filter_map(Pool::last_received).max() {
            self.silence.begin(heard);
        }
    }

    /// When the worker is to be given up, if nothing comes before.
    fn gives_up_at(&self) -> Option<Instant> {
        let is_busy = self.in_flight() > 0;
        let max = self.registration.fleet.silence_max;
        self.silence.ends_at(max).filter(|_| is_busy)
    }

    /// Closes the connections of a worker that has given no sign of life for too long.
    pub(super) fn give_up_if_silent(&mut self) {
        self.listen();
        if self.gives_up_at().is_none_or(|at| Instant::now() < at) {
            return;
        }
        let lost = self.in_flight();
        let silent_secs = self.registration.fleet.silence_max.as_secs();
        tracing::warn!(worker = %self.pool.endpoint(), requests = lost, silent_secs,
            "worker gives no sign of life: what it has goes elsewhere");
        self.pools().for_each(Pool::abort_in_flight);
        self.silence.begin(Instant::now());
    }

    /// Requests that run there.
    pub(super) fn in_flight(&self) -> usize {
        self.pools().map(Pool::in_flight).sum()
    }

    fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.retired.iter().chain([&self.pool])
    }

    /// Asks, and tells the routers. Says whether nothing speaks against the worker.
    pub(super) async fn check_again(&mut self) -> bool {
        let check = self.check().await;
        self.tell_health(&check);
        check.verdict != Verdict::Unwell
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
        let healthy = match check.verdict {
            Verdict::Well => true,
            Verdict::Unwell if self.is_ejected() => false,
            Verdict::Unwell | Verdict::Unknown => return,
        };
        let probe = Probe {
            worker: self.registration.id,
            asked: check.asked,
            healthy,
        };
        self.registration.tell(|_| Input::Probed(probe));
    }

    /// Waits so long. If a router ejects the worker meanwhile, it is asked at once. Says whether it is well. A silence that lasts
    /// too long ends at its time.
    pub(super) async fn pause(&mut self, span: Duration) -> bool {
        let end = Instant::now() + span;
        loop {
            let next = self.gives_up_at().map_or(end, |at| end.min(at));
            tokio::select! {
                () = tokio::time::sleep_until(next) => {
                    self.give_up_if_silent();
                    if Instant::now() >= end {
                        return true;
                    }
                    continue;
                }
                () = self.registration.faulted.notified() => {}
            }
            self.token_wanted.notify_one();
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
