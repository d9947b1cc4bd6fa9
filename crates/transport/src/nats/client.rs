//! Calls endpoints over NATS.
//!
//! A request that was published is answered by an acknowledgement, by the worker's call, or by the server, which knows when
//! nobody reads a subject. If the server goes away before any of them came, nobody can know whether the worker has the
//! request: it is published again when the server is back. A worker that gets it twice calls home twice, and the second call
//! is told to stop.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{HeaderMap, PublishErrorKind};
use bytes::Bytes;
use kvasir_protocol::Payload;
use kvasir_protocol::frame::Ack;
use kvasir_tasks::Tasks;
use kvasir_types::{PlaneEndpoint, WorkerId};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::inbox::{Inbox, Reply};
use super::{NatsLink, NatsLinkState};
use crate::call_home::{AnswerLimits, Expected};
use crate::endpoint::accepted;
use crate::tcp::{TcpOptions, two_part};
use crate::{
    AnswerStep, CallContext, CallFuture, CallStream, EndpointClient, PlaneError, ResponseServer,
};

/// After a server has come back, workers may take this long until they read their subjects again.
const RESUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(6);
/// Between two tries meanwhile.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(50);

/// How long a worker that took a request may be silent before it is looked for; and between two looks.
const GONE_PROBE_PAUSE: Duration = Duration::from_secs(1);

/// Calls endpoints over NATS. Clones are one.
#[derive(Clone)]
pub struct NatsClient {
    link: NatsLink,
    inbox: Inbox,
    home: ResponseServer,
    ack_timeout: Duration,
    limits: Arc<AnswerLimits>,
    tasks: Tasks,
}

impl NatsClient {
    /// Requests go over `link`, answers come to `home`. Of the options, timeouts count and the size of answers: that of
    /// requests is the server's.
    #[must_use]
    pub fn new(link: NatsLink, home: ResponseServer, options: &TcpOptions, tasks: &Tasks) -> Self {
        Self {
            inbox: Inbox::open(&link, tasks),
            link,
            home,
            ack_timeout: options.ack_timeout,
            limits: Arc::new(AnswerLimits::of(options)),
            tasks: tasks.clone(),
        }
    }

    async fn call(
        &self,
        subject: &str,
        payload: Payload,
        context: CallContext,
    ) -> Result<CallStream, PlaneError> {
        let (worker, codec) = (context.worker, payload.codec);
        let mut expected = self.home.expect()?;
        let message = two_part(payload, &context, expected.home(), expected.subject());
        let mut request = NatsRequest {
            worker,
            subject,
            headers: HeaderMap::new(),
            message: message.to_bytes(),
        };
        let id = context.id.to_string();
        request.headers.insert("request-id", id.as_str());
        accepted(self.deliver(&request, &mut expected).await?, worker)?;
        self.called(&request, &mut expected).await?;
        CallStream::open(expected, worker, codec, &self.limits, &self.tasks).await
    }

    /// Publishes a request until somebody says that it has come, or that it cannot.
    async fn deliver(
        &self,
        request: &NatsRequest<'_>,
        expected: &mut Expected,
    ) -> Result<Ack, PlaneError> {
        // A server that comes and goes is not waited for more often than one that is away.
        self.link.connect();
        let last = Instant::now() + self.link.outage_timeout();
        loop {
            let link = self.reached(last).await?;
            let mut awaited = self.inbox.expect();
            self.publish(request, awaited.subject()).await?;
            tokio::select! {
                reply = awaited.reply() => match reply {
                    Reply::Ack(text) => return Ok(Ack::of_text(&text)),
                    Reply::Nobody if link.is_settling() => sleep(RESUBSCRIBE_PAUSE).await,
                    Reply::Nobody => {
                        let why = format!("nobody reads the subject {}", request.subject);
                        return Err(PlaneError::Connect { worker: request.worker, why });
                    }
                },
                // It calls: it has the request.
                () = expected.called() => return Ok(Ack::Accepted),
                () = self.link.lost(link.connections) => {}
                () = sleep(self.ack_timeout) => return Err(PlaneError::Timeout {
                    worker: request.worker,
                    step: AnswerStep::Ack,
                }),
            }
        }
    }

    /// Waits until the worker connects to bring the answer. One whose subject nobody reads any more is gone.
    async fn called(
        &self,
        request: &NatsRequest<'_>,
        expected: &mut Expected,
    ) -> Result<(), PlaneError> {
        let worker = request.worker;
        let called = async {
            tokio::select! {
                biased;
                () = expected.called() => Ok(()),
                () = self.nobody_reads(request.subject) => Err(PlaneError::Disconnected(worker)),
            }
        };
        match timeout(self.limits.call_home, called).await {
            Ok(called) => called,
            Err(_) => Err(PlaneError::Timeout {
                worker,
                step: AnswerStep::CallHome,
            }),
        }
    }

    /// Waits until nobody reads a subject; for ever while somebody does, or nobody can tell. The server is asked by a message with nothing in it, which
    /// workers refuse; it says itself where there is no worker.
    async fn nobody_reads(&self, subject: &str) {
        loop {
            sleep(GONE_PROBE_PAUSE).await;
            let Some(link) = self.link.reached().await else {
                return std::future::pending().await;
            };
            let Some(client) = self.link.client().await else {
                return std::future::pending().await;
            };
            let mut awaited = self.inbox.expect();
            let (subject, reply) = (subject.to_owned(), awaited.subject());
            let asked = client.publish_with_reply(subject, reply, Bytes::new());
            if !matches!(timeout(self.ack_timeout, asked).await, Ok(Ok(()))) {
                continue;
            }
            let reply = timeout(self.ack_timeout, awaited.reply()).await;
            if matches!(reply, Ok(Reply::Nobody)) && !link.is_settling() {
                return;
            }
        }
    }

    /// Waits for the server, until `last` or until it has been away for too long.
    async fn reached(&self, last: Instant) -> Result<NatsLinkState, PlaneError> {
        let ready = async {
            self.inbox.listening().await;
            self.link.reached().await
        };
        let deadline = last.min(self.link.outage_end());
        let reached = timeout_at(deadline, ready).await.ok().flatten();
        reached.filter(|_| Instant::now() < last).ok_or_else(|| {
            PlaneError::Local(format!(
                "the NATS server at {} is not reached (--nats-server)",
                self.link.servers()
            ))
        })
    }

    async fn publish(&self, request: &NatsRequest<'_>, reply: String) -> Result<(), PlaneError> {
        let gone = || PlaneError::Local("the connection to NATS has ended".to_owned());
        let client = self.link.client().await.ok_or_else(gone)?;
        let subject = request.subject.to_owned();
        let (headers, message) = (request.headers.clone(), request.message.clone());
        let published = client.publish_with_reply_and_headers(subject, reply, headers, message);
        // It waits while more than fits is on its way to the server.
        let published = timeout(self.ack_timeout, published).await;
        let error = match published {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => return Err(PlaneError::Local("NATS takes no more requests".to_owned())),
        };
        Err(match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => PlaneError::Rejected(format!(
                "the request has {} bytes, more than the {} that the NATS server takes (its max_payload)",
                request.message.len(),
                client.max_payload()
            )),
            PublishErrorKind::InvalidSubject => PlaneError::Connect {
                worker: request.worker,
                why: "its subject is not one of NATS".to_owned(),
            },
            PublishErrorKind::Send => gone(),
        })
    }
}

/// A request as it is published.
struct NatsRequest<'a> {
    worker: WorkerId,
    subject: &'a str,
    headers: HeaderMap,
    message: Bytes,
}

impl NatsLinkState {
    /// Whether the server has just come back, so that workers may not read their subjects yet.
    fn is_settling(&self) -> bool {
        self.connections > 1 && self.since.elapsed() < RESUBSCRIBE_TIMEOUT
    }
}

impl EndpointClient for NatsClient {
    fn call<'a>(
        &'a self,
        endpoint: &'a PlaneEndpoint,
        payload: Payload,
        context: CallContext,
    ) -> CallFuture<'a> {
        Box::pin(self.call(&endpoint.address, payload, context))
    }
}
