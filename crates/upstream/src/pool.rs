//! Kept connections to one worker.

mod distrust;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{HeaderName, HeaderValue, Response, StatusCode};
use kvasir_types::HttpEndpoint;
use tokio::sync::futures::OwnedNotified;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use self::distrust::Distrust;
use crate::UpstreamError;
use crate::address::bearer;
use crate::body::UpstreamBody;
use crate::connection::{Connection, Readiness};
use crate::head::{Destination, Head, UpstreamRequest};
use crate::thread_slot::{THREAD_SLOTS, thread_slot};
use crate::tls::WorkerTls;

/// Connections to one worker that are open at once. Further requests wait for one.
const OPEN_MAX: usize = 8192;
/// Idle connections to one worker that are kept for one thread.
const IDLE_MAX: usize = 256;
/// A kept connection that ends within this time of a request was closed before it.
const STALE_WITHIN: Duration = Duration::from_secs(1);
/// Sweeps after which a connection that was not used is closed; the fleet sweeps every two seconds.
const IDLE_SWEEPS: u32 = 30;

/// No byte came yet.
const NEVER: u64 = u64::MAX;
/// How exactly the time of the last byte is known. Threads that read streams share that value, and mostly only read it.
const RECEIVED_STEP: Duration = Duration::from_millis(10);
/// Names a request in the logs of everybody on its way; some engines say it back.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Kept connections, latest last, each with the sweep after which it was given back.
type Idle = Vec<(Connection, u32)>;

/// The connections of one worker. Clones are one pool.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    endpoint: HttpEndpoint,
    tls: WorkerTls,
    /// What the `host` header says.
    authority: HeaderValue,
    /// What the `authorization` header says, where the worker wants a key.
    key: Option<HeaderValue>,
    /// The `via` field of probes and other requests of our own.
    via: Option<HeaderValue>,
    /// Kept connections of each thread.
    idle: [Mutex<Idle>; THREAD_SLOTS],
    sweeps: AtomicU32,
    /// Whether the worker sent bytes that nobody asked for.
    distrust: Distrust,
    /// The engine says the id of each request back, in a field of the head.
    echoes_ids: AtomicBool,
    /// The same in the body, as vLLM does: `chatcmpl-<id>`.
    names_ids: AtomicBool,
    /// Whether the engine takes the larger priority first.
    larger_first: AtomicBool,
    places: Arc<Semaphore>,
    /// The worker is draining: requests that are booked may still go there, no others.
    draining: AtomicBool,
    /// The engine returns the token ids of its answers on request (`return_token_ids`).
    returns_token_ids: AtomicBool,
    /// The worker was removed; no request is sent any more.
    closed: AtomicBool,
    /// Times that all requests in flight were aborted.
    generation: AtomicU32,
    created: Instant,
    /// When bytes last came from the worker, in milliseconds since `created`.
    received_millis: AtomicU64,
    /// Wakes requests in flight when they are aborted.
    aborting: Arc<Notify>,
}

impl Pool {
    /// A pool without connections.
    pub fn new(endpoint: HttpEndpoint, tls: WorkerTls) -> Self {
        Self::with_via(endpoint, tls, None)
    }

    /// The same; requests of our own carry `via`.
    pub fn with_via(endpoint: HttpEndpoint, tls: WorkerTls, via: Option<HeaderValue>) -> Self {
        let authority = HeaderValue::try_from(endpoint.authority());
        Self {
            shared: Arc::new(Shared {
                authority: authority.unwrap_or(HeaderValue::from_static("localhost")),
                key: endpoint.api_key.as_ref().and_then(bearer),
                endpoint,
                tls,
                via,
                idle: [const { Mutex::new(Vec::new()) }; THREAD_SLOTS],
                sweeps: AtomicU32::new(0),
                distrust: Distrust::default(),
                echoes_ids: AtomicBool::new(false),
                names_ids: AtomicBool::new(false),
                larger_first: AtomicBool::new(false),
                places: Arc::new(Semaphore::new(OPEN_MAX)),
                draining: AtomicBool::new(false),
                returns_token_ids: AtomicBool::new(false),
                closed: AtomicBool::new(false),
                generation: AtomicU32::new(0),
                created: Instant::now(),
                received_millis: AtomicU64::new(NEVER),
                aborting: Arc::default(),
            }),
        }
    }

    /// Whether the engine returns the token ids of its answers on request, as vLLM does.
    pub fn returns_token_ids(&self) -> bool {
        self.shared.returns_token_ids.load(Ordering::Relaxed)
    }

    /// Sets whether it does.
    pub fn set_returns_token_ids(&self, returns: bool) {
        self.shared
            .returns_token_ids
            .store(returns, Ordering::Relaxed);
    }

    /// The `via` field of requests of our own.
    pub fn via(&self) -> Option<&HeaderValue> {
        self.shared.via.as_ref()
    }

    /// Where the worker is.
    pub fn endpoint(&self) -> &HttpEndpoint {
        &self.shared.endpoint
    }

    /// Whether the engine takes the larger priority first, as SGLang does; vLLM, which is assumed, takes the smaller.
    pub fn larger_first(&self) -> bool {
        self.shared.larger_first.load(Ordering::Relaxed)
    }

    /// Sets which priority the engine takes first.
    pub fn set_larger_first(&self, larger: bool) {
        self.shared.larger_first.store(larger, Ordering::Relaxed);
    }

    /// Sends a request and waits for the head of the answer; dropping the future closes the connection.
    ///
    /// A kept connection that ends at once, before an answer begins, was most likely closed while it was idle. That is no failure
    /// of the worker, so the request is sent again on a new connection, once. The same holds where what comes on a kept connection is
    /// not this request's answer, or may not be.
    pub async fn send(
        &self,
        request: &UpstreamRequest<'_>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let aborted = self.shared.aborting.notified();
        let generation = self.generation();
        if self.is_closed() {
            return Err(UpstreamError::Absent);
        }
        tokio::select! {
            biased;
            response = self.send_on_connection(request, generation) => response,
            () = aborted => Err(self.abort_error()),
        }
    }

    async fn send_on_connection(
        &self,
        request: &UpstreamRequest<'_>,
        generation: u32,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let place = Arc::clone(&self.shared.places).acquire_owned().await.ok();
        let destination = Destination {
            prefix: &self.shared.endpoint.prefix,
            authority: &self.shared.authority,
            key: self.shared.key.as_ref(),
        };
        let sent_at = Instant::now();
        let idle = match request.fresh {
            true => None,
            false => self.take_idle(),
        };
        let kept = match idle {
            Some(mut connection) => match connection.send(request, &destination).await {
                Ok(head) => self
                    .is_answer(request, &head, sent_at)
                    .then_some((connection, head)),
                Err(error) if connection.was_stale(&error) && sent_at.elapsed() < STALE_WITHIN => {
                    tracing::debug!(worker = %self.endpoint(), %error, "kept connection was stale");
                    None
                }
                Err(error) => return Err(error),
            },
            None => None,
        };
        let is_reused = kept.is_some();
        let (connection, head) = match kept {
            Some(answered) => answered,
            None => {
                let mut connection =
                    Connection::open(&self.shared.endpoint, &self.shared.tls).await?;
                let head = connection.send(request, &destination).await?;
                self.learn_echo(request, &head);
                (connection, head)
            }
        };
        self.mark_received();
        let mut response = Response::new(UpstreamBody::new(
            connection,
            self.clone(),
            (generation, is_reused),
            place,
        ));
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        Ok(response)
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        OPEN_MAX - self.shared.places.available_permits()
    }

    /// The worker was removed: aborts all requests in flight and refuses new ones.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.abort_in_flight();
    }

    /// The worker is dead: aborts all requests in flight.
    pub fn abort_in_flight(&self) {
        self.shared.generation.fetch_add(1, Ordering::SeqCst);
        self.shared.aborting.notify_waiters();
        self.close_idle();
    }

    /// Whether the worker is draining.
    pub fn set_draining(&self, draining: bool) {
        self.shared.draining.store(draining, Ordering::Relaxed);
    }

    /// Whether it takes nothing new.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Relaxed)
    }

    /// Whether the worker was removed.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Relaxed)
    }

    /// Times that all requests in flight were aborted.
    pub(crate) fn generation(&self) -> u32 {
        self.shared.generation.load(Ordering::SeqCst)
    }

    /// Why requests in flight were aborted.
    pub(crate) fn abort_error(&self) -> UpstreamError {
        match self.is_closed() {
            true => UpstreamError::Removed,
            false => UpstreamError::Dead,
        }
    }

    /// Bytes came from the worker.
    pub(crate) fn mark_received(&self) {
        let received = &self.shared.received_millis;
        let now = self.millis();
        let last = received.load(Ordering::Relaxed);
        if last == NEVER || now >= last + RECEIVED_STEP.as_millis() as u64 {
            received.store(now, Ordering::Relaxed);
        }
    }

    /// When bytes last came from the worker on any connection, if any did.
    #[must_use]
    pub fn last_received(&self) -> Option<Instant> {
        match self.shared.received_millis.load(Ordering::Relaxed) {
            NEVER => None,
            millis => Some(self.shared.created + Duration::from_millis(millis)),
        }
    }

    /// Resolves when requests in flight are aborted.
    pub(crate) fn aborted(&self) -> OwnedNotified {
        Arc::clone(&self.shared.aborting).notified_owned()
    }

    /// Closes the connections that are idle: their descriptors are needed.
    pub fn close_idle(&self) {
        self.each_idle(Vec::clear);
    }

    /// Drops idle connections that engines have closed, and those that were not used for long.
    pub fn sweep(&self) {
        let sweep = self.shared.sweeps.fetch_add(1, Ordering::Relaxed);
        let age = |since: u32| sweep.wrapping_sub(since);
        let keeps = |connection: &mut Connection, since: u32| match connection.readiness() {
            _ if !self.reuses_connections() => false,
            Readiness::Ready => age(since) < IDLE_SWEEPS,
            Readiness::Unfinished => age(since) < 1,
            Readiness::Unfit => false,
            Readiness::Surplus => {
                self.distrust(SURPLUS);
                false
            }
        };
        self.each_idle(|idle| idle.retain_mut(|(connection, since)| keeps(connection, *since)));
    }

    /// The worker sent bytes that nobody asked for: the next answer on a kept connection might be none.
    fn distrust(&self, what: &str) {
        if let Some(span) = self.shared.distrust.notice(self.millis()) {
            tracing::warn!(worker = %self.endpoint(), what, seconds = span.as_secs(),
                "the engine sent bytes that belong to no request: its connections are not reused for so long");
        }
    }

    /// Whether connections to the worker are kept for further requests. They are not for a while after it sent bytes that belong to no
    /// request.
    #[must_use]
    pub fn reuses_connections(&self) -> bool {
        !self.shared.distrust.runs(|| self.millis())
    }

    /// Milliseconds since the pool was made.
    fn millis(&self) -> u64 {
        self.shared.created.elapsed().as_millis() as u64
    }

    /// Whether the head that came on a kept connection is that of this request's answer. It is if the engine says ids back and this is
    /// its id. It is not if that is another's; if the server ended its wait for a request just when this one was sent; or if it came
    /// soon, from an engine that sent surplus bytes meanwhile: then nobody can tell.
    fn is_answer(&self, request: &UpstreamRequest<'_>, head: &Head, sent_at: Instant) -> bool {
        match is_echo(request, head) {
            Some(true) => {
                learn(&self.shared.echoes_ids, true);
                return true;
            }
            Some(false) if self.shared.echoes_ids.load(Ordering::Relaxed) => {
                self.distrust(ANOTHERS);
                return false;
            }
            _ => {}
        }
        let is_doubtful = head.status == StatusCode::REQUEST_TIMEOUT || !self.reuses_connections();
        !(is_doubtful && sent_at.elapsed() < STALE_WITHIN)
    }

    /// The first answer on a connection is always the right one: it shows whether the engine says ids back.
    fn learn_echo(&self, request: &UpstreamRequest<'_>, head: &Head) {
        if let Some(echo) = is_echo(request, head) {
            learn(&self.shared.echoes_ids, echo);
        }
    }

    /// The body of an answer names a request, ours or not. Says whether the answer is another's: it came on a connection that was used
    /// before, from an engine that names ours.
    pub(crate) fn is_named_otherwise(&self, names_ours: bool, is_reused: bool) -> bool {
        let names_ids = &self.shared.names_ids;
        if names_ours || !is_reused {
            learn(names_ids, names_ours);
            return false;
        }
        let is_anothers = names_ids.load(Ordering::Relaxed);
        if is_anothers {
            self.distrust(ANOTHERS);
        }
        is_anothers
    }

    /// The calling thread's kept connections.
    fn idle(&self) -> MutexGuard<'_, Idle> {
        locked(&self.shared.idle[thread_slot()])
    }

    fn each_idle(&self, mut change: impl FnMut(&mut Idle)) {
        for idle in &self.shared.idle {
            change(&mut locked(idle));
        }
    }

    fn take_idle(&self) -> Option<Connection> {
        if !self.reuses_connections() {
            return None;
        }
        let mut idle = self.idle();
        let mut at = idle.len();
        while let Some((connection, _)) = at.checked_sub(1).and_then(|last| idle.get_mut(last)) {
            at -= 1;
            match connection.readiness() {
                Readiness::Ready => return Some(idle.remove(at).0),
                Readiness::Unfinished => {}
                Readiness::Unfit => drop(idle.remove(at)),
                Readiness::Surplus => {
                    idle.clear();
                    self.distrust(SURPLUS);
                    return None;
                }
            }
        }
        None
    }

    /// Keeps a connection whose answer was read to its end.
    pub(crate) fn give_back(&self, mut connection: Connection, generation: u32) {
        match connection.may_be_kept() {
            Readiness::Ready | Readiness::Unfinished => {}
            Readiness::Unfit => return,
            Readiness::Surplus => return self.distrust(SURPLUS),
        }
        if !self.reuses_connections() {
            return;
        }
        connection.shrink();
        let since = self.shared.sweeps.load(Ordering::Relaxed);
        let mut idle = self.idle();
        if self.generation() == generation && idle.len() < IDLE_MAX {
            idle.push((connection, since));
        }
    }
}

/// Bytes after an answer or on an idle connection.
const SURPLUS: &str = "bytes after an answer";

/// An answer on a kept connection that names another request.
const ANOTHERS: &str = "an answer to another request";

/// Stores what was seen, if it is new: all threads read it.
fn learn(known: &AtomicBool, seen: bool) {
    if known.load(Ordering::Relaxed) != seen {
        known.store(seen, Ordering::Relaxed);
    }
}

/// Whether the id in an answer is that of the request; none if one of them has no id.
fn is_echo(request: &UpstreamRequest<'_>, head: &Head) -> Option<bool> {
    let ours = request.headers.get(REQUEST_ID)?;
    let theirs = head.headers.get(REQUEST_ID)?;
    Some(ours == theirs)
}

fn locked(idle: &Mutex<Idle>) -> MutexGuard<'_, Idle> {
    idle.lock().unwrap_or_else(PoisonError::into_inner)
}
