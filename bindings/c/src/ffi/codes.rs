//! From what a function did to its result code. No panic gets past here.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{DynamoLlmResult, QueryRouterResult};
use crate::routers::RouterFailure;
use crate::said;

/// What `act` gives; `failed` if it panicked, which is a mistake of ours.
pub(super) fn caught<T>(failed: T, act: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|_| {
        said::set("libkvasir panicked, which is a mistake of its own; standard error says where");
        failed
    })
}

/// Runs a function of the publisher.
pub(super) fn told(act: impl FnOnce() -> Result<(), String>) -> DynamoLlmResult {
    caught(DynamoLlmResult::Err, || match act() {
        Ok(()) => DynamoLlmResult::Ok,
        Err(message) => {
            said::set(message);
            DynamoLlmResult::Err
        }
    })
}

/// Runs a function of the routers.
pub(super) fn asked(act: impl FnOnce() -> Result<(), RouterFailure>) -> QueryRouterResult {
    caught(QueryRouterResult::ErrQueryFailed, || match act() {
        Ok(()) => QueryRouterResult::Ok,
        Err(failure) => {
            let (code, message) = match failure {
                RouterFailure::InvalidHandle => (
                    QueryRouterResult::ErrInvalidHandle,
                    "the handle was destroyed, or never was one".to_owned(),
                ),
                RouterFailure::InvalidParam(text) => (QueryRouterResult::ErrInvalidParam, text),
                RouterFailure::InitFailed(text) => (QueryRouterResult::ErrInitFailed, text),
                RouterFailure::QueryFailed(text) => (QueryRouterResult::ErrQueryFailed, text),
                RouterFailure::DisaggEnforced(text) => (QueryRouterResult::ErrDisaggEnforced, text),
                RouterFailure::Timeout(text) => (QueryRouterResult::ErrTimeout, text),
                RouterFailure::Backpressure(text) => (QueryRouterResult::ErrBackpressure, text),
            };
            said::set(message);
            code
        }
    })
}
