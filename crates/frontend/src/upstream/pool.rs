//! Kept connections to one worker.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Body as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use kvasir_transport::Tasks;
use kvasir_types::WorkerId;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::WorkerAddress;

/// Connections to one worker that are open at once; the next request waits for one of them.
const OPEN_MAX: usize = 8192;
/// Idle connections that are kept for one worker.
const IDLE_MAX: usize = 256;
/// A worker has this long to accept a connection (`DYN_TCP_CONNECT_TIMEOUT` of the seeds).
const CONNECT_PATIENCE: Duration = Duration::from_secs(3);

/// Why an engine gave no answer, or not all of it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("the worker left while the request was on its way to it")]
    Gone,
    #[error("no connection within {} s", CONNECT_PATIENCE.as_secs())]
    ConnectTimeout,
    #[error("cannot connect: {0}")]
    Connect(#[source] std::io::Error),
    #[error("the connection broke: {0}")]
    Broken(#[source] hyper::Error),
    #[error("no answer in time")]
    AnswerTimeout,
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error("its answer is too long")]
    TooLong,
}

/// The workers of one model by id. Clones are one set.
#[derive(Clone, Default)]
pub struct Upstreams {
    by_id: Arc<RwLock<HashMap<WorkerId, Pool>>>,
}

impl Upstreams {
    /// The connections to a worker.
    pub(crate) fn get(&self, worker: WorkerId) -> Option<Pool> {
        self.by_id
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&worker)
            .cloned()
    }

    /// Adds a worker, or replaces its connections.
    pub(crate) fn insert(&self, worker: WorkerId, pool: Pool) {
        self.by_id
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(worker, pool);
    }

    /// Forgets a worker.
    pub(crate) fn remove(&self, worker: WorkerId) {
        self.by_id
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&worker);
    }
}

/// The connections of one worker. Clones are one pool.
#[derive(Clone)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    address: WorkerAddress,
    tasks: Tasks,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
    places: Arc<Semaphore>,
}

impl Pool {
    /// A pool without connections.
    pub(crate) fn new(address: WorkerAddress, tasks: Tasks) -> Self {
        let places = Arc::new(Semaphore::new(OPEN_MAX));
        Self {
            shared: Arc::new(Shared {
                address,
                tasks,
                idle: Mutex::default(),
                places,
            }),
        }
    }

    /// Whose connections they are.
    pub(crate) fn address(&self) -> &WorkerAddress {
        &self.shared.address
    }

    /// What the `host` header says.
    pub(crate) fn authority(&self) -> HeaderValue {
        let authority = self.shared.address.authority();
        HeaderValue::try_from(authority).unwrap_or(HeaderValue::from_static("localhost"))
    }

    /// Sends `request` and waits for the head of the answer. A kept connection that turns out to be closed is
    /// replaced by a new one, once; dropping the future closes the connection.
    pub(crate) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let places = Arc::clone(&self.shared.places);
        let place = places.acquire_owned().await.ok();
        let mut request = request;
        if let Some(mut sender) = self.take_idle() {
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(self.answer(sender, place, response)),
                // Closed while it was idle: the request was not sent and comes back.
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(UpstreamError::Broken(error.into_error())),
                },
            }
        }
        let mut sender = self.connect().await?;
        let response = sender
            .send_request(request)
            .await
            .map_err(UpstreamError::Broken)?;
        Ok(self.answer(sender, place, response))
    }

    fn answer(
        &self,
        sender: SendRequest<Full<Bytes>>,
        place: Option<OwnedSemaphorePermit>,
        response: Response<Incoming>,
    ) -> Response<UpstreamBody> {
        response.map(|incoming| UpstreamBody {
            incoming,
            back: Some((self.clone(), sender)),
            _place: place,
        })
    }

    fn take_idle(&self) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self
            .shared
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        std::iter::from_fn(|| idle.pop()).find(SendRequest::is_ready)
    }

    fn give_back(&self, sender: SendRequest<Full<Bytes>>) {
        let mut idle = self
            .shared
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX && !sender.is_closed() {
            idle.push(sender);
        }
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, UpstreamError> {
        let address = &self.shared.address;
        let connect = TcpStream::connect((address.host.as_str(), address.port));
        let stream = match tokio::time::timeout(CONNECT_PATIENCE, connect).await {
            Err(_) => return Err(UpstreamError::ConnectTimeout),
            Ok(stream) => stream.map_err(UpstreamError::Connect)?,
        };
        let _ = stream.set_nodelay(true);
        let (sender, connection) = http1::Builder::new()
            .preserve_header_case(false)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(UpstreamError::Broken)?;
        self.shared.tasks.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to a worker ended");
            }
        });
        Ok(sender)
    }
}

/// The body of an engine's answer. Read to its end, its connection goes back to the pool; dropped before, the
/// connection is closed and the engine stops working on it.
pub(crate) struct UpstreamBody {
    incoming: Incoming,
    back: Option<(Pool, SendRequest<Full<Bytes>>)>,
    _place: Option<OwnedSemaphorePermit>,
}

impl UpstreamBody {
    /// The next piece; `None` at the end.
    pub(crate) fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        loop {
            match std::task::ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
                Some(Err(error)) => {
                    self.back = None;
                    return Poll::Ready(Some(Err(UpstreamError::Broken(error))));
                }
                None => {
                    if let Some((pool, sender)) = self.back.take() {
                        pool.give_back(sender);
                    }
                    return Poll::Ready(None);
                }
            }
        }
    }

    /// All of it, if it is no longer than `limit` bytes.
    pub(crate) async fn collect(mut self, limit: usize) -> Result<Bytes, UpstreamError> {
        let mut whole = BytesMut::new();
        while let Some(data) = poll_fn(|cx| self.poll_data(cx)).await {
            let data = data?;
            if whole.len() + data.len() > limit {
                return Err(UpstreamError::TooLong);
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }
}
