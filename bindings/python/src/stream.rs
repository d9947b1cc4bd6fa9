//! Answers of workers, as Python iterates over them.
//!
//! What always holds: a reader that is slow slows its own worker's stream; a stream that nobody holds any more ends its call, and with it
//! whatever was booked for it; items that are there are taken without a turn of the event loop.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_msgpack::Value;
use kvasir_protocol::{Annotated as WireItem, Payload};
use pyo3::exceptions::PyStopAsyncIteration;
use pyo3::prelude::*;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::errors::Failure;
use crate::process::Promise;
use crate::trees;

/// What comes in a stream.
pub(crate) enum StreamItem {
    /// An item as the worker sent it: data, or a remark.
    Wire(Payload),
    /// An item that was read already.
    Value(Value),
}

struct State {
    items: VecDeque<StreamItem>,
    failed: Option<Failure>,
    ended: bool,
    waiter: Option<Promise>,
}

/// Both ends of a stream.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// The reader took something.
    room: Notify,
    capacity: usize,
}

impl Shared {
    pub(crate) fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                items: VecDeque::new(),
                failed: None,
                ended: false,
                waiter: None,
            }),
            room: Notify::new(),
            capacity: capacity.max(1),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an item; waits while the reader has as many as it wants.
    pub(crate) async fn put(&self, item: StreamItem) {
        loop {
            let room = self.room.notified();
            if self.lock().items.len() < self.capacity {
                break;
            }
            room.await;
        }
        let mut state = self.lock();
        state.items.push_back(item);
        let waiter = state.waiter.take();
        drop(state);
        wake(waiter);
    }

    /// Nothing more comes.
    pub(crate) fn end(&self, failed: Option<Failure>) {
        let mut state = self.lock();
        state.ended = true;
        state.failed = failed;
        let waiter = state.waiter.take();
        drop(state);
        wake(waiter);
    }
}

fn wake(waiter: Option<Promise>) {
    if let Some(waiter) = waiter {
        waiter.wake();
    }
}

/// An answer. `try_next` gives an item, `NotImplemented` while none is there, and raises at the end; `ready` is awaited meanwhile.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct Answer {
    shared: Arc<Shared>,
    task: AbortHandle,
    /// Give items with their remarks.
    annotated: bool,
}

impl Answer {
    pub(crate) const fn new(shared: Arc<Shared>, task: AbortHandle, annotated: bool) -> Self {
        Self {
            shared,
            task,
            annotated,
        }
    }

    fn item(&self, py: Python<'_>, item: &StreamItem) -> PyResult<Py<PyAny>> {
        let value = match item {
            StreamItem::Value(value) => return Ok(trees::to_python(py, value)?.unbind()),
            StreamItem::Wire(payload) => {
                trees::payload_value(payload).map_err(|failure| failure.into_error(py))?
            }
        };
        if is_error(&value) {
            let StreamItem::Wire(payload) = item else {
                return Ok(py.None());
            };
            return Err(error_of(payload).into_error(py));
        }
        let data = value.get("data").unwrap_or(&Value::Nil);
        let data = trees::to_python(py, data)?.unbind();
        if !self.annotated {
            return Ok(data);
        }
        let text = |name: &str| value.get(name).and_then(Value::text).map(ToOwned::to_owned);
        let lines = value.get("comment").and_then(Value::list);
        let lines = lines.map(|lines| {
            lines
                .iter()
                .filter_map(Value::text)
                .map(ToOwned::to_owned)
                .collect()
        });
        let item = Annotated {
            data,
            id: text("id"),
            event: text("event"),
            comment: lines,
        };
        Ok(Py::new(py, item)?.into_any())
    }
}

fn is_error(item: &Value) -> bool {
    let has_error = item.get("error").is_some_and(|error| *error != Value::Nil);
    has_error || item.get("event").and_then(Value::text) == Some("error")
}

/// What an error item says.
pub(crate) fn error_of(payload: &Payload) -> Failure {
    match WireItem::decode(payload).map(|item| item.error) {
        Ok(Some(error)) => error.into(),
        _ => Failure::Named("Unknown", "the worker failed and does not say how".into()),
    }
}

#[pymethods]
impl Answer {
    /// The next item; `NotImplemented` if none is there yet.
    fn try_next(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let mut state = self.shared.lock();
        if let Some(item) = state.items.pop_front() {
            drop(state);
            self.shared.room.notify_one();
            return self.item(py, &item);
        }
        match (state.failed.take(), state.ended) {
            (Some(failed), _) => {
                drop(state);
                Err(failed.into_error(py))
            }
            (None, true) => Err(PyStopAsyncIteration::new_err(())),
            (None, false) => Ok(py.NotImplemented()),
        }
    }

    /// Done when there is an item, or the end.
    fn ready<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (promise, future) = Promise::new(py)?;
        let mut state = self.shared.lock();
        let is_there = !state.items.is_empty() || state.ended;
        let before = match is_there {
            true => Some(promise),
            false => state.waiter.replace(promise),
        };
        drop(state);
        // Two that wait at once both look again.
        wake(before);
        Ok(future)
    }

    /// Ends the call.
    fn close(&self) {
        self.task.abort();
        self.shared.end(None);
        self.shared.lock().items.clear();
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One item of an answer with its remarks.
#[pyclass(frozen, module = "kvasir")]
pub(crate) struct Annotated {
    data: Py<PyAny>,
    id: Option<String>,
    event: Option<String>,
    comment: Option<Vec<String>>,
}

#[pymethods]
impl Annotated {
    /// What the worker says.
    fn data(&self, py: Python<'_>) -> Py<PyAny> {
        self.data.clone_ref(py)
    }

    /// The item's own name.
    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// The name of a remark.
    fn event(&self) -> Option<&str> {
        self.event.as_deref()
    }

    /// The lines of a remark.
    fn comments(&self) -> Option<Vec<String>> {
        self.comment.clone()
    }

    /// Whether it says that something went wrong; an error is raised instead, so never.
    fn is_error(&self) -> bool {
        false
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "Annotated(data={}, event={:?}, comment={:?}, id={:?})",
            self.data.bind(py).repr()?,
            self.event,
            self.comment,
            self.id
        ))
    }
}
