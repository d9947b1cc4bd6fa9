//! Calls endpoints over TCP.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kvasir_protocol::Payload;
use kvasir_protocol::control::{CallHome, ControlMessage};
use kvasir_protocol::frame::{Ack, FRAME_BYTES_MAX, RequestFrame, TwoPart};
use kvasir_tasks::Tasks;
use kvasir_types::{PlaneEndpoint, WorkerId};
use tokio::net::TcpStream;
use tokio::runtime::{Handle, Id};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::connection::{Connecting, Connection, SendError};
use crate::call_home::{AnswerLimits, Expected};
use crate::endpoint::accepted;
use crate::{
    AnswerStep, CallContext, CallFuture, CallStream, EndpointClient, PlaneError, ResponseServer,
    is_local_error,
};

/// Limits and settings of requests over TCP.
#[derive(Clone)]
pub struct TcpOptions {
    /// Longest time for a connection.
    pub connect_timeout: Duration,
    /// Longest time until a worker has said that it has a request, counted from when it is handed over.
    pub ack_timeout: Duration,
    /// Longest time from then until the worker connects to bring the answer.
    pub call_home_timeout: Duration,
    /// Longest time from then until it says that it has begun.
    pub prologue_timeout: Duration,
    /// Largest message, in either direction.
    pub message_bytes_max: usize,
    /// Requests that wait for a connection.
    pub queue_max: usize,
    /// Connections to one worker: each runtime has its own, as far as they go.
    pub pool_size: usize,
    /// Makes connections secure.
    pub tls: Option<TlsConnector>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(3),
            ack_timeout: Duration::from_secs(5),
            call_home_timeout: Duration::from_secs(30),
            prologue_timeout: Duration::from_secs(60),
            message_bytes_max: FRAME_BYTES_MAX,
            queue_max: 100,
            pool_size: 50,
            tls: None,
        }
    }
}

impl std::fmt::Debug for TcpOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpOptions")
            .field("ack_timeout", &self.ack_timeout)
            .field("call_home_timeout", &self.call_home_timeout)
            .field("prologue_timeout", &self.prologue_timeout)
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}

/// Calls endpoints over TCP. Clones are one.
#[derive(Clone)]
pub struct TcpClient {
    shared: Arc<Shared>,
}

struct Shared {
    home: ResponseServer,
    options: TcpOptions,
    limits: AnswerLimits,
    shares: Mutex<ThreadShares>,
    tasks: Tasks,
}

/// Runtimes whose share is known; those beyond them use the first.
const RUNTIMES_MAX: usize = 4096;

/// The connections. A runtime uses those of one share, so that a request and its acknowledgement wake no other thread.
struct ThreadShares {
    /// The runtime at `n` uses share `n`, counted round.
    runtimes: Vec<Id>,
    /// By the worker's address.
    connections: Vec<HashMap<Arc<str>, Connection>>,
}

impl ThreadShares {
    fn new(count: usize) -> Self {
        Self {
            runtimes: Vec::new(),
            connections: std::iter::repeat_with(HashMap::new)
                .take(count.max(1))
                .collect(),
        }
    }

    /// The connections that are used here.
    fn here(&mut self) -> Option<&mut HashMap<Arc<str>, Connection>> {
        let share = Handle::try_current()
            .ok()
            .map(|handle| self.share_of(handle.id()));
        let count = self.connections.len().max(1);
        self.connections.get_mut(share.unwrap_or(0) % count)
    }

    fn share_of(&mut self, runtime: Id) -> usize {
        let known = self.runtimes.iter().position(|one| *one == runtime);
        known.unwrap_or_else(|| {
            if self.runtimes.len() >= RUNTIMES_MAX {
                return 0;
            }
            self.runtimes.push(runtime);
            self.runtimes.len() - 1
        })
    }
}

impl TcpClient {
    /// Answers come to `home`.
    #[must_use]
    pub fn new(home: ResponseServer, options: TcpOptions, tasks: &Tasks) -> Self {
        let limits = AnswerLimits::of(&options);
        let shares = Mutex::new(ThreadShares::new(options.pool_size));
        Self {
            shared: Arc::new(Shared {
                home,
                options,
                limits,
                shares,
                tasks: tasks.clone(),
            }),
        }
    }

    /// How many connections are open.
    #[must_use]
    pub fn connections(&self) -> usize {
        let shares = self.shared.shares.lock();
        let shares = shares.unwrap_or_else(PoisonError::into_inner);
        let all = shares.connections.iter().flat_map(HashMap::values);
        all.filter(|one| one.is_open()).count()
    }
}

impl EndpointClient for TcpClient {
    fn call<'a>(
        &'a self,
        endpoint: &'a PlaneEndpoint,
        payload: Payload,
        context: CallContext,
    ) -> CallFuture<'a> {
        Box::pin(self.shared.call(&endpoint.address, payload, context))
    }
}

impl Shared {
    async fn call(
        &self,
        address: &str,
        payload: Payload,
        context: CallContext,
    ) -> Result<CallStream, PlaneError> {
        let worker = context.worker;
        let Some((host, path)) = address.split_once('/') else {
            let why = format!("`{address}` is not an address of the form host:port/path");
            return Err(PlaneError::Connect { worker, why });
        };
        let codec = payload.codec;
        let mut expected = self.home.expect()?;
        let request = self.frame(path, payload, &context, &expected)?;
        let connection = self.connection(host);
        accepted(self.send(&connection, worker, request).await?, worker)?;
        self.called(&connection, host, worker, &mut expected)
            .await?;
        CallStream::open(expected, worker, codec, &self.limits, &self.tasks).await
    }

    fn frame(
        &self,
        path: &str,
        payload: Payload,
        context: &CallContext,
        expected: &Expected,
    ) -> Result<Bytes, PlaneError> {
        let message = two_part(payload, context, expected.home(), expected.subject());
        let headers = headers(path, context);
        let mut frame = BytesMut::new();
        let fits = message.wire_len() <= self.options.message_bytes_max
            && RequestFrame::encode(path, &headers, &message, &mut frame);
        match fits {
            true => Ok(frame.freeze()),
            false => Err(PlaneError::Rejected(format!(
                "the request has {} bytes, more than the {} that workers take (--tcp-max-message-size)",
                message.wire_len(),
                self.options.message_bytes_max
            ))),
        }
    }

    /// Waits until the worker connects to bring the answer. One whose connection ended, and who takes no other, is gone.
    async fn called(
        &self,
        connection: &Connection,
        host: &str,
        worker: WorkerId,
        expected: &mut Expected,
    ) -> Result<(), PlaneError> {
        let gone = async {
            connection.closed().await;
            if !self.is_gone(host).await {
                std::future::pending().await
            }
        };
        let called = async {
            tokio::select! {
                biased;
                () = expected.called() => Ok(()),
                () = gone => Err(PlaneError::Disconnected(worker)),
            }
        };
        match timeout(self.options.call_home_timeout, called).await {
            Ok(called) => called,
            Err(_) => Err(PlaneError::Timeout {
                worker,
                step: AnswerStep::CallHome,
            }),
        }
    }

    /// Whether nobody accepts connections there any more.
    async fn is_gone(&self, host: &str) -> bool {
        match timeout(self.options.connect_timeout, TcpStream::connect(host)).await {
            Ok(Ok(_)) => false,
            Ok(Err(error)) => !is_local_error(&error),
            Err(_) => true,
        }
    }

    async fn send(
        &self,
        connection: &Connection,
        worker: WorkerId,
        frame: Bytes,
    ) -> Result<Ack, PlaneError> {
        match timeout(self.options.ack_timeout, connection.send(frame)).await {
            Ok(Ok(ack)) => Ok(ack),
            Ok(Err(SendError::Connect(why))) => Err(PlaneError::Connect { worker, why }),
            Ok(Err(SendError::Local(why))) => Err(PlaneError::Local(why)),
            Ok(Err(SendError::Broken)) => Err(PlaneError::Disconnected(worker)),
            Err(_) => {
                connection.give_up();
                Err(PlaneError::Timeout {
                    worker,
                    step: AnswerStep::Ack,
                })
            }
        }
    }

    /// This runtime's connection to this address; a new one if there is none or it has ended.
    fn connection(&self, host: &str) -> Connection {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let here = shares.here();
        let open = here.as_ref().and_then(|share| share.get(host));
        if let Some(open) = open.filter(|one| one.is_open()) {
            return open.clone();
        }
        let address: Arc<str> = host.into();
        let connecting = Connecting {
            address: Arc::clone(&address),
            timeout: self.options.connect_timeout,
            tls: self.options.tls.clone(),
        };
        let opened = Connection::open(connecting, self.options.queue_max, &self.tasks);
        if let Some(share) = here {
            share.retain(|_, one| one.is_open());
            share.insert(address, opened.clone());
        }
        opened
    }
}

/// The control message and the payload.
pub(crate) fn two_part(
    payload: Payload,
    context: &CallContext,
    home: &str,
    subject: String,
) -> TwoPart {
    let own = || context.id.to_string();
    let id = context.name.as_deref().map_or_else(own, str::to_owned);
    let metadata = context.metadata.iter();
    let control = ControlMessage {
        codec: payload.codec,
        home: CallHome {
            address: home.to_owned(),
            subject,
            context: id.clone(),
        },
        id,
        metadata: metadata
            .map(|(name, value)| (name.as_ref().to_owned(), value.as_ref().to_owned()))
            .collect(),
    };
    TwoPart {
        header: control.encode(),
        body: payload.bytes,
    }
}

/// A path comes from discovery, where names are letters, digits and a few signs; quotes would break the JSON.
fn headers(path: &str, context: &CallContext) -> Vec<u8> {
    let path = path.replace(['"', '\\'], "");
    let id = context.id;
    format!("{{\"request-id\":\"{id}\",\"x-endpoint-path\":\"{path}\"}}").into_bytes()
}
