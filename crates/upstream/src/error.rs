//! Why an engine gave no answer, or not all of it.

use std::time::Duration;

use http::StatusCode;

use crate::line::CONNECT_TIMEOUT;

/// Why an engine gave no answer, or not all of it.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// It was removed before it was asked.
    #[error("the worker is not there any more")]
    Absent,
    /// It was removed while asked.
    #[error("the worker was taken away")]
    Gone,
    /// It was given up while asked: no question about its health is answered any more.
    #[error("the worker gives no sign of life")]
    Mute,
    /// It does not accept connections in time.
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    ConnectTimeout,
    /// It cannot be connected to.
    #[error("cannot connect: {0}")]
    Connect(#[source] std::io::Error),
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(#[source] std::io::Error),
    /// The answer has no end.
    #[error("its stream ended before its answer did")]
    Unfinished,
    /// Nothing came in the time that it had.
    #[error("no answer in time")]
    AnswerTimeout,
    /// A stream stood still for so long.
    #[error("nothing came for {} s", .0.as_secs())]
    Silent(Duration),
    /// It refused.
    #[error("it answered {0}")]
    Status(StatusCode),
    /// It says that it failed.
    #[error("its engine failed")]
    Failed,
    /// More came than is read.
    #[error("its answer is too long")]
    TooLong,
}

impl UpstreamError {
    /// Whether nothing of a request can have reached an engine: it may be sent elsewhere, whatever it does.
    #[must_use]
    pub fn sent_nothing(&self) -> bool {
        matches!(self, Self::Absent | Self::ConnectTimeout | Self::Connect(_))
    }

    /// Whether somebody answered, if only to refuse.
    #[must_use]
    pub fn is_answer(&self) -> bool {
        matches!(self, Self::Status(_) | Self::TooLong | Self::Failed)
    }
}
