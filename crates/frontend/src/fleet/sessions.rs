//! How workers learn of sessions.
//!
//! Answers one question: where is a worker told that a session begins or ends? At the endpoint `session_control` that a store announces
//! for it, or, if it is an engine behind HTTP, at its routes `/open_session` and `/close_session`, where it has them (SGLang has).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use kvasir_discovery::{Bucket, Change, Record, Store, Watch};
use kvasir_host::{
    SessionFuture, SessionLink, SessionNews, SessionReply, TELL_TIMEOUT, endpoint_of,
};
use kvasir_transport::EndpointClient;
use kvasir_types::{PlaneEndpoint, RequestId, WorkerId};
use kvasir_upstream::{Bounds, Pool, UpstreamError};

use super::Fleet;
use crate::models::Models;

/// The endpoint that takes news of sessions.
const ENDPOINT: &str = "session_control";
/// Longest answer that is read; what it says does not matter.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Where the workers of a fleet take news of sessions.
pub(super) struct FleetSessions {
    clients: OnceLock<BTreeMap<&'static str, Arc<dyn EndpointClient>>>,
    endpoints: RwLock<BTreeMap<WorkerId, PlaneEndpoint>>,
    models: Weak<Models>,
    /// What calls are named by: the first half of their ids, and how many there were.
    seed: u64,
    calls: AtomicU64,
}

impl fmt::Debug for FleetSessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetSessions").finish_non_exhaustive()
    }
}

impl FleetSessions {
    pub(super) fn new(models: &Arc<Models>, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            clients: OnceLock::new(),
            endpoints: RwLock::default(),
            models: Arc::downgrade(models),
            seed,
            calls: AtomicU64::new(0),
        })
    }

    /// Endpoints are called over these planes, by name.
    pub(super) fn connect(&self, clients: &BTreeMap<&'static str, Arc<dyn EndpointClient>>) {
        let _ = self.clients.set(clients.clone());
    }

    fn note(&self, worker: WorkerId, endpoint: Option<PlaneEndpoint>) {
        let endpoints = self.endpoints.write();
        let mut endpoints = endpoints.unwrap_or_else(PoisonError::into_inner);
        match endpoint {
            Some(endpoint) => drop(endpoints.insert(worker, endpoint)),
            None => drop(endpoints.remove(&worker)),
        }
    }

    fn endpoint(&self, worker: WorkerId) -> Option<PlaneEndpoint> {
        let endpoints = self.endpoints.read();
        let endpoints = endpoints.unwrap_or_else(PoisonError::into_inner);
        endpoints.get(&worker).cloned()
    }

    fn pool(&self, worker: WorkerId) -> Option<Pool> {
        let models = self.models.upgrade()?.all();
        models.iter().find_map(|model| model.links().http(worker))
    }

    async fn over_plane(
        &self,
        endpoint: &PlaneEndpoint,
        worker: WorkerId,
        news: &SessionNews,
    ) -> Result<SessionReply, String> {
        let clients = self.clients.get();
        let Some(client) = clients.and_then(|clients| clients.get(&*endpoint.plane)) else {
            return Ok(SessionReply::NotServed);
        };
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let call = RequestId(u128::from(self.seed) << 64 | u128::from(call));
        news.send(&**client, endpoint, worker, call).await?;
        Ok(SessionReply::Done)
    }
}

impl SessionLink for FleetSessions {
    fn tell(&self, worker: WorkerId, news: SessionNews) -> SessionFuture<'_> {
        Box::pin(async move {
            if let Some(endpoint) = self.endpoint(worker) {
                return self.over_plane(&endpoint, worker, &news).await;
            }
            match self.pool(worker) {
                Some(pool) => over_http(&pool, &news).await,
                None => Ok(SessionReply::NotServed),
            }
        })
    }
}

/// Tells an engine behind HTTP. One without the route has no sessions.
async fn over_http(pool: &Pool, news: &SessionNews) -> Result<SessionReply, String> {
    let path = match news {
        SessionNews::Open { .. } => "/open_session",
        SessionNews::Close { .. } => "/close_session",
    };
    let mut request = Request::new(Bytes::from(news.to_json(false).to_string()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static(path);
    let json = HeaderValue::from_static("application/json");
    request.headers_mut().insert(CONTENT_TYPE, json);
    let bounds = Bounds {
        timeout: TELL_TIMEOUT,
        answer_bytes_max: ANSWER_BYTES_MAX,
    };
    match pool.fetch_ok(request, bounds).await {
        Ok(_) => Ok(SessionReply::Done),
        Err(UpstreamError::Status(StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)) => {
            Ok(SessionReply::NotServed)
        }
        Err(error) => Err(error.to_string()),
    }
}

impl Fleet {
    /// Learns from a store which workers take news of sessions, from now on.
    pub(super) fn follow_sessions(
        &self,
        store: &Arc<dyn Store>,
        wanted: impl Fn(&str) -> bool + Send + 'static,
    ) {
        let watch = store.watch(&[Bucket::Instances]);
        let follow = follow(Arc::clone(&self.sessions), watch, wanted);
        self.tasks().background().spawn(follow);
    }
}

/// Notes the endpoints that a store announces, for ever.
async fn follow(sessions: Arc<FleetSessions>, mut watch: Watch, wanted: impl Fn(&str) -> bool) {
    let mut known = BTreeMap::new();
    loop {
        match watch.next().await {
            Change::Added(key, record) | Change::Updated(key, record) => {
                let Record::Endpoint(instance) = &*record else {
                    continue;
                };
                if instance.endpoint == ENDPOINT && wanted(record.namespace()) {
                    let worker = WorkerId(instance.instance_id);
                    sessions.note(worker, Some(endpoint_of(instance)));
                    known.insert(key, worker);
                }
            }
            Change::Removed(key) => {
                if let Some(worker) = known.remove(&key) {
                    sessions.note(worker, None);
                }
            }
            Change::Synced | Change::Lost(_) | Change::Restored => {}
        }
    }
}
