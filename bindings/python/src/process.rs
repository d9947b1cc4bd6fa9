//! The way from tasks back into Python's event loop.
//!
//! What always holds: the runtime begins with the first thing that needs it and ends when the interpreter does, before Python is taken down;
//! a process that was forked from one that had a runtime is refused, since its threads are not there; no lock here is held while
//! Python runs.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use kvasir_embed::EmbedError;
use kvasir_tasks::Tasks;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::errors::Failure;

/// Where tasks run; begun if it has not been.
pub(crate) fn runtime() -> PyResult<(Handle, Tasks)> {
    kvasir_embed::runtime().map_err(|error| {
        let text = match error {
            EmbedError::Forked => "this process was forked from one that had begun to use kvasir, whose threads and sockets do not come along; \
                 start the child with multiprocessing.get_context(\"spawn\"), or use kvasir only after the fork"
                .to_owned(),
            error => error.to_string(),
        };
        PyRuntimeError::new_err(text)
    })
}

/// Ends the runtime; called when the interpreter ends.
#[pyfunction]
pub(crate) fn shut_down(py: Python<'_>) {
    if let Some(ending) = kvasir_embed::end_runtime() {
        py.detach(move || ending.wait());
    }
}

/// Tasks that run now, for tests.
#[pyfunction]
pub(crate) fn task_count() -> usize {
    kvasir_embed::task_count()
}

/// Waits for `work` on this thread, without the GIL.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, Failure>> + Send,
) -> PyResult<T> {
    let (handle, _) = runtime()?;
    let done = py.detach(|| handle.block_on(work));
    done.map_err(|failure| failure.into_error(py))
}

/// What is to be woken in one event loop. However many wait, the loop is told once, and wakes them all in its next turn: to tell it
/// takes the GIL and a system call, which would be most of what a token costs.
struct Alarm {
    event_loop: Py<PyAny>,
    ringing: Mutex<Vec<Py<PyAny>>>,
}

/// The alarms of all event loops. A program has one loop, or a few.
static ALARMS: Mutex<Vec<Arc<Alarm>>> = Mutex::new(Vec::new());

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Alarm {
    /// That of an event loop; those of loops that are closed go.
    fn of(event_loop: &Bound<'_, PyAny>) -> Arc<Self> {
        let known = locked(&ALARMS)
            .iter()
            .find(|alarm| alarm.event_loop.as_ptr() == event_loop.as_ptr())
            .cloned();
        if let Some(known) = known {
            return known;
        }
        let alarm = Arc::new(Self {
            event_loop: event_loop.clone().unbind(),
            ringing: Mutex::default(),
        });
        let before = std::mem::take(&mut *locked(&ALARMS));
        let is_open = |alarm: &Arc<Self>| {
            let closed = alarm
                .event_loop
                .bind(event_loop.py())
                .call_method0("is_closed");
            closed.is_ok_and(|closed| !closed.is_truthy().unwrap_or(true))
        };
        let mut kept: Vec<_> = before.into_iter().filter(is_open).collect();
        kept.push(Arc::clone(&alarm));
        locked(&ALARMS).extend(kept);
        alarm
    }

    /// Completes a future with nothing in the loop's next turn.
    fn ring(self: &Arc<Self>, future: Py<PyAny>) {
        let is_first = {
            let mut ringing = locked(&self.ringing);
            ringing.push(future);
            ringing.len() == 1
        };
        if !is_first {
            return;
        }
        let told = Python::try_attach(|py| {
            let alarm = Arc::clone(self);
            let told = Py::new(py, Wake { alarm })?;
            self.event_loop
                .call_method1(py, "call_soon_threadsafe", (told,))
        });
        if !matches!(told, Some(Ok(_))) {
            // A loop that is closed takes nothing, and nobody waits for it.
            drop(std::mem::take(&mut *locked(&self.ringing)));
        }
    }
}

/// Wakes all that are to be woken. Called by the event loop.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct Wake {
    alarm: Arc<Alarm>,
}

#[pymethods]
impl Wake {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let ringing = std::mem::take(&mut *locked(&self.alarm.ringing));
        for future in ringing {
            let future = future.bind(py);
            if !future.call_method0("done")?.is_truthy()? {
                future.call_method1("set_result", (py.None(),))?;
            }
        }
        Ok(())
    }
}

/// A future of Python's that a task of ours completes.
pub(crate) struct Promise {
    alarm: Arc<Alarm>,
    future: Py<PyAny>,
}

impl Promise {
    /// One of the loop that runs on this thread.
    pub(crate) fn new(py: Python<'_>) -> PyResult<(Self, Bound<'_, PyAny>)> {
        static RUNNING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let running = RUNNING.get_or_try_init(py, || {
            let asyncio = py.import("asyncio")?;
            asyncio.getattr("get_running_loop").map(Bound::unbind)
        })?;
        let event_loop = running.bind(py).call0()?;
        let future = event_loop.call_method0("create_future")?;
        let promise = Self {
            alarm: Alarm::of(&event_loop),
            future: future.clone().unbind(),
        };
        Ok((promise, future))
    }

    /// Completes it with nothing. Nothing happens if the loop or the interpreter has ended.
    pub(crate) fn wake(self) {
        self.alarm.ring(self.future);
    }

    /// Completes it with what `make` makes. Nothing happens if the loop or the interpreter has ended.
    pub(crate) fn settle(self, make: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>>) {
        Python::try_attach(|py| {
            let (value, error) = match make(py) {
                Ok(value) => (value, py.None()),
                Err(error) => (py.None(), error.into_value(py).into_any()),
            };
            static SETTLE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
            let settle = SETTLE.get_or_try_init(py, || {
                let module = py.import("kvasir._native")?;
                module.getattr("settle").map(Bound::unbind)
            });
            if let Ok(settle) = settle {
                let arguments = (settle, self.future, value, error);
                // A loop that is closed takes nothing, and nobody waits for it.
                let _ = self
                    .alarm
                    .event_loop
                    .call_method1(py, "call_soon_threadsafe", arguments);
            }
        });
    }
}

/// Completes a future, unless it was cancelled meanwhile. Called by the event loop.
#[pyfunction]
pub(crate) fn settle(
    future: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    error: &Bound<'_, PyAny>,
) -> PyResult<()> {
    if future.call_method0("done")?.is_truthy()? {
        return Ok(());
    }
    match error.is_none() {
        true => future.call_method1("set_result", (value,))?,
        false => future.call_method1("set_exception", (error,))?,
    };
    Ok(())
}

/// Stops the task behind a future that was cancelled.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct Canceller {
    task: AbortHandle,
}

#[pymethods]
impl Canceller {
    fn __call__(&self, future: &Bound<'_, PyAny>) -> PyResult<()> {
        if future.call_method0("cancelled")?.is_truthy()? {
            self.task.abort();
        }
        Ok(())
    }
}

/// Runs `work` and gives Python something to await. Cancelling that drops `work` where it waits.
pub(crate) fn awaitable<'py, T: Send + 'static>(
    py: Python<'py>,
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    into: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let (handle, tasks) = runtime()?;
    let (promise, future) = Promise::new(py)?;
    let task = tasks.spawn_on(&handle, async move {
        let done = work.await;
        promise.settle(|py| match done {
            Ok(value) => into(py, value),
            Err(failure) => Err(failure.into_error(py)),
        });
    });
    let task = task.abort_handle();
    future.call_method1("add_done_callback", (Canceller { task },))?;
    Ok(future)
}

/// As [`awaitable`], for work that is mostly done without waiting: that is done on this thread, and no task is begun.
pub(crate) fn awaitable_at_once<'py, T: Send + 'static>(
    py: Python<'py>,
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    into: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let (handle, _) = runtime()?;
    let mut work = Box::pin(work);
    let entered = handle.enter();
    let polled = work.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    drop(entered);
    match polled {
        Poll::Ready(Ok(value)) => {
            let (_, future) = Promise::new(py)?;
            future.call_method1("set_result", (into(py, value)?,))?;
            Ok(future)
        }
        Poll::Ready(Err(failure)) => Err(failure.into_error(py)),
        Poll::Pending => awaitable(py, work, into),
    }
}
