//! Calls endpoints over HTTP/2.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use kvasir_protocol::Payload;
use kvasir_protocol::frame::{ACK_BYTES_MAX, Ack};
use kvasir_tasks::Tasks;
use kvasir_types::{PlaneEndpoint, WorkerId};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Background;
use crate::call_home::AnswerLimits;
use crate::endpoint::accepted;
use crate::tcp::{TcpOptions, two_part};
use crate::{
    AnswerStep, CallContext, CallFuture, CallStream, EndpointClient, PlaneError, ResponseServer,
    is_local_error,
};

type Sender = SendRequest<Full<Bytes>>;

/// Calls endpoints over HTTP. Clones are one.
#[derive(Clone)]
pub struct HttpClient {
    shared: Arc<Shared>,
}

struct Shared {
    home: ResponseServer,
    connect_timeout: Duration,
    ack_timeout: Duration,
    message_bytes_max: usize,
    limits: AnswerLimits,
    senders: Mutex<HashMap<String, Sender>>,
    tasks: Tasks,
}

impl HttpClient {
    /// Answers come to `home`. Of the options, timeouts and sizes count.
    #[must_use]
    pub fn new(home: ResponseServer, options: &TcpOptions, tasks: &Tasks) -> Self {
        Self {
            shared: Arc::new(Shared {
                home,
                connect_timeout: options.connect_timeout,
                ack_timeout: options.ack_timeout,
                message_bytes_max: options.message_bytes_max,
                limits: AnswerLimits::of(options),
                senders: Mutex::default(),
                tasks: tasks.clone(),
            }),
        }
    }
}

impl EndpointClient for HttpClient {
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
        let (worker, codec) = (context.worker, payload.codec);
        let expected = self.home.expect()?;
        let message = two_part(payload, &context, expected.home(), expected.subject());
        if message.wire_len() > self.message_bytes_max {
            return Err(PlaneError::Rejected(format!(
                "the request has {} bytes, more than the {} that workers take (--tcp-max-message-size)",
                message.wire_len(),
                self.message_bytes_max
            )));
        }
        let request = Request::post(address)
            .header("content-type", "application/octet-stream")
            .header("request-id", context.id.to_string())
            .body(Full::new(message.to_bytes()));
        let request = request.map_err(|_| PlaneError::Connect {
            worker,
            why: format!("`{address}` is not a URL"),
        })?;
        let ack = match timeout(self.ack_timeout, self.send(worker, request)).await {
            Ok(ack) => ack?,
            Err(_) => {
                self.forget(address);
                let step = AnswerStep::Ack;
                return Err(PlaneError::Timeout { worker, step });
            }
        };
        accepted(ack, worker)?;
        CallStream::open(expected, worker, codec, &self.limits, &self.tasks).await
    }

    /// Sends a request and reads what its status says.
    async fn send(
        &self,
        worker: WorkerId,
        request: Request<Full<Bytes>>,
    ) -> Result<Ack, PlaneError> {
        let authority = authority(request.uri()).ok_or_else(|| PlaneError::Connect {
            worker,
            why: format!("`{}` names no host", request.uri()),
        })?;
        let mut sender = self.sender(&authority, worker).await?;
        if sender.ready().await.is_err() {
            // Closed since it was kept; nothing was sent.
            self.forget_authority(&authority);
            sender = self.sender(&authority, worker).await?;
        }
        let response = sender.send_request(request).await;
        let response = response.map_err(|_| PlaneError::Disconnected(worker))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ACK_BYTES_MAX).collect();
        let body = body.await.map_err(|_| PlaneError::Disconnected(worker))?;
        let text = body.to_bytes();
        Ok(match Ack::of_text(&text) {
            Ack::Accepted if status.is_success() => Ack::Accepted,
            Ack::Accepted if status == StatusCode::SERVICE_UNAVAILABLE => Ack::Overloaded,
            Ack::Accepted => Ack::Unavailable(format!("status {status}")),
            said => said,
        })
    }

    async fn sender(&self, authority: &str, worker: WorkerId) -> Result<Sender, PlaneError> {
        if let Some(sender) = self.senders().get(authority).filter(|one| !one.is_closed()) {
            return Ok(sender.clone());
        }
        let connecting = timeout(self.connect_timeout, connect(authority, &self.tasks));
        let sender = match connecting.await {
            Ok(Ok(sender)) => sender,
            Ok(Err(error)) if is_local_error(&error) => {
                return Err(PlaneError::Local(error.to_string()));
            }
            Ok(Err(error)) => {
                let why = error.to_string();
                return Err(PlaneError::Connect { worker, why });
            }
            Err(_) => {
                let why = "no connection in time".to_owned();
                return Err(PlaneError::Connect { worker, why });
            }
        };
        let mut senders = self.senders();
        senders.retain(|_, one| !one.is_closed());
        senders.insert(authority.to_owned(), sender.clone());
        Ok(sender)
    }

    fn senders(&self) -> std::sync::MutexGuard<'_, HashMap<String, Sender>> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, address: &str) {
        if let Some(authority) = address.parse().ok().and_then(|uri| authority(&uri)) {
            self.forget_authority(&authority);
        }
    }

    fn forget_authority(&self, authority: &str) {
        self.senders().remove(authority);
    }
}

/// `host:port` of a URL.
fn authority(uri: &Uri) -> Option<String> {
    let port = uri.port_u16().unwrap_or(80);
    uri.host().map(|host| format!("{host}:{port}"))
}

async fn connect(authority: &str, tasks: &Tasks) -> io::Result<Sender> {
    let socket = TcpStream::connect(authority).await?;
    socket.set_nodelay(true)?;
    let background = Background(tasks.clone());
    let shaken = handshake(background, TokioIo::new(socket)).await;
    let (sender, connection) = shaken.map_err(io::Error::other)?;
    tasks.background().spawn(connection);
    Ok(sender)
}
