//! Engines behind HTTP that compute prompts for others: how they are asked, and what they say.
//!
//! What always holds: such an engine is never asked for a stream; the booking of a prompt ends when its engine has answered, failed or was stopped.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use kvasir_host::Booking;
use kvasir_openai::{ApiError, LegApi, PrefillAnswer, Usage, prefill_leg};
use kvasir_router::{Attempts, NextStep, Outcome, Trouble};
use kvasir_types::{AttemptError as _, BootstrapRoom, FailureCause, Time, WorkerRank};
use kvasir_upstream::UpstreamError;

use super::Forward;
use super::kept_prompt::KeptPrompt;
use crate::attempts::OpenAttempt;
use crate::http::long_work;
use crate::http::routes::RESPONSES;
use crate::models::ServedModel;
use crate::request::two_step;

/// Longest answer of an engine that computed a prompt: one token, and a number for each block of the prompt.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// How long an engine whose client has left may take to end its answer; then it is stopped.
const LEAVING_GRACE: Duration = Duration::from_millis(100);

/// What came of asking for a prompt.
pub(super) enum ComputedPrompt {
    /// It is computed, and kept if its engine says where.
    Ended {
        kept: Option<KeptPrompt>,
        usage: Usage,
    },
    /// The engine refuses it.
    Refused(StatusCode),
    /// It is to be met there; it was not asked yet.
    Meeting(BootstrapRoom),
    /// Only engines of its own place may have it, and it does not say where that is.
    Placeless,
}

/// An attempt at an engine that computes prompts.
pub(super) struct PromptAttempt<'a> {
    pub(super) forward: &'a Arc<Forward>,
    pub(super) pool: &'a Arc<ServedModel>,
    /// What it is sent, once that was written.
    pub(super) body: Option<Bytes>,
    /// When the last of them was asked.
    pub(super) dispatched: Time,
}

impl OpenAttempt for PromptAttempt<'_> {
    type Answer = ComputedPrompt;
    type Error = UpstreamError;

    async fn open(
        &mut self,
        booking: &Booking,
        _: &Attempts,
    ) -> Result<ComputedPrompt, UpstreamError> {
        let (target, forward) = (booking.target(), self.forward);
        self.dispatched = forward.app.clock().now();
        self.pool.placements.dispatched();
        if let Err(why) = two_step::transfer_rule(self.pool, target.worker) {
            tracing::warn!("{why}");
            return Ok(ComputedPrompt::Placeless);
        }
        let observer = forward.app.observer();
        if let Some(room) = two_step::draw_room(observer, self.pool, target) {
            return Ok(ComputedPrompt::Meeting(room));
        }
        if self.body.is_none() {
            let api = forward.leg_api();
            self.body = forward.edited(move |body| prefill_leg(body, api)).await;
        }
        let body = self.body.as_ref().ok_or(UpstreamError::Unfinished)?;
        let (own, pool) = (Arc::clone(forward), Arc::clone(self.pool));
        let asked = compute(own, pool, target, body.clone());
        // An engine that is about to answer is heard, whoever has left: what it keeps is freed only by who knows where it is.
        forward.app.tasks().outliving(asked, LEAVING_GRACE).await
    }

    fn client_error(&self, error: &UpstreamError, _: NextStep) -> ApiError {
        let overload_status = self.forward.app.options().overload_status;
        match error.failure_cause() {
            FailureCause::Overloaded => ApiError::overloaded(overload_status),
            FailureCause::Timeout => ApiError::deadline(),
            _ => ApiError::unavailable(),
        }
    }
}

/// Asks an engine for a prompt.
async fn compute(
    forward: Arc<Forward>,
    pool: Arc<ServedModel>,
    target: WorkerRank,
    body: Bytes,
) -> Result<ComputedPrompt, UpstreamError> {
    let timeout = forward.app.options().limits.first_byte;
    let (status, answer) = forward.fetch(&pool, target, &body, timeout).await?;
    if status.is_success() {
        let now = forward.app.clock().now();
        let PrefillAnswer {
            transfer_params,
            usage,
        } = PrefillAnswer::read(&answer);
        return Ok(ComputedPrompt::Ended {
            kept: transfer_params.map(|params| KeptPrompt::new(&forward, params, now)),
            usage,
        });
    }
    let error = UpstreamError::Status(status);
    match error.failure_cause() {
        FailureCause::Rejected => Ok(ComputedPrompt::Refused(status)),
        _ => Err(error),
    }
}

/// A prompt that is computed while the answer's engine waits for it.
pub(super) struct PrefillBeside {
    pub(super) pool: Arc<ServedModel>,
    pub(super) booking: Booking,
    pub(super) body: Bytes,
    /// What the engine says that refuses it.
    pub(super) refusal: Arc<OnceLock<StatusCode>>,
}

impl PrefillBeside {
    /// Asks for it and reads what comes.
    pub(super) async fn run(self, forward: Arc<Forward>) -> Result<(), Trouble> {
        let target = self.booking.target();
        let fetch = forward.fetch(&self.pool, target, &self.body, Duration::MAX);
        let error = match fetch.await {
            Ok((status, _)) if status.is_success() => {
                self.booking.first_token();
                let outcome = Outcome::Completed { output_tokens: 1 };
                self.booking.finish(outcome);
                return Ok(());
            }
            Ok((status, _)) => UpstreamError::Status(status),
            Err(error) => error,
        };
        tracing::warn!(worker = %target, %error, "prefill failed beside its decode engine");
        let cause = error.failure_cause();
        if let (UpstreamError::Status(status), FailureCause::Rejected) = (&error, cause) {
            let _ = self.refusal.set(*status);
        }
        self.booking.finish(Outcome::of_failure(cause));
        Err(match cause {
            FailureCause::Overloaded => Trouble::Overloaded,
            _ => Trouble::Failed,
        })
    }
}

impl Forward {
    /// Which API its body is of.
    pub(super) fn leg_api(&self) -> LegApi {
        match self.path.path() == RESPONSES {
            true => LegApi::Responses,
            false => LegApi::Completions,
        }
    }

    /// The request's body, changed so. A long one is not changed on this thread.
    pub(super) async fn edited<F>(&self, edit: F) -> Option<Bytes>
    where
        F: FnOnce(&Bytes) -> Option<Bytes> + Send + 'static,
    {
        if !long_work::is_long(self.body.len()) {
            return edit(&self.body);
        }
        let own = self.body.clone();
        let edited = self.app.long_work().drive(async move { edit(&own) });
        edited.await.flatten()
    }

    /// Sends `body` to one of a model's engines and reads its answer.
    pub(super) async fn fetch(
        &self,
        model: &ServedModel,
        target: WorkerRank,
        body: &Bytes,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), UpstreamError> {
        let fetched = async {
            let response = self
                .send_to(model, target, &self.headers, body, self.urgency)
                .await?;
            let status = response.status();
            let answer = response.into_body().collect(ANSWER_BYTES_MAX).await?;
            Ok((status, answer))
        };
        let fetched = tokio::time::timeout(timeout, fetched).await;
        fetched.unwrap_or(Err(UpstreamError::AnswerTimeout))
    }
}
