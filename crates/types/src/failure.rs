//! Why an attempt at a worker failed, whose fault that is, and whether another attempt makes sense.
//!
//! Errors of every boundary answer two questions, `fault()` and `retry()`. The error of an attempt at a worker, over HTTP or over
//! a request plane, is an [`AttemptError`]: it names a [`FailureCause`], from which both answers follow.

/// Who caused a failure. It decides the status code and which alert fires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The request asks for something that cannot be.
    Client,
    /// The fleet is too small or too busy, or this machine is short of something.
    Router,
    /// The worker, or the way to it.
    Worker,
}

/// Whether another attempt makes sense. Says nothing about what the client has received already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// The same request fails again.
    Never,
    /// On another worker. The failed one has not run the request.
    Elsewhere,
    /// On another worker, if the request is idempotent: the failed one may have run it.
    IfIdempotent,
    /// After this many milliseconds it may pass.
    After(u64),
}

/// The error of an attempt at a worker, however the worker is reached.
pub trait AttemptError: std::error::Error {
    /// Why the attempt failed.
    fn failure_cause(&self) -> FailureCause;

    /// Who caused it.
    fn fault(&self) -> Fault {
        self.failure_cause().fault()
    }

    /// Whether another attempt makes sense.
    fn retry(&self) -> Retry {
        self.failure_cause().retry()
    }
}

/// Why an attempt at a worker failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureCause {
    /// The worker is not registered; nothing was sent.
    Absent,
    /// No connection could be made; nothing was sent.
    Connect,
    /// The connection broke before the answer was complete. The worker may be well.
    Disconnected,
    /// The worker was removed or declared dead before the answer was complete.
    WorkerLost,
    /// The worker sent nothing for too long.
    Timeout,
    /// The worker says that it is full or not ready.
    Overloaded,
    /// A gateway says that it got no answer from the worker.
    BadGateway,
    /// The worker refused the request; every worker would.
    Rejected,
    /// The worker says that its engine failed on the request.
    EngineFailed,
    /// The stream carries an error in place of an answer.
    ErrorEvent,
    /// This machine has no descriptor, port or memory left for a connection; nothing was sent. It says nothing about the worker.
    Local,
}

impl FailureCause {
    /// Every cause.
    pub const ALL: [Self; 11] = [
        Self::Absent,
        Self::Connect,
        Self::Disconnected,
        Self::WorkerLost,
        Self::Timeout,
        Self::Overloaded,
        Self::BadGateway,
        Self::Rejected,
        Self::EngineFailed,
        Self::ErrorEvent,
        Self::Local,
    ];

    /// Who caused it.
    #[must_use]
    pub const fn fault(self) -> Fault {
        match self {
            Self::Rejected => Fault::Client,
            Self::Local => Fault::Router,
            Self::Absent
            | Self::Connect
            | Self::Disconnected
            | Self::WorkerLost
            | Self::Timeout
            | Self::Overloaded
            | Self::BadGateway
            | Self::EngineFailed
            | Self::ErrorEvent => Fault::Worker,
        }
    }

    /// Whether another worker may be asked.
    #[must_use]
    pub const fn retry(self) -> Retry {
        match self {
            Self::Absent | Self::Connect | Self::Overloaded | Self::Local => Retry::Elsewhere,
            Self::Disconnected
            | Self::WorkerLost
            | Self::Timeout
            | Self::BadGateway
            | Self::EngineFailed
            | Self::ErrorEvent => Retry::IfIdempotent,
            Self::Rejected => Retry::Never,
        }
    }

    /// Whether the request may be what made the worker fail: the worker had it, and died or says that it failed. One that could not
    /// be reached, is full or is slow says nothing about the request.
    #[must_use]
    pub const fn suspects_request(self) -> bool {
        match self {
            Self::Disconnected
            | Self::WorkerLost
            | Self::BadGateway
            | Self::EngineFailed
            | Self::ErrorEvent => true,
            Self::Absent
            | Self::Connect
            | Self::Timeout
            | Self::Overloaded
            | Self::Rejected
            | Self::Local => false,
        }
    }
}
