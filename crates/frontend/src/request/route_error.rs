//! What a client is told when the router has no worker for its request.

use kvasir_openai::ApiError;
use kvasir_router::RouteError;
use kvasir_types::Fault;

/// What the client is told; `overload` is the status of an overload.
pub(crate) fn answer(overload: u16, error: &RouteError) -> ApiError {
    tracing::debug!(%error, "refused");
    match error {
        RouteError::QueueLimit {
            policy_class,
            limit_kind,
            current,
            limit,
            retry_after_ms,
        } => ApiError::queue_full(overload, policy_class, limit_kind.name(), *current, *limit)
            .retry_after(*retry_after_ms),
        RouteError::QueueTooSlow {
            expected_ms,
            limit_ms,
            retry_after_ms,
            predicted: _,
        } => ApiError::queue_too_slow(overload, *expected_ms, *limit_ms, *retry_after_ms),
        RouteError::AllEligibleWorkersOverloaded { retry_after_ms, .. } => {
            ApiError::overloaded(overload).retry_after(*retry_after_ms)
        }
        error if error.is_overload() => ApiError::overloaded(overload),
        RouteError::PinnedWorkerNotAllowed(_)
        | RouteError::PinnedWorkerUnknown(_)
        | RouteError::PinnedRankUnknown { .. } => ApiError::invalid_pin(error),
        error if error.fault() == Fault::Client => ApiError::bad_request(error.to_string()),
        _ => ApiError::unavailable(),
    }
}

/// The same after workers failed the request: `why` is the answer if no other worker is left.
pub(crate) fn answer_after(overload: u16, error: &RouteError, why: ApiError) -> ApiError {
    match error {
        RouteError::FailedWorkersOverloaded
        | RouteError::FailedWorkersUnavailable
        | RouteError::NoEndpoints { .. } => why,
        error => answer(overload, error),
    }
}
