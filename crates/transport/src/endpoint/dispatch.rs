//! The worker's side: a request that arrived, by whichever plane, is taken or refused, and answered.

use std::any::Any;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use kvasir_protocol::control::ControlMessage;
use kvasir_protocol::frame::{Ack, TwoPart};
use kvasir_protocol::{Payload, ProtocolError};
use kvasir_tasks::Tasks;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::DropGuard;

use crate::ReplySink;

/// Longest time to connect to whoever asked.
const CONNECT_HOME_TIMEOUT: Duration = Duration::from_secs(5);

/// What [`EndpointHandler::handle`] returns.
pub type HandlerFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Answers calls to one endpoint.
pub trait EndpointHandler: Send + Sync + 'static {
    /// Answers one call. It is dropped at its next await if the process stops; a caller that has left is seen by the reply.
    fn handle(&self, call: IncomingCall) -> HandlerFuture;

    /// Takes a place for one more call, which is held until it is answered; none if the endpoint is full.
    fn admit(&self) -> Option<CallPlace> {
        Some(CallPlace::default())
    }

    /// Whether the next call is taken and never answered: of workers that break the protocol on command.
    fn is_silent(&self) -> bool {
        false
    }
}

/// A call's place at an endpoint; dropped, it is free.
#[derive(Debug, Default)]
pub struct CallPlace {
    _permit: Option<OwnedSemaphorePermit>,
}

impl CallPlace {
    /// One of the places that `places` has, if one is free.
    #[must_use]
    pub fn of(places: &Arc<Semaphore>) -> Option<Self> {
        let permit = Arc::clone(places).try_acquire_owned().ok()?;
        Some(Self {
            _permit: Some(permit),
        })
    }
}

impl<F: Fn(IncomingCall) -> HandlerFuture + Send + Sync + 'static> EndpointHandler for F {
    fn handle(&self, call: IncomingCall) -> HandlerFuture {
        self(call)
    }
}

/// One call, as its endpoint receives it.
#[derive(Debug)]
pub struct IncomingCall {
    /// The call's name, as the caller gave it.
    pub id: String,
    /// What is asked.
    pub payload: Payload,
    /// What the client's headers say, by name.
    pub metadata: Vec<(String, String)>,
    /// Where the answer goes.
    pub reply: ReplySink,
}

/// What a [`CallObserver`] holds while a call is answered.
pub type CallWatch = Box<dyn Any + Send>;

/// Is told of calls.
pub trait CallObserver: Send + Sync + 'static {
    /// A call of so many bytes to `path` was taken; what this returns is dropped when it is answered.
    fn begun(&self, path: &str, bytes: usize) -> CallWatch;
}

/// The endpoints of one process and the calls that they answer. Clones are one.
#[derive(Clone)]
pub struct Dispatcher {
    shared: Arc<Shared>,
}

struct Shared {
    endpoints: RwLock<HashMap<String, Arc<dyn EndpointHandler>>>,
    /// Calls under way.
    active: AtomicUsize,
    /// Most calls under way.
    capacity: usize,
    observer: OnceLock<Arc<dyn CallObserver>>,
    tasks: Tasks,
}

/// An endpoint that is served; dropped, it is served no more. Calls under way go on.
pub struct ServedEndpoint {
    /// Ends what reads its requests, where each endpoint has that for itself.
    _reading: Option<DropGuard>,
    path: String,
    handler: Arc<dyn EndpointHandler>,
    shared: Arc<Shared>,
}

/// A call under way.
struct Active(Arc<Shared>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Dispatcher {
    /// Answers at most `capacity` calls at once, as tasks of `tasks`.
    #[must_use]
    pub fn new(capacity: usize, tasks: &Tasks) -> Self {
        Self {
            shared: Arc::new(Shared {
                endpoints: RwLock::default(),
                active: AtomicUsize::new(0),
                capacity,
                observer: OnceLock::new(),
                tasks: tasks.clone(),
            }),
        }
    }

    /// Serves `path`. Whoever served it before does so no more.
    #[must_use]
    pub fn serve(&self, path: &str, handler: Arc<dyn EndpointHandler>) -> ServedEndpoint {
        let mut endpoints = self.shared.write();
        endpoints.insert(path.to_owned(), Arc::clone(&handler));
        drop(endpoints);
        ServedEndpoint {
            _reading: None,
            path: path.to_owned(),
            handler,
            shared: Arc::clone(&self.shared),
        }
    }

    /// From now on `observer` is told of calls; the first one stays.
    pub fn observe(&self, observer: Arc<dyn CallObserver>) {
        let _ = self.shared.observer.set(observer);
    }

    /// How many calls are under way.
    #[must_use]
    pub fn active(&self) -> usize {
        self.shared.active.load(Ordering::Acquire)
    }

    /// Takes a request for `path`, or says why not. What is taken is answered by a task.
    pub fn accept(&self, path: &str, payload: Bytes) -> Ack {
        let handler = self.shared.read().get(path).cloned();
        let Some(handler) = handler else {
            return Ack::unknown_endpoint(path);
        };
        if handler.is_silent() {
            return Ack::Accepted;
        }
        let Some(place) = handler.admit() else {
            return Ack::Overloaded;
        };
        if self.shared.active.fetch_add(1, Ordering::AcqRel) >= self.shared.capacity {
            self.shared.active.fetch_sub(1, Ordering::AcqRel);
            return Ack::Overloaded;
        }
        let active = Active(Arc::clone(&self.shared));
        let observer = self.shared.observer.get();
        let watch = observer.map(|observer| observer.begun(path, payload.len()));
        let tasks = self.shared.tasks.clone();
        self.shared.tasks.spawn(async move {
            // A request that cannot be read names nobody who could be told so.
            if let Ok(call) = open(&payload, &tasks).await {
                handler.handle(call).await;
            }
            drop((active, place, watch));
        });
        Ack::Accepted
    }
}

/// Connects to whoever asked.
async fn open(payload: &Bytes, tasks: &Tasks) -> io::Result<IncomingCall> {
    let invalid = |error: ProtocolError| io::Error::new(io::ErrorKind::InvalidData, error);
    let frame = TwoPart::decode(payload).map_err(invalid)?;
    let control = ControlMessage::decode(&frame.header).map_err(invalid)?;
    let connecting = TcpStream::connect(&control.home.address);
    let socket = timeout(CONNECT_HOME_TIMEOUT, connecting).await??;
    socket.set_nodelay(true)?;
    let subject = control.home.subject;
    let reply = ReplySink::open(socket, subject, control.codec, tasks).await?;
    Ok(IncomingCall {
        id: control.id,
        payload: Payload::new(control.codec, frame.body),
        metadata: control.metadata,
        reply,
    })
}

type Endpoints = HashMap<String, Arc<dyn EndpointHandler>>;

impl Shared {
    fn read(&self) -> std::sync::RwLockReadGuard<'_, Endpoints> {
        self.endpoints
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Endpoints> {
        self.endpoints
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(feature = "nats")]
impl ServedEndpoint {
    /// The same; what `reading` guards ends with it.
    pub(crate) fn reading(mut self, reading: DropGuard) -> Self {
        self._reading = Some(reading);
        self
    }
}

impl Drop for ServedEndpoint {
    fn drop(&mut self) {
        let mut endpoints = self.shared.write();
        let served = endpoints.get(&self.path);
        if served.is_some_and(|served| Arc::ptr_eq(served, &self.handler)) {
            endpoints.remove(&self.path);
        }
    }
}
