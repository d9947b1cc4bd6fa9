//! Cancellation of a request, the same on both sides: whoever holds it can stop it, and learns that it was stopped.

use pyo3::prelude::*;
use tokio_util::sync::CancellationToken;

use crate::process;

/// Whether a request was stopped.
#[pyclass(frozen, from_py_object, module = "kvasir._native")]
#[derive(Clone, Debug)]
pub(crate) struct Cancellation {
    pub(crate) token: CancellationToken,
}

#[pymethods]
impl Cancellation {
    /// One of its own.
    #[new]
    fn new() -> Self {
        Self {
            token: CancellationToken::new(),
        }
    }

    /// Stops the request.
    fn stop(&self) {
        self.token.cancel();
    }

    /// Whether it was stopped.
    fn is_stopped(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Done when it was stopped.
    fn stopped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let token = self.token.clone();
        let work = async move {
            token.cancelled().await;
            Ok(())
        };
        process::awaitable(py, work, |py, ()| {
            Ok(pyo3::types::PyBool::new(py, true)
                .to_owned()
                .into_any()
                .unbind())
        })
    }
}
