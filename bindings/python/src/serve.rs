//! Endpoints that Python answers: a call comes in on a plane, a handler runs in the event loop, its items go back.
//!
//! What always holds: a caller who is slow holds up its own handler and no other; one who has left is seen as a stopped context; an answer
//! whose handler ended without a word is not marked complete.

use std::sync::{Arc, Mutex, PoisonError};

use kvasir_discovery::EndpointName;
use kvasir_msgpack::Value;
use kvasir_protocol::{Annotated, Payload, PayloadWriter, WorkerError};
use kvasir_transport::{EndpointHandler, HandlerFuture, IncomingCall, ServedEndpoint};
use kvasir_types::Codec;
use kvasir_worker::EndpointMember;
use pyo3::prelude::*;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::context::Cancellation;
use crate::errors::{Failure, kind_of};
use crate::planes::Runtime;
use crate::{process, trees};

/// Items that wait for a slow caller.
const ITEMS_MAX: usize = 64;

/// What a handler says.
enum Said {
    Item(Payload),
    End,
}

/// Where a handler puts its answer.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct Reply {
    sender: mpsc::Sender<Said>,
    codec: Codec,
    stopped: CancellationToken,
}

#[pymethods]
impl Reply {
    /// Sends an item. False if there is no room for it now: wait for `room` and send it again.
    fn send(&self, item: &Bound<'_, PyAny>) -> PyResult<bool> {
        let item = Value::Map(vec![("data".into(), trees::from_python(item)?)]);
        let said = Said::Item(Payload::of_value(self.codec, &item));
        Ok(match self.sender.try_send(said) {
            // A caller who has left wants nothing; the context says so.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => true,
            Err(mpsc::error::TrySendError::Full(_)) => false,
        })
    }

    /// Done when there is room, or nobody who reads.
    fn room<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let sender = self.sender.clone();
        let work = async move {
            let _ = sender.reserve().await;
            Ok(())
        };
        process::awaitable(py, work, |py, ()| Ok(py.None()))
    }

    /// Ends the answer with an error. False if there is no room for it now.
    fn fail(&self, kind: &str, message: String) -> bool {
        let error = WorkerError {
            kind: kind_of(kind),
            public: Some(message.clone()),
            message,
        };
        let mut writer = PayloadWriter::new(self.codec);
        Annotated::of_error(error).write(&mut writer);
        let said = self.sender.try_send(Said::Item(writer.finish()));
        !matches!(said, Err(mpsc::error::TrySendError::Full(_)))
    }

    /// Marks the answer complete. False if there is no room for the mark now.
    fn finish(&self) -> bool {
        let said = self.sender.try_send(Said::End);
        !matches!(said, Err(mpsc::error::TrySendError::Full(_)))
    }

    /// Whether the caller wants no more.
    #[getter]
    fn cancellation(&self) -> Cancellation {
        Cancellation {
            token: self.stopped.clone(),
        }
    }
}

/// Hands calls to Python.
struct Handler {
    event_loop: Py<PyAny>,
    /// `start(request, id, metadata, reply)`, which begins a task and returns.
    start: Py<PyAny>,
}

impl Handler {
    /// Begins a handler in its event loop; false if Python takes nothing any more.
    fn begin(
        &self,
        id: &str,
        payload: &Payload,
        metadata: Vec<(String, String)>,
        reply: Reply,
    ) -> bool {
        let begun = Python::try_attach(|py| {
            let value = trees::payload_value(payload).map_err(|failure| failure.into_error(py))?;
            let request = trees::to_python(py, &value)?;
            let arguments = (&self.start, request, id, metadata, Py::new(py, reply)?);
            self.event_loop
                .call_method1(py, "call_soon_threadsafe", arguments)
        });
        matches!(begun, Some(Ok(_)))
    }
}

/// The handler behind a count, so that a call can hold it without the GIL.
struct PythonEndpoint(Arc<Handler>);

impl EndpointHandler for PythonEndpoint {
    fn handle(&self, call: IncomingCall) -> HandlerFuture {
        let handler = Arc::clone(&self.0);
        Box::pin(async move {
            let IncomingCall {
                id,
                payload,
                metadata,
                mut reply,
            } = call;
            let (sender, mut said) = mpsc::channel(ITEMS_MAX);
            // However this ends, the handler is told: a connection that breaks under an item says nothing else.
            let _ended = reply.cancellation().drop_guard();
            let to = Reply {
                sender,
                codec: reply.codec(),
                stopped: reply.cancellation(),
            };
            if !handler.begin(&id, &payload, metadata, to) {
                return reply.refuse("this worker is about to end").await;
            }
            if !reply.start().await {
                return;
            }
            while let Some(said) = said.recv().await {
                match said {
                    Said::Item(item) => {
                        if !reply.send(&item).await {
                            return;
                        }
                    }
                    Said::End => return reply.finish().await,
                }
            }
        })
    }
}

/// An endpoint that is served.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct Served {
    member: EndpointMember,
    served: Mutex<Option<ServedEndpoint>>,
}

#[pymethods]
impl Served {
    /// Nobody is to find it any more; calls are taken until `close`.
    fn withdraw<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let member = self.member.clone();
        let work = async move { Ok(member.withdraw().await?) };
        process::awaitable(py, work, |py, ()| Ok(py.None()))
    }

    /// It is to be found again.
    fn announce<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let member = self.member.clone();
        let work = async move { Ok(member.announce().await?) };
        process::awaitable(py, work, |py, ()| Ok(py.None()))
    }

    /// Takes no more calls.
    fn close(&self) {
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        drop(served.take());
    }
}

/// Serves an endpoint by `start`, which the event loop calls for each request.
#[pyfunction]
pub(crate) fn serve<'py>(
    py: Python<'py>,
    runtime: &Runtime,
    name: (String, String, String),
    event_loop: Py<PyAny>,
    start: Py<PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let planes = Arc::clone(&runtime.planes);
    let (namespace, component, endpoint) = name;
    let endpoint = EndpointName::new(&namespace, &component, &endpoint);
    let handler = Arc::new(PythonEndpoint(Arc::new(Handler { event_loop, start })));
    let work = async move {
        let member = planes.member(&endpoint).await?;
        let served = member.serve(handler).await?;
        Ok::<_, Failure>(Served {
            member,
            served: Mutex::new(Some(served)),
        })
    };
    process::awaitable(py, work, |py, served| Ok(Py::new(py, served)?.into_any()))
}
