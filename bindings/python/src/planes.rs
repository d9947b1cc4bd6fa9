//! A process's store, planes and lease, for Python: what `DistributedRuntime` is made from.
//!
//! Elsewhere: the planes themselves (`kvasir-embed`), which the C library has too.

use std::sync::Arc;

use kvasir_embed::{ProcessPlanes, say_log_lines, settings_of};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::process;

/// A process among others: what `kvasir.runtime.DistributedRuntime` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct Runtime {
    pub(crate) planes: Arc<ProcessPlanes>,
}

#[pymethods]
impl Runtime {
    #[new]
    #[pyo3(signature = (discovery_backend=None, request_plane=None, event_plane=None))]
    fn new(
        discovery_backend: Option<&str>,
        request_plane: Option<&str>,
        event_plane: Option<&str>,
    ) -> PyResult<Self> {
        let (handle, _) = process::runtime()?;
        let given = [
            ("discovery-backend", discovery_backend),
            ("request-plane", request_plane),
            ("event-plane", event_plane),
        ];
        // Those of `kvasir mocker`, which takes calls and publishes as a worker does.
        let settings = settings_of("mocker", &given)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        say_log_lines(&settings);
        let _entered = handle.enter();
        let planes = ProcessPlanes::open(settings)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self {
            planes: Arc::new(planes),
        })
    }

    /// The id that this process announces itself under.
    fn connection_id(&self, py: Python<'_>) -> PyResult<u64> {
        process::wait(py, async { Ok(self.planes.lease().await?.id()) })
    }

    /// Which store this is.
    #[getter]
    fn discovery_backend(&self) -> &'static str {
        self.planes.store.backend()
    }

    /// Calls that this process answers now.
    #[getter]
    fn answering(&self) -> usize {
        self.planes.answering()
    }

    /// Takes back all that was announced, and stops; for the end of the process. Waits for a store no longer than two seconds.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        process::wait(py, async {
            self.planes.end().await;
            Ok(())
        })
    }
}
