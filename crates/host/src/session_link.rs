//! Sessions that engines hold.
//!
//! Answers one question: how does an engine learn that a session begins or ends? It is told before the first request of the session goes
//! out, after the last one, and when the session was idle for too long.
//!
//! What always holds: telling takes [`TELL_TIMEOUT`] at most and fails no request: a session that could not be opened is not bound, and
//! its requests are routed as others; at most [`ENDINGS_MAX`] endings are under way, further ones are left to the engine's own timeout.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_msgpack::Value;
use kvasir_protocol::Payload;
use kvasir_router::{Input, Placement, SessionCommand, SessionEvent};
use kvasir_transport::{CallContext, EndpointClient};
use kvasir_types::{Codec, PlaneEndpoint, RequestId, WorkerId, WorkerRank};
use serde_json::json;
use tokio::sync::Semaphore;

use crate::router_host::RouterHost;

/// An engine has so long to open or close a session.
pub const TELL_TIMEOUT: Duration = Duration::from_secs(5);
/// Sessions that are being closed at once.
pub const ENDINGS_MAX: usize = 64;
/// An engine forgets a session this much later than we do: it must not be the first.
const ENGINE_GRACE: Duration = Duration::from_secs(30);
/// Length of the text that an engine makes room for in a session.
const CAPACITY: u32 = 65_536;

/// What an engine is told of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionNews {
    /// It begins.
    Open {
        /// The session.
        id: Arc<str>,
        /// It ends when unused for so long.
        timeout: Duration,
    },
    /// It ends.
    Close {
        /// The session.
        id: Arc<str>,
    },
}

/// What came of telling an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionReply {
    /// It is as it was told.
    Done,
    /// The worker takes no news of sessions.
    NotServed,
}

/// What [`SessionLink::tell`] returns; an error says what happened.
pub type SessionFuture<'a> =
    Pin<Box<dyn Future<Output = Result<SessionReply, String>> + Send + 'a>>;

/// A way to tell workers of sessions.
pub trait SessionLink: fmt::Debug + Send + Sync + 'static {
    /// Tells a worker.
    fn tell(&self, worker: WorkerId, news: SessionNews) -> SessionFuture<'_>;
}

impl SessionNews {
    /// The session.
    #[must_use]
    pub fn id(&self) -> &Arc<str> {
        match self {
            Self::Open { id, .. } | Self::Close { id } => id,
        }
    }

    /// As the endpoint `session_control` takes it. Without `action` it is the body of the routes that have it in their name.
    #[must_use]
    pub fn to_json(&self, has_action: bool) -> serde_json::Value {
        let mut body = match self {
            Self::Open { id, timeout } => json!({
                "session_id": &**id,
                "timeout": (*timeout + ENGINE_GRACE).as_secs(),
                "capacity_of_str_len": CAPACITY,
            }),
            Self::Close { id } => json!({ "session_id": &**id }),
        };
        if has_action {
            let action = match self {
                Self::Open { .. } => "open_session",
                Self::Close { .. } => "close_session",
            };
            body["action"] = action.into();
        }
        body
    }

    /// Tells the worker over a request plane; `call` names the call there.
    pub async fn send(
        &self,
        client: &dyn EndpointClient,
        endpoint: &PlaneEndpoint,
        worker: WorkerId,
        call: RequestId,
    ) -> Result<(), String> {
        let json = self.to_json(true).to_string();
        let bytes = match endpoint.codec {
            Codec::Json => json.into_bytes(),
            Codec::MessagePack => {
                let value = Value::from_json(json.as_bytes()).map_err(|error| error.to_string())?;
                let mut bytes = Vec::new();
                value.to_msgpack(&mut bytes);
                bytes
            }
        };
        let payload = Payload::new(endpoint.codec, bytes.into());
        let answer = client.call(endpoint, payload, CallContext::new(worker, call));
        let mut answer = answer.await.map_err(|error| error.to_string())?;
        match answer.next().await {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("it answered nothing".to_owned()),
        }
    }
}

/// The sessions of one router, as its engines hold them.
#[derive(Debug)]
pub(crate) struct SessionLinks {
    link: OnceLock<Arc<dyn SessionLink>>,
    endings: Arc<Semaphore>,
    /// That no worker takes news of sessions was said.
    said: AtomicBool,
}

impl Default for SessionLinks {
    fn default() -> Self {
        Self {
            link: OnceLock::new(),
            endings: Arc::new(Semaphore::new(ENDINGS_MAX)),
            said: AtomicBool::new(false),
        }
    }
}

impl RouterHost {
    /// Its workers are told of sessions in this way; the first that is given counts.
    pub fn link_sessions(&self, link: Arc<dyn SessionLink>) {
        let _ = self.sessions().link.set(link);
    }

    /// Has the engine open the session of a request that is about to go there, if it is to; then the session is bound.
    pub(crate) async fn open_session(&self, placement: &Placement) {
        let SessionCommand::Open { id, timeout } = &placement.session else {
            return;
        };
        let (target, news) = (
            placement.target,
            SessionNews::Open {
                id: Arc::clone(id),
                timeout: *timeout,
            },
        );
        let link = self.sessions().link.get().cloned();
        if self.is_told(tell(link, target, news).await, target) {
            self.tell(Input::Session(SessionEvent::Opened {
                id: Arc::clone(id),
                target,
                timeout: *timeout,
            }));
        }
    }

    /// Has an engine close a session, behind everything else.
    pub(crate) fn close_session(&self, id: &Arc<str>, target: WorkerRank) {
        let Ok(permit) = Arc::clone(&self.sessions().endings).try_acquire_owned() else {
            tracing::warn!(worker = %target, most = ENDINGS_MAX,
                "too many sessions end at once: this one is left to its engine's own timeout");
            return;
        };
        let link = self.sessions().link.get().cloned();
        if link.is_none() {
            let _ = self.is_told(Ok(SessionReply::NotServed), target);
            return;
        }
        let news = SessionNews::Close { id: Arc::clone(id) };
        self.context().tasks.background().spawn(async move {
            if let Err(why) = tell(link, target, news).await {
                tracing::warn!(worker = %target, why, "a session could not be closed: its engine forgets it by itself");
            }
            drop(permit);
        });
    }

    fn is_told(&self, reply: Result<SessionReply, String>, target: WorkerRank) -> bool {
        match reply {
            Ok(SessionReply::Done) => true,
            Ok(SessionReply::NotServed) => {
                if !self.sessions().said.swap(true, Ordering::Relaxed) {
                    tracing::warn!(worker = %target,
                        "the worker takes no news of sessions: opening and closing are ignored, bind works");
                }
                false
            }
            Err(why) => {
                tracing::warn!(worker = %target, why, "a session could not be opened: it is not bound");
                false
            }
        }
    }
}

async fn tell(
    link: Option<Arc<dyn SessionLink>>,
    target: WorkerRank,
    news: SessionNews,
) -> Result<SessionReply, String> {
    let Some(link) = link else {
        return Ok(SessionReply::NotServed);
    };
    let told = tokio::time::timeout(TELL_TIMEOUT, link.tell(target.worker, news)).await;
    told.unwrap_or_else(|_| Err(format!("no answer within {} s", TELL_TIMEOUT.as_secs())))
}
