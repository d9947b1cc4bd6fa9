//! Kept connections to one worker.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use http::{HeaderValue, Response};
use kvasir_types::{HttpEndpoint, WorkerId};
use tokio::sync::futures::OwnedNotified;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use crate::UpstreamError;
use crate::address::bearer;
use crate::body::UpstreamBody;
use crate::head::{Ask, Whom};
use crate::home::{HOMES, home};
use crate::line::Line;
use crate::tls::WorkerTls;

/// Connections to one worker that are open at once; the next request waits for one of them.
const OPEN_MAX: usize = 8192;
/// Idle connections to one worker that are kept for one thread.
const IDLE_MAX: usize = 256;
/// A kept connection that ends within this time of a request had ended before it.
const STALE_WITHIN: Duration = Duration::from_secs(1);
/// Sweeps after which a connection that was not used is closed; the fleet sweeps every two seconds.
const IDLE_SWEEPS: u32 = 30;

/// The workers of one model by id. Clones are one set.
#[derive(Clone, Default)]
pub struct Upstreams {
    by_id: Arc<RwLock<HashMap<WorkerId, Pool>>>,
}

impl Upstreams {
    /// The connections to a worker.
    pub fn get(&self, worker: WorkerId) -> Option<Pool> {
        self.by_id
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&worker)
            .cloned()
    }

    /// The connections to some worker that takes new work and is `fit`, to each in turn.
    pub fn any(&self, turn: usize, fit: impl Fn(WorkerId) -> bool) -> Option<(WorkerId, Pool)> {
        let by_id = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        let open = || {
            by_id
                .iter()
                .filter(|(id, pool)| !pool.is_closing() && fit(**id))
        };
        let at = turn.checked_rem(open().count())?;
        open().nth(at).map(|(id, pool)| (*id, pool.clone()))
    }

    /// Every worker.
    pub fn ids(&self) -> Vec<WorkerId> {
        let by_id = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        by_id.keys().copied().collect()
    }

    /// Adds a worker, or replaces its connections.
    pub fn insert(&self, worker: WorkerId, pool: Pool) {
        self.by_id
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(worker, pool);
    }

    /// Forgets a worker.
    pub fn remove(&self, worker: WorkerId) {
        self.by_id
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&worker);
    }
}

/// Kept connections, latest last, each with the sweep after which it was given back.
type Idle = Vec<(Line, u32)>;

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
    /// How questions of our own are signed.
    via: Option<HeaderValue>,
    /// Kept connections of each thread.
    idle: [Mutex<Idle>; HOMES],
    sweeps: AtomicU32,
    /// Whether the engine takes the larger priority first.
    larger_first: AtomicBool,
    places: Arc<Semaphore>,
    /// The worker is on its way out: what is booked may still go there, nothing else.
    closing: AtomicBool,
    /// The engine tells the tokens of its answers to whoever asks (`return_token_ids`).
    tells_token_ids: AtomicBool,
    /// Nothing new begins.
    cut: AtomicBool,
    /// Times that everything that ran on these connections was given up.
    era: AtomicU32,
    /// Something came from the worker since that was last asked.
    heard: AtomicBool,
    /// Tells those who wait that it is.
    cutting: Arc<Notify>,
}

impl Pool {
    /// A pool without connections.
    pub fn new(endpoint: HttpEndpoint, tls: WorkerTls) -> Self {
        Self::signing(endpoint, tls, None)
    }

    /// The same, signing what is asked of its pages with `via`.
    pub fn signing(endpoint: HttpEndpoint, tls: WorkerTls, via: Option<HeaderValue>) -> Self {
        let authority = HeaderValue::try_from(endpoint.authority());
        Self {
            shared: Arc::new(Shared {
                authority: authority.unwrap_or(HeaderValue::from_static("localhost")),
                key: endpoint.api_key.as_ref().and_then(bearer),
                endpoint,
                tls,
                via,
                idle: [const { Mutex::new(Vec::new()) }; HOMES],
                sweeps: AtomicU32::new(0),
                larger_first: AtomicBool::new(false),
                places: Arc::new(Semaphore::new(OPEN_MAX)),
                closing: AtomicBool::new(false),
                tells_token_ids: AtomicBool::new(false),
                cut: AtomicBool::new(false),
                era: AtomicU32::new(0),
                heard: AtomicBool::new(false),
                cutting: Arc::default(),
            }),
        }
    }

    /// Whether the engine tells the tokens of its answers to whoever asks for them, as vLLM does.
    pub fn tells_token_ids(&self) -> bool {
        self.shared.tells_token_ids.load(Ordering::Relaxed)
    }

    /// It does, or does not.
    pub fn set_tells_token_ids(&self, tells: bool) {
        self.shared.tells_token_ids.store(tells, Ordering::Relaxed);
    }

    /// How questions of our own are signed.
    pub(crate) fn via(&self) -> Option<&HeaderValue> {
        self.shared.via.as_ref()
    }

    /// Whose connections they are.
    pub fn endpoint(&self) -> &HttpEndpoint {
        &self.shared.endpoint
    }

    /// Whether the engine takes the larger priority first, as SGLang does; vLLM, which is assumed, takes the smaller.
    pub fn larger_first(&self) -> bool {
        self.shared.larger_first.load(Ordering::Relaxed)
    }

    /// Says which priority the engine takes first.
    pub fn set_larger_first(&self, larger: bool) {
        self.shared.larger_first.store(larger, Ordering::Relaxed);
    }

    /// Sends a request and waits for the head of the answer; dropping the future closes the connection.
    ///
    /// A kept connection that ends at once, before an answer begins, was most likely closed while it was idle. That
    /// says nothing about the worker, so the request is sent again on a new connection, once.
    pub async fn send(&self, ask: &Ask<'_>) -> Result<Response<UpstreamBody>, UpstreamError> {
        let cut = self.shared.cutting.notified();
        let era = self.era();
        if self.is_cut() {
            return Err(UpstreamError::Absent);
        }
        tokio::select! {
            biased;
            response = self.send_uncut(ask, era) => response,
            () = cut => Err(self.why_cut()),
        }
    }

    async fn send_uncut(
        &self,
        ask: &Ask<'_>,
        era: u32,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let place = Arc::clone(&self.shared.places).acquire_owned().await.ok();
        let whom = Whom {
            prefix: &self.shared.endpoint.prefix,
            authority: &self.shared.authority,
            key: self.shared.key.as_ref(),
        };
        let asked = Instant::now();
        let idle = match ask.fresh {
            true => None,
            false => self.take_idle(),
        };
        let kept = match idle {
            Some(mut line) => match line.ask(ask, &whom).await {
                Ok(head) => Some((line, head)),
                Err(error) if line.was_stale(&error) && asked.elapsed() < STALE_WITHIN => {
                    tracing::debug!(worker = %self.endpoint(), %error, "kept connection was stale");
                    None
                }
                Err(error) => return Err(error),
            },
            None => None,
        };
        let (line, head) = match kept {
            Some(answered) => answered,
            None => {
                let mut line = Line::open(&self.shared.endpoint, &self.shared.tls).await?;
                let head = line.ask(ask, &whom).await?;
                (line, head)
            }
        };
        self.heard();
        let mut response = Response::new(UpstreamBody::new(line, self.clone(), era, place));
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        Ok(response)
    }

    /// How many requests are on their way or being answered.
    pub fn open(&self) -> usize {
        OPEN_MAX - self.shared.places.available_permits()
    }

    /// Gives up whatever runs on these connections, and lets nothing new begin.
    pub fn cut(&self) {
        self.shared.cut.store(true, Ordering::SeqCst);
        self.sever();
    }

    /// Gives up whatever runs on these connections now: the worker gives no sign of life.
    pub fn sever(&self) {
        self.shared.era.fetch_add(1, Ordering::SeqCst);
        self.shared.cutting.notify_waiters();
        self.each_idle(|idle| idle.clear());
    }

    /// The worker is on its way out, or is not after all.
    pub fn set_closing(&self, closing: bool) {
        self.shared.closing.store(closing, Ordering::Relaxed);
    }

    fn is_closing(&self) -> bool {
        self.shared.closing.load(Ordering::Relaxed)
    }

    /// Whether it was cut.
    pub fn is_cut(&self) -> bool {
        self.shared.cut.load(Ordering::Relaxed)
    }

    /// Times that everything was given up.
    pub(crate) fn era(&self) -> u32 {
        self.shared.era.load(Ordering::SeqCst)
    }

    /// Why what ran was given up.
    pub(crate) fn why_cut(&self) -> UpstreamError {
        match self.is_cut() {
            true => UpstreamError::Gone,
            false => UpstreamError::Mute,
        }
    }

    /// Something came. Nearly always that is known: threads only read, and share the line.
    pub(crate) fn heard(&self) {
        if !self.shared.heard.load(Ordering::Relaxed) {
            self.shared.heard.store(true, Ordering::Relaxed);
        }
    }

    /// Whether anything came from the worker, on any connection, since this was last asked.
    pub fn take_heard(&self) -> bool {
        self.shared.heard.swap(false, Ordering::Relaxed)
    }

    /// Comes to an end when what runs is given up.
    pub(crate) fn cutting(&self) -> OwnedNotified {
        Arc::clone(&self.shared.cutting).notified_owned()
    }

    /// Drops idle connections that engines have closed, and those that nobody has used for long.
    pub fn sweep(&self) {
        let sweep = self.shared.sweeps.fetch_add(1, Ordering::Relaxed);
        let young = |since: u32| sweep.wrapping_sub(since) < IDLE_SWEEPS;
        self.each_idle(|idle| idle.retain_mut(|(line, since)| young(*since) && line.is_ready()));
    }

    /// The calling thread's kept connections.
    fn idle(&self) -> MutexGuard<'_, Idle> {
        locked(&self.shared.idle[home()])
    }

    fn each_idle(&self, mut change: impl FnMut(&mut Idle)) {
        for idle in &self.shared.idle {
            change(&mut locked(idle));
        }
    }

    fn take_idle(&self) -> Option<Line> {
        let mut idle = self.idle();
        let latest = std::iter::from_fn(|| idle.pop());
        latest
            .map(|(line, _)| line)
            .find_map(|mut line| line.is_ready().then_some(line))
    }

    /// Keeps a connection whose answer was read to its end.
    pub(crate) fn give_back(&self, mut line: Line, era: u32) {
        if line.is_ready() {
            line.shrink();
            let since = self.shared.sweeps.load(Ordering::Relaxed);
            let mut idle = self.idle();
            if self.era() == era && idle.len() < IDLE_MAX {
                idle.push((line, since));
            }
        }
    }
}

fn locked(idle: &Mutex<Idle>) -> MutexGuard<'_, Idle> {
    idle.lock().unwrap_or_else(PoisonError::into_inner)
}
