//! Which exception says what went wrong.
//!
//! The classes are written in Python (`kvasir.exceptions`), where programs read them; here is who raises which.

use kvasir_embed::EmbedError;
use kvasir_host::EndpointError;
use kvasir_protocol::{WorkerError, WorkerErrorKind};
use kvasir_router::RouteError;
use kvasir_transport::PlaneError;
use kvasir_types::Fault;
use kvasir_worker::JoinError;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

const MODULE: &str = "kvasir.exceptions";

/// The exception of this name, made with `arguments`; the failure to make it, if that fails.
fn exception<'py>(
    py: Python<'py>,
    name: &str,
    arguments: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
) -> PyErr {
    let made = || {
        let class = py.import(MODULE)?.getattr(name)?;
        class.call1(arguments.into_pyobject(py)?)
    };
    match made() {
        Ok(value) => PyErr::from_value(value),
        Err(error) => error,
    }
}

/// The exception of this name with a message.
pub(crate) fn named(py: Python<'_>, name: &str, message: impl Into<String>) -> PyErr {
    let message: String = message.into();
    exception(py, name, (message,))
}

/// Why a request got no worker.
pub(crate) fn of_route(py: Python<'_>, error: &RouteError) -> PyErr {
    let message = error.to_string();
    match error {
        RouteError::QueueLimit {
            policy_class,
            limit_kind,
            current,
            limit,
            ..
        } => {
            let of = (message, policy_class.as_str(), limit_kind.name());
            let (message, class, kind) = of;
            exception(
                py,
                "RouterQueueLimitExceeded",
                (message, class, kind, *current, *limit),
            )
        }
        error if error.fault() == Fault::Client => named(py, "InvalidArgument", message),
        _ => named(py, "WorkerUnavailable", message),
    }
}

/// A request of a name that nobody booked.
pub(crate) fn not_found(py: Python<'_>, request: &str) -> PyErr {
    named(
        py,
        "RequestNotFound",
        format!("Request {request} not found"),
    )
}

/// A request of a name that is booked or waits.
pub(crate) fn already_there(py: Python<'_>, request: &str) -> PyErr {
    let text = format!(
        "Request {request} already exists: free it first, or give this one an id of its own"
    );
    named(py, "InvalidArgument", text)
}

/// What went wrong in a task, before there is an exception for it.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The exception of this name, with a message.
    Named(&'static str, String),
    /// No worker.
    Route(RouteError),
    /// A plain `Exception`, as Dynamo raises it.
    Plain(String),
}

impl Failure {
    /// The exception.
    pub(crate) fn into_error(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Named(name, message) => named(py, name, message),
            Self::Route(error) => of_route(py, &error),
            Self::Plain(message) => PyException::new_err(message),
        }
    }
}

impl From<RouteError> for Failure {
    fn from(error: RouteError) -> Self {
        Self::Route(error)
    }
}

impl From<PlaneError> for Failure {
    fn from(error: PlaneError) -> Self {
        let name = match &error {
            PlaneError::Gone(_) | PlaneError::Overloaded(_) => "WorkerUnavailable",
            PlaneError::Connect { .. } | PlaneError::Refused { .. } => "CannotConnect",
            PlaneError::Timeout { .. } => "ConnectionTimeout",
            PlaneError::Disconnected(_) => "Disconnected",
            PlaneError::Rejected(_) => "InvalidArgument",
            _ => "Unknown",
        };
        Self::Named(name, error.to_string())
    }
}

impl From<WorkerError> for Failure {
    fn from(error: WorkerError) -> Self {
        let name = match error.kind {
            WorkerErrorKind::InvalidArgument => "InvalidArgument",
            WorkerErrorKind::Overloaded => "WorkerUnavailable",
            WorkerErrorKind::Unavailable => "Disconnected",
            WorkerErrorKind::Timeout => "ConnectionTimeout",
            WorkerErrorKind::Cancelled => "Cancelled",
            WorkerErrorKind::Unknown => "Unknown",
        };
        Self::Named(name, error.message)
    }
}

impl From<EndpointError> for Failure {
    fn from(error: EndpointError) -> Self {
        match error {
            EndpointError::Route(error) => error.into(),
            EndpointError::Plane(PlaneError::Disconnected(worker)) => Self::Named(
                "StreamIncomplete",
                format!("Stream ended before generation completed: worker {worker} is gone"),
            ),
            EndpointError::Plane(error) => error.into(),
            EndpointError::Worker(error) => error.into(),
            error => Self::Named("Unknown", error.to_string()),
        }
    }
}

impl From<JoinError> for Failure {
    fn from(error: JoinError) -> Self {
        Self::Named("CannotConnect", error.to_string())
    }
}

impl From<EmbedError> for Failure {
    fn from(error: EmbedError) -> Self {
        let name = match error.is_option() {
            true => "InvalidArgument",
            false => "CannotConnect",
        };
        Self::Named(name, error.to_string())
    }
}

/// Which error item says this exception of a handler to whoever called.
pub(crate) fn kind_of(class: &str) -> WorkerErrorKind {
    match class {
        "InvalidArgument" | "ValueError" => WorkerErrorKind::InvalidArgument,
        "WorkerUnavailable" | "RouterQueueLimitExceeded" => WorkerErrorKind::Overloaded,
        "CannotConnect" | "Disconnected" | "EngineShutdown" | "StreamIncomplete" => {
            WorkerErrorKind::Unavailable
        }
        "ConnectionTimeout" | "TimeoutError" => WorkerErrorKind::Timeout,
        "Cancelled" | "CancelledError" => WorkerErrorKind::Cancelled,
        _ => WorkerErrorKind::Unknown,
    }
}
