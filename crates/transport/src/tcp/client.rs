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
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::connection::{Connecting, Connection, SendError};
use crate::call_home::AnswerLimits;
use crate::endpoint::accepted;
use crate::{
    AnswerStep, CallContext, CallFuture, CallStream, EndpointClient, PlaneError, ResponseServer,
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
    connections: Mutex<HashMap<Arc<str>, Connection>>,
    tasks: Tasks,
}

impl TcpClient {
    /// Answers come to `home`.
    #[must_use]
    pub fn new(home: ResponseServer, options: TcpOptions, tasks: &Tasks) -> Self {
        let limits = AnswerLimits::of(&options);
        Self {
            shared: Arc::new(Shared {
                home,
                options,
                limits,
                connections: Mutex::default(),
                tasks: tasks.clone(),
            }),
        }
    }

    /// How many addresses are connected.
    #[must_use]
    pub fn connections(&self) -> usize {
        let connections = self.shared.connections.lock();
        let connections = connections.unwrap_or_else(PoisonError::into_inner);
        connections.values().filter(|one| one.is_open()).count()
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
        let expected = self.home.expect()?;
        let request = self.frame(path, payload, &context, expected.subject())?;
        accepted(self.send(host, worker, request).await?, worker)?;
        CallStream::open(expected, worker, codec, &self.limits, &self.tasks).await
    }

    fn frame(
        &self,
        path: &str,
        payload: Payload,
        context: &CallContext,
        subject: String,
    ) -> Result<Bytes, PlaneError> {
        let message = two_part(payload, context, self.home.address(), subject);
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

    async fn send(&self, host: &str, worker: WorkerId, frame: Bytes) -> Result<Ack, PlaneError> {
        let connection = self.connection(host);
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

    /// The connection to this address; a new one if there is none or it has ended.
    fn connection(&self, host: &str) -> Connection {
        let connections = self.connections.lock();
        let mut connections = connections.unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = connections.get(host).filter(|one| one.is_open()) {
            return open.clone();
        }
        connections.retain(|_, one| one.is_open());
        let address: Arc<str> = host.into();
        let connecting = Connecting {
            address: Arc::clone(&address),
            timeout: self.options.connect_timeout,
            tls: self.options.tls.clone(),
        };
        let opened = Connection::open(connecting, self.options.queue_max, &self.tasks);
        connections.insert(address, opened.clone());
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
    let id = context.id.to_string();
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
