//! The loop over workers: a request is tried at one worker after another until one begins to answer.
//!
//! [`Attempts`] decides what follows a failure; [`OpenAttempt`] says how a worker is reached. What always holds: the booking of an
//! attempt that failed has ended before the next attempt begins.

use kvasir_host::{Booking, Model, PromptBlocks};
use kvasir_openai::ApiError;
use kvasir_router::{Arrival, AttemptLimits, Attempts, GiveUp, NextStep};
use kvasir_types::{AttemptError, RequestId};

use crate::App;
use crate::models::ServedModel;
use crate::request::migrate::Migration;
use crate::request::route_error;

/// A way to send a request to a worker: an engine behind HTTP, or a token worker.
pub(crate) trait OpenAttempt {
    /// An answer that has begun.
    type Answer;
    /// Why there is none.
    type Error: AttemptError;

    /// Sends the request to the worker where it is booked, and waits for the first bytes of the answer.
    fn open(
        &mut self,
        booking: &Booking,
        attempts: &Attempts,
    ) -> impl Future<Output = Result<Self::Answer, Self::Error>> + Send;

    /// What the client is told if no other attempt is made, or none can be.
    fn client_error(&self, error: &Self::Error, next: NextStep) -> ApiError;
}

/// Names a request under which two workers failed.
pub(crate) fn warn_failed_twice(
    request: RequestId,
    attempts: &Attempts,
    last: impl std::fmt::Display,
) {
    tracing::warn!(
        %request,
        failed = ?attempts.failed_workers(),
        worker = %last,
        "workers failed under this request, one after the other; it is not sent to a third, as it may be what makes them fail"
    );
}

/// How often a request may be sent again.
pub(crate) fn limits(app: &App, model: &Model) -> AttemptLimits {
    let options = app.options();
    AttemptLimits {
        retries: options.retry_limit,
        resumes: options.migration.limit_of(model),
    }
}

/// A request that looks for a worker.
pub(crate) struct UnplacedRequest<'a> {
    pub(crate) app: &'a App,
    pub(crate) model: &'a ServedModel,
    pub(crate) arrival: &'a Arrival,
    pub(crate) blocks: &'a PromptBlocks,
    /// It moves from a worker that failed it, and this counts that.
    pub(crate) migration: Option<Migration>,
}

/// Tries workers until one begins to answer. The error is for the client.
pub(crate) async fn run<O: OpenAttempt>(
    request: UnplacedRequest<'_>,
    attempts: &mut Attempts,
    opener: &mut O,
) -> Result<(Booking, O::Answer), ApiError> {
    let UnplacedRequest {
        app,
        model,
        arrival,
        blocks,
        mut migration,
    } = request;
    let mut client_error = ApiError::unavailable();
    let answer = loop {
        if attempts.failures() > 0 {
            let begin = || Migration::begin(app.observer(), &model.name, attempts.phase());
            migration.get_or_insert_with(begin).attempt();
        }
        let mut attempt = Box::new(arrival.clone());
        attempts.describe(&mut attempt);
        let booking = match model.book(attempt, blocks).await {
            Ok(booking) => booking,
            Err(error) => {
                break Err(route_error::answer_after(
                    app.options().overload_status,
                    &error,
                    client_error,
                ));
            }
        };
        let error = match opener.open(&booking, attempts).await {
            Ok(answer) => break Ok((booking, answer)),
            Err(error) => error,
        };
        let target = booking.target();
        let (outcome, next) = attempts.fail(target.worker, error.failure_cause());
        tracing::warn!(
            request = %arrival.id,
            worker = %target,
            %error,
            attempt = attempts.failures(),
            "attempt failed"
        );
        if next == NextStep::GiveUp(GiveUp::FailedTwice) {
            warn_failed_twice(arrival.id, attempts, target);
        }
        booking.finish(outcome);
        client_error = opener.client_error(&error, next);
        if next != NextStep::TryNext {
            break Err(client_error);
        }
    };
    if let Some(migration) = migration {
        migration.settle(answer.is_ok());
    }
    if answer.is_ok() {
        attempts.first_byte();
    }
    answer
}
