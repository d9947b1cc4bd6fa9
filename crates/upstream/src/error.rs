//! Why a request to an engine failed.

use std::time::Duration;

use http::StatusCode;
use kvasir_transport::is_local_error;
use kvasir_types::{AttemptError, FailureCause};

use crate::connection::CONNECT_TIMEOUT;

/// Why a request to an engine failed, before its answer or in it.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// The worker was removed before the request was sent.
    #[error("the worker is not registered")]
    Absent,
    /// The worker was removed while the request was in flight.
    #[error("the worker was removed")]
    Removed,
    /// The worker was declared dead while the request was in flight: it answers no health probe and sends nothing.
    #[error("the worker is dead: no health probe was answered")]
    Dead,
    /// The worker does not accept a connection in time.
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    ConnectTimeout,
    /// No connection can be made.
    #[error("cannot connect: {0}")]
    Connect(#[source] std::io::Error),
    /// This machine has no descriptor, port or memory left for a connection. It says nothing about the worker.
    #[error("this machine cannot open a connection: {0}")]
    Local(#[source] std::io::Error),
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(#[source] std::io::Error),
    /// The stream ended before the answer was complete.
    #[error("the stream ended before the answer was complete")]
    Unfinished,
    /// No answer came in time.
    #[error("no answer in time")]
    AnswerTimeout,
    /// A stream sent nothing for this long.
    #[error("the stream sent nothing for {} s", .0.as_secs())]
    StreamTimeout(Duration),
    /// The worker answered with this status.
    #[error("it answered {0}")]
    Status(StatusCode),
    /// The stream carried an error event.
    #[error("its stream carried an error event")]
    ErrorEvent,
    /// The answer is longer than the limit.
    #[error("its answer is too long")]
    TooLong,
}

impl UpstreamError {
    /// Whether a server answered, if only with an error.
    #[must_use]
    pub fn is_answer(&self) -> bool {
        matches!(self, Self::Status(_) | Self::TooLong | Self::ErrorEvent)
    }

    /// Whether this machine is why nothing was sent. Such an error is not held against a worker.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Local(_))
    }

    /// Why no connection could be made.
    pub(crate) fn of_connect(error: std::io::Error) -> Self {
        match is_local_error(&error) {
            true => Self::Local(error),
            false => Self::Connect(error),
        }
    }
}

impl AttemptError for UpstreamError {
    fn failure_cause(&self) -> FailureCause {
        match self {
            Self::Absent => FailureCause::Absent,
            Self::ConnectTimeout | Self::Connect(_) => FailureCause::Connect,
            Self::Local(_) => FailureCause::Local,
            Self::Removed | Self::Dead => FailureCause::WorkerLost,
            Self::Broken(_) | Self::Unfinished => FailureCause::Disconnected,
            Self::AnswerTimeout | Self::StreamTimeout(_) => FailureCause::Timeout,
            Self::Status(status) => cause_of_status(*status),
            Self::ErrorEvent => FailureCause::ErrorEvent,
            Self::TooLong => FailureCause::EngineFailed,
        }
    }
}

/// What a status other than success means. 503 says that the engine did not run the request. 502 and 504 come from a gateway
/// between us and the engine, which does not know whether it did.
#[must_use]
pub fn cause_of_status(status: StatusCode) -> FailureCause {
    match status {
        StatusCode::SERVICE_UNAVAILABLE => FailureCause::Overloaded,
        StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => FailureCause::BadGateway,
        status if status.is_server_error() => FailureCause::EngineFailed,
        _ => FailureCause::Rejected,
    }
}
